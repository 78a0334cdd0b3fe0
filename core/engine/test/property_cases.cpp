// Drawing cases and making their inputs; see property_cases.hpp. Place: tests of the engine.
// Numbers come from mix64 over (seed, stream, place), so nothing depends on the order of drawing.
// What is common is drawn often, what is slow (thousands of rows, 17 ranks) now and then.
// Values are written with the tests' own conversions (element.hpp), never with a kernel.
// Pure; one thread; memory is that of the values returned.
#include "property_cases.hpp"

#include <algorithm>
#include <bit>

#include "element.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::test {
namespace {

/// One stream per field: those that exist keep their numbers, or every seed changes its meaning.
enum Stream : std::uint64_t {
  kSize = 1,
  kRowsClass,
  kRows,
  kRowElems,
  kParts,
  kDType,
  kScheme,
  kHold,
  kSpread,
  kKind,
  kDensity,
  kHoles,
  kChunks,
  kChunkEnds,
  kCodec,
  kVerify,
  kPartition,
  kOp,
  kKey,
  kLead,
  kLate,
  kKernels,
  kHasRow,
  kValue,
  kHole,
  kEmptyRank,
  kEntries,
  kShuffle,
  kStride,
  kPlace,
};

std::uint64_t number(std::uint64_t seed, Stream stream, std::uint64_t place = 0) {
  return mix64(mix64(seed + 0x9E37ULL * stream) ^ place);
}
std::uint64_t below(std::uint64_t hash, std::uint64_t n) { return ((hash >> 32) * n) >> 32; }
bool happens(std::uint64_t hash, double probability) {
  return static_cast<double>(hash >> 11) * 0x1p-53 < probability;
}

std::uint64_t draw_size(std::uint64_t seed) {
  const std::uint64_t choice = below(number(seed, kSize), 100);
  if (choice < 4) return 16 + choice % 2;
  return 1 + below(number(seed, kSize, 1), 9);
}

std::uint64_t draw_rows(std::uint64_t seed) {
  const std::uint64_t choice = below(number(seed, kRowsClass), 1000);
  const std::uint64_t hash = number(seed, kRows);
  if (choice < 500) return below(hash, 13);
  if (choice < 800) return below(hash, 61);
  if (choice < 989) return below(hash, 301);
  if (choice < 999) return 300 + below(hash, 5000);
  return 16000 + below(hash, 60000);  // more than one block of slots
}

std::uint64_t draw_row_elems(std::uint64_t seed, std::uint64_t rows) {
  const std::uint64_t hash = number(seed, kRowElems);
  const std::uint64_t drawn = happens(hash, 0.3) ? 1 : 1 + below(mix64(hash), 17);
  return rows > 300 ? 1 + drawn % 2 : drawn;
}

std::uint64_t draw_parts(std::uint64_t seed, std::uint64_t row_elems) {
  std::vector<std::uint64_t> divisors;
  for (std::uint64_t parts = 1; parts <= row_elems; ++parts) {
    if (row_elems % parts == 0) divisors.push_back(parts);
  }
  return divisors[below(number(seed, kParts), divisors.size())];
}

/// Ends of up to six chunks, uneven; strictly ascending, as the planner makes them.
std::vector<std::uint64_t> draw_chunk_ends(const PropertyCase& given) {
  const std::uint64_t slots = div_ceil(given.units(), static_cast<std::uint64_t>(given.size));
  const bool one = given.wire.partition == PartitionKind::kRange;
  const std::uint64_t drawn = 1 + below(number(given.seed, kChunks), 6);
  std::vector<std::uint64_t> ends = {slots};
  for (std::uint64_t i = 1; i < std::min(drawn, given.limits.chunks) && !one; ++i) {
    const std::uint64_t end = below(number(given.seed, kChunkEnds, i), slots + 1);
    if (end != 0) ends.push_back(end);
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  return ends;
}

void draw_wire(PropertyCase& given) {
  constexpr IndexCodec kCodecs[] = {IndexCodec::kBlocks, IndexCodec::kBlocks, IndexCodec::kRaw32,
                                    IndexCodec::kBitmap, IndexCodec::kEliasFano};
  const std::uint64_t seed = given.seed;
  given.wire.codec = kCodecs[below(number(seed, kCodec), 5)];
  given.wire.verify = happens(number(seed, kVerify), 0.6);
  given.wire.partition =
      happens(number(seed, kPartition), 0.8) ? PartitionKind::kRotation : PartitionKind::kRange;
  given.key = number(seed, kKey) | 1;
  given.lead_elems = below(number(seed, kLead), 4);
  given.late_sends = happens(number(seed, kLate), 0.5);
  given.mixed_kernels = happens(number(seed, kKernels), 0.15);
}

bool rank_has_row(const PropertyCase& given, std::uint64_t rank, std::uint64_t row) {
  const auto n = static_cast<std::uint64_t>(given.size);
  const auto hash = [&](std::uint64_t of) { return number(given.seed, kHasRow, row * 64 + of); };
  switch (given.spread) {
    case Spread::kUniform:
      return happens(hash(rank), given.density);
    case Spread::kEmptyRanks:
      return happens(number(given.seed, kEmptyRank, rank), 0.5) &&
             happens(hash(rank), given.density);
    case Spread::kIdentical:
      return happens(hash(63), given.density);
    case Spread::kDisjoint:
      return below(hash(62), n) == rank && happens(hash(63), 4 * given.density);
    case Spread::kLastUnit:
      return row + 1 == given.row_runs();
    case Spread::kFull:
      return true;
    case Spread::kNone:
      return false;
  }
  return false;
}

/// A float of any sign, mantissa and an exponent within 2^±20 of 1 (fp16: any finite bits).
std::uint64_t float_bits(std::uint64_t hash, DType t) {
  const std::uint64_t sign = (hash & 1) != 0 ? sign_bit(t) : 0;
  const std::uint64_t scale = below(mix64(hash), 41);
  if (t == DType::kF64) return sign | ((1003 + scale) << 52) | (hash >> 12);
  if (t == DType::kF32) return sign | ((107 + scale) << 23) | (hash >> 41);
  if (t == DType::kBF16) return sign | ((107 + scale) << 7) | (hash >> 57);
  return sign | below(hash, 0x7C00);
}

std::uint64_t denormal_bits(std::uint64_t hash, DType t) {
  const std::uint64_t sign = (hash & 1) != 0 ? sign_bit(t) : 0;
  const unsigned mantissa = t == DType::kF64 ? 52 : t == DType::kF32 ? 23 : is_half(t) ? 7 : 0;
  return sign | (hash >> 1 & ((1ULL << mantissa) - 1)) | 1;
}

/// All bits of the exponent set: NaN of any payload and sign, or an infinity.
std::uint64_t special_bits(std::uint64_t hash, DType t) {
  const unsigned mantissa = t == DType::kF64    ? 52
                            : t == DType::kF32  ? 23
                            : t == DType::kBF16 ? 7
                                                : 10;
  const std::uint64_t low = (1ULL << mantissa) - 1;
  const std::uint64_t exponent = (sign_bit(t) - 1) & ~low;
  const std::uint64_t sign = (hash & 1) != 0 ? sign_bit(t) : 0;
  return sign | exponent | ((hash & 6) != 0 ? hash >> 12 & low : 0);
}

std::uint64_t small_bits(std::uint64_t hash, DType t) {
  return bits_of(static_cast<double>(below(hash, 9)) - 4, t);
}

std::uint64_t element_bits(const PropertyCase& given, std::uint64_t rank, std::uint64_t place) {
  const DType t = given.spec.dtype;
  const bool same = given.spread == Spread::kIdentical || given.kind == Kind::kCancelling;
  const std::uint64_t hash = number(given.seed, kValue, place * 64 + (same ? 63 : rank));
  const bool hole = happens(number(given.seed, kHole, place * 64 + rank), given.holes);
  if (hole) return given.kind == Kind::kZeros && is_float(t) && hash % 2 ? sign_bit(t) : 0;
  if (!is_float(t)) {
    if (given.kind == Kind::kCancelling) return bits_of(rank % 2 != 0 ? -3 : 3, t);
    if (given.kind != Kind::kFloats) return small_bits(hash, t);
    return t == DType::kI32 ? hash & 0xFFFFFFFFU : hash;
  }
  switch (given.kind) {
    case Kind::kFloats:
      return float_bits(hash, t);
    case Kind::kDenormals:
      return denormal_bits(hash, t);
    case Kind::kCancelling:
      return float_bits(hash, t) ^ (rank % 2 != 0 ? sign_bit(t) : 0);
    case Kind::kSpecial:
      return happens(mix64(hash), 0.1) ? special_bits(hash, t) : small_bits(hash, t);
    default:
      return small_bits(hash, t);
  }
}

/// Entries in stored order: each row once to three times, shuffled; all values drawn anew.
void store_shuffled(const PropertyCase& given, std::uint64_t rank, RankInput& input,
                    std::vector<std::uint64_t>& stored) {
  const std::uint64_t row_elems = given.spec.row_elems;
  const DType t = given.spec.dtype;
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < input.rows.size(); ++i) {
    const std::uint64_t hash = number(given.seed, kEntries, input.rows[i] * 64 + rank);
    order.insert(order.end(), 1 + below(hash, 3), i);
  }
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[below(number(given.seed, kShuffle, i * 64 + rank), i)]);
  }
  for (std::size_t entry = 0; entry < order.size(); ++entry) {
    input.indices.push_back(static_cast<std::int64_t>(input.rows[order[entry]]));
    if (entry > 0 && input.indices[entry] <= input.indices[entry - 1]) input.is_coalesced = true;
    for (std::uint64_t j = 0; j < row_elems; ++j) {
      stored.push_back(element_bits(given, rank, entry * row_elems + j));
      std::uint64_t& cell = input.cells[order[entry] * row_elems + j];
      cell = add_bits(cell, widen_bits(stored.back(), t), t);
    }
  }
}

/// Elements of the rank's rows, in order of rows (kCooShuffled: of entries).
std::vector<std::uint64_t> draw_stored(const PropertyCase& given, std::uint64_t rank,
                                       RankInput& input) {
  const std::uint64_t row_elems = given.spec.row_elems;
  std::vector<std::uint64_t> stored;
  input.cells.resize(input.rows.size() * row_elems);
  stored.reserve(input.cells.size());
  if (given.hold == Hold::kCooShuffled) {
    store_shuffled(given, rank, input, stored);
    return stored;
  }
  const bool last_only = given.spread == Spread::kLastUnit && !given.is_listed();
  for (std::uint64_t row : input.rows) {
    for (std::uint64_t j = 0; j < row_elems; ++j) {
      const bool skip = last_only && j / given.plan.width + 1 != given.parts();
      const std::uint64_t bits = skip ? 0 : element_bits(given, rank, row * row_elems + j);
      input.cells[stored.size()] = widen_bits(bits, given.spec.dtype);
      stored.push_back(bits);
    }
  }
  if (given.is_listed()) input.indices.assign(input.rows.begin(), input.rows.end());
  return stored;
}

void list_units(const PropertyCase& given, const std::vector<std::uint64_t>& stored,
                RankInput& input) {
  const std::uint64_t width = given.plan.width;
  std::size_t at = 0;
  for (std::uint64_t row : input.rows) {
    for (std::uint64_t part = 0; part < given.parts(); ++part) {
      std::uint64_t found = 0;
      for (std::uint64_t j = 0; j < width && !given.is_listed(); ++j) {
        if (is_nonzero(stored[at++], given.spec.dtype)) ++found;
      }
      if (found == 0 && !given.is_listed()) continue;
      input.units.push_back(row * given.parts() + part);
      input.nonzero_elems += found;
    }
  }
}

void store_memory(const PropertyCase& given, const std::vector<std::uint64_t>& stored,
                  std::size_t lead_bytes, RankInput& input) {
  const DType t = given.spec.dtype;
  const std::size_t elems = given.is_coo() ? stored.size() : given.spec.elems();
  const std::size_t bytes = elems * dtype_bytes(t);
  input.memory.assign(lead_bytes + bytes + kFenceBytes, kFence);
  const std::span<std::byte> data(input.memory.data() + lead_bytes, bytes);
  if (given.is_coo()) {
    for (std::size_t i = 0; i < elems; ++i) store(data, i, t, stored[i]);
    return;
  }
  if (given.hold == Hold::kDense) {  // with ids, rows that are not listed hold what they like
    const bool negative = given.kind == Kind::kZeros && is_float(t);
    for (std::size_t i = 0; i < elems; ++i) store(data, i, t, negative && i % 3 ? sign_bit(t) : 0);
  }
  for (std::size_t i = 0; i < stored.size(); ++i) {
    const std::size_t row = input.rows[i / given.spec.row_elems];
    store(data, row * given.spec.row_elems + i % given.spec.row_elems, t, stored[i]);
  }
}

}  // namespace

std::uint64_t widen_bits(std::uint64_t bits, DType t) {
  if (t == DType::kBF16) return bits << 16;
  if (t != DType::kF16) return bits;
  static const std::vector<std::uint32_t> kWide = [] {
    std::vector<std::uint32_t> wide(0x10000);
    for (std::uint64_t i = 0; i < wide.size(); ++i) {
      wide[i] = static_cast<std::uint32_t>(bits_of_float(static_cast<float>(half_value(i))));
    }
    return wide;
  }();
  return kWide[bits];
}

std::uint64_t add_bits(std::uint64_t a, std::uint64_t b, DType t) {
  if (t == DType::kI64) return a + b;
  if (t == DType::kI32) return (a + b) & 0xFFFFFFFFU;
  if (t == DType::kF64) {
    return std::bit_cast<std::uint64_t>(std::bit_cast<double>(a) + std::bit_cast<double>(b));
  }
  const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(a));
  const auto y = std::bit_cast<float>(static_cast<std::uint32_t>(b));
  return std::bit_cast<std::uint32_t>(x + y);
}

PropertyCase draw_case(std::uint64_t seed, const Limits& limits) {
  PropertyCase given;
  given.seed = seed;
  given.limits = limits;
  given.size = static_cast<int>(std::min(limits.size, draw_size(seed)));
  const std::uint64_t rows = draw_rows(seed);
  given.spec.rows = std::min(limits.rows, rows);
  given.spec.row_elems = std::min(limits.row_elems, draw_row_elems(seed, rows));
  given.spec.dtype = kAllDTypes[below(number(seed, kDType), 6)];
  constexpr SchemeId kChoices[] = {SchemeId::kBalanced, SchemeId::kBalanced,
                                   SchemeId::kRecursiveDoubling, SchemeId::kAgSparse,
                                   SchemeId::kDenseRing};
  given.plan.scheme = kChoices[below(number(seed, kScheme), 5)];
  const bool ring = given.plan.scheme == SchemeId::kDenseRing;
  const std::uint64_t hold = below(number(seed, kHold), 8);
  given.hold = ring || hold < 3 ? Hold::kDense
               : hold < 4       ? Hold::kDenseIds
               : hold < 6       ? Hold::kCooSorted
                                : Hold::kCooShuffled;
  if (given.is_coo() && rows <= 60 && happens(number(seed, kStride), 0.02)) {
    given.stride = std::min(limits.stride, 1 + below(number(seed, kStride, 1), 100000));
    given.spec.rows *= given.stride;  // many blocks of slots that nobody has
  }
  given.spec.layout = given.is_coo() ? Layout::kCoo : Layout::kDense;
  given.plan.width = given.spec.row_elems / draw_parts(seed, given.spec.row_elems);
  const std::uint64_t spread = below(number(seed, kSpread), 13);
  given.spread = spread <= 6 ? static_cast<Spread>(spread) : Spread::kUniform;
  given.kind = static_cast<Kind>(below(number(seed, kKind), 6));
  constexpr double kDensities[] = {0.02, 0.1, 0.3, 0.7};
  given.density = kDensities[below(number(seed, kDensity), 4)] * (rows > 300 ? 0.2 : 1.0);
  constexpr double kHoleShares[] = {0, 0.2, 0.8};
  given.holes = kHoleShares[given.kind == Kind::kZeros ? 2 : below(number(seed, kHoles), 3)];
  draw_wire(given);
  const bool may_divide = is_float(given.spec.dtype) && happens(number(seed, kOp), 0.3);
  given.op = may_divide ? ReduceOp::kAvg : ReduceOp::kSum;
  if (given.plan.scheme == SchemeId::kBalanced) given.plan.chunk_ends = draw_chunk_ends(given);
  return given;
}

Inputs make_inputs(const PropertyCase& given) {
  Inputs inputs;
  inputs.ranks.resize(static_cast<std::size_t>(given.size));
  inputs.lead_bytes = kFenceBytes + given.lead_elems * dtype_bytes(given.spec.dtype);
  for (std::size_t rank = 0; rank < inputs.ranks.size(); ++rank) {
    RankInput& input = inputs.ranks[rank];
    for (std::uint64_t run = 0; run < given.row_runs(); ++run) {
      const std::uint64_t place = below(number(given.seed, kPlace, run), given.stride);
      if (rank_has_row(given, rank, run)) input.rows.push_back(run * given.stride + place);
    }
    const std::vector<std::uint64_t> stored = draw_stored(given, rank, input);
    list_units(given, stored, input);
    store_memory(given, stored, inputs.lead_bytes, input);
  }
  return inputs;
}

}  // namespace zensync::test
