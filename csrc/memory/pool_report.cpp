// What a pool tells of itself: statistics, a snapshot, the check; and what it does around a fork.
#include <stdexcept>

#include "memory/block_cache.h"
#include "memory/pool.h"
#include "memory/supply.h"

namespace pipecomm {

// Holds the pool's lock and those of all caches.
class Pool::Everything {
 public:
  explicit Everything(Pool& pool) : pool_(pool) { pool_.lock_for_fork(); }
  Everything(const Everything&) = delete;
  Everything& operator=(const Everything&) = delete;
  ~Everything() { pool_.unlock_after_fork(false); }

 private:
  Pool& pool_;
};

void Pool::check() {
  const Everything held(*this);
  const BlockList& blocks = supply_->blocks();
  blocks.check();
  const std::size_t reserved =
      blocks.reserved_nbytes(SegmentClass::small) + blocks.reserved_nbytes(SegmentClass::large);
  const std::size_t pending = blocks.requested_nbytes(BlockState::pending);
  if (reserved != supply_->reserved_nbytes() || pending != pending_nbytes_ ||
      blocks.requested_nbytes(BlockState::live) + pending != in_use_nbytes_) {
    throw std::logic_error("pool check failed: the statistics do not match the blocks");
  }
}

PoolStats Pool::stats() {
  const std::scoped_lock lock(mutex_);
  drain_caches();
  PoolStats result;
  result.num_allocations = num_allocations_;
  for (const BlockCache& cache : caches_->all) {
    const std::scoped_lock cache_lock(cache.mutex);
    result.num_allocations += cache.num_allocations;
  }
  result.pending_nbytes = pending_nbytes_;
  result.live_nbytes = in_use_nbytes_ - result.pending_nbytes;
  result.peak_live_nbytes = peak_in_use_nbytes_;
  result.reserved_nbytes = supply_->reserved_nbytes();
  result.peak_reserved_nbytes = supply_->peak_reserved_nbytes();
  result.free_nbytes = supply_->blocks().free_nbytes();
  result.largest_free_nbytes = supply_->blocks().largest_free_nbytes();
  result.limit_nbytes = supply_->limit_nbytes();
  result.num_segments = supply_->blocks().num_segments();
  result.num_upstream_calls = supply_->num_upstream_calls();
  result.num_remaps = supply_->num_remaps();
  return result;
}

std::size_t Pool::reserved_nbytes() const {
  const std::scoped_lock lock(mutex_);
  return supply_->reserved_nbytes();
}

std::uint64_t Pool::num_upstream_calls() const {
  const std::scoped_lock lock(mutex_);
  return supply_->num_upstream_calls();
}

TagStats Pool::tag_stats(std::uint16_t tag) const {
  const TagCounters& counters = tags_.at(tag);
  return {counters.live_nbytes, counters.peak_live_nbytes, counters.num_allocations};
}

std::vector<SnapshotEntry> Pool::snapshot() {
  const Everything held(*this);
  std::vector<SnapshotEntry> entries;
  SegmentClass current = SegmentClass::small;
  supply_->blocks().visit(
      [&](const Piece& segment, SegmentClass segment_class) {
        current = segment_class;
        entries.push_back({segment.data, segment.nbytes, 0, true, current, BlockState::free, 0});
      },
      [&](const BlockNode& block) {
        const BlockEntry& entry = block.second;
        entries.push_back({block.first, entry.nbytes, entry.requested_nbytes, false, current,
                           entry.state.load(std::memory_order_relaxed), entry.tag});
      });
  return entries;
}

void Pool::reset_peaks() {
  const Everything held(*this);
  peak_in_use_nbytes_ = in_use_nbytes_.load();
  supply_->reset_peak();
  for (TagCounters& counters : tags_) counters.peak_live_nbytes = counters.live_nbytes.load();
}

void Pool::lock_for_fork() {
  mutex_.lock();
  for (BlockCache& cache : caches_->all) cache.mutex.lock();
}

void Pool::unlock_after_fork(bool is_child) {
  if (is_child) {
    // The streams' threads stayed behind: what they used is lost to the child, and nothing may wait for it.
    pending_.clear();
    supply_->upstream().enter_child();
  }
  for (BlockCache& cache : caches_->all) cache.mutex.unlock();
  mutex_.unlock();
}

}  // namespace pipecomm
