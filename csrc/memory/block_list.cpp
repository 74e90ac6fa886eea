// Best fit, split and coalesce over the block map.
#include "memory/block_list.h"

#include <stdexcept>
#include <string>

namespace pipecomm {
namespace {

// More pieces would meet the kernel's limit on mappings, and cost more than they give.
constexpr std::size_t kMaxPieces = 4096;

[[noreturn]] void fail(const std::string& text) { throw std::logic_error("pool check failed: " + text); }

std::byte* align_up(std::byte* data, std::size_t granule) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return data + (granule - address % granule) % granule;
}

}  // namespace

BlockList::Segments::const_iterator BlockList::segment_at(std::byte* data) const {
  return std::prev(segments_.upper_bound(data));
}

BlockList::FreeSet& BlockList::free_set_of(std::byte* data) {
  return free_.at(static_cast<std::size_t>(segment_of(data).segment_class));
}

void BlockList::add_free(std::byte* data, std::size_t nbytes) {
  blocks_.insert_or_assign(data, BlockEntry{nbytes, 0, BlockState::free});
  free_set_of(data).emplace(nbytes, data);
}

void BlockList::erase_free(Blocks::const_iterator block) {
  free_set_of(block->first).erase({block->second.nbytes, block->first});
  blocks_.erase(block);
}

bool BlockList::can_join(Blocks::const_iterator block, SegmentClass segment_class) const {
  return block->second.state == BlockState::free && segment_of(block->first).segment_class == segment_class;
}

void BlockList::join_free(std::byte* data, std::size_t nbytes) {
  const SegmentClass segment_class = segment_of(data).segment_class;
  const auto next = blocks_.find(data + nbytes);
  if (next != blocks_.end() && can_join(next, segment_class)) {
    nbytes += next->second.nbytes;
    erase_free(next);
  }
  const auto after = blocks_.lower_bound(data);
  if (after != blocks_.begin()) {
    const auto previous = std::prev(after);
    if (previous->first + previous->second.nbytes == data && can_join(previous, segment_class)) {
      data = previous->first;
      nbytes += previous->second.nbytes;
      erase_free(previous);
    }
  }
  add_free(data, nbytes);
}

void BlockList::give_back(std::byte* data) {
  const auto block = blocks_.find(data);
  const std::size_t nbytes = block->second.nbytes;
  blocks_.erase(block);
  join_free(data, nbytes);
}

void BlockList::add_segment(std::byte* data, std::size_t nbytes, SegmentClass segment_class,
                            std::vector<Piece> pieces) {
  segments_.emplace(data, SegmentEntry{nbytes, segment_class, std::move(pieces)});
  if (segment_class == SegmentClass::stitched) {
    blocks_.emplace(data, BlockEntry{nbytes, 0, BlockState::live});
  } else {
    join_free(data, nbytes);
  }
}

void BlockList::remove_segment(std::byte* data) {
  const auto block = block_at(data);
  if (block->second.state == BlockState::free) {
    carve(block, data, segments_.at(data).nbytes, BlockState::live);
  }
  blocks_.erase(data);
  segments_.erase(data);
}

std::byte* BlockList::place_for(std::size_t nbytes, SegmentClass segment_class) const {
  for (auto segment = segments_.begin(); segment != segments_.end(); ++segment) {
    if (segment->second.segment_class != segment_class) continue;
    std::byte* end = segment->first + segment->second.nbytes;
    const auto next = std::next(segment);
    if (next == segments_.end() || static_cast<std::size_t>(next->first - end) >= nbytes) return end;
  }
  return nullptr;
}

BlockEntry& BlockList::carve(Blocks::iterator block, std::byte* data, std::size_t nbytes, BlockState state) {
  std::byte* begin = block->first;
  std::byte* end = begin + block->second.nbytes;
  erase_free(block);
  if (data > begin) add_free(begin, static_cast<std::size_t>(data - begin));
  if (data + nbytes < end) add_free(data + nbytes, static_cast<std::size_t>(end - (data + nbytes)));
  return blocks_.insert_or_assign(data, BlockEntry{nbytes, 0, state}).first->second;
}

std::byte* BlockList::take(std::size_t nbytes, SegmentClass segment_class) {
  const FreeSet& free = free_.at(static_cast<std::size_t>(segment_class));
  const auto best = free.lower_bound({nbytes, nullptr});
  if (best == free.end()) return nullptr;
  std::byte* data = best->second;
  carve(blocks_.find(data), data, nbytes, BlockState::live);
  return data;
}

std::vector<Piece> BlockList::lend(std::size_t nbytes, std::size_t granule_nbytes) {
  std::vector<Piece> pieces;
  std::size_t missing = nbytes;
  for (const SegmentClass segment_class : {SegmentClass::large, SegmentClass::small}) {
    const FreeSet& free = free_.at(static_cast<std::size_t>(segment_class));
    for (auto block = free.rbegin(); block != free.rend() && missing > 0; ++block) {
      std::byte* begin = align_up(block->second, granule_nbytes);
      const auto skipped = static_cast<std::size_t>(begin - block->second);
      if (block->first < skipped + granule_nbytes) continue;
      const std::size_t whole = (block->first - skipped) / granule_nbytes * granule_nbytes;
      pieces.push_back({begin, std::min(whole, missing)});
      missing -= pieces.back().nbytes;
    }
  }
  if (missing > 0 || pieces.size() > kMaxPieces) return {};
  for (const Piece& piece : pieces) {
    carve(block_at(piece.data), piece.data, piece.nbytes, BlockState::lent);
  }
  return pieces;
}

BlockEntry* BlockList::find(std::byte* data) {
  const auto found = blocks_.find(data);
  return found == blocks_.end() ? nullptr : &found->second;
}

std::vector<Piece> BlockList::free_segments() const {
  std::vector<Piece> result;
  for (const auto& [data, segment] : segments_) {
    const auto block = block_at(data);
    const std::byte* end = block->first + block->second.nbytes;
    if (block->second.state == BlockState::free && end >= data + segment.nbytes)
      result.push_back({data, segment.nbytes});
  }
  return result;
}

std::size_t BlockList::reserved_nbytes(SegmentClass segment_class) const {
  std::size_t total = 0;
  for (const auto& [data, segment] : segments_) {
    if (segment.segment_class == segment_class) total += segment.nbytes;
  }
  return total;
}

std::size_t BlockList::free_nbytes() const {
  std::size_t total = 0;
  for (const FreeSet& free : free_) {
    for (const auto& [nbytes, data] : free) total += nbytes;
  }
  return total;
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
    if (block.state == state) total += block.requested_nbytes;
  }
  return total;
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
  if (entry.requested_nbytes > entry.nbytes) fail("a block smaller than what was asked for");
  const auto next = std::next(block);
  if (next != blocks_.end() && next->first < end) fail("two blocks overlap");
  if (entry.state != BlockState::free) return;
  if (!free_.at(static_cast<std::size_t>(segment_class)).contains({entry.nbytes, data})) {
    fail("a free block missing from the index");
  }
  if (next != blocks_.end() && next->first == end && can_join(next, segment_class)) fail("two free neighbours");
}

void BlockList::check_pieces(const SegmentEntry& segment) const {
  for (const Piece& piece : segment.pieces) {
    const auto lent = blocks_.find(piece.data);
    if (lent == blocks_.end() || lent->second.state != BlockState::lent || lent->second.nbytes != piece.nbytes) {
      fail("a stitched segment without its piece");
    }
  }
}

void BlockList::check() const {
  std::size_t num_free = 0;
  std::size_t num_lent = 0;
  std::size_t uncovered_nbytes = 0;
  for (const auto& [data, segment] : segments_) {
    check_pieces(segment);
    num_lent += segment.pieces.size();
    uncovered_nbytes += segment.nbytes;
  }
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    check_block(block);
    num_free += std::size_t{block->second.state == BlockState::free};
    num_lent -= std::size_t{block->second.state == BlockState::lent};
    uncovered_nbytes -= block->second.nbytes;
  }
  if (uncovered_nbytes != 0) fail("blocks do not fill their segments");
  if (num_free != free_[0].size() + free_[1].size()) fail("an index entry without its free block");
  if (num_lent != 0) fail("a lent block without its stitched segment");
}

}  // namespace pipecomm
