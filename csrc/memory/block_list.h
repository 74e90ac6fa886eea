// The blocks of all memory in address order: best fit, split and coalesce. Knows no upstream, no limit, no lock.
// A free block may span segments of one class that stand back to back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "memory/block_node.h"
#include "memory/upstream.h"

namespace pipecomm {

// Where more memory would best stand.
struct GrowthPoint {
  std::byte* data = nullptr;           // nullptr: anywhere
  std::size_t before_nbytes = 0;       // free right before it
  std::size_t room_nbytes = SIZE_MAX;  // of addresses up to the next segment
};

class BlockList {
 public:
  // With `merges`, segments that stand back to back become one, and any part of one can be removed.
  explicit BlockList(bool merges) : merges_(merges) {}

  // New memory becomes free.
  void add(std::byte* data, std::size_t nbytes, SegmentClass segment_class);
  // Free memory goes: a segment, or where they merge any part of one.
  void remove(std::byte* data, std::size_t nbytes);
  // The end of a segment where the free block before it and the addresses behind it hold `nbytes`, and where
  // `can_stand(address, nbytes)`; the one with most free before it.
  GrowthPoint growth_point(std::size_t nbytes, SegmentClass segment_class, std::size_t granule_nbytes,
                           const std::function<bool(std::byte*, std::size_t)>& can_stand) const;

  // Best fit in one class; the block becomes live. nullptr where none is large enough. A rest below `least_rest_nbytes`
  // stays with the block; the one that ends at `last_choice` is taken only where no other is large enough.
  BlockNode* take(std::size_t nbytes, SegmentClass segment_class, std::size_t least_rest_nbytes = 0,
                  const std::byte* last_choice = nullptr);
  // Frees a block and joins it with free neighbours of its class.
  void give_back(BlockNode* block);

  // nullptr for an address that is not the start of a block.
  BlockNode* find(std::byte* data);

  // Whole free granules, largest blocks first, until they are `nbytes` or all; none that ends at `but_before`.
  std::vector<Piece> free_granules(std::size_t nbytes, std::size_t granule_nbytes, const std::byte* but_before) const;
  // Segments that hold nothing.
  std::vector<Piece> free_segments() const;
  // Free memory in whole granules, of blocks that have at least `least_nbytes` of them or are all of their segments.
  std::vector<Piece> free_runs(std::size_t granule_nbytes, std::size_t least_nbytes) const;

  std::size_t reserved_nbytes(SegmentClass segment_class) const { return reserved_.at(index_of(segment_class)); }
  std::size_t free_nbytes() const { return free_nbytes_; }
  std::size_t largest_free_nbytes() const;
  std::size_t num_segments() const { return segments_.size(); }
  // Bytes asked for by the blocks in `state`.
  std::size_t requested_nbytes(BlockState state) const;
  // Calls with every segment, and with every block of it after that.
  void visit(const std::function<void(const Piece&, SegmentClass)>& segment,
             const std::function<void(const BlockNode&)>& block) const;
  // Walks everything; throws std::logic_error where the blocks do not tile their segments or an index is wrong.
  void check() const;

 private:
  struct SegmentEntry {
    std::size_t nbytes;
    SegmentClass segment_class;
  };
  using Blocks = std::map<std::byte*, BlockEntry>;
  using Segments = std::map<std::byte*, SegmentEntry>;
  using FreeSet = std::set<std::pair<std::size_t, std::byte*>>;

  static std::size_t index_of(SegmentClass segment_class) { return static_cast<std::size_t>(segment_class); }
  Segments::const_iterator segment_at(std::byte* data) const { return std::prev(segments_.upper_bound(data)); }
  // Bytes of addresses up to the next segment.
  std::size_t gap_behind(Segments::const_iterator segment) const;
  // The block that holds this address.
  Blocks::iterator block_at(std::byte* data) { return std::prev(blocks_.upper_bound(data)); }
  Blocks::const_iterator block_at(std::byte* data) const { return std::prev(blocks_.upper_bound(data)); }
  // Cuts [data, data + nbytes) out of a free block, as a live one; what is left on either side stays free.
  Blocks::iterator carve(Blocks::iterator block, std::byte* data, std::size_t nbytes);
  // The entry and the index of a block that has become free, joined with its neighbours.
  void join_free(Blocks::iterator block);
  bool can_join(Blocks::const_iterator block, SegmentClass segment_class) const;
  void index(Blocks::const_iterator block, FreeSet& free);
  void unindex(Blocks::const_iterator block, FreeSet& free);
  void add_segment(std::byte* data, std::size_t nbytes, SegmentClass segment_class);
  void remove_segment(std::byte* data, std::size_t nbytes);
  void check_block(Blocks::const_iterator block) const;

  const bool merges_;
  Blocks blocks_;
  Segments segments_;
  std::array<FreeSet, 2> free_;  // by SegmentClass: small, large
  std::array<std::size_t, 2> reserved_{};
  std::size_t free_nbytes_ = 0;
};

}  // namespace pipecomm
