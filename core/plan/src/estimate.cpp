// Bytes of a scheme from what travelled: per-rank counts and the union. Place: plan. Pure.
// The ranks' units are taken as drawn by chance from a support of E units, with E such that the
// expected union is the known one; the union of any subset follows. Index bytes come from the
// codec's own formula at that density. A rank's own units are taken to carry the tensor's dtype;
// what no rank knows of another is whether its COO entries had to be added up first, after which
// 16-bit ones carry fp32 (traffic() is told).
#include <algorithm>
#include <bit>

#include "zensync/codec/index_codec.hpp"
#include "zensync/plan/plan.hpp"
#include "zensync/scheme/exchange.hpp"

namespace zensync {
namespace {

using Counts = std::vector<std::uint64_t>;

/// Expected union of ranks [0, counts.size()) when each draws from `support` units.
double expected_union(std::span<const std::uint64_t> counts, double support) {
  double absent = 1.0;
  for (std::uint64_t units : counts) absent *= 1.0 - static_cast<double>(units) / support;
  return support * (1.0 - absent);
}

double effective_support(const KnownCounts& counts, double units) {
  const auto target = static_cast<double>(counts.union_units);
  double low = std::max(1.0, target);
  double high = std::max(units, low);
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (expected_union(counts.units, middle) < target ? low : high) = middle;
  }
  return high;
}

/// Headers and frame prefixes of `messages` messages, `with_job` of them with a job header.
double header_bytes(double messages, double with_job) {
  return messages * static_cast<double>(sizeof(MessageHeader) + kFramePrefixBytes) +
         with_job * static_cast<double>(sizeof(JobHeader));
}

struct Model {
  double support;
  double unit_bytes;

  /// Bytes of `units` units with their index.
  double bytes(double units, double value_bytes) const {
    if (units <= 0) return 0;
    const double per_block = kernels::kBlockSlots * units / support;
    const auto count = static_cast<std::uint32_t>(
        std::clamp(per_block, 1.0, static_cast<double>(kernels::kBlockSlots)));
    const double index =
        static_cast<double>(block_bytes(IndexCodec::kBlocks, 0, count, kernels::kBlockSlots));
    return units * (value_bytes + index / count);
  }
};

double balanced_bytes(const Model& model, const KnownCounts& counts) {
  const auto n = static_cast<double>(counts.units.size());
  double total = 0;
  double most = 0;
  for (std::uint64_t units : counts.units) {
    total += static_cast<double>(units);
    most = std::max(most, static_cast<double>(units));
  }
  const double pull = model.bytes(static_cast<double>(counts.union_units), model.unit_bytes);
  const double sent = model.bytes(most, model.unit_bytes);
  const double received = model.bytes(total / n, model.unit_bytes);
  return (n - 1) / n * (std::max(sent, received) + pull) + header_bytes(2 * (n - 1), n - 1);
}

double agsparse_bytes(const Model& model, const KnownCounts& counts) {
  const auto n = static_cast<double>(counts.units.size());
  double total = 0;
  double most = 0;
  double least = -1;
  for (std::uint64_t units : counts.units) {
    const double bytes = model.bytes(static_cast<double>(units), model.unit_bytes);
    total += bytes;
    most = std::max(most, bytes);
    least = least < 0 ? bytes : std::min(least, bytes);
  }
  return std::max((n - 1) * most, total - least) + header_bytes(n - 1, n - 1);
}

double doubling_bytes(const Model& model, const KnownCounts& counts, double sum_bytes) {
  const std::size_t n = counts.units.size();
  const std::size_t power = std::bit_floor(n);
  double most = 0;
  for (std::size_t rank = 0; rank < power; ++rank) {
    double sent = 0;
    double received = 0;
    for (std::size_t width = 1; width < power; width *= 2) {
      const auto block_bytes_at = [&](std::size_t member) {
        const std::size_t begin = member / width * width;
        Counts block(counts.units.begin() + static_cast<std::ptrdiff_t>(begin),
                     counts.units.begin() + static_cast<std::ptrdiff_t>(begin + width));
        for (std::size_t r = begin; r < begin + width && r + power < n; ++r) {
          block.push_back(counts.units[r + power]);
        }
        constexpr double kCountBytes = 16;  // units and elements of each rank behind the sum
        return model.bytes(expected_union(block, model.support),
                           block.size() == 1 ? model.unit_bytes : sum_bytes) +
               header_bytes(1, 1) + kCountBytes * static_cast<double>(block.size());
      };
      sent += block_bytes_at(rank);
      received += block_bytes_at(rank ^ width);
    }
    if (rank + power < n) {
      sent += model.bytes(static_cast<double>(counts.union_units), model.unit_bytes);
      received += model.bytes(static_cast<double>(counts.units[rank + power]), model.unit_bytes);
    }
    most = std::max({most, sent, received});
  }
  return most;
}

}  // namespace

double estimate_bytes(const TensorSpec& spec, int size, const KnownCounts& counts,
                      SchemeId scheme) {
  const auto n = static_cast<double>(size);
  const auto elem_bytes = static_cast<double>(dtype_bytes(spec.dtype));
  const auto width = static_cast<double>(counts.width);
  const Model model{effective_support(counts, static_cast<double>(spec.elems()) / width),
                    width * elem_bytes};
  switch (scheme) {
    case SchemeId::kBalanced:
      return balanced_bytes(model, counts);
    case SchemeId::kAgSparse:
      return agsparse_bytes(model, counts);
    case SchemeId::kRecursiveDoubling:
      return doubling_bytes(model, counts,
                            width * static_cast<double>(dtype_bytes(sum_dtype(spec.dtype))));
    default:
      return 2 * (n - 1) / n * static_cast<double>(spec.dense_bytes());
  }
}

}  // namespace zensync
