// The order in which the ways to a block are tried, and how much each takes.
#include "memory/supply.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "memory/segment.h"

namespace pipecomm {
namespace {

constexpr std::size_t kMaxSmallNbytes = std::size_t{1} << 20;
constexpr std::size_t kMinGrowthNbytes = std::size_t{2} << 20;
constexpr std::size_t kMaxGrowthNbytes = std::size_t{64} << 20;
// Share of the peak in use that may lie idle before free granules are moved instead of taking fresh memory.
constexpr std::size_t kSlackShare = 48;
// Moving granules smaller than this part of the pool would leave it in too many mappings.
constexpr std::size_t kMaxGranules = 8192;
// Free runs below this stay when the pool is trimmed: they would cost a mapping each.
constexpr std::size_t kMinTrimNbytes = std::size_t{64} << 10;

SegmentClass class_of(std::size_t nbytes) {
  return nbytes <= kMaxSmallNbytes ? SegmentClass::small : SegmentClass::large;
}

SegmentClass other(SegmentClass segment_class) {
  return segment_class == SegmentClass::small ? SegmentClass::large : SegmentClass::small;
}

}  // namespace

BlockNode* Supply::take(std::size_t nbytes) { return blocks_.take(nbytes, class_of(nbytes)); }

BlockNode* Supply::obtain(std::size_t nbytes, std::size_t peak_nbytes, Growth growth) {
  upstream_error_.clear();
  is_awaiting_ = false;
  return upstream_->can_remap() ? obtain_by_remap(nbytes, peak_nbytes) : obtain_by_segments(nbytes, growth);
}

std::size_t Supply::room_nbytes() const { return limit_or_max() - std::min(limit_or_max(), reserved_nbytes_); }

std::size_t Supply::coarse_granule_nbytes() const {
  return std::max(upstream_->granule_nbytes(), std::bit_floor(reserved_nbytes_ / kMaxGranules));
}

GrowthPoint Supply::growth_point(std::size_t nbytes, SegmentClass segment_class, std::size_t granule) const {
  return blocks_.growth_point(nbytes, segment_class, granule, [this](std::byte* data, std::size_t missing_nbytes) {
    return upstream_->can_stand_at(data, missing_nbytes);
  });
}

// Whether what was found for finer granules is what would be found for these.
bool Supply::is_growth_point(const GrowthPoint& point, std::size_t nbytes, std::size_t granule) const {
  if (point.data == nullptr) return true;
  const std::size_t missing = round_up(nbytes - point.before_nbytes, granule);
  return missing <= point.room_nbytes && upstream_->can_stand_at(point.data, missing);
}

BlockNode* Supply::obtain_by_remap(std::size_t nbytes, std::size_t peak_nbytes) {
  const SegmentClass segment_class = class_of(nbytes);
  const std::size_t granule = upstream_->granule_nbytes();
  const std::size_t unit =
      round_up(std::clamp(blocks_.reserved_nbytes(segment_class) / 64, kMinGrowthNbytes, kMaxGrowthNbytes), granule);
  // Blocks are larger than what was asked for.
  const std::size_t used = reserved_nbytes_ - blocks_.free_nbytes() + nbytes;
  peak_used_nbytes_ = std::max({peak_used_nbytes_, peak_nbytes, used});
  const std::size_t allowed =
      std::min(limit_or_max(), peak_used_nbytes_ + peak_used_nbytes_ / kSlackShare + kMinGrowthNbytes);
  const GrowthPoint point = growth_point(nbytes, segment_class, granule);
  const std::size_t missing = round_up(nbytes - point.before_nbytes, granule);
  for (const std::size_t fresh : {std::max(missing, unit), missing}) {
    if (fresh > allowed - std::min(allowed, reserved_nbytes_)) continue;
    const bool fits = fresh <= point.room_nbytes && upstream_->can_stand_at(point.data, fresh);
    if (point.data != nullptr && !fits) continue;
    if (add_fresh(fresh, segment_class, point.data)) return take(nbytes);
  }
  const std::uint64_t num_remaps = num_remaps_;
  for (const std::size_t piece_granule : {coarse_granule_nbytes(), granule}) {
    const bool stays = num_remaps == num_remaps_ && is_growth_point(point, nbytes, piece_granule);
    if (!gather(nbytes, piece_granule, stays ? point : growth_point(nbytes, segment_class, piece_granule))) continue;
    if (BlockNode* block = take(nbytes)) return block;
  }
  if (BlockNode* block = blocks_.take(nbytes, other(segment_class))) return block;
  // Free granules cannot be moved any more: fresh memory beyond what should lie idle.
  const GrowthPoint last = num_remaps == num_remaps_ ? point : growth_point(nbytes, segment_class, granule);
  const std::size_t least = round_up(nbytes - last.before_nbytes, granule);
  return least <= room_nbytes() && add_fresh(least, segment_class, last.data) ? take(nbytes) : nullptr;
}

// Free granules from elsewhere, and fresh ones where they are too few, behind `point`.
bool Supply::gather(std::size_t nbytes, std::size_t granule, const GrowthPoint& point) {
  const SegmentClass segment_class = class_of(nbytes);
  const std::size_t missing = round_up(nbytes - point.before_nbytes, granule);
  const std::vector<Piece> pieces = blocks_.free_granules(missing, granule, point.data);
  std::size_t found = 0;
  for (const Piece& piece : pieces) found += piece.nbytes;
  const std::size_t fresh = missing - std::min(missing, found);
  if (pieces.empty() || fresh > room_nbytes()) return false;
  ++num_upstream_calls_;
  std::byte* data = upstream_->remap(pieces, point.data);
  if (data == nullptr) return false;
  ++num_remaps_;
  for (const Piece& piece : pieces) blocks_.remove(piece.data, piece.nbytes);
  blocks_.add(data, found, segment_class);
  return fresh == 0 || add_fresh(fresh, segment_class, data + found);
}

bool Supply::add_fresh(std::size_t nbytes, SegmentClass segment_class, std::byte* wanted, Growth growth) {
  try {
    ++num_upstream_calls_;
    const bool is_later = growth == Growth::later && upstream_->waits_at_allocate();
    std::byte* data = is_later ? upstream_->allocate_later(nbytes) : upstream_->allocate(nbytes, wanted);
    is_awaiting_ = data == nullptr;
    if (is_awaiting_) return false;
    blocks_.add(data, nbytes, segment_class);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::pool_exhausted) throw;
    upstream_error_ = error.what();
    return false;
  }
  reserved_nbytes_ += nbytes;
  peak_reserved_nbytes_ = std::max(peak_reserved_nbytes_, reserved_nbytes_);
  return true;
}

BlockNode* Supply::obtain_by_segments(std::size_t nbytes, Growth growth) {
  const SegmentClass segment_class = class_of(nbytes);
  if (grow_by_segment(nbytes, segment_class, growth)) return take(nbytes);
  if (is_awaiting_) return nullptr;
  if (BlockNode* block = blocks_.take(nbytes, other(segment_class))) return block;
  const bool may_give_back = growth == Growth::waits || !upstream_->waits_at_release();
  if (may_give_back && release(blocks_.free_segments()) > 0 && grow_by_segment(nbytes, segment_class, growth)) {
    return take(nbytes);
  }
  return nullptr;
}

// Segments grow with the pool, a sixteenth of its size each: few calls, little held in reserve.
bool Supply::grow_by_segment(std::size_t nbytes, SegmentClass segment_class, Growth growth) {
  const std::size_t granule = upstream_->granule_nbytes();
  const std::size_t least = round_up(nbytes, granule);
  if (least > room_nbytes()) return false;
  const std::size_t share = blocks_.reserved_nbytes(segment_class) / 16;
  const std::size_t wanted =
      round_up(std::max(nbytes, std::clamp(share, kMinGrowthNbytes, kMaxGrowthNbytes)), kMinGrowthNbytes);
  const std::size_t possible = std::min(wanted, room_nbytes() / granule * granule);
  if (add_fresh(possible, segment_class, nullptr, growth)) return true;
  return !is_awaiting_ && possible > least && add_fresh(least, segment_class, nullptr, growth);
}

std::size_t Supply::release(const std::vector<Piece>& pieces) {
  std::size_t total = 0;
  for (const Piece& piece : pieces) {
    blocks_.remove(piece.data, piece.nbytes);
    upstream_->release(piece.data, piece.nbytes);
    ++num_upstream_calls_;
    total += piece.nbytes;
  }
  reserved_nbytes_ -= total;
  return total;
}

std::size_t Supply::trim() {
  return release(upstream_->can_remap() ? blocks_.free_runs(upstream_->granule_nbytes(), kMinTrimNbytes)
                                        : blocks_.free_segments());
}

void Supply::set_limit_nbytes(std::size_t limit_nbytes) {
  limit_nbytes_ = limit_nbytes;
  if (limit_nbytes > 0 && reserved_nbytes_ > limit_nbytes) trim();
}

}  // namespace pipecomm
