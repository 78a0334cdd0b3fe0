// Comparing job headers field by field, in words a user can act on. Place: codec, level 2.
// Pure; fails with kMismatch only, and names the peer, the tensor and both values of each field.
#include "zensync/codec/headers.hpp"

namespace zensync {
namespace {

std::string shape_text(const JobHeader& h) {
  return "[" + std::to_string(h.rows) + " x " + std::to_string(h.row_elems) + "]";
}
std::string layout_text(Layout layout) { return layout == Layout::kCoo ? "COO" : "dense-stored"; }

std::string call_text(JobCall call) {
  switch (call) {
    case JobCall::kAllReduce:
      return "all_reduce";
    case JobCall::kScatterRows:
      return "reduce_scatter(layout=\"rows\")";
    case JobCall::kScatterColumns:
      return "reduce_scatter(layout=\"columns\")";
  }
  return "unknown (" + std::to_string(static_cast<int>(call)) + ")";
}

std::string op_text(ReduceOp op) { return op == ReduceOp::kAvg ? "AVG" : "SUM"; }

void differ(std::string& text, const char* field, const std::string& theirs,
            const std::string& mine) {
  text +=
      std::string(text.empty() ? "" : "; ") + field + " " + theirs + " there, " + mine + " here";
}

}  // namespace

Status check_job_header(const JobHeader& mine, const JobHeader& theirs, Rank peer,
                        const std::string& tensor) {
  std::string text;
  if (mine.size != theirs.size) {
    differ(text, "number of ranks", std::to_string(theirs.size), std::to_string(mine.size));
  }
  if (mine.sequence != theirs.sequence) {
    differ(text, "job number", std::to_string(theirs.sequence), std::to_string(mine.sequence));
  }
  if (mine.rows != theirs.rows || mine.row_elems != theirs.row_elems) {
    differ(text, "shape", shape_text(theirs), shape_text(mine));
  }
  if (mine.dtype != theirs.dtype) {
    differ(text, "dtype", std::string(dtype_name(theirs.dtype)),
           std::string(dtype_name(mine.dtype)));
  }
  if (mine.layout != theirs.layout) {
    differ(text, "layout", layout_text(theirs.layout), layout_text(mine.layout));
  }
  if (mine.call != theirs.call) {
    differ(text, "call", call_text(theirs.call), call_text(mine.call));
  }
  if (mine.op != theirs.op) differ(text, "operation", op_text(theirs.op), op_text(mine.op));
  if (text.empty() && mine.key != theirs.key) {
    text = "another tensor there (key " + std::to_string(theirs.key) + "), this one here (key " +
           std::to_string(mine.key) + "): the ranks call in another order or with other names";
  }
  if (text.empty() && mine.plan_digest != theirs.plan_digest) {
    text = "another plan there (digest " + std::to_string(theirs.plan_digest) + ", here " +
           std::to_string(mine.plan_digest) + "): the ranks' settings differ";
  }
  if (text.empty()) return {};
  Error error = make_error(ErrorKind::kMismatch,
                           "rank " + std::to_string(peer.value) + " disagrees: " + text, peer);
  error.tensor = tensor;
  return error;
}

}  // namespace zensync
