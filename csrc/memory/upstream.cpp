// The two upstreams of host memory: memfd segments and lazy private mappings.
#include "memory/upstream.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>

#include "base/error.h"
#include "memory/addresses.h"
#include "memory/segment.h"
#include "memory/segment_directory.h"

namespace pipecomm {
namespace {

std::size_t total_nbytes(std::span<const Piece> pieces) {
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += piece.nbytes;
  return total;
}

[[noreturn]] void throw_no_addresses(std::size_t nbytes) {
  throw Error(ErrorKind::pool_exhausted,
              "expected " + std::to_string(nbytes) + " bytes of address space; got none from the system");
}

class HostUpstream final : public Upstream {
 public:
  HostUpstream() = default;
  HostUpstream(const HostUpstream&) = delete;
  HostUpstream& operator=(const HostUpstream&) = delete;
  ~HostUpstream() override {
    for (const auto& [data, item] : segments_) SegmentDirectory::instance().remove_segment(item.id);
  }

  std::size_t granule_nbytes() const override { return page_nbytes(); }

  std::byte* allocate(std::size_t nbytes, std::byte* wanted) override {
    Segment segment = Segment::create(nbytes, SegmentMapping::none);
    std::byte* data = ranges_.claim(nbytes, wanted);
    if (data == nullptr) throw_no_addresses(nbytes);
    if (!map_shared_at(data, segment.fd(), 0, nbytes)) {
      ranges_.give_back(data, nbytes);
      throw_no_addresses(nbytes);
    }
    const std::uint64_t id = SegmentDirectory::instance().add(data, segment.nbytes(), segment.fd());
    segments_.emplace(data, Item{std::move(segment), id});
    return data;
  }

  void release(std::byte* data) noexcept override {
    const auto item = segments_.find(data);
    SegmentDirectory::instance().remove_segment(item->second.id);
    ranges_.give_back(data, item->second.segment.nbytes());
    segments_.erase(item);
  }

  std::byte* stitch(std::span<const Piece> pieces) noexcept override {
    const std::size_t nbytes = total_nbytes(pieces);
    std::byte* data = reserve_addresses(nbytes);
    if (data == nullptr) return nullptr;
    std::byte* end = data;
    for (const Piece& piece : pieces) {
      if (!map_again(piece, end)) {
        unstitch(data, nbytes);
        return nullptr;
      }
      end += piece.nbytes;
    }
    return data;
  }

  void unstitch(std::byte* data, std::size_t nbytes) noexcept override {
    SegmentDirectory::instance().remove(data, nbytes);
    munmap(data, nbytes);
  }

 private:
  struct Item {
    Segment segment;
    std::uint64_t id;
  };

  // Maps the memory of `piece` a second time, at `target`.
  bool map_again(Piece piece, std::byte* target) noexcept {
    while (piece.nbytes > 0) {
      const auto& [start, item] = *std::prev(segments_.upper_bound(piece.data));
      const auto offset = static_cast<std::size_t>(piece.data - start);
      const std::size_t nbytes = std::min(piece.nbytes, item.segment.nbytes() - offset);
      if (!map_shared_at(target, item.segment.fd(), offset, nbytes)) return false;
      SegmentDirectory::instance().add_again(target, nbytes, piece.data);
      piece = {piece.data + nbytes, piece.nbytes - nbytes};
      target += nbytes;
    }
    return true;
  }

  AddressRanges ranges_;
  std::map<std::byte*, Item> segments_;
};

class LazyUpstream final : public Upstream {
 public:
  explicit LazyUpstream(std::size_t capacity_nbytes) : capacity_nbytes_(capacity_nbytes) {}

  std::size_t granule_nbytes() const override { return page_nbytes(); }

  std::byte* allocate(std::size_t nbytes, std::byte* wanted) override {
    if (capacity_nbytes_ > 0 && nbytes > capacity_nbytes_ - used_nbytes_) {
      throw Error(ErrorKind::pool_exhausted, "expected " + std::to_string(nbytes) + " bytes of address space; got " +
                                                 std::to_string(used_nbytes_) + " bytes used of " +
                                                 std::to_string(capacity_nbytes_));
    }
    std::byte* data = ranges_.claim(nbytes, wanted);
    if (data == nullptr) throw_no_addresses(nbytes);
    if (!map_private_at(data, nbytes)) {
      ranges_.give_back(data, nbytes);
      throw_no_addresses(nbytes);
    }
    segments_.emplace(data, nbytes);
    used_nbytes_ += nbytes;
    return data;
  }

  void release(std::byte* data) noexcept override {
    const auto segment = segments_.find(data);
    used_nbytes_ -= segment->second;
    ranges_.give_back(data, segment->second);
    segments_.erase(segment);
  }

  // Contents of a new block are undefined, so other untouched addresses are as good as those of the pieces.
  std::byte* stitch(std::span<const Piece> pieces) noexcept override {
    const std::size_t nbytes = total_nbytes(pieces);
    std::byte* data = reserve_addresses(nbytes);
    if (data == nullptr || map_private_at(data, nbytes)) return data;
    munmap(data, nbytes);
    return nullptr;
  }
  void unstitch(std::byte* data, std::size_t nbytes) noexcept override { munmap(data, nbytes); }

 private:
  std::size_t capacity_nbytes_;
  std::size_t used_nbytes_ = 0;
  AddressRanges ranges_;
  std::map<std::byte*, std::size_t> segments_;
};

}  // namespace

std::unique_ptr<Upstream> make_host_upstream() { return std::make_unique<HostUpstream>(); }

std::unique_ptr<Upstream> make_lazy_upstream(std::size_t capacity_nbytes) {
  return std::make_unique<LazyUpstream>(capacity_nbytes);
}

}  // namespace pipecomm
