// A whole message: header, job headers, values, index. Place: fuzz.
// Input: what the reader expects (12 bytes, see `take_expected`), then the message. Bit 1 of the
// flags makes its digest right, since no fuzzer guesses one.
// Properties: parts fill the message; job headers can be compared; an accepted set is sound and its
// values are as many as its units; written again it is read as the same; with digests on and a
// wrong digest nothing is accepted.
#include "sets.hpp"
#include "zensync/base/hash.hpp"

namespace zensync::fuzz {
namespace {

constexpr std::size_t kDigestBytes = 8;
constexpr std::uint8_t kVerify = 1;
constexpr std::uint8_t kMakeDigest = 2;
constexpr std::uint8_t kPartialSums = 4;

struct Setting {
  std::uint8_t flags = 0;
  Expected expected;
  std::uint8_t table = 0;
};

Setting take_setting(Input& input) {
  Setting setting;
  setting.flags = input.take<std::uint8_t>();
  Expected& expected = setting.expected;
  expected.verify = (setting.flags & kVerify) != 0;
  expected.partial_sums = (setting.flags & kPartialSums) != 0;
  expected.kind = static_cast<MessageKind>(1 + input.take<std::uint8_t>() % kMaxMessageKind);
  expected.slots = choose_slots(input.take<std::uint8_t>());
  expected.width = 1 + input.take<std::uint8_t>() % 5;
  expected.dtype = static_cast<DType>(input.take<std::uint8_t>() % kDTypeCount);
  expected.job_headers = input.take<std::uint8_t>() % 3;
  setting.table = input.take<std::uint8_t>();
  expected.sequence = input.take<std::uint8_t>();
  return setting;
}

void make_digest(std::span<std::byte> message) {
  if (message.size() < sizeof(MessageHeader)) return;
  const std::uint64_t digest =
      digest64(message.data() + kDigestBytes, message.size() - kDigestBytes);
  std::memcpy(message.data(), &digest, kDigestBytes);
}

bool has_right_digest(std::span<const std::byte> message) {
  std::uint64_t digest = 0;
  std::memcpy(&digest, message.data(), kDigestBytes);
  return digest == digest64(message.data() + kDigestBytes, message.size() - kDigestBytes);
}

void require_good_error(const Error& error) {
  require(error.kind == ErrorKind::kCorruptMessage || error.kind == ErrorKind::kMismatch,
          "the error is of its kind");
  require(!error.message.empty(), "the error says what is wrong");
}

/// Writes `set` with the header of `message` and reads it again.
void require_same_again(const ParsedMessage& message, const Expected& expected,
                        const SparseSet& set) {
  std::vector<JobHeader> jobs;
  for (std::size_t i = 0; i < message.header.job_headers; ++i) {
    jobs.push_back(job_header_of(message, i));
  }
  MessageWriter writer;
  writer.begin(kernels::active(), message.header, jobs, expected.slots);
  writer.add_set(set, message.values.size());
  const auto bytes = writer.finish(expected.verify);
  const auto parsed = parse_message(bytes, expected);
  require(parsed.ok(), "what was written again can be parsed");
  SparseSet again;
  require(read_set(kernels::active(), parsed.value(), expected, again).ok(),
          "what was written again can be read");
  require(same_slots(set, again), "what was written again has the same units");
  const auto& values = parsed.value().values;
  require(
      values.size() == message.values.size() &&
          (values.empty() || std::memcmp(values.data(), message.values.data(), values.size()) == 0),
      "what was written again has the same values");
}

}  // namespace

void run_message(std::span<const std::byte> bytes) {
  Input input(bytes);
  const Setting setting = take_setting(input);
  const Expected& expected = setting.expected;
  ExactBytes exact(input.rest());
  if ((setting.flags & kMakeDigest) != 0) make_digest(exact.bytes());
  const std::span<const std::byte> message = exact.bytes();

  const auto parsed = parse_message(message, expected);
  if (!parsed.ok()) {
    require_good_error(parsed.error());
    return;
  }
  require(!expected.verify || has_right_digest(message), "a wrong digest is refused");
  const ParsedMessage& view = parsed.value();
  require(
      sizeof(MessageHeader) + view.job_headers.size() + view.values.size() + view.index.size() ==
          message.size(),
      "parts fill the message");
  for (std::size_t i = 0; i < view.header.job_headers; ++i) {
    const JobHeader header = job_header_of(view, i);
    require(check_job_header(header, header, Rank{1}, "t").ok(), "a job header equals itself");
    const Status differs = check_job_header(JobHeader(), header, Rank{1}, "t");
    if (!differs.ok()) require_good_error(differs.error());
  }
  static const auto kTables = kernels::available();
  SparseSet set;
  const Status status = read_set(*kTables[setting.table % kTables.size()], view, expected, set);
  if (!status.ok()) {
    require_good_error(status.error());
    return;
  }
  require_sound(set, expected.slots, view.header.units);
  require(view.values.size() == set.units() * expected.width * dtype_bytes(set.values_dtype),
          "values are as many as units");
  require_same_again(view, expected, set);
  note_accepted();
}

Corpus message_seeds() {
  Corpus corpus;
  constexpr IndexCodec kCodecs[] = {IndexCodec::kBlocks, IndexCodec::kRaw32,
                                    IndexCodec::kEliasFano};
  for (std::uint8_t i = 0; i < 48; ++i) {
    const auto choice = static_cast<std::uint8_t>(i % kSlotChoices);
    const auto flags = static_cast<std::uint8_t>(i % 3 == 0 ? 0 : kVerify | kMakeDigest);
    Bytes bytes;
    for (const std::uint8_t setting : {flags, std::uint8_t{0}, choice, std::uint8_t{1},
                                       static_cast<std::uint8_t>(i % 2), i, i, std::uint8_t{9}}) {
      put(bytes, setting);
    }
    Input input(bytes);
    const Expected expected = take_setting(input).expected;
    SparseSet set;
    fill_set(some_slots(expected.slots, i % 4 * 11, i), set);
    const Bytes values(set.units() * expected.width * dtype_bytes(expected.dtype), std::byte{i});
    set.values = values.data();
    MessageHeader header;
    header.kind = expected.kind;
    header.codec = kCodecs[i % 3];
    header.values_dtype = expected.dtype;
    header.sequence = expected.sequence;
    MessageWriter writer;
    writer.begin(kernels::active(), header, std::vector<JobHeader>(expected.job_headers),
                 expected.slots);
    writer.add_set(set, values.size());
    corpus.push_back(put_bytes(bytes, writer.finish(expected.verify)));
  }
  return corpus;
}

}  // namespace zensync::fuzz
