// What is printed of a property case, and how it is read again; see property_cases.hpp. Place:
// tests of the engine. The key (seed and bounds) says all; the rest of the line is for the reader,
// and changes with the fields of a case. Pure; results are values; nothing fails but the reading,
// which says so.
#include <cstdio>

#include "property_cases.hpp"
#include "zensync/plan/plan.hpp"

namespace zensync::test {

std::string repeat_key(const PropertyCase& given) {
  char text[128];
  const Limits& l = given.limits;
  std::snprintf(
      text, sizeof text, "0x%016llx:%llu:%llu:%llu:%llu:%llu",
      static_cast<unsigned long long>(given.seed), static_cast<unsigned long long>(l.size),
      static_cast<unsigned long long>(l.rows), static_cast<unsigned long long>(l.row_elems),
      static_cast<unsigned long long>(l.chunks), static_cast<unsigned long long>(l.stride));
  return text;
}

bool parse_repeat_key(const std::string& text, std::uint64_t& seed, Limits& limits) {
  unsigned long long v[6];
  const int read = std::sscanf(text.c_str(), "%llx:%llu:%llu:%llu:%llu:%llu", &v[0], &v[1], &v[2],
                               &v[3], &v[4], &v[5]);
  if (read != 1 && read != 6) return false;
  seed = v[0];
  if (read == 6) limits = {v[1], v[2], v[3], v[4], v[5]};
  return limits.size > 0 && limits.row_elems > 0 && limits.chunks > 0 && limits.stride > 0;
}

std::string describe(const PropertyCase& given) {
  constexpr const char* kHolds[] = {"dense", "dense with ids", "COO", "COO shuffled"};
  constexpr const char* kSpreads[] = {"uniform",   "empty ranks", "identical", "disjoint",
                                      "last unit", "full",        "none"};
  constexpr const char* kKinds[] = {"small",     "floats",     "zeros",
                                    "denormals", "cancelling", "special"};
  constexpr const char* kCodecs[] = {"none", "raw", "raw64", "blocks", "bitmap", "elias_fano"};
  std::string text = "ZENSYNC_PROPERTY=" + repeat_key(given) + " : ";
  text += std::string(scheme_name(given.plan.scheme)) + " n=" + std::to_string(given.size);
  text += given.op == ReduceOp::kAvg ? " avg " : " sum ";
  text += std::string(dtype_name(given.spec.dtype)) + " " + std::to_string(given.spec.rows) + "x" +
          std::to_string(given.spec.row_elems) + " width " + std::to_string(given.plan.width) +
          ", " + kHolds[static_cast<int>(given.hold)] + ", " +
          kSpreads[static_cast<int>(given.spread)] + " " + kKinds[static_cast<int>(given.kind)];
  text += ", density " + std::to_string(given.density) + ", " +
          kCodecs[static_cast<int>(given.wire.codec)] + ", " +
          (given.wire.partition == PartitionKind::kRange ? "range" : "rotation") + ", chunks";
  for (std::uint64_t end : given.plan.chunk_ends) text += " " + std::to_string(end);
  text += given.wire.verify ? ", verify" : "";
  text += given.late_sends ? ", late sends" : "";
  return text + (given.mixed_kernels ? ", mixed kernels" : "");
}

}  // namespace zensync::test
