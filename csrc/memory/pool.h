// The memory pool: blocks from cached memory, with a limit, statistics, and frees that wait for a stream.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/api.h"
#include "device/stream.h"
#include "memory/block_node.h"
#include "memory/fork.h"
#include "memory/upstream.h"

namespace pipecomm {

class BlockCache;
struct BlockCaches;
class Supply;
class TraceRecorder;

struct PoolStats {
  std::size_t live_nbytes = 0;       // asked for by blocks in use
  std::size_t pending_nbytes = 0;    // asked for by freed blocks that a stream may still use
  std::size_t reserved_nbytes = 0;   // held from upstream
  std::size_t peak_live_nbytes = 0;  // live and pending
  std::size_t peak_reserved_nbytes = 0;
  std::size_t free_nbytes = 0;          // in all free blocks
  std::size_t largest_free_nbytes = 0;  // in one free block
  std::size_t limit_nbytes = 0;         // 0 = no limit
  std::size_t num_segments = 0;
  std::uint64_t num_allocations = 0;
  std::uint64_t num_upstream_calls = 0;
  std::uint64_t num_remaps = 0;  // times that free memory was moved together
};

// Of one tag; bytes asked for.
struct TagStats {
  std::size_t live_nbytes = 0;  // and pending
  std::size_t peak_live_nbytes = 0;
  std::uint64_t num_allocations = 0;
};

// A block, or a segment: `is_segment`.
struct SnapshotEntry {
  std::byte* data;
  std::size_t nbytes;
  std::size_t requested_nbytes;
  bool is_segment;
  SegmentClass segment_class;  // of the segment, or of the one the block lies in
  BlockState state;
  std::uint16_t tag;
};

// Thread-safe. A freed small block is kept for the next request of its size by a thread of the same shard; another one,
// and those whenever memory is short, is joined with its free neighbours and handed out again by best fit. Before more
// is taken from upstream than a 48th of what was in use at most, free memory is moved together. Memory goes back
// upstream only by trim() or a lowered limit, or to make room under the limit. Blocks start at multiples of kAlignment.
class PC_API Pool final : private ForkAware {
 public:
  static constexpr std::size_t kAlignment = 512;
  static constexpr std::size_t kNumTags = 256;

  // `limit_nbytes` bounds what is held from upstream; 0 = no limit.
  explicit Pool(std::unique_ptr<Upstream> upstream, std::size_t limit_nbytes = 0);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  // Waits for pending frees; memory still allocated becomes invalid.
  ~Pool();

  // Contents undefined; 0 bytes give a unique address too. Where neither free memory nor the limit serves the request:
  // waits for pending frees, asks the exhausted callback, and then throws a pool exhausted error.
  void* allocate(std::size_t nbytes) { return allocate_node(nbytes)->first; }
  BlockNode* allocate_node(std::size_t nbytes);
  // The same without waiting for a stream: gives nullptr where pending frees, or with Growth::later more memory, may
  // serve the request later.
  BlockNode* try_allocate_node(std::size_t nbytes, Growth growth = Growth::now);
  // Memory for work of `stream`, to be freed with an event of that stream. A block that another stream still uses may
  // serve: `stream` then waits for it, the host does not.
  BlockNode* allocate_node_on(Stream& stream, std::size_t nbytes);
  // Hands the memory out again once `event` is ready. Throws a config error, and changes nothing, for an address that
  // is not that of a live block (freed twice, foreign).
  void deallocate(void* data, const Event& event = {});
  // The same for what allocate_node() gave.
  void deallocate_node(BlockNode* block, const Event& event = {});

  // Gives free memory back, in whole segments or in runs of at least 64 KiB; returns its bytes.
  std::size_t trim();
  // Walks everything; throws std::logic_error on an inconsistency.
  void check();
  PoolStats stats();
  std::size_t reserved_nbytes() const;
  std::uint64_t num_upstream_calls() const;
  TagStats tag_stats(std::uint16_t tag) const;
  // Every segment, and after it its blocks, by address.
  std::vector<SnapshotEntry> snapshot();
  // Peaks begin anew at what is held now.
  void reset_peaks();
  std::size_t limit_nbytes() const;
  // For all threads, from the next allocation on. Memory in use stays, also above the limit.
  void set_limit_nbytes(std::size_t limit_nbytes);

  // Called without locks with the bytes that could not be had; true: try again.
  using Exhausted = std::function<bool(std::size_t nbytes)>;
  void set_exhausted(Exhausted exhausted);
  // Notes every allocation and free in `recorder`; nullptr: no more.
  void set_recorder(std::shared_ptr<TraceRecorder> recorder);
  // What this thread allocates from here on counts for `tag`, in all pools; returns the tag before. 0: none.
  static std::uint16_t set_thread_tag(std::uint16_t tag);

 private:
  struct PendingFree {
    BlockNode* block;
    Event event;
  };
  struct TagCounters {
    std::atomic<std::size_t> live_nbytes{0}, peak_live_nbytes{0};
    std::atomic<std::uint64_t> num_allocations{0};
  };
  class Everything;  // holds all locks

  BlockCache& cache();
  BlockNode* take_cached(std::size_t block_nbytes, std::size_t nbytes);
  BlockNode* take(std::size_t nbytes, Growth growth, Stream* stream);
  BlockNode* take_pending(std::size_t block_nbytes, Stream& stream);
  BlockNode* find_or_obtain(std::size_t block_nbytes, std::size_t nbytes, Growth growth);
  BlockNode* hand_out(BlockNode* block, std::size_t nbytes);
  bool ask_exhausted(std::size_t nbytes);
  void refuse_unless_live(BlockNode* block, const void* data) const;
  void end_use(BlockNode* block);
  void cache_or_free(BlockNode* block);
  void defer(BlockNode* block, const Event& event);
  bool drain_caches();
  void collect_pending();
  std::string exhausted_text(std::size_t nbytes) const;
  void lock_for_fork() override;
  void unlock_after_fork(bool is_child) override;

  std::atomic<std::size_t> in_use_nbytes_{0};  // live and pending
  std::atomic<std::size_t> peak_in_use_nbytes_{0};
  std::atomic<std::size_t> pending_nbytes_{0};
  std::atomic<TraceRecorder*> recorder_{nullptr};
  const std::unique_ptr<BlockCaches> caches_;  // one of them for each shard of threads
  std::array<TagCounters, kNumTags> tags_;

  // Taken before those of the caches. Guards what follows.
  mutable std::mutex mutex_;
  const std::unique_ptr<Supply> supply_;
  std::list<PendingFree> pending_;  // oldest first
  std::uint64_t num_allocations_ = 0;
  Exhausted exhausted_;
  std::vector<std::shared_ptr<TraceRecorder>> recorders_;  // all there ever were: another thread may be in one
};

}  // namespace pipecomm
