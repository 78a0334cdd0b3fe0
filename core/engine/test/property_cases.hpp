// One random case of the schemes: everything that it is, drawn from a 64-bit seed, and its inputs
// as each rank stores them. Place: tests of the engine, for property_test.cpp.
// Each field is drawn from a stream of its own, and Limits clip fields after they are drawn: so a
// failing seed can be made smaller field by field while all other fields stay as they were.
// Owner: PropertyCase and Inputs are values; memory handed to a scheme is that of Inputs, which is
// changed in place (dense-stored) and must outlive the scheme. Pure; nothing fails.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zensync/base/plan.hpp"
#include "zensync/base/types.hpp"
#include "zensync/scheme/context.hpp"

namespace zensync::test {

enum class Hold { kDense, kDenseIds, kCooSorted, kCooShuffled };
/// Which rows a rank has; kEmptyRanks: uniform, but some ranks have none.
enum class Spread { kUniform, kEmptyRanks, kIdentical, kDisjoint, kLastUnit, kFull, kNone };
/// What elements are. Integers of the small kind add up exactly in any order; kFloats (integers:
/// all bits, so that sums wrap), kDenormals and kZeros are compared with the documented order;
/// kSpecial has NaN and infinities in all bit patterns, compared by rule.
enum class Kind { kSmall, kFloats, kZeros, kDenormals, kCancelling, kSpecial };

/// Upper bounds on what is drawn; the shrinking lowers them.
struct Limits {
  std::uint64_t size = 17;
  std::uint64_t rows = 1 << 20;
  std::uint64_t row_elems = 17;
  std::uint64_t chunks = 6;
  std::uint64_t stride = 1 << 20;
};

struct PropertyCase {
  std::uint64_t seed = 0;
  Limits limits;
  int size = 1;
  TensorSpec spec;
  Hold hold = Hold::kDense;
  Spread spread = Spread::kUniform;
  Kind kind = Kind::kSmall;
  double density = 0.1;
  double holes = 0;  ///< share of elements that are zero in a row that a rank has
  Plan plan;
  WireOptions wire;
  ReduceOp op = ReduceOp::kSum;
  std::uint64_t key = 1;
  std::uint64_t stride = 1;      ///< COO: one row at most of each run of so many may be there
  std::uint64_t lead_elems = 0;  ///< how far the tensor lies from an aligned address
  bool late_sends = false;       ///< messages are read as late as exchange.hpp allows
  bool mixed_kernels = false;    ///< ranks run different targets' kernels
  std::uint64_t row_runs() const { return spec.rows / stride; }
  std::uint64_t units() const { return spec.elems() / plan.width; }
  std::uint64_t parts() const { return spec.row_elems / plan.width; }
  std::uint64_t row_bytes() const { return spec.row_elems * dtype_bytes(spec.dtype); }
  bool is_coo() const { return hold == Hold::kCooSorted || hold == Hold::kCooShuffled; }
  bool is_listed() const { return hold != Hold::kDense; }
};

PropertyCase draw_case(std::uint64_t seed, const Limits& limits = {});

/// "SEED:size:rows:row_elems:chunks:stride", what ZENSYNC_PROPERTY takes to run one case again.
std::string repeat_key(const PropertyCase& given);
/// One line: repeat_key and every field.
std::string describe(const PropertyCase& given);
/// The reverse of repeat_key; false if `text` is none.
bool parse_repeat_key(const std::string& text, std::uint64_t& seed, Limits& limits);

/// What one rank has: its rows, ascending, with what they add up to, and the same as stored.
struct RankInput {
  std::vector<std::uint64_t> rows;
  /// rows × row_elems, bits of sum_dtype: the rank's contribution, duplicates added.
  std::vector<std::uint64_t> cells;
  std::vector<UnitId> units;          ///< ascending, those that the rank sends
  std::vector<std::int64_t> indices;  ///< COO: entries as stored; kDenseIds: `rows`
  std::vector<std::byte> memory;      ///< the tensor or the entries' values, between two fences
  bool is_coalesced = false;          ///< COO whose entries had to be sorted: values travel as sums
  std::uint64_t nonzero_elems = 0;    ///< among `units`, as stored
};

/// Bytes in front of the tensor (lead included) and behind it that no scheme may touch.
inline constexpr std::size_t kFenceBytes = 64;
inline constexpr std::byte kFence{0x5A};

struct Inputs {
  std::vector<RankInput> ranks;
  std::size_t lead_bytes = 0;  ///< where the tensor begins in `memory`
  std::byte* data(std::size_t rank) { return ranks[rank].memory.data() + lead_bytes; }
  const std::byte* data(std::size_t rank) const { return ranks[rank].memory.data() + lead_bytes; }
};

Inputs make_inputs(const PropertyCase& given);

/// a + b, both bits of sum_dtype(t), in that type; the obvious addition of the processor.
std::uint64_t add_bits(std::uint64_t a, std::uint64_t b, DType t);
/// The bits of a value of `t` in sum_dtype(t).
std::uint64_t widen_bits(std::uint64_t bits, DType t);

}  // namespace zensync::test
