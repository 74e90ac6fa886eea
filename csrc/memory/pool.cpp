// Requests and frees: the caches first, then the supply under the lock; what is counted on the way.
#include "memory/pool.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/error.h"
#include "memory/block_cache.h"
#include "memory/segment.h"
#include "memory/supply.h"
#include "memory/trace.h"

namespace pipecomm {
namespace {

// No allocation may be larger: differences of addresses must fit.
constexpr std::size_t kMaxRequestNbytes = SIZE_MAX / 4;

thread_local std::uint16_t thread_tag = 0;

std::string mib_text(std::size_t nbytes) {
  return std::to_string(nbytes) + " bytes (" + std::to_string(nbytes >> 20) + " MiB)";
}

[[noreturn]] void throw_not_live(const void* data, const char* what) {
  throw Error(ErrorKind::config, "expected the address of a live block of this pool; got " +
                                     std::to_string(reinterpret_cast<std::uintptr_t>(data)) + ", " + what);
}

void raise_to(std::atomic<std::size_t>& peak, std::size_t value) {
  std::size_t seen = peak.load(std::memory_order_relaxed);
  while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

BlockState state_of(const BlockNode* block) { return block->second.state.load(std::memory_order_relaxed); }
void set_state(BlockNode* block, BlockState state) { block->second.state.store(state, std::memory_order_relaxed); }

}  // namespace

Pool::Pool(std::unique_ptr<Upstream> upstream, std::size_t limit_nbytes)
    : caches_(std::make_unique<BlockCaches>()), supply_(std::make_unique<Supply>(std::move(upstream), limit_nbytes)) {
  hear_of_forks();
}

Pool::~Pool() {
  forget_forks();
  for (const PendingFree& pending : pending_) {
    try {
      pending.event.wait();
    } catch (const Error&) {
      // The device is lost: nothing uses the memory any more.
    }
  }
}

BlockCache& Pool::cache() { return caches_->all[shard_of_this_thread(caches_->all.size())]; }

BlockNode* Pool::allocate_node(std::size_t nbytes) {
  if (BlockNode* block = take_cached(round_up(std::max<std::size_t>(nbytes, 1), kAlignment), nbytes)) return block;
  while (true) {
    std::unique_lock lock(mutex_);
    try {
      if (BlockNode* block = take(nbytes, Growth::waits, nullptr)) return block;
    } catch (const Error& error) {
      lock.unlock();
      if (error.kind() != ErrorKind::pool_exhausted || !ask_exhausted(nbytes)) throw;
      continue;
    }
    const Event oldest = pending_.front().event;
    lock.unlock();
    oldest.wait();
  }
}

BlockNode* Pool::try_allocate_node(std::size_t nbytes, Growth growth) {
  if (BlockNode* block = take_cached(round_up(std::max<std::size_t>(nbytes, 1), kAlignment), nbytes)) return block;
  const std::scoped_lock lock(mutex_);
  return take(nbytes, growth, nullptr);
}

BlockNode* Pool::allocate_node_on(Stream& stream, std::size_t nbytes) {
  {
    const std::scoped_lock lock(mutex_);
    if (BlockNode* block = take(nbytes, Growth::now, &stream)) return block;
  }
  return allocate_node(nbytes);
}

BlockNode* Pool::take_cached(std::size_t block_nbytes, std::size_t nbytes) {
  if (block_nbytes > BlockCache::kMaxBlockNbytes || nbytes > kMaxRequestNbytes) return nullptr;
  BlockCache& own = cache();
  const std::scoped_lock lock(own.mutex);
  BlockNode* block = own.take(block_nbytes);
  if (block == nullptr) return nullptr;
  ++own.num_allocations;
  return hand_out(block, nbytes);
}

// Under the lock of the pool, or of the cache that the block comes from.
BlockNode* Pool::hand_out(BlockNode* block, std::size_t nbytes) {
  block->second.requested_nbytes = nbytes;
  block->second.tag = thread_tag;
  set_state(block, BlockState::live);
  raise_to(peak_in_use_nbytes_, in_use_nbytes_.fetch_add(nbytes, std::memory_order_relaxed) + nbytes);
  if (thread_tag != 0) {
    TagCounters& counters = tags_[thread_tag];
    counters.num_allocations.fetch_add(1, std::memory_order_relaxed);
    raise_to(counters.peak_live_nbytes, counters.live_nbytes.fetch_add(nbytes, std::memory_order_relaxed) + nbytes);
  }
  if (TraceRecorder* recorder = recorder_.load(std::memory_order_acquire)) {
    recorder->add(block->first, static_cast<std::int64_t>(nbytes));
  }
  return block;
}

// nullptr: there are pending frees, or with Growth::later memory on its way. Under the lock.
BlockNode* Pool::take(std::size_t nbytes, Growth growth, Stream* stream) {
  // What can never be served must not cost the cache.
  if (nbytes > std::min(kMaxRequestNbytes, supply_->limit_or_max())) {
    throw Error(ErrorKind::pool_exhausted, exhausted_text(nbytes));
  }
  collect_pending();
  const std::size_t block_nbytes = round_up(std::max<std::size_t>(nbytes, 1), kAlignment);
  BlockNode* block = supply_->take(block_nbytes);
  if (block == nullptr && stream != nullptr) block = take_pending(block_nbytes, *stream);
  if (block == nullptr) block = find_or_obtain(block_nbytes, nbytes, growth);
  if (block == nullptr && pending_.empty() && !supply_->is_awaiting())
    throw Error(ErrorKind::pool_exhausted, exhausted_text(nbytes));
  if (block == nullptr) return nullptr;
  ++num_allocations_;
  return hand_out(block, nbytes);
}

BlockNode* Pool::find_or_obtain(std::size_t block_nbytes, std::size_t nbytes, Growth growth) {
  if (drain_caches()) {
    if (BlockNode* block = supply_->take(block_nbytes)) return block;
  }
  const std::size_t in_use = in_use_nbytes_.load() + nbytes;
  return supply_->obtain(block_nbytes, std::max(peak_in_use_nbytes_.load(), in_use), growth);
}

// A whole block that another stream still uses, not twice too large.
BlockNode* Pool::take_pending(std::size_t block_nbytes, Stream& stream) {
  for (auto pending = pending_.begin(); pending != pending_.end(); ++pending) {
    BlockNode* block = pending->block;
    if (block->second.nbytes < block_nbytes || block->second.nbytes > 2 * block_nbytes) continue;
    stream.wait(pending->event);
    pending_nbytes_ -= block->second.requested_nbytes;
    end_use(block);
    pending_.erase(pending);
    return block;
  }
  return nullptr;
}

bool Pool::ask_exhausted(std::size_t nbytes) {
  Exhausted exhausted;
  {
    const std::scoped_lock lock(mutex_);
    exhausted = exhausted_;
  }
  return exhausted && exhausted(nbytes);
}

void Pool::refuse_unless_live(BlockNode* block, const void* data) const {
  if (block == nullptr) throw_not_live(data, "which it did not hand out");
  if (state_of(block) != BlockState::live) throw_not_live(data, "which was freed already");
}

void Pool::deallocate(void* data, const Event& event) {
  std::unique_lock lock(mutex_);
  BlockNode* block = supply_->blocks().find(static_cast<std::byte*>(data));
  refuse_unless_live(block, data);
  if (event.is_ready()) {
    end_use(block);
    supply_->blocks().give_back(block);
  } else {
    defer(block, event);
  }
}

void Pool::deallocate_node(BlockNode* block, const Event& event) {
  if (event.is_ready()) return cache_or_free(block);
  const std::scoped_lock lock(mutex_);
  defer(block, event);
}

void Pool::defer(BlockNode* block, const Event& event) {
  if (TraceRecorder* recorder = recorder_.load(std::memory_order_acquire)) recorder->add(block->first, -1);
  set_state(block, BlockState::pending);
  pending_nbytes_ += block->second.requested_nbytes;
  pending_.push_back({block, event});
}

// Nobody uses the block any more; under the lock of the pool or of a cache.
void Pool::end_use(BlockNode* block) {
  BlockEntry& entry = block->second;
  if (state_of(block) == BlockState::live) {
    if (TraceRecorder* recorder = recorder_.load(std::memory_order_acquire)) recorder->add(block->first, -1);
  }
  const std::size_t nbytes = std::exchange(entry.requested_nbytes, 0);
  if (entry.tag != 0) tags_[entry.tag].live_nbytes.fetch_sub(nbytes, std::memory_order_relaxed);
  in_use_nbytes_.fetch_sub(nbytes, std::memory_order_relaxed);
  set_state(block, BlockState::cached);
}

void Pool::cache_or_free(BlockNode* block) {
  std::array<BlockNode*, 8> dropped;
  std::size_t num_dropped = 0;
  if (block->second.nbytes <= BlockCache::kMaxBlockNbytes) {
    BlockCache& own = cache();
    const std::scoped_lock lock(own.mutex);
    end_use(block);
    if (!own.put(block, [&](BlockNode* other) { dropped[num_dropped++] = other; })) dropped[num_dropped++] = block;
    if (num_dropped == 0) return;
  } else {
    dropped[num_dropped++] = block;
  }
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < num_dropped; ++i) {
    if (state_of(dropped[i]) == BlockState::live) end_use(dropped[i]);
    supply_->blocks().give_back(dropped[i]);
  }
}

// Under the lock; false where nothing was cached.
bool Pool::drain_caches() {
  bool is_any = false;
  for (BlockCache& cache : caches_->all) {
    if (cache.cached_nbytes() == 0) continue;
    const std::scoped_lock lock(cache.mutex);
    cache.drain([&](BlockNode* block) {
      supply_->blocks().give_back(block);
      is_any = true;
    });
  }
  return is_any;
}

void Pool::collect_pending() {
  // All of them, not up to the first that is not ready: a slow stream must not hold back the others.
  std::erase_if(pending_, [this](const PendingFree& pending) {
    if (!pending.event.is_ready()) return false;
    pending_nbytes_ -= pending.block->second.requested_nbytes;
    end_use(pending.block);
    supply_->blocks().give_back(pending.block);
    return true;
  });
}

std::size_t Pool::trim() {
  const std::scoped_lock lock(mutex_);
  collect_pending();
  drain_caches();
  return supply_->trim();
}

void Pool::set_exhausted(Exhausted exhausted) {
  const std::scoped_lock lock(mutex_);
  // What was set before dies with the argument, without the lock: that may take other locks.
  exhausted_.swap(exhausted);
}

void Pool::set_recorder(std::shared_ptr<TraceRecorder> recorder) {
  const std::scoped_lock lock(mutex_);
  recorder_.store(recorder.get(), std::memory_order_release);
  if (recorder) recorders_.push_back(std::move(recorder));
}

std::uint16_t Pool::set_thread_tag(std::uint16_t tag) { return std::exchange(thread_tag, tag); }

std::size_t Pool::limit_nbytes() const {
  const std::scoped_lock lock(mutex_);
  return supply_->limit_nbytes();
}

void Pool::set_limit_nbytes(std::size_t limit_nbytes) {
  const std::scoped_lock lock(mutex_);
  drain_caches();
  supply_->set_limit_nbytes(limit_nbytes);
}

std::string Pool::exhausted_text(std::size_t nbytes) const {
  const std::size_t live = in_use_nbytes_ - pending_nbytes_;
  const std::size_t limit = supply_->limit_nbytes();
  std::string text = "expected " + mib_text(nbytes) + " from the pool; got none: " + mib_text(live) + " live, " +
                     mib_text(supply_->reserved_nbytes()) + " reserved, largest free block " +
                     mib_text(supply_->blocks().largest_free_nbytes()) + " of " +
                     mib_text(supply_->blocks().free_nbytes()) + " free, ";
  text += limit == 0 ? "no limit" : "limit " + mib_text(limit);
  // Advice only where it would help.
  if (!supply_->upstream_error().empty()) return text + ". The system: " + supply_->upstream_error();
  if (limit == 0 || nbytes > kMaxRequestNbytes) return text;
  text += ". Raise the pool's limit";
  return live > 0 && nbytes <= limit ? text + ", or keep fewer blocks live" : text;
}

}  // namespace pipecomm
