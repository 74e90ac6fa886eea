// What the pool does around the block list: growth, limit, stitching, pending frees, and the block handle.
#include "memory/pool.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/error.h"
#include "memory/block_list.h"
#include "memory/segment.h"

namespace pipecomm {
namespace {

constexpr std::size_t kMaxSmallNbytes = std::size_t{1} << 20;
constexpr std::size_t kMinGrowthNbytes = std::size_t{2} << 20;
constexpr std::size_t kMaxGrowthNbytes = std::size_t{64} << 20;
// No allocation may be larger: differences of addresses must fit.
constexpr std::size_t kMaxRequestNbytes = SIZE_MAX / 4;

SegmentClass class_of(bool is_small) { return is_small ? SegmentClass::small : SegmentClass::large; }

std::string mib_text(std::size_t nbytes) {
  return std::to_string(nbytes) + " bytes (" + std::to_string(nbytes >> 20) + " MiB)";
}

[[noreturn]] void throw_not_live(const void* data, const char* what) {
  throw Error(ErrorKind::config, "expected the address of a live block of this pool; got " +
                                     std::to_string(reinterpret_cast<std::uintptr_t>(data)) + ", " + what);
}

}  // namespace

Pool::Pool(std::unique_ptr<Upstream> upstream, std::size_t limit_nbytes)
    : upstream_(std::move(upstream)), blocks_(std::make_unique<BlockList>()) {
  stats_.limit_nbytes = limit_nbytes;
}

Pool::~Pool() {
  for (const PendingFree& pending : pending_) {
    try {
      pending.event.wait();
    } catch (const Error&) {
      // The device is lost: nothing uses the memory any more.
    }
  }
}

void* Pool::allocate(std::size_t nbytes) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (void* data = take(nbytes, true)) return data;
    const Event oldest = pending_.front().event;
    lock.unlock();
    oldest.wait();
    lock.lock();
  }
}

void* Pool::try_allocate(std::size_t nbytes) {
  const std::scoped_lock lock(mutex_);
  return take(nbytes, false);
}

// nullptr: there are pending frees. Under the lock.
void* Pool::take(std::size_t nbytes, bool may_wait) {
  upstream_error_.clear();
  // What can never be served must not cost the cache.
  if (nbytes > std::min(kMaxRequestNbytes, limit_or_max())) {
    throw Error(ErrorKind::pool_exhausted, exhausted_text(nbytes));
  }
  collect_pending();
  std::byte* data = find_memory(round_up(std::max<std::size_t>(nbytes, 1), kAlignment), may_wait);
  if (data == nullptr && pending_.empty()) throw Error(ErrorKind::pool_exhausted, exhausted_text(nbytes));
  if (data == nullptr) return nullptr;
  blocks_->find(data)->requested_nbytes = nbytes;
  ++stats_.num_allocations;
  stats_.live_nbytes += nbytes;
  stats_.peak_live_nbytes = std::max(stats_.peak_live_nbytes, stats_.live_nbytes + stats_.pending_nbytes);
  return data;
}

std::byte* Pool::find_memory(std::size_t nbytes, bool may_wait) {
  const bool is_small = nbytes <= kMaxSmallNbytes;
  if (std::byte* data = blocks_->take(nbytes, class_of(is_small))) return data;
  if (grow(nbytes, is_small)) return blocks_->take(nbytes, class_of(is_small));
  if (std::byte* data = blocks_->take(nbytes, class_of(!is_small))) return data;
  const bool may_give_back = may_wait || !upstream_->waits_at_release();
  if (may_give_back && give_back_segments() > 0 && grow(nbytes, is_small)) {
    return blocks_->take(nbytes, class_of(is_small));
  }
  if (grow_to_limit(nbytes)) {
    if (std::byte* data = blocks_->take(nbytes, SegmentClass::large)) return data;
  }
  return stitch(nbytes);
}

std::size_t Pool::room_nbytes() const { return limit_or_max() - std::min(limit_or_max(), stats_.reserved_nbytes); }

std::size_t Pool::limit_or_max() const { return stats_.limit_nbytes == 0 ? SIZE_MAX : stats_.limit_nbytes; }

bool Pool::add_segment(std::size_t nbytes, bool is_small) {
  try {
    ++stats_.num_upstream_calls;
    std::byte* wanted = blocks_->place_for(nbytes, class_of(is_small));
    blocks_->add_segment(upstream_->allocate(nbytes, wanted), nbytes, class_of(is_small));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::pool_exhausted) throw;
    upstream_error_ = error.what();
    return false;
  }
  stats_.reserved_nbytes += nbytes;
  stats_.peak_reserved_nbytes = std::max(stats_.peak_reserved_nbytes, stats_.reserved_nbytes);
  return true;
}

// Segments grow with the pool, a sixteenth of its size each: few calls, little held in reserve.
bool Pool::grow(std::size_t nbytes, bool is_small) {
  const std::size_t granule = upstream_->granule_nbytes();
  const std::size_t least = round_up(nbytes, granule);
  if (least > room_nbytes()) return false;
  const std::size_t share = blocks_->reserved_nbytes(class_of(is_small)) / 16;
  const std::size_t wanted =
      round_up(std::max(nbytes, std::clamp(share, kMinGrowthNbytes, kMaxGrowthNbytes)), kMinGrowthNbytes);
  const std::size_t possible = std::min(wanted, room_nbytes() / granule * granule);
  return add_segment(possible, is_small) || (possible > least && add_segment(least, is_small));
}

// Takes what is left under the limit, where that and the free blocks are enough together.
bool Pool::grow_to_limit(std::size_t nbytes) {
  if (stats_.limit_nbytes == 0) return false;
  const std::size_t granule = upstream_->granule_nbytes();
  const std::size_t room = room_nbytes() / granule * granule;
  return room > 0 && nbytes <= room + blocks_->free_nbytes() && add_segment(room, false);
}

std::byte* Pool::stitch(std::size_t nbytes) {
  const std::size_t granule = upstream_->granule_nbytes();
  const std::size_t wanted = round_up(nbytes, granule);
  std::vector<Piece> pieces = blocks_->lend(wanted, granule);
  if (pieces.empty()) return nullptr;
  ++stats_.num_upstream_calls;
  std::byte* data = upstream_->stitch(pieces);
  if (data == nullptr) {
    for (const Piece& piece : pieces) blocks_->give_back(piece.data);
    return nullptr;
  }
  blocks_->add_segment(data, wanted, SegmentClass::stitched, std::move(pieces));
  return data;
}

std::byte* Pool::start_free(void* data) {
  auto* address = static_cast<std::byte*>(data);
  BlockEntry* block = blocks_->find(address);
  if (block == nullptr || block->state == BlockState::lent) throw_not_live(data, "which it did not hand out");
  if (block->state != BlockState::live) throw_not_live(data, "which was freed already");
  block->state = BlockState::pending;
  stats_.live_nbytes -= block->requested_nbytes;
  stats_.pending_nbytes += block->requested_nbytes;
  return address;
}

void Pool::finish_free(std::byte* data) {
  BlockEntry* block = blocks_->find(data);
  stats_.pending_nbytes -= std::exchange(block->requested_nbytes, 0);
  const SegmentEntry& segment = blocks_->segment_of(data);
  if (segment.segment_class != SegmentClass::stitched) {
    blocks_->give_back(data);
    return;
  }
  const std::vector<Piece> pieces = segment.pieces;
  ++stats_.num_upstream_calls;
  upstream_->unstitch(data, segment.nbytes);
  blocks_->remove_segment(data);
  for (const Piece& piece : pieces) blocks_->give_back(piece.data);
}

void Pool::deallocate(void* data, const Event& event) {
  const std::scoped_lock lock(mutex_);
  std::byte* address = start_free(data);
  if (event.is_ready()) {
    finish_free(address);
  } else {
    pending_.push_back({address, event});
  }
}

void Pool::collect_pending() {
  // All of them, not up to the first that is not ready: a slow stream must not hold back the others.
  std::erase_if(pending_, [this](const PendingFree& pending) {
    const bool is_ready = pending.event.is_ready();
    if (is_ready) finish_free(pending.data);
    return is_ready;
  });
}

std::size_t Pool::give_back_segments() {
  std::size_t total = 0;
  for (const Piece& segment : blocks_->free_segments()) {
    blocks_->remove_segment(segment.data);
    upstream_->release(segment.data);
    ++stats_.num_upstream_calls;
    total += segment.nbytes;
  }
  stats_.reserved_nbytes -= total;
  return total;
}

std::size_t Pool::trim() {
  const std::scoped_lock lock(mutex_);
  collect_pending();
  return give_back_segments();
}

void Pool::check() const {
  const std::scoped_lock lock(mutex_);
  blocks_->check();
  const std::size_t reserved =
      blocks_->reserved_nbytes(SegmentClass::small) + blocks_->reserved_nbytes(SegmentClass::large);
  if (reserved != stats_.reserved_nbytes || blocks_->requested_nbytes(BlockState::live) != stats_.live_nbytes ||
      blocks_->requested_nbytes(BlockState::pending) != stats_.pending_nbytes) {
    throw std::logic_error("pool check failed: the statistics do not match the blocks");
  }
}

PoolStats Pool::stats() const {
  const std::scoped_lock lock(mutex_);
  PoolStats result = stats_;
  result.free_nbytes = blocks_->free_nbytes();
  result.largest_free_nbytes = blocks_->largest_free_nbytes();
  result.num_segments = blocks_->num_segments();
  return result;
}

std::size_t Pool::limit_nbytes() const {
  const std::scoped_lock lock(mutex_);
  return stats_.limit_nbytes;
}

void Pool::set_limit_nbytes(std::size_t limit_nbytes) {
  const std::scoped_lock lock(mutex_);
  stats_.limit_nbytes = limit_nbytes;
  if (limit_nbytes > 0 && stats_.reserved_nbytes > limit_nbytes) give_back_segments();
}

std::string Pool::exhausted_text(std::size_t nbytes) const {
  std::string text = "expected " + mib_text(nbytes) + " from the pool; got none: " + mib_text(stats_.live_nbytes) +
                     " live, " + mib_text(stats_.reserved_nbytes) + " reserved, largest free block " +
                     mib_text(blocks_->largest_free_nbytes()) + " of " + mib_text(blocks_->free_nbytes()) + " free, ";
  text += stats_.limit_nbytes == 0 ? "no limit" : "limit " + mib_text(stats_.limit_nbytes);
  // Advice only where it would help.
  if (!upstream_error_.empty()) return text + ". The system: " + upstream_error_;
  if (stats_.limit_nbytes == 0 || nbytes > kMaxRequestNbytes) return text;
  text += ". Raise the pool's limit";
  return stats_.live_nbytes > 0 && nbytes <= stats_.limit_nbytes ? text + ", or keep fewer blocks live" : text;
}

Block::Block(std::shared_ptr<Pool> pool, void* data, std::size_t nbytes)
    : pool_(std::move(pool)), data_(data), nbytes_(nbytes) {}

Block::Block(Block&& other) noexcept
    : pool_(std::move(other.pool_)),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    reset();
    pool_ = std::move(other.pool_);
    data_ = std::exchange(other.data_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
  }
  return *this;
}

Block::~Block() { reset(); }

// Terminates where the block is not the pool's: only a constructor call with another's address leads there.
void Block::reset(const Event& event) noexcept {
  if (data_ != nullptr) pool_->deallocate(std::exchange(data_, nullptr), event);
  pool_.reset();
  nbytes_ = 0;
}

std::shared_ptr<Pool> make_host_pool(std::size_t limit_nbytes) {
  return std::make_shared<Pool>(make_host_upstream(), limit_nbytes);
}

Block allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
  return Block(pool, pool->allocate(nbytes), nbytes);
}

Block try_allocate_block(const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
  void* data = pool->try_allocate(nbytes);
  return data == nullptr ? Block() : Block(pool, data, nbytes);
}

}  // namespace pipecomm
