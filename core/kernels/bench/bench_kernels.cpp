// Times of each kernel, ref against the table in use (ZENSYNC_CPU_TARGET names another): Google
// Benchmark. Place: kernels/bench; built with ZENSYNC_BENCH. Sizes are those of the design's
// claims: 128 MB of fp32, 100 k rows of 64, blocks of 16 Ki slots, 8192 ids of a Zipf-like batch.
// `memcpy` and `read` are the yardsticks. Times per item: elements, offsets or entries a second.
// Repetitions: the shortest counts.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "zensync/kernels/kernels.hpp"

namespace {

using zensync::DType;
using namespace zensync::kernels;

const Table& table_of(const benchmark::State& state) {
  return state.range(0) == 0 ? *available().back() : active();
}

/// Floats of which per_mille are non-zero; of the others, half −0.0 where `signed_zeros`.
std::vector<float> make_floats(std::size_t elems, long per_mille, bool signed_zeros = false) {
  std::mt19937 random(1);
  std::vector<float> data(elems);
  for (float& x : data) {
    if (random() % 1000 < static_cast<unsigned long>(per_mille))
      x = 1.5F;
    else if (signed_zeros && random() % 2 == 0)
      x = -0.0F;
  }
  return data;
}

constexpr std::size_t kBigElems = std::size_t{1} << 25;

void yardstick_memcpy(benchmark::State& state) {
  const std::size_t elems = static_cast<std::size_t>(state.range(0)) / 4;
  const auto from = make_floats(elems, 0);
  std::vector<float> to(elems, 1.0F);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), elems * 4);
    benchmark::ClobberMemory();
  }
}

void find_singles(benchmark::State& state) {
  auto data = make_floats(kBigElems, state.range(1));
  std::vector<std::uint32_t> out(kBigElems + kSlackElems);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        table_of(state).find_units(data.data(), kBigElems, 1, DType::kF32, out.data()));
  }
}

void find_signed_zeros(benchmark::State& state) {
  const auto original = make_floats(kBigElems, 10, true);
  auto data = original;
  std::vector<std::uint32_t> out(kBigElems + kSlackElems);
  for (auto _ : state) {
    state.PauseTiming();
    data = original;
    state.ResumeTiming();
    benchmark::DoNotOptimize(
        table_of(state).find_units(data.data(), kBigElems, 1, DType::kF32, out.data()));
  }
}

/// 25.6 MB in units of `width`: 1 % of the rows of 64 are non-zero.
void find_rows(benchmark::State& state) {
  constexpr std::size_t kRows = 100000;
  const auto width = static_cast<std::size_t>(state.range(1));
  std::mt19937 random(1);
  std::vector<float> data(kRows * 64);
  for (std::size_t row = 0; row < kRows; ++row) {
    if (random() % 100 == 0) std::fill_n(data.begin() + static_cast<long>(row) * 64, 64, -1.5F);
  }
  const std::size_t units = data.size() / width;
  std::vector<std::uint32_t> out(units + kSlackElems);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        table_of(state).find_units(data.data(), units, width, DType::kF32, out.data()));
  }
}

/// 5 % of 8 Mi positions.
std::vector<std::uint32_t> some_positions(std::size_t units, unsigned per_mille) {
  std::mt19937 random(2);
  std::vector<std::uint32_t> at;
  for (std::uint32_t i = 0; i < units; ++i) {
    if (random() % 1000 < per_mille) at.push_back(i);
  }
  return at;
}

void add_units(benchmark::State& state) {
  const auto width = static_cast<std::size_t>(state.range(1));
  const auto dtype = static_cast<DType>(state.range(2));
  const auto at = some_positions((std::size_t{1} << 23) / width, 50);
  const std::vector<float> values(at.size() * width, 1.0F);
  std::vector<float> sums(std::size_t{1} << 23);
  for (auto _ : state) {
    table_of(state).add_units(sums.data(), at.data(), values.data(), at.size(), width, dtype);
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(at.size() * width) * state.iterations());
}

void gather_scatter(benchmark::State& state) {
  const auto unit_bytes = static_cast<std::size_t>(state.range(1));
  const auto at = some_positions((std::size_t{1} << 25) / unit_bytes, 50);
  std::vector<std::byte> base(std::size_t{1} << 25);
  std::vector<std::byte> units(at.size() * unit_bytes);
  for (auto _ : state) {
    table_of(state).gather(base.data(), at.data(), at.size(), unit_bytes, units.data());
    table_of(state).scatter(base.data(), at.data(), at.size(), unit_bytes, units.data());
  }
  state.SetItemsProcessed(2 * static_cast<std::int64_t>(at.size()) * state.iterations());
}

void finish(benchmark::State& state) {
  constexpr std::size_t kElems = std::size_t{1} << 18;
  const auto dtype = static_cast<DType>(state.range(1));
  const auto sums = make_floats(kElems, 500);
  std::vector<float> out(kElems);
  for (auto _ : state) {
    table_of(state).finish(sums.data(), out.data(), kElems, dtype, 7.0);
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(kElems) * state.iterations());
}

/// 64 blocks of offsets at range(1) per mille; range(2): 0 bitmap, 1 Elias–Fano; range(3): 1
/// unpacks.
void offsets(benchmark::State& state) {
  constexpr std::size_t kBlocks = 64;
  const bool is_bitmap = state.range(2) == 0;
  const Table& table = table_of(state);
  const auto pack = is_bitmap ? table.pack_bitmap : table.pack_elias_fano;
  const auto unpack = is_bitmap ? table.unpack_bitmap : table.unpack_elias_fano;
  std::vector<std::vector<std::uint16_t>> blocks(kBlocks);
  std::mt19937 random(3);
  std::int64_t count = 0;
  for (auto& block : blocks) {
    for (std::uint32_t slot = 0; slot < kBlockSlots; ++slot) {
      if (random() % 1000 < static_cast<unsigned long>(state.range(1))) {
        block.push_back(static_cast<std::uint16_t>(slot));
      }
    }
    count += static_cast<std::int64_t>(block.size());
  }
  std::vector<std::vector<std::byte>> packed(kBlocks, std::vector<std::byte>(8192));
  std::vector<std::uint16_t> out(kBlockSlots + kSlackElems);
  const auto size_of = [](const auto& block) { return static_cast<std::uint32_t>(block.size()); };
  for (std::size_t b = 0; b < kBlocks; ++b) {
    pack(blocks[b].data(), size_of(blocks[b]), kBlockSlots, packed[b].data());
  }
  for (auto _ : state) {
    for (std::size_t b = 0; b < kBlocks; ++b) {
      if (state.range(3) == 0) {
        pack(blocks[b].data(), size_of(blocks[b]), kBlockSlots, packed[b].data());
      } else {
        benchmark::DoNotOptimize(
            unpack(packed[b].data(), size_of(blocks[b]), kBlockSlots, out.data()));
      }
    }
  }
  state.SetItemsProcessed(count * state.iterations());
}

void coalesce_rows(benchmark::State& state) {
  constexpr std::size_t kEntries = 8192;
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<std::int64_t> indices(kEntries);
  // Zipf-like: about 2200 distinct rows of 6000.
  for (auto& row : indices) row = static_cast<std::int64_t>(std::pow(6000.0, uniform(random))) - 1;
  const std::vector<float> values(kEntries * 64, 1.0F);
  CoalesceScratch scratch;
  zensync::Array<std::uint64_t> rows;
  zensync::Buffer sums;
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        coalesce(table_of(state), {indices, values.data(), 64, DType::kF32}, scratch, rows, sums));
  }
  state.SetLabel(std::to_string(rows.size()) + " distinct rows");
}

BENCHMARK(yardstick_memcpy)->Arg(128 << 20)->Arg(25600000)->Unit(benchmark::kMillisecond);
BENCHMARK(find_singles)->ArgsProduct({{0, 1}, {0, 10, 50, 230}})->Unit(benchmark::kMillisecond);
BENCHMARK(find_signed_zeros)->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond);
BENCHMARK(find_rows)->ArgsProduct({{0, 1}, {8, 64}})->Unit(benchmark::kMillisecond);
BENCHMARK(add_units)->ArgsProduct({{0, 1}, {1, 8, 64}, {0, 2, 3}});
BENCHMARK(gather_scatter)->ArgsProduct({{0, 1}, {4, 8, 32, 256}});
BENCHMARK(finish)->ArgsProduct({{0, 1}, {0, 2, 3}});
BENCHMARK(offsets)->ArgsProduct({{0, 1}, {10, 50, 230}, {0, 1}, {0, 1}});
BENCHMARK(coalesce_rows)->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
