// A growable block of bytes that is not initialised, aligned for SIMD; and a typed array over one.
// Place: base, level 0; what workspaces, messages and COO results are made of.
// Owner: whoever holds it. It moves and does not copy; one that was moved from may only be assigned
// to or destroyed. Once grown it is kept: growth is by half of what was held before, so that counts
// which grow slowly do not allocate at each step. Pointers into it hold until it grows.
// Threads: none of its own; one thread at a time.
// Fails with std::bad_alloc only, and then still holds what it held.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

namespace zensync {

inline constexpr std::size_t kBufferAlign = 64;

class Buffer {
 public:
  Buffer() = default;
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return capacity_; }
  std::span<std::byte> bytes() { return {data_.get(), size_}; }
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_.get());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_.get());
  }

  /// Sets the size and drops what was held; new bytes have no value.
  void resize_discard(std::size_t size_bytes) {
    if (size_bytes > capacity_) allocate(grown(size_bytes), 0);
    size_ = size_bytes;
  }
  /// Sets the size and keeps what was held; new bytes have no value.
  void resize_keep(std::size_t size_bytes) {
    if (size_bytes > capacity_) allocate(grown(size_bytes), size_);
    size_ = size_bytes;
  }
  void append(const void* source, std::size_t size_bytes) {
    const std::size_t old_bytes = size_;
    resize_keep(old_bytes + size_bytes);
    if (size_bytes != 0) std::memcpy(data_.get() + old_bytes, source, size_bytes);
  }
  void clear() { size_ = 0; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::size_t grown(std::size_t need) const {
    const std::size_t want = std::max(need, capacity_ + capacity_ / 2);
    return (want + kBufferAlign - 1) / kBufferAlign * kBufferAlign;
  }
  void allocate(std::size_t capacity_bytes, std::size_t keep_bytes) {
    auto* fresh = static_cast<std::byte*>(std::aligned_alloc(kBufferAlign, capacity_bytes));
    if (fresh == nullptr) throw std::bad_alloc();
    if (keep_bytes != 0) std::memcpy(fresh, data_.get(), keep_bytes);
    data_.reset(fresh);
    capacity_ = capacity_bytes;
  }
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// A typed array over a Buffer, for trivially copyable T; elements start without a value.
template <class T>
class Array {
 public:
  T* data() { return buffer_.template as<T>(); }
  const T* data() const { return buffer_.template as<T>(); }
  std::size_t size() const { return buffer_.size() / sizeof(T); }
  bool empty() const { return size() == 0; }
  void resize_discard(std::size_t count) { buffer_.resize_discard(count * sizeof(T)); }
  void resize_keep(std::size_t count) { buffer_.resize_keep(count * sizeof(T)); }
  void clear() { buffer_.clear(); }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  std::span<T> span() { return {data(), size()}; }
  std::span<const T> span() const { return {data(), size()}; }
  std::size_t capacity_bytes() const { return buffer_.capacity(); }

 private:
  Buffer buffer_;
};

}  // namespace zensync
