// Writer to reader and back, for each codec policy: slots, values, headers, sizes. Place: tests of
// codec. Oracle: the obvious reader (bit by bit) and the sizes that `traffic` uses. All kernel
// tables write equal bytes.
#include "zensync/codec/message.hpp"

#include <gtest/gtest.h>

#include "obvious_reader.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

constexpr IndexCodec kPolicies[] = {IndexCodec::kBlocks, IndexCodec::kRaw32, IndexCodec::kBitmap,
                                    IndexCodec::kEliasFano};

/// About `count` distinct slots; ascending.
Slots random_slots(std::uint64_t slots, std::uint64_t count, std::uint64_t seed) {
  std::set<std::uint64_t> drawn;
  for (std::uint64_t i = 0; i < count; ++i) drawn.insert(mix64(seed * 1000003 + i) % slots);
  return {drawn.begin(), drawn.end()};
}
Slots run_of_slots(std::uint64_t begin, std::uint64_t end) {
  Slots found;
  for (std::uint64_t slot = begin; slot < end; ++slot) found.push_back(slot);
  return found;
}

/// All the selections that are tried over `slots` slots.
std::vector<Slots> selections(std::uint64_t slots) {
  std::vector<Slots> all = {{}, {0}, {slots - 1}, {slots / 2}};
  if (slots > 1) all.push_back({0, slots - 1});
  for (std::uint64_t count : {2, 15, 16, 17, 300}) all.push_back(random_slots(slots, count, count));
  if (slots > 200000) return all;
  all.push_back(run_of_slots(0, slots));
  all.push_back(run_of_slots(slots / 3, slots / 2));
  for (std::uint64_t share : {50, 8, 3, 1}) {
    all.push_back(random_slots(slots, slots / share, share));
  }
  return all;
}

std::uint64_t bytes_of_blocks(IndexCodec policy, const Slots& found, std::uint64_t slots) {
  std::uint64_t bytes = 0;
  std::uint64_t next_block = 0;
  for (std::size_t i = 0; i < found.size();) {
    const std::uint64_t block = found[i] / kernels::kBlockSlots;
    std::uint32_t count = 0;
    for (; i < found.size() && found[i] / kernels::kBlockSlots == block; ++i) ++count;
    bytes += block_bytes(policy, block - next_block, count, slots_of_block(block, slots));
    next_block = block + 1;
  }
  return bytes;
}

/// The bytes a selection must take, apart from headers.
void check_sizes(const MessageSpec& spec, const Slots& found, const Bytes& message) {
  const IndexCodec policy = spec.header.codec;
  const std::uint64_t blocks_bytes = bytes_of_blocks(policy, found, spec.slots);
  const IndexChoice choice = choose_index(policy, found.size(), spec.slots, blocks_bytes);
  EXPECT_EQ(integer_at(message, 24, 8), choice.bytes);
  EXPECT_EQ(static_cast<IndexCodec>(message[10]), choice.codec);
  EXPECT_EQ(message.size(),
            message_bytes(spec.job_headers.size(), found.size(), spec.unit_bytes, choice.bytes));
  if (policy == IndexCodec::kBlocks && !found.empty()) {
    const std::uint64_t raw = found.size() * (spec.slots <= (1ULL << 32) ? 4 : 8);
    EXPECT_EQ(choice.bytes, found.size() <= kRawUnits ? std::min(raw, blocks_bytes) : blocks_bytes);
  }
}

void check_round_trip(const MessageSpec& spec, std::uint64_t width, DType dtype,
                      const Slots& found) {
  MessageWriter writer;
  SparseSet set;
  Bytes first;
  for (const kernels::Table* table : kernels::available()) {
    const Bytes message = write_message(*table, spec, found, writer);
    if (first.empty()) first = message;
    ASSERT_EQ(message, first) << table->name << " writes other bytes";
    ASSERT_NO_FATAL_FAILURE(check_sizes(spec, found, message));
    Bytes holder;
    Expected expected = expected_of(spec, width, dtype);
    expected.partial_sums = spec.header.values_dtype != dtype;
    const auto parsed = parse_exact(message, expected, holder);
    ASSERT_TRUE(parsed.ok()) << parsed.error().message;
    const ParsedMessage& view = parsed.value();
    EXPECT_EQ(view.header.units, found.size());
    ObviousReader obvious(view.index, spec.slots);
    ASSERT_EQ(obvious.read(view.header.codec, found.size()), found);
    const Status status = read_set(*table, view, expected, set);
    ASSERT_TRUE(status.ok()) << status.error().message;
    const Walk walked = walk(set, spec.slots);
    ASSERT_TRUE(walked.is_sound);
    ASSERT_EQ(walked.slots, found) << table->name;
    EXPECT_EQ(set.units(), found.size());
    EXPECT_EQ(set.values_dtype, spec.header.values_dtype);
    ASSERT_EQ(view.values.size(), found.size() * spec.unit_bytes);
    for (std::size_t i = 0; i < view.values.size(); ++i) {
      ASSERT_EQ(static_cast<const std::byte*>(set.values)[i], static_cast<std::byte>(i * 7 + 1));
    }
  }
}

class RoundTrip : public ::testing::TestWithParam<IndexCodec> {};

TEST_P(RoundTrip, SlotsAndValues) {
  for (std::uint64_t slots :
       {1ULL, 2ULL, 7ULL, 64ULL, 1000ULL, 16383ULL, 16384ULL, 16385ULL, 50001ULL, 131072ULL,
        (1ULL << 32), (1ULL << 32) + 1, (1ULL << 33) + 77}) {
    for (const Slots& found : selections(slots)) {
      MessageSpec spec;
      spec.header.codec = GetParam();
      spec.header.kind = MessageKind::kPull;
      spec.slots = slots;
      ASSERT_NO_FATAL_FAILURE(check_round_trip(spec, 1, DType::kF32, found))
          << slots << " slots, " << found.size() << " units";
    }
  }
}

TEST_P(RoundTrip, DtypesAndWidths) {
  for (int t = 0; t < kDTypeCount; ++t) {
    const auto dtype = static_cast<DType>(t);
    for (DType values : {dtype, sum_dtype(dtype)}) {
      for (std::uint64_t width : {1, 3, 64}) {
        MessageSpec spec;
        spec.header.codec = GetParam();
        spec.header.values_dtype = values;
        spec.slots = 40000;
        spec.unit_bytes = width * dtype_bytes(values);
        spec.verify = width != 3;
        ASSERT_NO_FATAL_FAILURE(check_round_trip(spec, width, dtype, random_slots(40000, 500, 3)));
      }
    }
  }
}

/// Where final values are expected (a pull), sums of another type are refused, though the digest is
/// right.
TEST(Reader, SumsAreRefusedWhereValuesMustBeFinal) {
  MessageSpec spec;
  spec.header.codec = IndexCodec::kBlocks;
  spec.header.values_dtype = DType::kF32;
  spec.slots = 100;
  spec.unit_bytes = 4;
  MessageWriter writer;
  const Bytes message = write_message(kernels::active(), spec, {3, 50}, writer);
  Expected expected = expected_of(spec, 1, DType::kBF16);
  for (bool partial : {true, false}) {
    expected.partial_sums = partial;
    const auto parsed = parse_message(message, expected);
    ASSERT_TRUE(parsed.ok());
    SparseSet set;
    EXPECT_EQ(read_set(kernels::active(), parsed.value(), expected, set).ok(), partial);
  }
}

TEST_P(RoundTrip, EveryCountOfASmallBlock) {
  for (std::uint64_t slots : {9, 130}) {
    for (std::uint64_t count = 0; count <= slots; ++count) {
      Slots found;
      for (std::uint64_t i = 0; i < count; ++i) found.push_back(i * slots / count);
      MessageSpec spec;
      spec.header.codec = GetParam();
      spec.slots = slots;
      ASSERT_NO_FATAL_FAILURE(check_round_trip(spec, 1, DType::kF32, found)) << count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, RoundTrip, ::testing::ValuesIn(kPolicies));

/// Headers arrive as they were given; job headers too, though they may lie unaligned.
TEST(Message, HeadersArrive) {
  MessageSpec spec;
  spec.header = {0,
                 kWireVersion,
                 MessageKind::kGather,
                 IndexCodec::kBlocks,
                 DType::kF32,
                 9,
                 4,
                 0,
                 0,
                 0,
                 1ULL << 40,
                 77};
  JobHeader first;
  first.key = 5;
  first.rows = 1ULL << 35;
  JobHeader second = first;
  second.probe_rows = 64;
  spec.job_headers = {first, second};
  spec.slots = 100;
  MessageWriter writer;
  const Bytes message = write_message(kernels::active(), spec, {3, 99}, writer);
  const auto parsed = parse_message(message, expected_of(spec, 1, DType::kF32));
  ASSERT_TRUE(parsed.ok()) << parsed.error().message;
  EXPECT_EQ(parsed.value().header.sequence, 9U);
  EXPECT_EQ(parsed.value().header.chunk, 4);
  EXPECT_EQ(parsed.value().header.total_units, 1ULL << 40);
  EXPECT_EQ(parsed.value().header.total_elements, 77U);
  EXPECT_EQ(job_header_of(parsed.value(), 0).rows, first.rows);
  EXPECT_EQ(job_header_of(parsed.value(), 0).probe_rows, 0U);
  EXPECT_EQ(job_header_of(parsed.value(), 1).probe_rows, 64U);
}

TEST(Message, DenseValuesHaveNoIndex) {
  MessageWriter writer;
  MessageHeader header;
  header.kind = MessageKind::kRingReduce;
  header.codec = IndexCodec::kNone;
  writer.begin(kernels::active(), header, {}, 0);
  std::memset(writer.add_values(40), 1, 40);
  writer.set_units(10);
  const auto bytes = writer.finish(true);
  Expected expected;
  expected.kind = MessageKind::kRingReduce;
  const auto parsed = parse_message(bytes, expected);
  ASSERT_TRUE(parsed.ok()) << parsed.error().message;
  EXPECT_EQ(bytes.size(), 48U + 40);
  EXPECT_EQ(parsed.value().values.size(), 40U);
}

/// `add_set` writes the same bytes as blocks added one by one; the writer is used again without
/// residue.
TEST(Message, AddSetEqualsAddBlock) {
  MessageSpec spec;
  spec.header.codec = IndexCodec::kBlocks;
  spec.slots = 100000;
  const Slots found = random_slots(spec.slots, 3000, 8);
  MessageWriter writer;
  const Bytes message = write_message(kernels::active(), spec, found, writer);
  const Expected expected = expected_of(spec, 1, DType::kF32);
  const auto parsed = parse_message(message, expected);
  ASSERT_TRUE(parsed.ok());
  SparseSet set;
  ASSERT_TRUE(read_set(kernels::active(), parsed.value(), expected, set).ok());
  MessageWriter second;
  for (int round = 0; round < 2; ++round) {
    second.begin(kernels::active(), spec.header, {}, spec.slots);
    second.add_set(set, found.size() * 4);
    const auto bytes = second.finish(true);
    EXPECT_EQ(Bytes(bytes.begin(), bytes.end()), message);
  }
}

/// A place other than the expected one is a mismatch (the peer is elsewhere), not damage.
TEST(Message, AnotherPlaceIsAMismatch) {
  MessageSpec spec;
  spec.header.codec = IndexCodec::kBlocks;
  spec.header.sequence = 3;
  spec.job_headers = {JobHeader()};
  spec.slots = 100;
  MessageWriter writer;
  const Bytes message = write_message(kernels::active(), spec, {1, 5}, writer);
  const Expected right = expected_of(spec, 1, DType::kF32);
  ASSERT_TRUE(parse_message(message, right).ok());
  Expected kind = right;
  kind.kind = MessageKind::kGather;
  Expected sequence = right;
  sequence.sequence = 4;
  Expected headers = right;
  headers.job_headers = 0;
  Expected chunk = right;
  chunk.chunk = 1;
  for (const Expected& other : {kind, sequence, headers, chunk}) {
    const auto parsed = parse_message(message, other);
    SparseSet set;
    const Status status =
        parsed.ok() ? read_set(kernels::active(), parsed.value(), other, set) : parsed.status();
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kMismatch) << status.error().message;
  }
}

}  // namespace
}  // namespace zensync::test
