// Extents and descriptors under one lock.
#include "memory/segment_directory.h"

namespace pipecomm {

// Never destroyed: pools may live until the process ends.
SegmentDirectory& SegmentDirectory::instance() {
  static auto* const kDirectory = new SegmentDirectory();
  return *kDirectory;
}

std::uint64_t SegmentDirectory::add_segment(int fd) {
  const std::lock_guard lock(mutex_);
  fds_[++last_id_] = fd;
  return last_id_;
}

std::uint64_t SegmentDirectory::add(const std::byte* data, std::size_t nbytes, int fd) {
  const std::uint64_t id = add_segment(fd);
  add_extent({const_cast<std::byte*>(data), nbytes, id, 0});
  return id;
}

void SegmentDirectory::add_extent(const Extent& extent) {
  const std::lock_guard lock(mutex_);
  if (fds_.contains(extent.file_id)) extents_.add(extent);
}

void SegmentDirectory::remove(std::byte* data, std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  extents_.cut(data, nbytes);
}

void SegmentDirectory::remove_segment(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (fds_.erase(id) == 0) return;
  extents_.erase_file(id);
  num_removed_.fetch_add(1);
}

std::optional<SegmentSpan> SegmentDirectory::find(const std::byte* data) const {
  const std::lock_guard lock(mutex_);
  const auto extent = extents_.find(data);
  if (!extent) return std::nullopt;
  return SegmentSpan{extent->file_id, fds_.at(extent->file_id), extent->offset, extent->nbytes};
}

bool SegmentDirectory::has(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  return fds_.contains(id);
}

void SegmentDirectory::unlock_after_fork(bool is_child) {
  if (is_child) {
    extents_.clear();
    fds_.clear();
  }
  mutex_.unlock();
}

}  // namespace pipecomm
