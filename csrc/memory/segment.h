// A sealed memfd and its mapping: memory that is known by file descriptor and vanishes with its last owner.
#pragma once

#include <cstddef>
#include <utility>

#include "base/api.h"

namespace pipecomm {

// Owns the descriptor and the mapping. Size and seals never change, so a peer cannot make an access fault.
class PC_API Segment {
 public:
  Segment() = default;
  // Makes `nbytes` zeroed bytes, rounded up to pages and physically there, so that exhaustion is an error here and not
  // SIGBUS later. Throws a pool exhausted error, or a config error for 0 bytes.
  static Segment create(std::size_t nbytes);
  // Makes a segment of zeroed bytes that take memory once they are filled, and is not mapped.
  static Segment create_sparse(std::size_t nbytes);
  // Makes a range physically there; throws a pool exhausted error.
  void fill(std::size_t offset, std::size_t nbytes);
  // Takes a range's memory away; whoever has it mapped reads zeros, in memory of its own.
  void empty(std::size_t offset, std::size_t nbytes) noexcept;
  // Maps a segment received from another process. Takes `fd` over, also when it throws: a transport error where it is
  // not sealed or not of `expected_nbytes` rounded up to pages. The descriptor is closed, since the mapping is all that
  // is needed.
  static Segment adopt(int fd, std::size_t expected_nbytes);
  // The same for a segment of any size that is only to be read; pages are mapped when they are touched.
  static Segment adopt_to_read(int fd);

  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    Segment(std::move(other)).swap(*this);
    return *this;
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  int fd() const { return fd_; }
  // A mapping stays. Whoever the descriptor was passed on to has one of their own.
  void close_fd();
  std::byte* data() const { return data_; }
  // Bytes of the memory itself, a multiple of the page size.
  std::size_t nbytes() const { return nbytes_; }
  explicit operator bool() const { return fd_ >= 0 || data_ != nullptr; }

 private:
  void swap(Segment& other) noexcept;
  void map();

  int fd_ = -1;
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

// Throws a pool exhausted error where the system has less memory than that: filling would wake the OOM killer.
PC_API void check_available(std::size_t nbytes);
PC_API std::size_t page_nbytes();

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace pipecomm
