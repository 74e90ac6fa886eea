// The blocks of all segments in address order: best fit, split and coalesce. Knows no upstream, no limit, no lock.
// A free block may span segments of one class that stand back to back.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "memory/upstream.h"

namespace pipecomm {

// Small blocks have segments of their own, so that long-lived small ones do not cut up what large ones need again.
// A stitched segment is a second mapping of blocks that are lent to it.
enum class SegmentClass { small, large, stitched };
// pending: freed, but a stream may still use it.
enum class BlockState { free, live, pending, lent };

struct BlockEntry {
  std::size_t nbytes;
  std::size_t requested_nbytes;  // what the user asked for; 0 unless live or pending
  BlockState state;
};

struct SegmentEntry {
  std::size_t nbytes;
  SegmentClass segment_class;
  std::vector<Piece> pieces;  // of a stitched segment
};

class BlockList {
 public:
  // The whole segment becomes one free block; of a stitched one, one live block.
  void add_segment(std::byte* data, std::size_t nbytes, SegmentClass segment_class, std::vector<Piece> pieces = {});
  // No block but free ones may reach into it; of a stitched segment, its one block goes too.
  void remove_segment(std::byte* data);
  // Where a new segment would best stand: behind one of its class, with `nbytes` free there; nullptr without any.
  std::byte* place_for(std::size_t nbytes, SegmentClass segment_class) const;

  // Best fit in segments of one class; the block becomes live. nullptr where none is large enough.
  std::byte* take(std::size_t nbytes, SegmentClass segment_class);
  // Lends free granules of at least `nbytes` together, the largest blocks first; empty where there are too few.
  std::vector<Piece> lend(std::size_t nbytes, std::size_t granule_nbytes);
  // Frees a block and joins it with free neighbours of its class.
  void give_back(std::byte* data);

  // nullptr for an address that is not the start of a block.
  BlockEntry* find(std::byte* data);
  const SegmentEntry& segment_of(std::byte* data) const { return segment_at(data)->second; }

  // Segments that hold nothing.
  std::vector<Piece> free_segments() const;
  std::size_t reserved_nbytes(SegmentClass segment_class) const;
  std::size_t free_nbytes() const;
  std::size_t largest_free_nbytes() const;
  std::size_t num_segments() const { return segments_.size(); }
  // Bytes asked for by the blocks in `state`.
  std::size_t requested_nbytes(BlockState state) const;
  // Walks everything; throws std::logic_error where the blocks do not tile their segments or an index is wrong.
  void check() const;

 private:
  using Blocks = std::map<std::byte*, BlockEntry>;
  using Segments = std::map<std::byte*, SegmentEntry>;
  using FreeSet = std::set<std::pair<std::size_t, std::byte*>>;

  Segments::const_iterator segment_at(std::byte* data) const;
  FreeSet& free_set_of(std::byte* data);
  // The block that holds this address.
  Blocks::iterator block_at(std::byte* data) { return std::prev(blocks_.upper_bound(data)); }
  Blocks::const_iterator block_at(std::byte* data) const { return std::prev(blocks_.upper_bound(data)); }
  // Cuts [data, data + nbytes) out of a free block; what is left on either side stays free.
  BlockEntry& carve(Blocks::iterator block, std::byte* data, std::size_t nbytes, BlockState state);
  void add_free(std::byte* data, std::size_t nbytes);
  // Adds a free block, joined with its free neighbours.
  void join_free(std::byte* data, std::size_t nbytes);
  bool can_join(Blocks::const_iterator block, SegmentClass segment_class) const;
  void erase_free(Blocks::const_iterator block);
  void check_block(Blocks::const_iterator block) const;
  void check_pieces(const SegmentEntry& segment) const;

  Blocks blocks_;
  Segments segments_;
  std::array<FreeSet, 2> free_;  // by SegmentClass: small, large
};

}  // namespace pipecomm
