// Every scheme, over every driver, with every fault at every exchange: sums are exact or ranks
// report an error in time; never a wrong sum, never a hang. Place: tests of the engine.
// One rank of n has the fault, in the first of three jobs that all ranks submit at once. A rank
// that was done with a job before the fault reached it keeps its sum and learns of the fault in the
// job after: so if any rank fails in one job, all ranks fail in the next. Short deadlines only
// where a message that never comes can be waited for.
#include <gtest/gtest.h>

#include <ostream>
#include <tuple>

#include "group.hpp"
#include "tables.hpp"
#include "worlds.hpp"

namespace zensync::test {
namespace {

constexpr int kJobs = 3;
constexpr milliseconds kNoWait{20000};
constexpr milliseconds kShort{400};
constexpr milliseconds kSoon{10000};  ///< for a run without a long wait, on a busy machine

struct Way {
  const char* name;
  SchemeId scheme;
  std::uint64_t max_bytes = 0;
  bool is_agreement = false;
  std::optional<ShardLayout> shard = std::nullopt;  ///< a reduce-scatter
  bool gathers = false;                             ///< in place of it, rows of shards
  friend std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }
};
constexpr Way kWays[] = {
    {"balanced", SchemeId::kBalanced},
    {"balanced_chunked", SchemeId::kBalanced, 4800},
    {"recursive_doubling", SchemeId::kRecursiveDoubling},
    {"agsparse", SchemeId::kAgSparse},
    {"dense_ring", SchemeId::kDenseRing},
    {"agreement", SchemeId::kBalanced, 0, true},
    {"scatter_rows", SchemeId::kBalanced, 0, false, ShardLayout::kRows},
    {"scatter_columns", SchemeId::kBalanced, 0, false, ShardLayout::kColumns},
    {"gather_rows", SchemeId::kBalanced, 0, false, ShardLayout::kRows, true},
    {"gather_columns", SchemeId::kBalanced, 0, false, ShardLayout::kColumns, true}};

struct Medium {
  const char* name;
  Drivers (*make)(int size);
  bool waits;  ///< real time passes until a deadline
  friend std::ostream& operator<<(std::ostream& out, const Medium& medium) {
    return out << medium.name;
  }
};
const Medium kMediums[] = {
    {"loopback", [](int size) { return make_loopback(size); }, true},
    {"native", make_native, true},
    {"simulated", [](int size) { return make_simulated(size).drivers; }, false}};

struct World {
  int size;
  int faulty;
};
/// Rank 2 of 3 is folded in recursive doubling, rank 0 of 5 has a folded rank, rank 1 of 2 neither.
constexpr World kWorlds[] = {{2, 1}, {3, 2}, {5, 0}};

/// What came of it: per job and rank.
struct Result {
  std::vector<std::vector<Status>> status;
  std::vector<std::vector<bool>> exact;
  int acted = 0;
  int exchanges = 0;  ///< of the faulty rank in the first job (without faults)

  bool any_failed(int job) const {
    const auto& of_job = status[static_cast<std::size_t>(job)];
    return std::any_of(of_job.begin(), of_job.end(), [](const Status& s) { return !s.ok(); });
  }
  bool any_failed() const { return any_failed(kJobs - 1); }
};

class FaultMatrix : public ::testing::TestWithParam<std::tuple<Way, Medium>> {
 protected:
  const Way& way() const { return std::get<0>(GetParam()); }
  const Medium& medium() const { return std::get<1>(GetParam()); }

  Result run(const World& world, const Fault* fault, milliseconds deadline, bool verify = true) {
    Result result;
    EngineOptions options = options_of(way().scheme);
    options.max_bytes = way().max_bytes;
    options.deadline = deadline;
    options.wire.verify = verify;
    auto trace = std::make_shared<Trace>();
    // All outlive the engines.
    std::vector<Case> cases = make_cases(world.size);
    std::vector<ShardOutputs> outputs;
    for (const Case& job : cases) outputs.emplace_back(job.spec, way().shard.value_or(kRows));
    std::vector<Table> tables = make_tables(cases);
    std::vector<std::unique_ptr<Engine>> engines;
    for (auto& driver : medium().make(world.size)) {
      if (driver->rank().value == world.faulty) {
        FaultPlan plan;
        if (fault != nullptr) plan.faults = {*fault};
        plan.acted = [&result](const Fault&) { ++result.acted; };
        driver = make_faulty(make_tracing(std::move(driver), trace), std::move(plan));
      }
      engines.push_back(make_engine(std::move(driver), options));
    }
    submit(engines, {cases, outputs, tables}, deadline, result);
    for (auto& engine : engines) engine->close(milliseconds(500));
    for (const TraceEvent& event : trace->events()) {
      if (event.kind != TraceKind::kExchange) break;
      ++result.exchanges;
    }
    return result;
  }

  /// Tests `fault` at every exchange of the first job, in every world.
  template <class Check>
  void at_every_exchange(Fault fault, milliseconds deadline, Check check) {
    if (!medium().waits) deadline = kNoWait;
    for (const World& world : kWorlds) {
      const Result without = run(world, nullptr, kNoWait);
      ASSERT_NO_FATAL_FAILURE(expect_sound(without));
      ASSERT_FALSE(without.any_failed());
      ASSERT_GT(without.exchanges, 0);
      const bool has_peers = fault.kind != FaultKind::kDelay && fault.kind != FaultKind::kDie;
      const int variants = has_peers && world.size > 2 ? 2 : 1;
      for (int i = 0; i < without.exchanges * variants; ++i) {
        fault.exchange = i / variants;
        fault.peer = Rank{i % variants == 0 ? -1 : (world.faulty + 1) % world.size};
        vary(fault, static_cast<std::size_t>(i));
        SCOPED_TRACE(faults_text({fault}) + " on rank " + std::to_string(world.faulty) + " of " +
                     std::to_string(world.size));
        const auto start = Clock::now();
        const Result result = run(world, &fault, deadline);
        EXPECT_LT(Clock::now() - start, kSoon) << "somebody waited for a deadline";
        ASSERT_NO_FATAL_FAILURE(expect_sound(result));
        ASSERT_NO_FATAL_FAILURE(check(result, world));
        if (result.acted == 0) {
          EXPECT_FALSE(result.any_failed());
        }
      }
    }
  }

  /// Every error of another rank that has one names the faulty rank.
  static void expect_culprit(const Result& result, const World& world) {
    for (const auto& of_job : result.status) {
      for (const Status& status : of_job) {
        if (status.ok()) continue;
        EXPECT_EQ(status.error().culprit.value, world.faulty) << status.error().message;
      }
    }
  }

 private:
  static constexpr ShardLayout kRows = ShardLayout::kRows;

  std::vector<Case> make_cases(int size) const {
    std::vector<Case> cases;
    const bool has_columns = way().shard == ShardLayout::kColumns;
    for (int job = 0; job < kJobs; ++job) {
      CaseSpec spec{size, DType::kF32, Storage::kDense, 600, 1, Pattern::kUniform};
      if (has_columns) spec.row_elems = static_cast<std::uint64_t>(size);
      spec.density = 0.2;
      spec.seed = static_cast<std::uint64_t>(job) + 1;
      cases.push_back(make_case(spec));
    }
    return cases;
  }

  struct Memories {
    std::vector<Case>& cases;
    std::vector<ShardOutputs>& outputs;
    std::vector<Table>& tables;
  };

  /// Each rank asks for fifty rows of all shards.
  std::vector<Table> make_tables(const std::vector<Case>& cases) const {
    std::vector<Table> tables;
    for (const Case& job : cases) {
      Table& table = tables.emplace_back(make_table(job.spec, way().shard.value_or(kRows)));
      for (std::size_t rank = 0; rank < table.ids.size(); ++rank) {
        table.ids[rank].clear();
        for (std::int64_t i = 0; i < 50; ++i) table.ids[rank].push_back(i * 67 % 600);
        table.outputs[rank].assign(50 * table.row_bytes(), std::byte{0xAB});
      }
    }
    return tables;
  }

  std::shared_ptr<Job> submit_one(Engine& engine, const Memories& memories, std::size_t job,
                                  int rank) const {
    if (way().is_agreement) {
      return engine.agree(
          {{"t", {600, 1, DType::kF32, Layout::kDense}, nullptr, ReduceOp::kSum, false}});
    }
    if (way().gathers) return engine.submit(memories.tables[job].job(rank));
    const JobSpec spec = job_of(memories.cases[job], rank, "tensor");
    return engine.submit(way().shard ? memories.outputs[job].into(spec, rank) : spec);
  }

  bool is_exact(const Memories& memories, std::size_t job, int rank, const Job& done,
                const Sum& sum) const {
    if (way().is_agreement) return done.status().ok() && done.outcome() == Outcome::kUseDense;
    if (way().gathers) {
      const Table& table = memories.tables[job];
      return done.status().ok() &&
             table.outputs[static_cast<std::size_t>(rank)] == table.expected(rank);
    }
    if (way().shard) {
      return static_cast<bool>(holds_shard(memories.outputs[job], rank, done, sum));
    }
    return static_cast<bool>(holds(memories.cases[job], rank, done, sum));
  }

  void submit(std::vector<std::unique_ptr<Engine>>& engines, const Memories& memories,
              milliseconds deadline, Result& result) {
    const std::vector<Case>& cases = memories.cases;
    std::vector<Sum> expected;
    for (const Case& job : cases) expected.push_back(oracle(job));
    std::vector<Jobs> jobs(cases.size());
    for (std::size_t i = 0; i < cases.size(); ++i) {
      for (std::size_t rank = 0; rank < engines.size(); ++rank) {
        jobs[i].push_back(submit_one(*engines[rank], memories, i, static_cast<int>(rank)));
      }
    }
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (!wait_all(jobs[i], deadline + milliseconds(10000))) {
        ADD_FAILURE() << "a hang";
        for (auto& engine : engines) {
          engine->abort(make_error(ErrorKind::kInternal, "the test gives up"));
        }
        ASSERT_TRUE(wait_all(jobs[i]));
      }
      auto& statuses = result.status.emplace_back();
      auto& exact = result.exact.emplace_back();
      for (std::size_t rank = 0; rank < engines.size(); ++rank) {
        const Job& job = *jobs[i][rank];
        statuses.push_back(job.status());
        exact.push_back(is_exact(memories, i, static_cast<int>(rank), job, expected[i]));
      }
    }
  }

  /// Other bytes, masks and lengths each time.
  static void vary(Fault& fault, std::size_t number) {
    constexpr std::uint64_t kOffsets[] = {0, 1 << 20, 20, 60};
    constexpr std::uint8_t kMasks[] = {0x01, 0x80, 0xFF};
    constexpr std::uint64_t kCuts[] = {1, 1 << 20, 40};
    fault.offset = kOffsets[number % 4];
    fault.mask = kMasks[number % 3];
    fault.bytes = kCuts[number % 3];
  }

  static void expect_sound(const Result& result) {
    ASSERT_EQ(result.status.size(), static_cast<std::size_t>(kJobs));
    for (std::size_t job = 0; job < kJobs; ++job) {
      for (std::size_t rank = 0; rank < result.status[job].size(); ++rank) {
        const Status& status = result.status[job][rank];
        if (status.ok()) {
          EXPECT_TRUE(result.exact[job][rank]) << "a wrong sum: job " << job << " rank " << rank;
        }
        if (job > 0 && result.any_failed(static_cast<int>(job) - 1)) {
          EXPECT_FALSE(status.ok()) << "job " << job << " rank " << rank << " knows of no fault";
        }
      }
    }
  }
};

void expect_any_failure(const Result& result, const World&) {
  EXPECT_TRUE(result.any_failed() || result.acted == 0);
}

TEST_P(FaultMatrix, Delay) {
  Fault fault;
  fault.delay = milliseconds(3);
  at_every_exchange(fault, kNoWait, [](const Result& result, const World&) {
    EXPECT_EQ(result.acted, 1);
    EXPECT_FALSE(result.any_failed());
  });
}

TEST_P(FaultMatrix, Truncate) {
  Fault fault;
  fault.kind = FaultKind::kTruncate;
  at_every_exchange(fault, kNoWait, [](const Result& result, const World& world) {
    expect_any_failure(result, world);
    expect_culprit(result, world);
  });
}

TEST_P(FaultMatrix, Corrupt) {
  Fault fault;
  fault.kind = FaultKind::kCorrupt;
  at_every_exchange(fault, kNoWait, [](const Result& result, const World& world) {
    expect_any_failure(result, world);
    expect_culprit(result, world);
  });
}

/// A second copy that no job awaits any more is harmless; each job before must be.
TEST_P(FaultMatrix, Duplicate) {
  Fault fault;
  fault.kind = FaultKind::kDuplicate;
  at_every_exchange(fault, kNoWait, [](const Result& result, const World& world) {
    expect_any_failure(result, world);  // the next job finds it at the latest
    expect_culprit(result, world);
  });
}

TEST_P(FaultMatrix, Reorder) {
  Fault fault;
  fault.kind = FaultKind::kReorder;
  at_every_exchange(fault, kShort, [](const Result&, const World&) {});
}

TEST_P(FaultMatrix, Drop) {
  Fault fault;
  fault.kind = FaultKind::kDrop;
  at_every_exchange(fault, kShort, expect_any_failure);
}

TEST_P(FaultMatrix, Die) {
  for (const bool after : {false, true}) {
    Fault fault;
    fault.kind = FaultKind::kDie;
    fault.after = after;
    at_every_exchange(fault, kNoWait, [](const Result& result, const World& world) {
      EXPECT_EQ(result.acted, 1);
      EXPECT_TRUE(result.any_failed());
      expect_culprit(result, world);
      for (const Status& status : result.status.back()) {
        EXPECT_EQ(status.error().kind, ErrorKind::kPeerLost) << status.error().message;
      }
    });
  }
}

/// Control: with digests off a flipped bit of a value gives a wrong sum, which the comparison sees.
TEST_P(FaultMatrix, ControlWithoutDigestsTheSumIsWrong) {
  if (way().is_agreement) GTEST_SKIP() << "an agreement has no values";
  for (const World& world : kWorlds) {
    int wrong_sums = 0;
    Fault fault;
    fault.kind = FaultKind::kCorrupt;
    fault.mask = 0x40;  // in the exponent of the first value, behind none, one or two counts
    for (fault.exchange = 0; fault.exchange < 2; ++fault.exchange) {
      for (const std::uint64_t counts : {0, 1, 2}) {
        fault.offset = 48 + 64 + 16 * counts + 3;
        const Result result = run(world, &fault, kNoWait, false);
        const auto& exact = result.exact.front();
        const bool is_wrong = std::find(exact.begin(), exact.end(), false) != exact.end();
        wrong_sums += is_wrong && !result.any_failed();
      }
    }
    EXPECT_GT(wrong_sums, 0) << "n = " << world.size;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FaultMatrix, ::testing::Combine(::testing::ValuesIn(kWays), ::testing::ValuesIn(kMediums)),
    [](const auto& given) {
      return std::string(std::get<0>(given.param).name) + "_" + std::get<1>(given.param).name;
    });

}  // namespace
}  // namespace zensync::test
