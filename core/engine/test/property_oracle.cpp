// The oracle of the property cases; see property_oracle.hpp. Place: tests of the engine.
// An element is summed from all ranks' contributions, +0.0 where a rank has none, which changes no
// bit of a sum that started from +0.0.
// Sums are kept as bits of sum_dtype and added by `add_bits`; rounding is that of element.hpp.
// Pure; memory is that of the values returned.
#include "property_oracle.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "element.hpp"

namespace zensync::test {
namespace {

std::size_t power_below(std::size_t n) { return std::bit_floor(n); }

std::uint64_t in_order(const std::vector<std::uint64_t>& terms, std::size_t first, DType t) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    sum = add_bits(sum, terms[(first + i) % terms.size()], t);
  }
  return sum;
}

std::uint64_t in_tree(std::vector<std::uint64_t> terms, DType t) {
  const std::size_t power = power_below(terms.size());
  for (std::uint64_t& term : terms) term = add_bits(0, term, t);
  for (std::size_t r = power; r < terms.size(); ++r) {
    terms[r - power] = add_bits(terms[r - power], terms[r], t);
  }
  for (std::size_t step = 1; step < power; step *= 2) {
    for (std::size_t r = 0; r < power; r += 2 * step) {
      terms[r] = add_bits(terms[r], terms[r + step], t);
    }
  }
  return terms[0];
}

/// `bits` of sum_dtype(t), divided in that type, then rounded to t.
std::uint64_t finished(std::uint64_t bits, const PropertyCase& given) {
  const DType t = given.spec.dtype;
  const bool divides = given.op == ReduceOp::kAvg;
  if (!is_float(t)) return bits;
  if (t == DType::kF64) {
    const auto sum = std::bit_cast<double>(bits);
    return std::bit_cast<std::uint64_t>(divides ? sum / given.size : sum);
  }
  const auto sum = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
  const float value = divides ? sum / static_cast<float>(given.size) : sum;
  return t == DType::kF32 ? bits_of_float(value) : bits_of(static_cast<double>(value), t);
}

class Summing {
 public:
  Summing(const PropertyCase& given, const Inputs& inputs, Adding adding)
      : given_(given), inputs_(inputs), adding_(adding), cursors_(inputs.ranks.size()) {}

  void run(Expected& expected) {
    if (!given_.is_coo()) {
      const std::byte rest = given_.hold == Hold::kDenseIds ? kFence : std::byte{0};
      expected.image.assign(given_.spec.rows * given_.row_bytes(), rest);
    }
    for (std::uint64_t row = next(); row < given_.spec.rows; row = next()) {
      find(row);
      add_row(row, expected);
    }
  }

 private:
  /// The least row that any rank has and that was not summed yet; else the number of rows.
  std::uint64_t next() const {
    std::uint64_t least = given_.spec.rows;
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      const auto& rows = inputs_.ranks[rank].rows;
      if (cursors_[rank] < rows.size()) least = std::min(least, rows[cursors_[rank]]);
    }
    return least;
  }

  /// Points `cells_` at each rank's cells of `row`, null where it has none.
  void find(std::uint64_t row) {
    cells_.assign(inputs_.ranks.size(), nullptr);
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      const RankInput& input = inputs_.ranks[rank];
      std::size_t& at = cursors_[rank];
      if (at == input.rows.size() || input.rows[at] != row) continue;
      cells_[rank] = input.cells.data() + at++ * given_.spec.row_elems;
    }
  }

  void add_row(std::uint64_t row, Expected& expected) {
    const std::uint64_t row_elems = given_.spec.row_elems;
    expected.rows.push_back(static_cast<std::int64_t>(row));
    const std::size_t place = given_.is_coo() ? expected.rows.size() - 1 : row;
    expected.image.resize(std::max(expected.image.size(), (place + 1) * given_.row_bytes()));
    for (std::uint64_t j = 0; j < row_elems; ++j) {
      terms_.clear();
      for (const std::uint64_t* cells : cells_) terms_.push_back(cells == nullptr ? 0 : cells[j]);
      const std::uint64_t sum = add(row * row_elems + j);
      store(expected.image, place * row_elems + j, given_.spec.dtype, finished(sum, given_));
    }
  }

  std::uint64_t add(std::uint64_t element) {
    const DType t = given_.spec.dtype;
    if (adding_ == Adding::kReversed) std::reverse(terms_.begin(), terms_.end());
    if (given_.plan.scheme == SchemeId::kRecursiveDoubling) return in_tree(terms_, t);
    if (given_.plan.scheme != SchemeId::kDenseRing) return in_order(terms_, 0, t);
    return in_order(terms_, element / div_ceil(given_.spec.elems(), terms_.size()), t);
  }

  const PropertyCase& given_;
  const Inputs& inputs_;
  Adding adding_;
  std::vector<std::size_t> cursors_;
  std::vector<const std::uint64_t*> cells_;
  std::vector<std::uint64_t> terms_;
};

std::uint64_t count_union(const Inputs& inputs) {
  std::vector<UnitId> all;
  for (const RankInput& input : inputs.ranks) {
    all.insert(all.end(), input.units.begin(), input.units.end());
  }
  std::sort(all.begin(), all.end());
  return static_cast<std::uint64_t>(std::unique(all.begin(), all.end()) - all.begin());
}

std::vector<RankTraffic> expected_traffic(const PropertyCase& given, const Inputs& inputs) {
  std::vector<std::vector<UnitId>> units;
  std::vector<bool> coalesced;
  for (const RankInput& input : inputs.ranks) {
    units.push_back(input.units);
    coalesced.push_back(input.is_coalesced);
  }
  const ExactCounts counts(std::move(units));
  TrafficInput input;
  input.size = given.size;
  input.spec = given.spec;
  input.plan = given.plan;
  input.wire = given.wire;
  input.key = given.key;
  input.counts = &counts;
  input.coalesced = std::move(coalesced);
  return traffic(input);
}

}  // namespace

Expected oracle(const PropertyCase& given, const Inputs& inputs, Adding adding) {
  Expected expected;
  Summing(given, inputs, adding).run(expected);
  expected.union_units = count_union(inputs);
  expected.traffic = expected_traffic(given, inputs);
  return expected;
}

}  // namespace zensync::test
