// Freed small blocks kept whole, by size: the next request of the same size takes one without the pool's lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "memory/block_node.h"

namespace pipecomm {

// For the threads of one shard. All but `mutex` is guarded by it.
class alignas(64) BlockCache {
 public:
  static constexpr std::size_t kMaxBlockNbytes = std::size_t{1} << 20;

  mutable std::mutex mutex;
  std::uint64_t num_allocations = 0;

  // The block of this size that was put last; nullptr without any.
  BlockNode* take(std::size_t nbytes) {
    Bin& bin = bin_of(nbytes);
    if (bin.count == 0 || bin.nbytes != nbytes) return nullptr;
    count_nbytes(-nbytes);
    return bin.blocks[--bin.count];
  }

  // False where there is no room for the block. A block of another size that it replaces goes to `drop`.
  template <typename Drop>
  bool put(BlockNode* block, Drop&& drop) {
    const std::size_t nbytes = block->second.nbytes;
    if (nbytes > kMaxBlockNbytes) return false;
    Bin& bin = bin_of(nbytes);
    if (bin.nbytes != nbytes) {
      empty(bin, drop);
      bin.nbytes = nbytes;
    }
    if (bin.count == kMaxBlocks || cached_nbytes() + nbytes > kMaxNbytes) return false;
    bin.blocks[bin.count++] = block;
    count_nbytes(nbytes);
    return true;
  }

  template <typename Drop>
  void drain(Drop&& drop) {
    if (cached_nbytes() == 0) return;
    for (Bin& bin : bins_) empty(bin, drop);
  }

  // Also without the lock, as it was a moment ago.
  std::size_t cached_nbytes() const { return cached_nbytes_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kMaxBlocks = 7;
  static constexpr std::size_t kNumBins = 32;
  static constexpr std::size_t kMaxNbytes = std::size_t{4} << 20;

  struct Bin {
    std::size_t nbytes = 0;
    std::size_t count = 0;
    std::array<BlockNode*, kMaxBlocks> blocks;
  };

  // Multiplication spreads sizes that are multiples of each other.
  Bin& bin_of(std::size_t nbytes) { return bins_[(nbytes >> 9) * 0x9E3779B97F4A7C15u >> 59]; }

  template <typename Drop>
  void empty(Bin& bin, Drop&& drop) {
    for (; bin.count > 0; count_nbytes(-bin.nbytes)) drop(bin.blocks[--bin.count]);
  }

  void count_nbytes(std::size_t more) { cached_nbytes_.store(cached_nbytes() + more, std::memory_order_relaxed); }

  std::array<Bin, kNumBins> bins_{};
  std::atomic<std::size_t> cached_nbytes_{0};
};

struct BlockCaches {
  std::array<BlockCache, 16> all;
};

// The shard of this thread: threads beyond the number of shards share.
inline std::size_t shard_of_this_thread(std::size_t num_shards) {
  static std::atomic<std::size_t> next{0};
  thread_local const std::size_t kIndex = next.fetch_add(1, std::memory_order_relaxed);
  return kIndex % num_shards;
}

}  // namespace pipecomm
