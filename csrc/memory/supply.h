// How a pool comes to a free block: from what is there, from fresh memory, from the granules of scattered free blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory/block_list.h"
#include "memory/upstream.h"

namespace pipecomm {

// Under the pool's lock. What is held from upstream stays within 1/48 (and 2 MiB of either class) of the most that
// has been in use at once, as long as upstream can move free granules together; those of blocks in use never move.
class Supply {
 public:
  Supply(std::unique_ptr<Upstream> upstream, std::size_t limit_nbytes)
      : upstream_(std::move(upstream)), blocks_(upstream_->can_remap()), limit_nbytes_(limit_nbytes) {}

  BlockList& blocks() { return blocks_; }
  const BlockList& blocks() const { return blocks_; }
  Upstream& upstream() { return *upstream_; }

  // Best fit among what is there; nullptr without. `nbytes` is a multiple of the pool's alignment.
  BlockNode* take(std::size_t nbytes);
  // With more memory; nullptr where neither upstream nor the limit allows it. `peak_nbytes` is the most that has been
  // in use, this request included.
  BlockNode* obtain(std::size_t nbytes, std::size_t peak_nbytes, Growth growth);
  // The last obtain() has begun something that will be there later.
  bool is_awaiting() const { return is_awaiting_; }
  // Gives free memory back; returns its bytes.
  std::size_t trim();

  std::size_t limit_nbytes() const { return limit_nbytes_; }
  void set_limit_nbytes(std::size_t limit_nbytes);
  std::size_t limit_or_max() const { return limit_nbytes_ == 0 ? SIZE_MAX : limit_nbytes_; }
  std::size_t reserved_nbytes() const { return reserved_nbytes_; }
  std::size_t peak_reserved_nbytes() const { return peak_reserved_nbytes_; }
  void reset_peak() { peak_reserved_nbytes_ = reserved_nbytes_; }
  // Calls of allocate, release and remap.
  std::uint64_t num_upstream_calls() const { return num_upstream_calls_; }
  std::uint64_t num_remaps() const { return num_remaps_; }
  // Why upstream refused in the last obtain(); "" where it did not.
  const std::string& upstream_error() const { return upstream_error_; }

 private:
  BlockNode* obtain_by_remap(std::size_t nbytes, std::size_t peak_nbytes);
  BlockNode* obtain_by_segments(std::size_t nbytes, Growth growth);
  bool gather(std::size_t nbytes, std::size_t granule_nbytes, const GrowthPoint& point);
  bool add_fresh(std::size_t nbytes, SegmentClass segment_class, std::byte* wanted, Growth growth = Growth::now);
  bool grow_by_segment(std::size_t nbytes, SegmentClass segment_class, Growth growth);
  GrowthPoint growth_point(std::size_t nbytes, SegmentClass segment_class, std::size_t granule_nbytes) const;
  bool is_growth_point(const GrowthPoint& point, std::size_t nbytes, std::size_t granule_nbytes) const;
  std::size_t coarse_granule_nbytes() const;
  std::size_t room_nbytes() const;
  std::size_t release(const std::vector<Piece>& pieces);

  std::unique_ptr<Upstream> upstream_;
  BlockList blocks_;
  std::size_t limit_nbytes_;  // of what is held from upstream; 0 = none
  std::size_t reserved_nbytes_ = 0;
  std::size_t peak_reserved_nbytes_ = 0;
  std::size_t peak_used_nbytes_ = 0;  // in blocks not free, whenever more memory was wanted
  std::uint64_t num_upstream_calls_ = 0;
  std::uint64_t num_remaps_ = 0;
  std::string upstream_error_;
  bool is_awaiting_ = false;
};

}  // namespace pipecomm
