// What a fuzz target is: a function over bytes from anywhere that checks properties, and a corpus
// to start from. Place: fuzz, beside the tests; sees codec and driver, nothing sees it.
// Owner: a target owns what it makes in one call. Threads: one.
// A property that does not hold ends the process (`require`): that is how libFuzzer learns of it.
// The same functions run in ctest over the corpus and simple changes of it, without libFuzzer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zensync::fuzz {

using Bytes = std::vector<std::byte>;
using Corpus = std::vector<Bytes>;

struct Target {
  const char* name;
  void (*run)(std::span<const std::byte> input);
  Corpus (*seeds)();
  std::size_t most_bytes;  ///< of an input: longer ones show nothing new
};

/// All targets; `find_target` gives null for a name that is none.
std::span<const Target> all_targets();
const Target* find_target(std::string_view name);

/// Ends the process with `what` on standard error unless `holds`.
void require(bool holds, const char* what);

/// Called by a target when it has taken an input for good and checked all of it; and how often that
/// was: a target that refuses everything tests nothing.
void note_accepted();
std::uint64_t accepted();

/// Takes settings off the front of an input; what is left is the bytes under test.
class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : rest_(bytes) {}

  /// An integer; bytes that are missing are 0.
  template <class T>
  T take() {
    T value{};
    const std::size_t count = std::min(sizeof value, rest_.size());
    if (count != 0) std::memcpy(&value, rest_.data(), count);
    rest_ = rest_.subspan(count);
    return value;
  }
  std::span<const std::byte> rest() const { return rest_; }
  std::string text() const { return {reinterpret_cast<const char*>(rest_.data()), rest_.size()}; }

 private:
  std::span<const std::byte> rest_;
};

/// Bytes on the heap in a block of exactly their size, so that a read beyond the end is seen.
class ExactBytes {
 public:
  explicit ExactBytes(std::span<const std::byte> bytes)
      : data_(new std::byte[bytes.size()]), size_bytes_(bytes.size()) {
    if (!bytes.empty()) std::memcpy(data_.get(), bytes.data(), bytes.size());
  }
  std::span<std::byte> bytes() { return {data_.get(), size_bytes_}; }

 private:
  std::unique_ptr<std::byte[]> data_;
  std::size_t size_bytes_;
};

/// Puts integers in front of bytes, as `Input` takes them.
template <class T>
Bytes& put(Bytes& bytes, T value) {
  const auto* from = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), from, from + sizeof value);
  return bytes;
}
inline Bytes& put_text(Bytes& bytes, std::string_view text) {
  for (const char c : text) bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}
inline Bytes& put_bytes(Bytes& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
  return bytes;
}

// One file per group of targets.
void run_message(std::span<const std::byte> input);
Corpus message_seeds();
void run_index(std::span<const std::byte> input);
Corpus index_seeds();
void run_frames(std::span<const std::byte> input);
Corpus frame_seeds();
void run_mesh_record(std::span<const std::byte> input);
Corpus mesh_record_seeds();
void run_faults_text(std::span<const std::byte> input);
Corpus faults_text_seeds();

}  // namespace zensync::fuzz
