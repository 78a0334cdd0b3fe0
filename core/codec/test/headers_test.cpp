// Job headers: each field that differs is an error that names the field, both values, the peer and
// the tensor. Place: tests of codec. A table of fields; the control is the pair of equal headers.
#include "zensync/codec/headers.hpp"

#include <gtest/gtest.h>

#include <functional>

namespace zensync::test {
namespace {

JobHeader sample() {
  JobHeader header;
  header.key = 11;
  header.rows = 1000;
  header.row_elems = 16;
  header.plan_digest = 77;
  header.sequence = 5;
  header.size = 4;
  return header;
}

struct Change {
  const char* field;
  std::function<void(JobHeader&)> make;
  std::vector<std::string> words;  ///< in the message
};

const std::vector<Change>& changes() {
  static const std::vector<Change> kChanges = {
      {"key", [](JobHeader& h) { h.key = 12; }, {"12", "11"}},
      {"rows", [](JobHeader& h) { h.rows = 999; }, {"shape", "999", "1000"}},
      {"row_elems", [](JobHeader& h) { h.row_elems = 8; }, {"shape", "8", "16"}},
      {"plan", [](JobHeader& h) { h.plan_digest = 78; }, {"plan", "78", "77"}},
      {"sequence", [](JobHeader& h) { h.sequence = 6; }, {"6", "5"}},
      {"size", [](JobHeader& h) { h.size = 3; }, {"ranks", "3", "4"}},
      {"dtype", [](JobHeader& h) { h.dtype = DType::kBF16; }, {"dtype", "bfloat16", "float32"}},
      {"layout", [](JobHeader& h) { h.layout = Layout::kCoo; }, {"layout", "COO", "dense"}},
      {"op", [](JobHeader& h) { h.op = ReduceOp::kAvg; }, {"AVG", "SUM"}}};
  return kChanges;
}

TEST(JobHeaderCheck, EachDifferingFieldIsNamed) {
  for (const Change& change : changes()) {
    JobHeader theirs = sample();
    change.make(theirs);
    const Status status = check_job_header(sample(), theirs, Rank{3}, "embedding");
    ASSERT_FALSE(status.ok()) << change.field;
    EXPECT_EQ(status.error().kind, ErrorKind::kMismatch) << change.field;
    EXPECT_EQ(status.error().culprit, Rank{3}) << change.field;
    EXPECT_EQ(status.error().tensor, "embedding") << change.field;
    for (const std::string& word : change.words) {
      EXPECT_NE(status.error().message.find(word), std::string::npos)
          << change.field << " without '" << word << "': " << status.error().message;
    }
  }
}

TEST(JobHeaderCheck, TwoDifferencesAreBothNamed) {
  JobHeader theirs = sample();
  theirs.rows = 999;
  theirs.dtype = DType::kF64;
  const Status status = check_job_header(sample(), theirs, Rank{1}, "t");
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("shape"), std::string::npos);
  EXPECT_NE(status.error().message.find("dtype"), std::string::npos);
}

TEST(JobHeaderCheck, EqualHeadersAndProbesPass) {
  JobHeader theirs = sample();
  EXPECT_TRUE(check_job_header(sample(), theirs, Rank{1}, "t").ok());
  theirs.probe_rows = 64;
  theirs.probe_nonzero_rows = 3;
  theirs.probe_nonzero_elems = 3;
  EXPECT_TRUE(check_job_header(sample(), theirs, Rank{1}, "t").ok());
}

/// Bytes from elsewhere: values outside the enumerations are named, not read out of bounds.
TEST(JobHeaderCheck, ImpossibleValuesAreADifference) {
  JobHeader theirs = sample();
  theirs.dtype = static_cast<DType>(200);
  EXPECT_FALSE(check_job_header(sample(), theirs, Rank{1}, "t").ok());
  theirs = sample();
  theirs.layout = static_cast<Layout>(9);
  EXPECT_FALSE(check_job_header(sample(), theirs, Rank{1}, "t").ok());
  theirs = sample();
  theirs.op = static_cast<ReduceOp>(9);
  EXPECT_FALSE(check_job_header(sample(), theirs, Rank{1}, "t").ok());
}

}  // namespace
}  // namespace zensync::test
