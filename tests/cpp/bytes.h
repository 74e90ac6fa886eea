// A buffer at a chosen alignment with guard bytes on both sides.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace check {

class Bytes {
 public:
  // Starts `offset` bytes (< 64) after a 64-byte boundary; every byte is 0xa5.
  explicit Bytes(std::size_t nbytes, std::size_t offset = 0) : storage_(nbytes + 256, kGuard), nbytes_(nbytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    begin_ = (64 - address % 64) + 64 + offset;
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::byte* data() { return storage_.data() + begin_; }
  const std::byte* data() const { return storage_.data() + begin_; }
  std::size_t nbytes() const { return nbytes_; }
  bool operator==(const Bytes& other) const {
    return nbytes_ == other.nbytes_ && std::memcmp(data(), other.data(), nbytes_) == 0;
  }
  bool guards_are_untouched() const {
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    return std::all_of(storage_.data(), data(), is_guard) &&
           std::all_of(data() + nbytes_, storage_.data() + storage_.size(), is_guard);
  }

 private:
  static constexpr std::byte kGuard{0xa5};
  std::vector<std::byte> storage_;
  std::size_t nbytes_;
  std::size_t begin_;
};

}  // namespace check
