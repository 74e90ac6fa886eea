// Which memfd segment of this process's pools an address lies in, so that a peer can be told where to read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "base/api.h"
#include "memory/extents.h"

namespace pipecomm {

// Where bytes lie: `offset` into the segment, `nbytes` of which follow each other there and in memory.
struct SegmentSpan {
  std::uint64_t id = 0;  // of the segment; never used again in this process
  int fd = -1;           // open while any memory of the segment is in use
  std::size_t offset = 0;
  std::size_t nbytes = 0;
};

// One per process. Thread-safe; its lock is taken last.
class PC_API SegmentDirectory {
 public:
  static SegmentDirectory& instance();

  // A segment, nothing of which is mapped; gives its id.
  std::uint64_t add_segment(int fd);
  // A segment that is mapped at `data`; gives its id.
  std::uint64_t add(const std::byte* data, std::size_t nbytes, int fd);
  // Part of a segment is mapped there.
  void add_extent(const Extent& extent);
  // Nothing is mapped there any more.
  void remove(std::byte* data, std::size_t nbytes);
  // The segment goes back to the system.
  void remove_segment(std::uint64_t id);

  std::optional<SegmentSpan> find(const std::byte* data) const;
  bool has(std::uint64_t id) const;
  // Segments that have ever gone back: unchanged, no id has become invalid.
  std::uint64_t num_removed() const { return num_removed_.load(); }

  // Around a fork: held by the forking thread. A child has nothing that a peer could read.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork(bool is_child);

 private:
  mutable std::mutex mutex_;
  Extents extents_;                   // guarded by mutex_
  std::map<std::uint64_t, int> fds_;  // by id; guarded by mutex_
  std::uint64_t last_id_ = 0;         // guarded by mutex_
  std::atomic<std::uint64_t> num_removed_{0};
};

}  // namespace pipecomm
