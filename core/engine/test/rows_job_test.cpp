// Row gathers as jobs of the engine: random cases against a plain loop, among other jobs; ids that
// do not exist and ranks that disagree; broken messages. Place: tests of the engine.
#include <gtest/gtest.h>

#include "group.hpp"
#include "tables.hpp"

namespace zensync::test {
namespace {

Table draw(std::uint64_t seed) {
  CaseSpec spec;
  spec.seed = seed;
  spec.size = 1 + static_cast<int>(below(seed, 1, 6));
  spec.dtype = kAllDTypes[below(seed, 2, 6)];
  spec.rows = below(seed, 3, 15) == 0 ? 40000 + below(seed, 4, 90000) : below(seed, 4, 200);
  const ShardLayout layout = below(seed, 5, 2) == 0 ? ShardLayout::kRows : ShardLayout::kColumns;
  spec.row_elems = 1 + below(seed, 6, 5);
  if (layout == ShardLayout::kColumns) spec.row_elems *= static_cast<std::uint64_t>(spec.size);
  return make_table(spec, layout);
}

Jobs gather(Group& group, Table& table) {
  Jobs jobs;
  for (int rank = 0; rank < group.size(); ++rank) {
    jobs.push_back(group.engine(rank).submit(table.job(rank)));
  }
  EXPECT_TRUE(wait_all(jobs)) << "a hang";
  return jobs;
}

TEST(RowsJob, RandomCasesGetTheirRows) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    Table table = draw(seed);
    EngineOptions options;
    options.wire.verify = seed % 3 != 0;
    options.wire.codec = kPolicies[seed % 4];
    Group group(table.spec.size, options);
    for (int again = 0; again < 2; ++again) {
      const Jobs jobs = gather(group, table);
      for (int rank = 0; rank < group.size(); ++rank) {
        const auto index = static_cast<std::size_t>(rank);
        ASSERT_TRUE(jobs[index]->status().ok()) << jobs[index]->status().error().message;
        ASSERT_EQ(table.outputs[index], table.expected(rank))
            << "seed " << seed << " rank " << rank << " " << label(table.spec);
        table.outputs[index].assign(table.outputs[index].size(), std::byte{0});
      }
    }
  }
}

/// Columns: each rank sends the parts of the rows that were asked for, and no others.
TEST(RowsJob, BytesAreThoseOfTheRows) {
  CaseSpec spec{2, DType::kF32, Storage::kDense, 1000, 64, Pattern::kUniform};
  for (const ShardLayout layout : {ShardLayout::kRows, ShardLayout::kColumns}) {
    Table table = make_table(spec, layout);
    table.ids = {{999, 3, 999, 3, 700}, {}};
    table.outputs = {Memory(5 * 256), {}};
    Group group(2);
    const Jobs jobs = gather(group, table);
    const bool rows = layout == ShardLayout::kRows;
    EXPECT_EQ(table.outputs[0], table.expected(0));
    EXPECT_EQ(jobs[0]->report().units, 3U) << "distinct ids";
    const std::vector<std::uint64_t> asked =
        rows ? std::vector<std::uint64_t>{1, 2} : std::vector<std::uint64_t>{3, 3};
    EXPECT_EQ(jobs[0]->report().shard.sent_units, asked);
    EXPECT_EQ(jobs[1]->report().shard.received_units[0], asked[1]);
    const std::uint64_t values = rows ? 2 * 256 : 3 * 128;
    EXPECT_GE(jobs[1]->report().sent_bytes, values + 2 * 56 + 64);
    EXPECT_LE(jobs[1]->report().sent_bytes, values + 2 * 56 + 64 + 8);
  }
}

TEST(RowsJob, WhatOneRankHasWrongAllAreTold) {
  const CaseSpec spec{2, DType::kF32, Storage::kDense, 40, 4, Pattern::kUniform};
  Table table = make_table(spec, ShardLayout::kRows);
  const auto expect = [&](const JobSpec& wrong, ErrorKind kind, const std::string& words) {
    for (const Error& error : errors_of(table.job(0), wrong)) {
      EXPECT_EQ(error.kind, kind) << error.message;
      EXPECT_NE(error.message.find(words), std::string::npos) << error.message;
      if (kind == ErrorKind::kInvalid) {
        EXPECT_EQ(error.culprit, Rank{1}) << error.message;
      }
    }
  };
  const std::int64_t beyond[] = {3, 40};
  const std::int64_t negative[] = {-1};
  JobSpec wrong = table.job(1);
  wrong.rows->ids = beyond;
  wrong.rows->ids_count = 2;
  expect(wrong, ErrorKind::kInvalid, "row 40 (entry 1) is outside");
  wrong.rows->ids = negative;
  wrong.rows->ids_count = 1;
  expect(wrong, ErrorKind::kInvalid, "row -1");
  wrong = table.job(1);
  wrong.rows->output = nullptr;
  wrong.rows->ids = beyond;
  wrong.rows->ids_count = 1;
  expect(wrong, ErrorKind::kInvalid, "no memory");
  wrong = table.job(1);
  std::get<DenseView>(wrong.input).rows = 3;
  expect(wrong, ErrorKind::kInvalid, "12 elements");
  wrong = table.job(1);
  wrong.input = CooView{nullptr, nullptr, 0, 20, 4, DType::kF32};
  expect(wrong, ErrorKind::kUnsupported, "dense-stored");
  wrong = table.job(1);
  wrong.rows->rows = 39;
  expect(wrong, ErrorKind::kMismatch, "shape");
  wrong = table.job(1);
  wrong.rows.reset();
  wrong.shard = ShardView{ShardLayout::kRows, table.whole.data()};
  expect(wrong, ErrorKind::kMismatch, "shape");
}

/// Of three ranks the one that differs is the culprit for all, itself included.
TEST(RowsJob, TheOneThatDiffersFromMostIsNamed) {
  const CaseSpec spec{3, DType::kF32, Storage::kDense, 42, 4, Pattern::kUniform};
  Table table = make_table(spec, ShardLayout::kRows);
  Group group(3);
  Jobs jobs;
  for (int rank = 0; rank < 3; ++rank) {
    JobSpec job = table.job(rank);
    if (rank == 1) {
      job.rows->rows = 41;
      job.rows->ids_count = 0;
    }
    jobs.push_back(group.engine(rank).submit(job));
  }
  ASSERT_TRUE(wait_all(jobs));
  int named = 0;
  for (const auto& job : jobs) {
    ASSERT_FALSE(job->status().ok());
    if (job->status().error().culprit == Rank{1}) ++named;
  }
  EXPECT_EQ(named, 3);
}

/// Changes one received message of rank 0.
class ChangingDriver final : public Driver {
 public:
  using Change = std::function<void(Memory&)>;
  ChangingDriver(std::unique_ptr<Driver> inner, int exchange, Change change)
      : inner_(std::move(inner)), left_(exchange), change_(std::move(change)) {}
  Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  std::string name() const override { return "changing"; }
  Status exchange(const Exchange& exchange, Clock::time_point deadline) override {
    Status status = inner_->exchange(exchange, deadline);
    if (!status.ok() || rank().value != 0 || left_-- != 0) return status;
    const auto got = std::as_const(*exchange.recvs[0].into).bytes();
    Memory copy(got.begin(), got.end());
    change_(copy);
    exchange.recvs[0].into->resize_discard(copy.size());
    std::copy(copy.begin(), copy.end(), exchange.recvs[0].into->data());
    return status;
  }
  Status flush(Clock::time_point deadline) override { return inner_->flush(deadline); }
  void abort(const Error& why) override { inner_->abort(why); }
  WireCount wire_count() const override { return inner_->wire_count(); }

 private:
  std::unique_ptr<Driver> inner_;
  int left_;
  Change change_;
};

/// Rank 0's status when message `exchange` from rank 1 is changed.
Status changed(int exchange, bool verify, const ChangingDriver::Change& change) {
  const CaseSpec spec{2, DType::kF32, Storage::kDense, 41, 4, Pattern::kUniform};
  Table table = make_table(spec, ShardLayout::kRows);
  table.ids = {{40, 3, 25, 21}, {2, 20, 0, 39}};
  table.outputs = {Memory(4 * 16, std::byte{0xAB}), Memory(4 * 16)};
  EngineOptions options;
  options.wire.verify = verify;
  Group group(2, options, [&](std::unique_ptr<Driver> inner) -> std::unique_ptr<Driver> {
    return std::make_unique<ChangingDriver>(std::move(inner), exchange, change);
  });
  const Jobs jobs = gather(group, table);
  if (jobs[0]->status().ok() && verify) {
    EXPECT_EQ(table.outputs[0], table.expected(0));
  } else if (!jobs[0]->status().ok()) {
    EXPECT_EQ(table.outputs[0], Memory(4 * 16, std::byte{0xAB})) << "the output was written";
  }
  return jobs[0]->status();
}

TEST(RowsJobHostile, ChangedMessagesAreRefused) {
  for (const int exchange : {0, 1}) {
    std::size_t length = 0;
    ASSERT_TRUE(changed(exchange, true, [&](Memory& m) { length = m.size(); }).ok()) << "control";
    for (std::size_t at = 0; at < length; at += 3) {
      const Status flipped = changed(exchange, true, [&](Memory& m) { m[at] ^= std::byte{0x10}; });
      ASSERT_FALSE(flipped.ok()) << "byte " << at;
      EXPECT_EQ(flipped.error().culprit, Rank{1}) << flipped.error().message;
      EXPECT_FALSE(changed(exchange, true, [&](Memory& m) { m.resize(at); }).ok());
      // Without digests any flip is found or harmless, never a crash.
      (void)changed(exchange, false, [&](Memory& m) { m[at] ^= std::byte{0x10}; });
      EXPECT_FALSE(changed(exchange, false, [&](Memory& m) { m.resize(at); }).ok()) << at;
    }
    EXPECT_FALSE(changed(exchange, false, [](Memory& m) { m.resize(m.size() + 1); }).ok());
  }
}

/// A right message that asks for row 21 of a shard of 20 or 21 rows.
TEST(RowsJobHostile, IdsBeyondTheShardAreRefused) {
  const auto asked = [](std::uint32_t slot) {
    return changed(0, false, [slot](Memory& m) {
      MessageHeader header;
      std::memcpy(&header, m.data(), sizeof header);
      header.codec = IndexCodec::kRaw32;
      header.units = 1;
      header.index_bytes = sizeof slot;
      m.resize(sizeof header + sizeof(JobHeader) + sizeof slot);
      std::memcpy(m.data(), &header, sizeof header);
      std::memcpy(m.data() + m.size() - sizeof slot, &slot, sizeof slot);
    });
  };
  const Status right = asked(20);  // rank 1, which gets fewer rows than it asked for, may complain
  EXPECT_TRUE(right.ok() || right.error().culprit == Rank{0}) << "control";
  for (const std::uint32_t slot : {21U, 0xFFFFFFFFU}) {
    const Status status = asked(slot);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::kCorruptMessage) << status.error().message;
    EXPECT_EQ(status.error().culprit, Rank{1});
  }
}

}  // namespace
}  // namespace zensync::test
