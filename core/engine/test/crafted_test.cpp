// Messages that are whole and carry a right digest, but say what cannot be: written by hand for
// rank 1 of two, while rank 0 is an engine. Place: tests of the engine. Each must be refused,
// before any memory is touched.
#include <gtest/gtest.h>

#include "group.hpp"
#include "zensync/base/hash.hpp"
#include "zensync/partition/partition.hpp"
#include "zensync/plan/plan.hpp"

namespace zensync::test {
namespace {

constexpr std::uint64_t kRows = 5;  // two owners, three slots each: one slot has no unit

/// A name whose key puts the slot without a unit at `owner`.
std::string name_for(int owner) {
  for (int i = 0;; ++i) {
    std::string name = "tensor ";
    name += std::to_string(i);
    const Partition partition(PartitionKind::kRotation, kRows, 2, key_of(name));
    if (partition.unit_at(Rank{owner}, 2) >= kRows) return name;
  }
}

/// Rank 1: sends what the test writes, receives what rank 0's engine sends.
class Forger {
 public:
  Forger(std::unique_ptr<Driver> driver, const std::string& name, TensorSpec spec)
      : driver_(std::move(driver)), spec_(spec) {
    PlanOptions options;
    options.scheme = SchemeId::kBalanced;
    plan_ = make_plan(spec, 2, TensorState(), options);
    job_.key = key_of(name);
    job_.rows = spec.rows;
    job_.row_elems = spec.row_elems;
    job_.dtype = spec.dtype;
    job_.layout = spec.layout;
    job_.size = 2;
    job_.plan_digest = plan_digest(plan_);
  }

  /// One exchange with rank 0: a message with units at `slots`, all values 1.
  Status exchange(MessageKind kind, const std::vector<std::uint16_t>& slots) {
    MessageHeader header;
    header.kind = kind;
    header.codec = IndexCodec::kBlocks;
    header.values_dtype = spec_.dtype;
    header.total_units = slots.size();
    std::vector<JobHeader> jobs;
    if (kind == MessageKind::kPush) jobs.push_back(job_);
    writer_.begin(kernels::active(), header, jobs, plan_.chunk_ends.back());
    const std::size_t bytes = slots.size() * plan_.width * dtype_bytes(spec_.dtype);
    std::memset(writer_.add_values(bytes), 1, bytes);
    writer_.add_block(0, slots);
    Exchange exchange;
    exchange.sends.push_back({Rank{0}, writer_.finish(true)});
    exchange.recvs.push_back({Rank{0}, 1 << 20, &received_});
    return driver_->exchange(exchange, Clock::now() + milliseconds(5000));
  }
  const Plan& plan() const { return plan_; }

 private:
  std::unique_ptr<Driver> driver_;
  TensorSpec spec_;
  Plan plan_;
  JobHeader job_;
  MessageWriter writer_;
  Buffer received_;
};

struct Meeting {
  Meeting(Case& job, const std::string& name) {
    auto drivers = make_loopback(2);
    engine = make_engine(std::move(drivers[0]), options_of(SchemeId::kBalanced));
    const TensorSpec spec{job.spec.rows, job.spec.row_elems, job.spec.dtype,
                          is_coo(job.spec.storage) ? Layout::kCoo : Layout::kDense};
    forger = std::make_unique<Forger>(std::move(drivers[1]), name, spec);
    done = engine->submit(job_of(job, 0, name));
  }
  ~Meeting() { engine->close(milliseconds(500)); }
  void expect_corrupt() {
    ASSERT_TRUE(done->wait_until(Clock::now() + milliseconds(5000)));
    ASSERT_FALSE(done->status().ok());
    EXPECT_EQ(done->status().error().kind, ErrorKind::kCorruptMessage)
        << done->status().error().message;
    EXPECT_EQ(done->status().error().culprit, Rank{1});
  }
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Forger> forger;
  std::shared_ptr<Job> done;
};

Case small_case(Storage storage, std::uint64_t row_elems) {
  return make_case({2, DType::kF32, storage, kRows, row_elems, Pattern::kEmpty});
}

TEST(Crafted, APushedSlotWithoutAUnit) {
  Case job = small_case(Storage::kDense, 1);
  Meeting meeting(job, name_for(0));
  (void)meeting.forger->exchange(MessageKind::kPush, {0, 2});
  meeting.expect_corrupt();
}

TEST(Crafted, APulledSlotWithoutAUnit) {
  Case job = small_case(Storage::kDense, 1);
  Meeting meeting(job, name_for(1));
  ASSERT_TRUE(meeting.forger->exchange(MessageKind::kPush, {}).ok());
  (void)meeting.forger->exchange(MessageKind::kPull, {2});
  meeting.expect_corrupt();
}

/// A COO row of which only one part comes back: the first, an inner one, the last; of any row.
TEST(Crafted, APartOfARow) {
  const std::string name = "table";
  for (std::uint16_t slot = 0; slot < 64; ++slot) {
    Case job = make_case({2, DType::kF32, Storage::kCoo, 64, 64, Pattern::kEmpty});
    Meeting meeting(job, name);
    ASSERT_LT(meeting.forger->plan().width, 64U) << "rows are whole units: choose another shape";
    ASSERT_TRUE(meeting.forger->exchange(MessageKind::kPush, {}).ok());
    (void)meeting.forger->exchange(MessageKind::kPull, {slot});
    ASSERT_TRUE(meeting.done->wait_until(Clock::now() + milliseconds(5000)));
    ASSERT_FALSE(meeting.done->status().ok()) << "slot " << slot;
    const Error& error = meeting.done->status().error();
    EXPECT_EQ(error.kind, ErrorKind::kCorruptMessage) << error.message;
    EXPECT_NE(error.message.find("row"), std::string::npos) << error.message;
  }
}

/// Control: what is right is accepted, and reaches the caller's memory.
TEST(CraftedControl, WhatIsRightIsAccepted) {
  Case job = small_case(Storage::kDense, 1);
  const std::string name = name_for(0);
  Meeting meeting(job, name);
  ASSERT_TRUE(meeting.forger->exchange(MessageKind::kPush, {}).ok());
  ASSERT_TRUE(meeting.forger->exchange(MessageKind::kPull, {1}).ok());
  ASSERT_TRUE(meeting.done->wait_until(Clock::now() + milliseconds(5000)));
  ASSERT_TRUE(meeting.done->status().ok()) << meeting.done->status().error().message;
  const Partition partition(PartitionKind::kRotation, kRows, 2, key_of(name));
  EXPECT_EQ(load(job.ranks[0].dense, partition.unit_at(Rank{1}, 1), DType::kF32), 0x01010101U);
}

}  // namespace
}  // namespace zensync::test
