// The memory pool: blocks from cached segments, with a limit, statistics, and frees that wait for a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "base/api.h"
#include "device/stream.h"
#include "memory/upstream.h"

namespace pipecomm {

class BlockList;

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
};

// Thread-safe. A freed block is joined with its free neighbours and handed out again by best fit; segments go back
// upstream only by trim() or to make room under the limit. No call after the first step of a repeated pattern goes
// upstream. Blocks start at multiples of kAlignment.
class PC_API Pool {
 public:
  static constexpr std::size_t kAlignment = 512;

  // `limit_nbytes` bounds what is held from upstream; 0 = no limit.
  explicit Pool(std::unique_ptr<Upstream> upstream, std::size_t limit_nbytes = 0);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  // Waits for pending frees; memory still allocated becomes invalid.
  ~Pool();

  // Contents undefined; 0 bytes give a unique address too. Where neither free memory nor the limit serves the request:
  // gives whole free segments back, joins free pieces, waits for pending frees, and then throws a pool exhausted error.
  void* allocate(std::size_t nbytes);
  // The same without waiting for a stream: gives nullptr where pending frees may serve the request later.
  void* try_allocate(std::size_t nbytes);
  // Hands the memory out again once `event` is ready. Throws a config error, and changes nothing, for an address that
  // is not that of a live block (freed twice, foreign).
  void deallocate(void* data, const Event& event = {});

  // Gives whole free segments back; returns their bytes.
  std::size_t trim();
  // Walks everything; throws std::logic_error on an inconsistency.
  void check() const;
  PoolStats stats() const;
  std::size_t limit_nbytes() const;
  // For all threads, from the next allocation on. Memory in use stays, also above the limit.
  void set_limit_nbytes(std::size_t limit_nbytes);

 private:
  struct PendingFree {
    std::byte* data;
    Event event;
  };

  void* take(std::size_t nbytes, bool may_wait);
  std::byte* find_memory(std::size_t nbytes, bool may_wait);
  bool grow(std::size_t nbytes, bool is_small);
  bool grow_to_limit(std::size_t nbytes);
  bool add_segment(std::size_t nbytes, bool is_small);
  std::byte* stitch(std::size_t nbytes);
  std::byte* start_free(void* data);
  void finish_free(std::byte* data);
  void collect_pending();
  std::size_t give_back_segments();
  std::size_t limit_or_max() const;
  std::size_t room_nbytes() const;
  std::string exhausted_text(std::size_t nbytes) const;

  mutable std::mutex mutex_;
  std::unique_ptr<Upstream> upstream_;
  std::unique_ptr<BlockList> blocks_;
  std::list<PendingFree> pending_;  // oldest first
  PoolStats stats_;                 // without what BlockList knows
  std::string upstream_error_;      // of the current allocation
};

// A block on loan from a pool; goes back when destroyed. Keeps its pool alive.
class PC_API Block {
 public:
  Block() = default;
  // Takes over `data`, which `pool` allocated.
  Block(std::shared_ptr<Pool> pool, void* data, std::size_t nbytes);
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  void* data() const { return data_; }
  // As asked for; the memory may be longer.
  std::size_t nbytes() const { return nbytes_; }
  explicit operator bool() const { return data_ != nullptr; }
  // Gives the block back now, to be handed out again once `event` is ready.
  void reset(const Event& event = {}) noexcept;

 private:
  std::shared_ptr<Pool> pool_;
  void* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

// A pool over memfd segments of host memory; 0 = no limit.
PC_API std::shared_ptr<Pool> make_host_pool(std::size_t limit_nbytes);
PC_API Block allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes);
// As Pool::try_allocate: none for now.
PC_API Block try_allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes);

}  // namespace pipecomm
