// Where a pool gets its segments from.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/api.h"

namespace pipecomm {

// A range of addresses inside a segment, or in several that stand back to back.
struct Piece {
  std::byte* data;
  std::size_t nbytes;
};

// Called with the pool's lock held. Sizes, and the edges of pieces, are multiples of granule_nbytes().
class PC_API Upstream {
 public:
  virtual ~Upstream() = default;

  virtual std::size_t granule_nbytes() const = 0;
  // A segment, at the free address `wanted` where that is possible. Throws a pool exhausted error.
  virtual std::byte* allocate(std::size_t nbytes, std::byte* wanted) = 0;
  virtual void release(std::byte* segment) noexcept = 0;
  // release() may wait for all that is enqueued on a device.
  virtual bool waits_at_release() const { return false; }
  // One contiguous range for the memory of `pieces`, which nobody uses until unstitch(); nullptr where that cannot be.
  virtual std::byte* stitch(std::span<const Piece> pieces) noexcept = 0;
  virtual void unstitch(std::byte* data, std::size_t nbytes) noexcept = 0;
};

// Sealed memfd segments, physically there once allocated.
PC_API std::unique_ptr<Upstream> make_host_upstream();
// Private memory that becomes physical when touched, at most `capacity_nbytes` of addresses (0 = no limit): replays
// traces that are larger than the machine.
PC_API std::unique_ptr<Upstream> make_lazy_upstream(std::size_t capacity_nbytes);

}  // namespace pipecomm
