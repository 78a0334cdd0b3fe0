// A Rendezvous of files: one file per key in a folder that all ranks reach.
// Place: driver, level 4. Owns nothing but the folder's name; files stay behind on purpose, as
// other ranks may still want them. One object per thread; any number of processes and threads may
// share a folder. A value is written to a temporary file and then appears at once, by rename or
// (first value) by link, so a reader never sees half of one. Writers hold a lock on the folder,
// which the system drops if they die. Fails with kDeadline (`wait`) and kUnsupported (the folder
// cannot be read or written).
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "zensync/base/hash.hpp"
#include "zensync/driver/driver.hpp"
#include "zensync/driver/rendezvous.hpp"

namespace zensync {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxNameBytes = 180;
constexpr std::chrono::microseconds kFirstSleep{500};
constexpr std::chrono::microseconds kLongestSleep{50000};

Error failed(const std::string& what, const fs::path& path, int number) {
  return make_error(ErrorKind::kUnsupported,
                    "file rendezvous: cannot " + what + " " + path.string() + ": " +
                        std::error_code(number, std::generic_category()).message());
}

/// A file name for any key: what is not plain is written as %XX, and long names end in a digest.
std::string file_name(const std::string& key) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string name = "k.";
  for (const unsigned char c : key) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                       c == '-' || c == '_' || c == '.';
    if (plain) {
      name += static_cast<char>(c);
    } else {
      name += {'%', kHex[c >> 4], kHex[c & 15]};
    }
  }
  if (name.size() > kMaxNameBytes) {
    const std::uint64_t digest = digest64(key.data(), key.size());
    name.resize(kMaxNameBytes);
    name += '~';
    for (int shift = 60; shift >= 0; shift -= 4) name += kHex[(digest >> shift) & 15];
  }
  return name;
}

/// An exclusive lock among all writers of a folder.
class FolderLock {
 public:
  explicit FolderLock(const fs::path& folder)
      : handle_(::open((folder / "lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
    if (handle_ < 0) error_ = errno;
    while (error_ == 0 && ::flock(handle_, LOCK_EX) != 0) {
      if (errno != EINTR) error_ = errno;
    }
  }
  ~FolderLock() {
    if (handle_ >= 0) ::close(handle_);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  /// 0 when the lock is held.
  int error() const { return error_; }

 private:
  int handle_;
  int error_ = 0;
};

class FileRendezvous final : public Rendezvous {
 public:
  explicit FileRendezvous(fs::path folder) : folder_(std::move(folder)) {
    std::error_code ignored;  // a folder that cannot be made shows at the first call
    fs::create_directories(folder_, ignored);
  }

  Status set(const std::string& key, const std::string& value) override {
    const FolderLock lock(folder_);
    if (lock.error() != 0) return failed("lock", folder_, lock.error());
    return write(key, value, Mode::kReplace);
  }

  Result<std::string> get(const std::string& key) override {
    std::optional<std::string> value;
    if (Status status = read(key, value); !status.ok()) return status.error();
    return value.value_or("");
  }

  Result<std::string> wait(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    auto sleep = kFirstSleep;
    for (;;) {
      std::optional<std::string> value;
      if (Status status = read(key, value); !status.ok()) return status.error();
      if (value) return *std::move(value);
      const auto left =
          std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
      if (left.count() <= 0) {
        return make_error(ErrorKind::kDeadline, "file rendezvous: nobody set '" + key +
                                                    "' within " + std::to_string(timeout.count()) +
                                                    " ms");
      }
      std::this_thread::sleep_for(std::min(sleep, left));
      sleep = std::min(sleep * 3 / 2, kLongestSleep);
    }
  }

  Result<std::string> compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) override {
    const FolderLock lock(folder_);
    if (lock.error() != 0) return failed("lock", folder_, lock.error());
    std::optional<std::string> value;
    if (Status status = read(key, value); !status.ok()) return status.error();
    if (value.value_or("") != expected) return value.value_or("");
    Status status = write(key, desired, value ? Mode::kReplace : Mode::kFirst);
    if (!status.ok()) return status.error();
    return get(key);
  }

 private:
  enum class Mode { kReplace, kFirst };

  /// No value when there is no file; the other calls take an empty value for the same.
  Status read(const std::string& key, std::optional<std::string>& value) {
    const fs::path path = folder_ / file_name(key);
    const int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (handle < 0) {
      if (errno == ENOENT) return {};
      return failed("read", path, errno);
    }
    std::string text;
    char block[4096];
    ssize_t count = 0;
    int number = 0;
    while ((count = ::read(handle, block, sizeof block)) != 0) {
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        number = errno;
        break;
      }
      text.append(block, static_cast<std::size_t>(count));
    }
    ::close(handle);
    if (number != 0) return failed("read", path, number);
    value = std::move(text);
    return {};
  }

  /// kFirst leaves a value that somebody else wrote first: `link` refuses an existing name, which
  /// holds even on network file systems that do not keep the folder's lock.
  Status write(const std::string& key, const std::string& value, Mode mode) {
    const fs::path path = folder_ / file_name(key);
    const fs::path fresh = folder_ / temporary_name();
    {
      std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
      file.write(value.data(), static_cast<std::streamsize>(value.size()));
      file.close();
      if (!file) return failed("write", fresh, errno);
    }
    const bool first = mode == Mode::kFirst;
    const int done =
        first ? ::link(fresh.c_str(), path.c_str()) : std::rename(fresh.c_str(), path.c_str());
    const int number = done == 0 || (first && errno == EEXIST) ? 0 : errno;
    if (first || number != 0) ::unlink(fresh.c_str());
    if (number != 0) return failed("write", path, number);
    return {};
  }

  /// Differs between threads, processes and (random part) hosts that share the folder.
  std::string temporary_name() {
    static std::atomic<std::uint64_t> counter{0};
    return "t." + std::to_string(salt_) + "." + std::to_string(::getpid()) + "." +
           std::to_string(counter.fetch_add(1));
  }

  const fs::path folder_;
  const unsigned salt_ = std::random_device{}();
};

}  // namespace

std::unique_ptr<Rendezvous> make_file_rendezvous(const std::filesystem::path& folder) {
  return std::make_unique<FileRendezvous>(folder);
}

}  // namespace zensync
