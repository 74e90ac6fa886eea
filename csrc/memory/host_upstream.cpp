// Host memory in sparse memfds: filled from the start on, given back by punching holes, moved by moving mappings.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <string>

#include "base/error.h"
#include "memory/addresses.h"
#include "memory/extents.h"
#include "memory/segment.h"
#include "memory/segment_directory.h"
#include "memory/upstream.h"

namespace pipecomm {
namespace {

// Size of a file, of which only what is filled takes memory: one descriptor for each of these.
constexpr std::size_t kFileNbytes = std::size_t{4} << 30;
// The kernel allows 65530 mappings to a process; other libraries need some.
constexpr std::size_t kMaxMappings = 20000;

class HostUpstream final : public Upstream {
 public:
  HostUpstream() = default;
  HostUpstream(const HostUpstream&) = delete;
  HostUpstream& operator=(const HostUpstream&) = delete;
  ~HostUpstream() override {
    for (const auto& [id, file] : files_) SegmentDirectory::instance().remove_segment(id);
  }

  std::size_t granule_nbytes() const override { return page_nbytes(); }
  bool can_remap() const override { return true; }
  bool can_stand_at(const std::byte* data, std::size_t nbytes) const override { return ranges_.has(data, nbytes); }

  std::byte* allocate(std::size_t nbytes, std::byte* wanted) override {
    const auto [id, offset] = fill(nbytes);
    std::byte* data = ranges_.claim(nbytes, wanted);
    if (data == nullptr || !map_shared_at(data, files_.at(id).segment.fd(), offset, nbytes)) {
      if (data != nullptr) ranges_.give_back(data, nbytes);
      empty({nullptr, nbytes, id, offset});
      throw Error(ErrorKind::pool_exhausted,
                  "expected " + std::to_string(nbytes) + " bytes of address space; got none from the system");
    }
    add_extent({data, nbytes, id, offset});
    return data;
  }

  void release(std::byte* data, std::size_t nbytes) noexcept override {
    for (const Extent& extent : forget(data, nbytes)) empty(extent);
    ranges_.give_back(data, nbytes);
  }

  std::byte* remap(std::span<const Piece> pieces, std::byte* wanted) noexcept override {
    std::size_t nbytes = 0;
    for (const Piece& piece : pieces) nbytes += piece.nbytes;
    if (extents_.size() + 2 * pieces.size() > kMaxMappings) return nullptr;
    std::byte* data = ranges_.claim(nbytes, wanted);
    if (data == nullptr) return nullptr;
    std::byte* end = data;
    for (const Piece& piece : pieces) {
      if (!map_again(piece, end)) {
        ranges_.give_back(data, nbytes);
        return nullptr;
      }
      end += piece.nbytes;
    }
    end = data;
    for (const Piece& piece : pieces) {
      for (Extent extent : forget(piece.data, piece.nbytes)) {
        extent.data = end;
        end += extent.nbytes;
        add_extent(extent);
      }
      ranges_.give_back(piece.data, piece.nbytes);
    }
    return data;
  }

  void enter_child() noexcept override {
    for (auto& [id, file] : files_) file.is_parents = true;
    for (const auto& [data, extent] : extents_) {
      map_copy_at(data, files_.at(extent.file_id).segment.fd(), extent.offset, extent.nbytes);
    }
  }

 private:
  struct File {
    Segment segment;
    std::size_t filled_nbytes = 0;  // from the start
    std::size_t used_nbytes = 0;    // of these, not given back
    bool is_parents = false;        // that of the process this one was forked from
  };
  struct Filled {
    std::uint64_t id;
    std::size_t offset;
  };

  // Fresh bytes of a file, physically there.
  Filled fill(std::size_t nbytes) {
    check_available(nbytes);
    if (files_.empty() || !has_room(files_.rbegin()->second, nbytes)) {
      Segment segment = Segment::create_sparse(std::max(nbytes, kFileNbytes));
      const std::uint64_t id = SegmentDirectory::instance().add_segment(segment.fd());
      files_.emplace(id, File{std::move(segment)});
    }
    auto& [id, file] = *files_.rbegin();
    try {
      file.segment.fill(file.filled_nbytes, nbytes);
    } catch (const Error&) {
      close_unused(id);
      throw;
    }
    const std::size_t offset = file.filled_nbytes;
    file.filled_nbytes += nbytes;
    file.used_nbytes += nbytes;
    return {id, offset};
  }

  static bool has_room(const File& file, std::size_t nbytes) {
    return !file.is_parents && nbytes <= file.segment.nbytes() - file.filled_nbytes;
  }

  // Gives the bytes of a file back to the system.
  void empty(const Extent& extent) noexcept {
    File& file = files_.at(extent.file_id);
    if (!file.is_parents) file.segment.empty(extent.offset, extent.nbytes);
    file.used_nbytes -= extent.nbytes;
    close_unused(extent.file_id);
  }

  void close_unused(std::uint64_t id) noexcept {
    if (files_.at(id).used_nbytes > 0) return;
    SegmentDirectory::instance().remove_segment(id);
    files_.erase(id);
  }

  void add_extent(const Extent& extent) {
    extents_.add(extent);
    if (!files_.at(extent.file_id).is_parents) SegmentDirectory::instance().add_extent(extent);
  }

  std::vector<Extent> forget(std::byte* data, std::size_t nbytes) {
    SegmentDirectory::instance().remove(data, nbytes);
    return extents_.cut(data, nbytes);
  }

  // Maps the memory of `piece` at `target` too.
  bool map_again(Piece piece, std::byte* target) noexcept {
    while (piece.nbytes > 0) {
      const auto extent = extents_.find(piece.data);
      const std::size_t nbytes = std::min(piece.nbytes, extent->nbytes);
      const File& file = files_.at(extent->file_id);
      const bool is_moved = move_pages(piece.data, target, nbytes);
      // Of a parent's file the child has copies of its own, which only moving keeps; what is free has no contents.
      const auto map = file.is_parents ? map_copy_at : map_shared_at;
      if (!is_moved && !map(target, file.segment.fd(), extent->offset, nbytes)) return false;
      piece = {piece.data + nbytes, piece.nbytes - nbytes};
      target += nbytes;
    }
    return true;
  }

  AddressRanges ranges_;
  Extents extents_;
  std::map<std::uint64_t, File> files_;  // by id; the last one is filled
};

}  // namespace

std::unique_ptr<Upstream> make_host_upstream() { return std::make_unique<HostUpstream>(); }

}  // namespace pipecomm
