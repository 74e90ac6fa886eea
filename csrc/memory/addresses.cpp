// mmap behind the reserved address ranges.
#include "memory/addresses.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

namespace pipecomm {
namespace {

// Addresses cost nothing; a pool that outgrows a range goes on in another one.
constexpr std::size_t kRangeNbytes = std::size_t{256} << 30;

bool map_at(std::byte* data, std::size_t nbytes, int protection, int flags, int fd, std::size_t offset) noexcept {
  return mmap(data, nbytes, protection, flags | MAP_FIXED, fd, static_cast<off_t>(offset)) != MAP_FAILED;
}

}  // namespace

std::byte* reserve_addresses(std::size_t nbytes) noexcept {
  void* data = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

bool map_shared_at(std::byte* data, int fd, std::size_t offset, std::size_t nbytes) noexcept {
  // Populated: page faults belong to the set-up, not to the first transfer.
  return map_at(data, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
}

bool map_copy_at(std::byte* data, int fd, std::size_t offset, std::size_t nbytes) noexcept {
  return map_at(data, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, offset);
}

bool move_pages(std::byte* from, std::byte* to, std::size_t nbytes) noexcept {
  constexpr int kFlags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  return mremap(from, nbytes, nbytes, kFlags, to) != MAP_FAILED;
}

std::byte* map_to_read(int fd, std::size_t nbytes) noexcept {
  void* data = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

bool map_private_at(std::byte* data, std::size_t nbytes) noexcept {
  return map_at(data, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

AddressRanges::~AddressRanges() {
  for (const auto& [data, range] : ranges_) munmap(data, range.nbytes);
}

std::map<std::byte*, AddressRanges::Range>::const_iterator AddressRanges::range_of(const std::byte* data,
                                                                                   std::size_t nbytes) const noexcept {
  const auto after = ranges_.upper_bound(const_cast<std::byte*>(data));
  if (after == ranges_.begin()) return ranges_.end();
  const auto range = std::prev(after);
  const auto offset = static_cast<std::size_t>(data - range->first);
  return offset <= range->second.nbytes && nbytes <= range->second.nbytes - offset ? range : ranges_.end();
}

bool AddressRanges::has(const std::byte* data, std::size_t nbytes) const noexcept {
  return nbytes > 0 && range_of(data, nbytes) != ranges_.end();
}

std::byte* AddressRanges::claim(std::size_t nbytes, std::byte* wanted) noexcept {
  if (const auto range = range_of(wanted, nbytes); range != ranges_.end()) {
    ranges_.at(range->first).claimed_nbytes += nbytes;
    return wanted;
  }
  // The smaller one where the process has a limit on its addresses.
  for (const std::size_t size : {std::max(nbytes, kRangeNbytes), nbytes}) {
    if (std::byte* data = reserve_addresses(size)) {
      ranges_.emplace(data, Range{size, nbytes});
      return data;
    }
  }
  return nullptr;
}

void AddressRanges::give_back(std::byte* data, std::size_t nbytes) noexcept {
  // Ranges may stand back to back.
  while (nbytes > 0) {
    const auto range = std::prev(ranges_.upper_bound(data));
    const auto left = range->second.nbytes - static_cast<std::size_t>(data - range->first);
    const std::size_t part = std::min(nbytes, left);
    range->second.claimed_nbytes -= part;
    if (range->second.claimed_nbytes == 0) {
      munmap(range->first, range->second.nbytes);
      ranges_.erase(range);
    } else {
      map_at(data, part, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    data += part;
    nbytes -= part;
  }
}

}  // namespace pipecomm
