// Address space reserved ahead, so that segments can stand back to back and a block may span several of them.
#pragma once

#include <cstddef>
#include <map>

namespace pipecomm {

// Addresses that fault, and that nothing else is mapped into; nullptr where there are none left.
std::byte* reserve_addresses(std::size_t nbytes) noexcept;
// Maps [offset, offset + nbytes) of `fd` over reserved addresses.
bool map_shared_at(std::byte* data, int fd, std::size_t offset, std::size_t nbytes) noexcept;
// Maps all of `fd` somewhere, to be read only; nullptr where that cannot be.
std::byte* map_to_read(int fd, std::size_t nbytes) noexcept;
// Maps the same as a copy: what is written there, the file and other mappings of it do not see.
bool map_copy_at(std::byte* data, int fd, std::size_t offset, std::size_t nbytes) noexcept;
// Moves the pages of a shared mapping over reserved addresses; the old ones map the same until something else is put
// there. False, with nothing changed, where the kernel (before 5.13) cannot.
bool move_pages(std::byte* from, std::byte* to, std::size_t nbytes) noexcept;
// Maps private memory, physical when touched, over reserved addresses.
bool map_private_at(std::byte* data, std::size_t nbytes) noexcept;

// Large reserved ranges that segments are placed in. Not thread-safe.
class AddressRanges {
 public:
  AddressRanges() = default;
  AddressRanges(const AddressRanges&) = delete;
  AddressRanges& operator=(const AddressRanges&) = delete;
  // Unmaps everything.
  ~AddressRanges();

  // Reserved addresses, at `wanted` where it is free and in a range, else at the start of a new range; nullptr where
  // the system has none left.
  std::byte* claim(std::size_t nbytes, std::byte* wanted) noexcept;
  bool has(const std::byte* data, std::size_t nbytes) const noexcept;
  // Unmaps what was mapped there and keeps the addresses reserved while their range is used.
  void give_back(std::byte* data, std::size_t nbytes) noexcept;

 private:
  struct Range {
    std::size_t nbytes;
    std::size_t claimed_nbytes;
  };
  std::map<std::byte*, Range>::const_iterator range_of(const std::byte* data, std::size_t nbytes) const noexcept;

  std::map<std::byte*, Range> ranges_;
};

}  // namespace pipecomm
