// Best fit, split and coalesce over the block map.
#include "memory/block_list.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "memory/segment.h"

namespace pipecomm {
namespace {

[[noreturn]] void fail(const std::string& text) { throw std::logic_error("pool check failed: " + text); }

std::size_t bytes_between(const std::byte* from, const std::byte* to) { return static_cast<std::size_t>(to - from); }

// The whole granules of a range; none is an empty piece.
Piece whole_granules(std::byte* data, std::size_t nbytes, std::size_t granule) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::size_t skipped = (granule - address % granule) % granule;
  if (nbytes < skipped + granule) return {data, 0};
  return {data + skipped, (nbytes - skipped) / granule * granule};
}

}  // namespace

void BlockList::index(Blocks::const_iterator block, FreeSet& free) {
  free.emplace(block->second.nbytes, block->first);
  free_nbytes_ += block->second.nbytes;
}

void BlockList::unindex(Blocks::const_iterator block, FreeSet& free) {
  free.erase(free.find({block->second.nbytes, block->first}));
  free_nbytes_ -= block->second.nbytes;
}

bool BlockList::can_join(Blocks::const_iterator block, SegmentClass segment_class) const {
  return block->second.state.load(std::memory_order_relaxed) == BlockState::free &&
         block->second.segment_class == segment_class;
}

void BlockList::join_free(Blocks::iterator block) {
  const SegmentClass segment_class = block->second.segment_class;
  FreeSet& free = free_.at(index_of(segment_class));
  const auto next = std::next(block);
  if (next != blocks_.end() && next->first == block->first + block->second.nbytes && can_join(next, segment_class)) {
    unindex(next, free);
    block->second.nbytes += next->second.nbytes;
    blocks_.erase(next);
  }
  if (block != blocks_.begin()) {
    const auto previous = std::prev(block);
    if (previous->first + previous->second.nbytes == block->first && can_join(previous, segment_class)) {
      unindex(previous, free);
      previous->second.nbytes += block->second.nbytes;
      blocks_.erase(block);
      block = previous;
    }
  }
  index(block, free);
}

void BlockList::give_back(BlockNode* block) {
  const auto found = blocks_.find(block->first);
  found->second.requested_nbytes = 0;
  found->second.state.store(BlockState::free, std::memory_order_relaxed);
  join_free(found);
}

void BlockList::add_segment(std::byte* data, std::size_t nbytes, SegmentClass segment_class) {
  reserved_.at(index_of(segment_class)) += nbytes;
  auto segment = segments_.emplace(data, SegmentEntry{nbytes, segment_class}).first;
  if (!merges_) return;
  const auto joins = [&](Segments::iterator left, Segments::iterator right) {
    return left->first + left->second.nbytes == right->first && right->second.segment_class == segment_class &&
           left->second.segment_class == segment_class;
  };
  if (const auto next = std::next(segment); next != segments_.end() && joins(segment, next)) {
    segment->second.nbytes += next->second.nbytes;
    segments_.erase(next);
  }
  if (segment != segments_.begin() && joins(std::prev(segment), segment)) {
    std::prev(segment)->second.nbytes += segment->second.nbytes;
    segments_.erase(segment);
  }
}

void BlockList::add(std::byte* data, std::size_t nbytes, SegmentClass segment_class) {
  add_segment(data, nbytes, segment_class);
  join_free(blocks_.try_emplace(data, nbytes, segment_class).first);
}

void BlockList::remove_segment(std::byte* data, std::size_t nbytes) {
  const auto segment = segments_.find(segment_at(data)->first);
  const auto [begin, entry] = *segment;
  std::byte* end = begin + entry.nbytes;
  reserved_.at(index_of(entry.segment_class)) -= nbytes;
  if (data == begin) {
    segments_.erase(segment);
  } else {
    segment->second.nbytes = bytes_between(begin, data);
  }
  if (data + nbytes < end) {
    segments_.emplace(data + nbytes, SegmentEntry{bytes_between(data + nbytes, end), entry.segment_class});
  }
}

void BlockList::remove(std::byte* data, std::size_t nbytes) {
  blocks_.erase(carve(block_at(data), data, nbytes));
  remove_segment(data, nbytes);
}

std::size_t BlockList::gap_behind(Segments::const_iterator segment) const {
  const auto next = std::next(segment);
  return next == segments_.end() ? SIZE_MAX : bytes_between(segment->first + segment->second.nbytes, next->first);
}

GrowthPoint BlockList::growth_point(std::size_t nbytes, SegmentClass segment_class, std::size_t granule,
                                    const std::function<bool(std::byte*, std::size_t)>& can_stand) const {
  GrowthPoint best;
  const FreeSet& free = free_.at(index_of(segment_class));
  for (auto block = free.rbegin(); block != free.rend(); ++block) {
    const std::size_t before = std::min(block->first, nbytes);
    if (best.data != nullptr && before < best.before_nbytes) break;
    std::byte* end = block->second + block->first;
    if (best.data != nullptr && end > best.data) continue;
    const auto segment = segment_at(end - 1);
    if (segment->first + segment->second.nbytes != end) continue;
    const std::size_t gap = gap_behind(segment);
    const std::size_t missing = round_up(nbytes - before, granule);
    if (gap > 0 && gap >= missing && can_stand(end, missing)) best = {end, before, gap};
  }
  for (auto segment = segments_.begin(); best.data == nullptr && segment != segments_.end(); ++segment) {
    if (segment->second.segment_class != segment_class) continue;
    std::byte* end = segment->first + segment->second.nbytes;
    const std::size_t gap = gap_behind(segment);
    const std::size_t missing = round_up(nbytes, granule);
    if (gap >= missing && can_stand(end, missing)) best = {end, 0, gap};
  }
  return best;
}

BlockList::Blocks::iterator BlockList::carve(Blocks::iterator block, std::byte* data, std::size_t nbytes) {
  const SegmentClass segment_class = block->second.segment_class;
  FreeSet& free = free_.at(index_of(segment_class));
  std::byte* end = block->first + block->second.nbytes;
  unindex(block, free);
  if (data + nbytes < end) {
    const std::size_t rest = bytes_between(data + nbytes, end);
    index(blocks_.try_emplace(std::next(block), data + nbytes, rest, segment_class), free);
  }
  if (data > block->first) {
    block->second.nbytes = bytes_between(block->first, data);
    index(block, free);
    block = blocks_.try_emplace(std::next(block), data, nbytes, segment_class);
  }
  block->second.nbytes = nbytes;
  block->second.state.store(BlockState::live, std::memory_order_relaxed);
  return block;
}

BlockNode* BlockList::take(std::size_t nbytes, SegmentClass segment_class, std::size_t least_rest_nbytes,
                           const std::byte* last_choice) {
  const FreeSet& free = free_.at(index_of(segment_class));
  auto best = free.lower_bound({nbytes, nullptr});
  if (best == free.end()) return nullptr;
  const auto next = std::next(best);
  if (best->second + best->first == last_choice && next != free.end()) best = next;
  const auto [whole_nbytes, data] = *best;
  return &*carve(blocks_.find(data), data, whole_nbytes - nbytes < least_rest_nbytes ? whole_nbytes : nbytes);
}

std::vector<Piece> BlockList::free_granules(std::size_t nbytes, std::size_t granule,
                                            const std::byte* but_before) const {
  std::vector<Piece> pieces;
  std::size_t missing = nbytes;
  for (const SegmentClass segment_class : {SegmentClass::large, SegmentClass::small}) {
    const FreeSet& free = free_.at(index_of(segment_class));
    for (auto block = free.rbegin(); block != free.rend() && missing > 0 && block->first >= granule; ++block) {
      if (block->second + block->first == but_before) continue;
      Piece piece = whole_granules(block->second, block->first, granule);
      if (piece.nbytes == 0) continue;
      piece.nbytes = std::min(piece.nbytes, round_up(missing, granule));
      missing -= std::min(missing, piece.nbytes);
      pieces.push_back(piece);
    }
  }
  return pieces;
}

BlockNode* BlockList::find(std::byte* data) {
  const auto found = blocks_.find(data);
  return found == blocks_.end() ? nullptr : &*found;
}

std::vector<Piece> BlockList::free_segments() const {
  std::vector<Piece> result;
  for (const auto& [data, segment] : segments_) {
    const auto block = block_at(data);
    const std::byte* end = block->first + block->second.nbytes;
    if (block->second.state.load() == BlockState::free && end >= data + segment.nbytes) {
      result.push_back({data, segment.nbytes});
    }
  }
  return result;
}

std::vector<Piece> BlockList::free_runs(std::size_t granule, std::size_t least_nbytes) const {
  std::vector<Piece> result;
  for (const FreeSet& free : free_) {
    for (const auto& [nbytes, data] : free) {
      const Piece run = whole_granules(data, nbytes, granule);
      const auto segment = segments_.find(data);
      const bool is_segment = segment != segments_.end() && segment->second.nbytes == nbytes;
      if (run.nbytes > 0 && (run.nbytes >= least_nbytes || is_segment)) result.push_back(run);
    }
  }
  return result;
}

std::size_t BlockList::largest_free_nbytes() const {
  std::size_t largest = 0;
  for (const FreeSet& free : free_) {
    if (!free.empty()) largest = std::max(largest, free.rbegin()->first);
  }
  return largest;
}

std::size_t BlockList::requested_nbytes(BlockState state) const {
  std::size_t total = 0;
  for (const auto& [data, block] : blocks_) {
    if (block.state.load() == state) total += block.requested_nbytes;
  }
  return total;
}

void BlockList::visit(const std::function<void(const Piece&, SegmentClass)>& segment,
                      const std::function<void(const BlockNode&)>& block) const {
  auto next = blocks_.begin();
  for (const auto& [data, entry] : segments_) {
    segment({data, entry.nbytes}, entry.segment_class);
    for (; next != blocks_.end() && next->first < data + entry.nbytes; ++next) block(*next);
  }
}

// A block lies in segments of one class that stand back to back.
void BlockList::check_block(Blocks::const_iterator block) const {
  const auto& [data, entry] = *block;
  const std::byte* end = data + entry.nbytes;
  auto segment = segment_at(data);
  const SegmentClass segment_class = segment->second.segment_class;
  while (segment->first + segment->second.nbytes < end) {
    const std::byte* border = segment->first + segment->second.nbytes;
    ++segment;
    if (segment == segments_.end() || segment->first != border || segment->second.segment_class != segment_class) {
      fail("a block outside its segments");
    }
  }
  if (entry.segment_class != segment_class) fail("a block of another class than its segments");
  if (entry.requested_nbytes > entry.nbytes) fail("a block smaller than what was asked for");
  const auto next = std::next(block);
  if (next != blocks_.end() && next->first < end) fail("two blocks overlap");
  if (entry.state.load() != BlockState::free) return;
  if (!free_.at(index_of(segment_class)).contains({entry.nbytes, data})) fail("a free block missing from the index");
  if (next != blocks_.end() && next->first == end && can_join(next, segment_class)) fail("two free neighbours");
}

void BlockList::check() const {
  std::size_t num_free = 0;
  std::size_t free_nbytes = 0;
  std::size_t uncovered_nbytes = 0;
  for (const auto& [data, segment] : segments_) uncovered_nbytes += segment.nbytes;
  if (uncovered_nbytes != reserved_[0] + reserved_[1]) fail("segments that do not add up to what is reserved");
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    check_block(block);
    uncovered_nbytes -= block->second.nbytes;
    if (block->second.state.load() != BlockState::free) continue;
    ++num_free;
    free_nbytes += block->second.nbytes;
  }
  if (uncovered_nbytes != 0) fail("blocks do not fill their segments");
  if (num_free != free_[0].size() + free_[1].size()) fail("an index entry without its free block");
  if (free_nbytes != free_nbytes_) fail("free blocks that do not add up");
}

}  // namespace pipecomm
