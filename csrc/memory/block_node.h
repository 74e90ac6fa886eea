// One block: where it is and what it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace pipecomm {

// Small blocks have addresses of their own, so that long-lived small ones do not cut up what large ones need again.
enum class SegmentClass { small, large };
// cached: freed, and kept whole for the next request of this size. pending: freed, but a stream may still use it.
enum class BlockState : std::uint8_t { free, live, cached, pending };

struct BlockEntry {
  BlockEntry(std::size_t of_nbytes, SegmentClass of_class) : nbytes(of_nbytes), segment_class(of_class) {}

  std::size_t nbytes;
  const SegmentClass segment_class;  // that of the segments it lies in
  std::size_t requested_nbytes = 0;  // what the user asked for; 0 unless live or pending
  // Between live, cached and pending whoever has the block changes it; to and from free, the list.
  std::atomic<BlockState> state{BlockState::free};
  std::uint16_t tag = 0;  // whose it is
};

// Where a block is, and what: the address stays valid until the block is given back.
using BlockNode = std::pair<std::byte* const, BlockEntry>;

}  // namespace pipecomm
