// The sparse reduce-scatter over counting(loopback) against a plain loop, bit for bit: every dtype,
// n = 1–6, both layouts, odd shapes; its traffic against the wire; messages that are broken, and
// ranks that disagree. Place: tests of the engine's directory, because drivers stand above schemes.
#include "zensync/scheme/reduce_scatter.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "element.hpp"
#include "zensync/base/hash.hpp"
#include "zensync/driver/counting.hpp"
#include "zensync/driver/loopback.hpp"
#include "zensync/plan/plan.hpp"

namespace zensync::test {
namespace {

using Bytes = std::vector<std::byte>;
using Edit = std::function<void(int rank, SchemeContext& context)>;

struct Shape {
  int size = 1;
  TensorSpec spec;
  ShardLayout layout = ShardLayout::kRows;
  ReduceOp op = ReduceOp::kSum;
  int percent = 30;  ///< of rows that are not zero, per rank
};

Bytes make_input(const Shape& shape, int rank) {
  Bytes data(shape.spec.dense_bytes());
  for (std::uint64_t row = 0; row < shape.spec.rows; ++row) {
    const std::uint64_t seed = mix64(row * 64 + static_cast<std::uint64_t>(rank) + 1);
    if (seed % 100 >= static_cast<std::uint64_t>(shape.percent)) continue;
    for (std::uint64_t j = 0; j < shape.spec.row_elems; ++j) {
      const std::uint64_t hash = mix64(seed + j);
      double value = static_cast<double>(static_cast<std::int64_t>(hash % 4001) - 2000);
      if (is_float(shape.spec.dtype)) value /= 7;  // sums that depend on their order
      std::uint64_t bits = bits_of(value, shape.spec.dtype);
      if (is_float(shape.spec.dtype) && hash % 5 == 0) bits = sign_bit(shape.spec.dtype);  // −0.0
      store(data, row * shape.spec.row_elems + j, shape.spec.dtype, bits);
    }
  }
  return data;
}

struct Outcome {
  Status status;
  Bytes output;
  ShardCounts counts;
  WireCount wire;
};

void run_rank(Driver& driver, const Shape& shape, Bytes& input, const Edit& edit, Outcome& out) {
  Workspace workspace(shape.size);
  KnownCounts known;
  SchemeContext context;
  context.kernels = &kernels::active();
  context.rank = driver.rank();
  context.topology = &driver.topology();
  context.tensor = "table";
  context.spec = shape.spec;
  context.plan.width = shard_width(shape.spec, shape.size, shape.layout).value();
  context.job = {key_of("table"), shape.spec.rows, shape.spec.row_elems};
  context.job.plan_digest = plan_digest(context.plan);
  context.job.size = static_cast<std::uint16_t>(shape.size);
  context.job.dtype = shape.spec.dtype;
  context.job.op = shape.op;
  context.workspace = &workspace;
  context.counts = &known;
  if (edit) edit(driver.rank().value, context);
  UnitSource source = UnitSource::scanned(input.data(), context.plan.width, shape.spec.dtype);
  context.source = &source;
  const std::uint64_t elems = shard_elems(shape.spec, shape.size, driver.rank(), shape.layout);
  out.output.assign(elems * dtype_bytes(shape.spec.dtype), std::byte{0xAB});
  SchemeTask task = reduce_scatter(context, {shape.layout, out.output.data(), &out.counts});
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (const Exchange* exchange = task.next()) {
    out.status = driver.exchange(*exchange, deadline);
    if (!out.status.ok()) return;
  }
  out.status = task.status();
  out.wire = driver.wire_count();
}

std::vector<Outcome> run(const std::vector<Shape>& shapes, std::vector<Bytes>& inputs,
                         const Edit& edit = {}) {
  const int size = shapes[0].size;
  auto drivers = make_loopback(size);
  std::vector<Outcome> outcomes(drivers.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < drivers.size(); ++rank) {
    drivers[rank] = make_counting(std::move(drivers[rank]));
    const Shape& shape = shapes[rank % shapes.size()];
    threads.emplace_back(
        [&, rank] { run_rank(*drivers[rank], shape, inputs[rank], edit, outcomes[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

std::vector<Bytes> inputs_of(const Shape& shape) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < shape.size; ++rank) inputs.push_back(make_input(shape, rank));
  return inputs;
}

/// Element `i` of the shard of `rank`: its place in the whole tensor.
std::uint64_t place_of(const Shape& shape, int rank, std::uint64_t i) {
  const auto n = static_cast<std::uint64_t>(shape.size);
  const auto r = static_cast<std::uint64_t>(rank);
  if (shape.layout == ShardLayout::kRows) {
    return r * ((shape.spec.rows + n - 1) / n) * shape.spec.row_elems + i;
  }
  const std::uint64_t part = shape.spec.row_elems / n;
  return i / part * shape.spec.row_elems + r * part + i % part;
}

void expect_sums(const Shape& shape, const std::vector<Bytes>& before,
                 const std::vector<Outcome>& outcomes) {
  const DType dtype = shape.spec.dtype;
  std::uint64_t elems = 0;
  for (int rank = 0; rank < shape.size; ++rank) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.error().message;
    const std::uint64_t own = outcome.output.size() / dtype_bytes(dtype);
    elems += own;
    for (std::uint64_t i = 0; i < own; ++i) {
      std::vector<std::uint64_t> terms;
      for (const Bytes& input : before) {
        terms.push_back(load(input, place_of(shape, rank, i), dtype));
      }
      const double divisor = shape.op == ReduceOp::kAvg ? shape.size : 1;
      ASSERT_EQ(load(outcome.output, i, dtype), ordered_sum(terms, dtype, divisor))
          << "rank " << rank << " element " << i;
    }
  }
  EXPECT_EQ(elems, shape.spec.elems()) << "shards cover the tensor";
}

std::vector<UnitId> units_of(const Shape& shape, const Bytes& input, std::uint64_t width) {
  std::vector<UnitId> units;
  for (UnitId unit = 0; unit < shape.spec.elems() / width; ++unit) {
    for (std::uint64_t j = 0; j < width; ++j) {
      if (!is_nonzero(load(input, unit * width + j, shape.spec.dtype), shape.spec.dtype)) continue;
      units.push_back(unit);
      break;
    }
  }
  return units;
}

void expect_traffic(const Shape& shape, const std::vector<Bytes>& before,
                    const std::vector<Outcome>& outcomes) {
  TrafficInput input;
  input.size = shape.size;
  input.spec = shape.spec;
  input.plan.width = shard_width(shape.spec, shape.size, shape.layout).value();
  std::vector<std::vector<UnitId>> units;
  for (const Bytes& data : before) units.push_back(units_of(shape, data, input.plan.width));
  const ExactCounts counts(units);
  input.counts = &counts;
  const std::vector<RankTraffic> expected = reduce_scatter_traffic(input, shape.layout);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].wire.sent_bytes, expected[rank].sent_bytes) << "rank " << rank;
    EXPECT_EQ(outcomes[rank].wire.received_bytes, expected[rank].received_bytes);
    std::uint64_t sent = 0;
    for (std::uint64_t part : outcomes[rank].counts.sent_units) sent += part;
    EXPECT_EQ(sent, units[rank].size());
  }
}

void check(const Shape& shape) {
  SCOPED_TRACE(std::to_string(shape.size) + " ranks, " + std::to_string(shape.spec.rows) + " × " +
               std::to_string(shape.spec.row_elems) + " " +
               std::string(dtype_name(shape.spec.dtype)) + ", layout " +
               std::to_string(static_cast<int>(shape.layout)) + ", " +
               std::to_string(shape.percent) + " %");
  const std::vector<Bytes> before = inputs_of(shape);
  std::vector<Bytes> inputs = before;
  const std::vector<Outcome> outcomes = run({shape}, inputs);
  ASSERT_NO_FATAL_FAILURE(expect_sums(shape, before, outcomes));
  ASSERT_NO_FATAL_FAILURE(expect_traffic(shape, before, outcomes));
}

void check_all(DType dtype, ShardLayout layout) {
  for (int size = 1; size <= 6; ++size) {
    const auto n = static_cast<std::uint64_t>(size);
    const std::uint64_t row_elems = layout == ShardLayout::kColumns ? 2 * n : 3;
    for (std::uint64_t rows : {std::uint64_t{0}, std::uint64_t{1}, n - 1, n + 1, 2 * n, 101UL}) {
      for (int percent : {0, 30, 100}) {
        Shape shape{size, {rows, row_elems, dtype}, layout, ReduceOp::kSum, percent};
        ASSERT_NO_FATAL_FAILURE(check(shape));
        shape.op = ReduceOp::kAvg;
        if (!is_float(dtype)) continue;
        ASSERT_NO_FATAL_FAILURE(check(shape));
      }
    }
  }
}

TEST(ReduceScatter, RowsEqualThePlainLoop) {
  for (DType dtype : kAllDTypes) check_all(dtype, ShardLayout::kRows);
}

TEST(ReduceScatter, ColumnsEqualThePlainLoop) {
  for (DType dtype : kAllDTypes) check_all(dtype, ShardLayout::kColumns);
}

TEST(ReduceScatter, ManyBlocks) {
  check({3, {60001, 1, DType::kF32}, ShardLayout::kRows, ReduceOp::kSum, 3});
  check({3, {60001, 3, DType::kBF16}, ShardLayout::kColumns, ReduceOp::kAvg, 3});
}

/// Rows by frequency all belong to rank 0; parts of rows are even whatever the rows are.
TEST(ReduceScatter, ColumnsAreEven) {
  for (ShardLayout layout : {ShardLayout::kRows, ShardLayout::kColumns}) {
    const Shape shape{4, {400, 8, DType::kI32}, layout, ReduceOp::kSum, 100};
    std::vector<Bytes> inputs = inputs_of(shape);
    for (Bytes& input : inputs) std::fill(input.begin() + 50 * 32, input.end(), std::byte{0});
    const std::vector<Outcome> outcomes = run({shape}, inputs);
    const bool rows = layout == ShardLayout::kRows;
    EXPECT_DOUBLE_EQ(outcomes[0].counts.imbalance(), rows ? 4.0 : 1.0);
  }
}

TEST(ReduceScatter, RefusesPartsThatAreNotEqual) {
  const auto width = shard_width({10, 7, DType::kF32}, 3, ShardLayout::kColumns);
  ASSERT_FALSE(width.ok());
  EXPECT_EQ(width.error().kind, ErrorKind::kUnsupported);
  EXPECT_NE(width.error().message.find("7 elements"), std::string::npos);
  EXPECT_FALSE(shard_width({10, 7, DType::kF32, Layout::kCoo}, 1, ShardLayout::kRows).ok());
  EXPECT_FALSE(shard_width({1ULL << 32, 1, DType::kF32}, 2, ShardLayout::kRows).ok());
}

void expect_mismatch(const Shape& mine, const Shape& other, const std::string& word) {
  std::vector<Bytes> inputs = {make_input(mine, 0), make_input(other, 1)};
  const std::vector<Outcome> outcomes = run({mine, other}, inputs);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ASSERT_FALSE(outcomes[rank].status.ok()) << word;
    const Error& error = outcomes[rank].status.error();
    EXPECT_EQ(error.kind, ErrorKind::kMismatch) << error.message;
    EXPECT_EQ(error.culprit, Rank{1 - static_cast<int>(rank)});
    EXPECT_EQ(error.tensor, "table");
    EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
  }
}

TEST(ReduceScatter, RanksThatDisagreeAreNamed) {
  const Shape mine{2, {40, 4, DType::kF32}};
  Shape other = mine;
  other.spec.rows = 44;
  expect_mismatch(mine, other, "44");
  other = mine;
  other.spec.dtype = DType::kBF16;
  expect_mismatch(mine, other, "bfloat16");
  other = mine;
  other.op = ReduceOp::kAvg;
  expect_mismatch(mine, other, "AVG");
  other = mine;
  other.layout = ShardLayout::kColumns;
  expect_mismatch(mine, other, "plan");
}

/// Rank 0 of two with `forge`d bytes in place of what rank 1 sent; the output stays untouched.
Status forged(const Shape& shape, const std::function<void(Bytes&)>& forge) {
  std::vector<Bytes> inputs = inputs_of(shape);
  auto drivers = make_loopback(2);
  Outcome honest;
  std::thread peer([&] { run_rank(*drivers[1], shape, inputs[1], {}, honest); });
  struct Forger : Driver {
    Driver& inner;
    std::function<void(Bytes&)> forge;
    Forger(Driver& given, std::function<void(Bytes&)> how) : inner(given), forge(std::move(how)) {}
    Rank rank() const override { return inner.rank(); }
    int size() const override { return inner.size(); }
    const Topology& topology() const override { return inner.topology(); }
    std::string name() const override { return "forger"; }
    Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
      Status status = inner.exchange(exchange, deadline);
      const auto got = std::as_const(*exchange.recvs[0].into).bytes();
      Bytes copy(got.begin(), got.end());
      forge(copy);
      exchange.recvs[0].into->resize_discard(copy.size());
      std::copy(copy.begin(), copy.end(), exchange.recvs[0].into->data());
      return status;
    }
    Status flush(Clock::time_point deadline) override { return inner.flush(deadline); }
    void abort(const Error& why) override { inner.abort(why); }
    WireCount wire_count() const override { return inner.wire_count(); }
  } forger(*drivers[0], forge);
  Outcome outcome;
  run_rank(forger, shape, inputs[0], {}, outcome);
  peer.join();
  const Bytes untouched(outcome.output.size(), std::byte{0xAB});
  EXPECT_EQ(outcome.output == untouched, !outcome.status.ok());
  return outcome.status;
}

void expect_corrupt(const Status& status, const std::string& what) {
  ASSERT_FALSE(status.ok()) << what;
  EXPECT_EQ(status.error().kind, ErrorKind::kCorruptMessage) << status.error().message;
  EXPECT_EQ(status.error().culprit, Rank{1}) << what;
}

TEST(ReduceScatterHostile, TruncatedOrChangedMessagesAreRefused) {
  const Shape shape{2, {41, 4, DType::kF32}, ShardLayout::kRows, ReduceOp::kSum, 60};
  std::size_t length = 0;
  ASSERT_TRUE(forged(shape, [&](Bytes& bytes) { length = bytes.size(); }).ok()) << "control";
  for (std::size_t keep = 0; keep < length; keep += 7) {
    expect_corrupt(forged(shape, [&](Bytes& bytes) { bytes.resize(keep); }), "truncated");
  }
  for (std::size_t at = 0; at < length; at += 13) {
    const Status status = forged(shape, [&](Bytes& bytes) { bytes[at] ^= std::byte{0x10}; });
    EXPECT_FALSE(status.ok()) << "byte " << at;
  }
}

/// A whole message with a right digest, but units at `slots`.
Bytes written(const Bytes& from, const Shape& shape, IndexCodec codec,
              const std::vector<std::uint16_t>& slots) {
  MessageHeader header;
  JobHeader job;
  std::memcpy(&header, from.data(), sizeof(header));
  std::memcpy(&job, from.data() + sizeof(header), sizeof(job));
  header.codec = codec;
  MessageWriter writer;
  writer.begin(kernels::active(), header, {&job, 1}, 64);
  const std::size_t bytes = slots.size() * shape.spec.row_elems * dtype_bytes(shape.spec.dtype);
  std::memset(writer.add_values(bytes), 1, bytes);
  writer.add_block(0, slots);
  const auto message = writer.finish(true);
  return {message.begin(), message.end()};
}

/// 41 rows on two ranks: 21 slots; rank 1 owns 20 rows, rank 0 the rest.
TEST(ReduceScatterHostile, SlotsThatDoNotExistAreRefused) {
  const Shape shape{2, {41, 4, DType::kF32}, ShardLayout::kRows, ReduceOp::kSum, 60};
  const auto with = [&](const std::vector<std::uint16_t>& slots) {
    return forged(shape,
                  [&](Bytes& bytes) { bytes = written(bytes, shape, IndexCodec::kRaw32, slots); });
  };
  EXPECT_TRUE(with({0, 20}).ok()) << "control";
  expect_corrupt(with({21}), "beyond the shard");
  expect_corrupt(with({60}), "beyond the tensor");
}

}  // namespace
}  // namespace zensync::test
