// The index of a message, in each codec: raw (32 and 64 bits), bitmap, Elias–Fano, blocks of both.
// Place: fuzz. Input: codec, choice of slots, table (a byte each), units (4), then the index.
// Properties: what is accepted is a sound set of as many units as stated; every table of kernels
// says the same; writing the set again gives the same bytes, so there is one way to write a set.
#include "sets.hpp"

namespace zensync::fuzz {
namespace {

/// The index as the writer would write it.
Bytes written(const SparseSet& set, IndexCodec codec, std::uint64_t slots) {
  Bytes bytes;
  std::uint64_t next_block = 0;
  Buffer out;
  for (const BlockRun& run : set.runs) {
    const std::span<const std::uint16_t> offsets(set.offsets.data() + run.begin, run.count);
    if (codec == IndexCodec::kRaw32 || codec == IndexCodec::kRaw64) {
      for (const std::uint16_t offset : offsets) {
        const std::uint64_t slot = run.block * kernels::kBlockSlots + offset;
        if (codec == IndexCodec::kRaw64) {
          put(bytes, slot);
        } else {
          put(bytes, static_cast<std::uint32_t>(slot));
        }
      }
      continue;
    }
    write_block(kernels::active(), codec,
                {run.block - next_block, offsets, slots_of_block(run.block, slots)}, out);
    next_block = run.block + 1;
  }
  put_bytes(bytes, out.bytes());
  return bytes;
}

}  // namespace

void run_index(std::span<const std::byte> bytes) {
  Input input(bytes);
  IndexBytes index;
  index.codec = static_cast<IndexCodec>(input.take<std::uint8_t>() % (kMaxIndexCodec + 2));
  index.slots = choose_slots(input.take<std::uint8_t>());
  static const auto kTables = kernels::available();
  const kernels::Table& table = *kTables[input.take<std::uint8_t>() % kTables.size()];
  index.units = input.take<std::uint32_t>();
  ExactBytes exact(input.rest());
  index.bytes = exact.bytes();

  SparseSet set;
  const Status status = read_index(table, index, set);
  SparseSet other;
  const Status reference = read_index(*kTables.back(), index, other);
  require(status.ok() == reference.ok(), "all tables accept the same");
  if (!status.ok()) {
    require(status.error().kind == ErrorKind::kCorruptMessage, "the error is of its kind");
    require(!status.error().message.empty(), "the error says what is wrong");
    return;
  }
  require_sound(set, index.slots, index.units);
  require(same_slots(set, other), "all tables read the same");
  if (index.codec == IndexCodec::kNone) return;
  const Bytes again = written(set, index.codec, index.slots);
  require(again.size() == index.bytes.size() &&
              std::memcmp(again.data(), index.bytes.data(), again.size()) == 0,
          "a set is written in one way");
  note_accepted();
}

Corpus index_seeds() {
  Corpus corpus;
  for (int codec = 1; codec <= kMaxIndexCodec; ++codec) {
    for (int choice = 0; choice < kSlotChoices; ++choice) {
      const std::uint64_t slots = choose_slots(static_cast<std::uint8_t>(choice));
      for (const std::uint64_t units : {0, 3, 40, 200}) {
        SparseSet set;
        fill_set(some_slots(slots, units, static_cast<std::uint64_t>(choice)), set);
        if (codec == static_cast<int>(IndexCodec::kRaw32) && slots > (1ULL << 32)) continue;
        if (codec == static_cast<int>(IndexCodec::kBitmap) && set.runs.size() > 2) continue;
        Bytes bytes;
        put(bytes, static_cast<std::uint8_t>(codec));
        put(bytes, static_cast<std::uint8_t>(choice));
        put(bytes, static_cast<std::uint8_t>(units));
        put(bytes, set.units());
        corpus.push_back(put_bytes(bytes, written(set, static_cast<IndexCodec>(codec), slots)));
      }
    }
  }
  return corpus;
}

}  // namespace zensync::fuzz
