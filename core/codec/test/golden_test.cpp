// Wire bytes that are kept in files: a change of the format shows here, and must change
// kWireVersion. Place: tests of codec; files in golden/, hex, 32 bytes a line. Written bytes are
// compared with the files, and the files are read with the codec and with the obvious reader.
// ZENSYNC_WRITE_GOLDEN=1 writes the files anew (and fails, so that it is never left on).
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "obvious_reader.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

struct Golden {
  std::string name;
  MessageSpec spec;
  Slots slots;
  DType dtype = DType::kF32;
  std::uint64_t width = 1;
};

std::string path_of(const std::string& name) {
  return std::string(ZENSYNC_GOLDEN_DIR) + "/" + name + ".hex";
}

std::string hex_of(const Bytes& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    text += kDigits[static_cast<unsigned>(bytes[i]) / 16];
    text += kDigits[static_cast<unsigned>(bytes[i]) % 16];
    if (i % 32 == 31 || i + 1 == bytes.size()) text += '\n';
  }
  return text;
}

Bytes bytes_of(const std::string& name) {
  std::ifstream file(path_of(name));
  Bytes bytes;
  std::string digits;
  for (char c; file >> c;) {
    digits += c;
    if (digits.size() < 2) continue;
    bytes.push_back(static_cast<std::byte>(std::stoi(digits, nullptr, 16)));
    digits.clear();
  }
  return bytes;
}

/// Two sparse blocks with an empty one between, a dense short one at the end.
Slots mixed_slots() {
  Slots slots;
  for (std::uint64_t i = 0; i < 30; ++i) slots.push_back(i * i * 17 + i);
  for (std::uint64_t slot = 2 * 16384 + 16300; slot < 3 * 16384; slot += 5) slots.push_back(slot);
  for (std::uint64_t slot = 3 * 16384; slot < 3 * 16384 + 50; ++slot) {
    if (slot % 5 != 2) slots.push_back(slot);
  }
  return slots;
}

JobHeader sample_job_header() {
  JobHeader job;
  job.key = key_of("embedding.weight");
  job.rows = 151936;
  job.row_elems = 64;
  job.plan_digest = 0x0123456789ABCDEFULL;
  job.sequence = 7;
  job.size = 8;
  job.dtype = DType::kBF16;
  job.layout = Layout::kCoo;
  job.op = ReduceOp::kAvg;
  job.probe_rows = 64;
  job.probe_nonzero_rows = 5;
  job.probe_nonzero_elems = 300;
  return job;
}

std::vector<Golden> all_golden() {
  std::vector<Golden> all(5);
  all[0] = {"raw32", {}, {3, 70000, 99999}};
  all[0].spec.slots = 100000;
  all[1] = {"raw64", {}, {3, (1ULL << 32) + 1}};
  all[1].spec.slots = 1ULL << 33;
  all[2] = {"bitmap", {}, {}};
  all[2].spec.slots = 203;
  for (std::uint64_t slot = 0; slot < 203; slot += 1 + slot % 3) all[2].slots.push_back(slot);
  all[3] = {"elias_fano", {}, {}};
  all[3].spec.slots = 20000;
  for (std::uint64_t i = 0; i < 40; ++i) all[3].slots.push_back(i * i * 12);
  all[4] = {"mixed", {}, mixed_slots(), DType::kBF16};
  all[4].spec.slots = 3 * 16384 + 50;
  all[4].spec.job_headers = {sample_job_header()};
  all[4].spec.unit_bytes = 2;
  for (Golden& golden : all) {
    golden.spec.header.kind = MessageKind::kPush;
    golden.spec.header.codec = golden.name == "raw64" ? IndexCodec::kRaw64 : IndexCodec::kBlocks;
    golden.spec.header.values_dtype = golden.dtype;
    golden.spec.header.sequence = 7;
    golden.spec.header.total_units = golden.slots.size() + 5;
    golden.spec.header.total_elements = golden.slots.size();
  }
  all[4].spec.header.chunk = 2;
  return all;
}

TEST(Golden, WritersWriteTheFiles) {
  const bool is_generator = std::getenv("ZENSYNC_WRITE_GOLDEN") != nullptr;
  for (const Golden& golden : all_golden()) {
    for (const kernels::Table* table : kernels::available()) {
      MessageWriter writer;
      const Bytes message = write_message(*table, golden.spec, golden.slots, writer);
      if (is_generator) {
        std::ofstream(path_of(golden.name)) << hex_of(message);
        continue;
      }
      EXPECT_EQ(hex_of(message), hex_of(bytes_of(golden.name))) << golden.name;
    }
  }
  ASSERT_FALSE(is_generator) << "golden files were written; unset ZENSYNC_WRITE_GOLDEN";
}

TEST(Golden, ReadersReadTheFiles) {
  for (const Golden& golden : all_golden()) {
    const Bytes message = bytes_of(golden.name);
    ASSERT_GE(message.size(), 48U) << golden.name;
    const Expected expected = expected_of(golden.spec, golden.width, golden.dtype);
    const auto parsed = parse_message(message, expected);
    ASSERT_TRUE(parsed.ok()) << golden.name << ": " << parsed.error().message;
    const ParsedMessage& view = parsed.value();
    ObviousReader obvious(view.index, golden.spec.slots);
    EXPECT_EQ(obvious.read(view.header.codec, view.header.units), golden.slots) << golden.name;
    SparseSet set;
    ASSERT_TRUE(read_set(kernels::active(), view, expected, set).ok()) << golden.name;
    EXPECT_EQ(walk(set, golden.spec.slots).slots, golden.slots) << golden.name;
    EXPECT_EQ(integer_at(message, 0, 8), digest64(message.data() + 8, message.size() - 8));
  }
}

/// The codecs that the files are named after are those inside.
TEST(Golden, FilesHoldWhatTheirNamesSay) {
  EXPECT_EQ(static_cast<IndexCodec>(bytes_of("raw32").at(10)), IndexCodec::kRaw32);
  EXPECT_EQ(static_cast<IndexCodec>(bytes_of("raw64").at(10)), IndexCodec::kRaw64);
  EXPECT_EQ(static_cast<IndexCodec>(bytes_of("mixed").at(10)), IndexCodec::kBlocks);
  EXPECT_FALSE(uses_elias_fano(IndexCodec::kBlocks, 102, 203));
  EXPECT_TRUE(uses_elias_fano(IndexCodec::kBlocks, 30, 16384));
}

/// Fields of the job header at the offsets that the document gives.
TEST(Golden, JobHeaderFieldsLieWhereTheyShould) {
  const Bytes message = bytes_of("mixed");
  ASSERT_GE(message.size(), 112U);
  const std::span<const std::byte> job = std::span(message).subspan(48, 64);
  EXPECT_EQ(integer_at(job, 0, 8), key_of("embedding.weight"));
  EXPECT_EQ(integer_at(job, 8, 8), 151936U);
  EXPECT_EQ(integer_at(job, 16, 8), 64U);
  EXPECT_EQ(integer_at(job, 24, 8), 0x0123456789ABCDEFULL);
  EXPECT_EQ(integer_at(job, 32, 4), 7U);
  EXPECT_EQ(integer_at(job, 36, 2), 8U);
  EXPECT_EQ(integer_at(job, 38, 1), 2U);
  EXPECT_EQ(integer_at(job, 39, 1), 1U);
  EXPECT_EQ(integer_at(job, 40, 1), 1U);
  EXPECT_EQ(integer_at(job, 44, 4), 64U);
  EXPECT_EQ(integer_at(job, 48, 4), 5U);
  EXPECT_EQ(integer_at(job, 52, 4), 300U);
}

/// Control: one other slot, value or header field gives other bytes than the file's.
TEST(GoldenControl, AnotherMessageIsAnotherFile) {
  Golden golden = all_golden()[3];
  MessageWriter writer;
  golden.slots.back() += 1;
  EXPECT_NE(hex_of(write_message(kernels::active(), golden.spec, golden.slots, writer)),
            hex_of(bytes_of(golden.name)));
}

}  // namespace
}  // namespace zensync::test
