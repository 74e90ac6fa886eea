// Where a pool gets its memory from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/api.h"

namespace pipecomm {

// A range of addresses.
struct Piece {
  std::byte* data;
  std::size_t nbytes;
};

// How a pool may come to more memory.
enum class Growth : std::uint8_t {
  waits,  // also by waiting for a device, to give back what lies idle
  now,    // without that
  later,  // what may have to wait for a device is begun, and is there another time
};

// Called with the pool's lock held. Sizes, and the edges of pieces, are multiples of granule_nbytes().
class PC_API Upstream {
 public:
  virtual ~Upstream() = default;

  virtual std::size_t granule_nbytes() const = 0;
  // Whether memory can be had in any sizes side by side, moved to other addresses and given back in parts.
  virtual bool can_remap() const { return false; }
  // Whether allocate() and remap() can put memory at these addresses, where none of this upstream's is.
  virtual bool can_stand_at(const std::byte*, std::size_t) const { return false; }
  // Fresh memory, at `wanted` where it can stand there, else anywhere. Throws a pool exhausted error.
  virtual std::byte* allocate(std::size_t nbytes, std::byte* wanted) = 0;
  // allocate() may wait for all that is enqueued on a device. Then what allocate_later() has begun at an earlier call;
  // nullptr: it begins now, or is under way. Throws likewise.
  virtual bool waits_at_allocate() const { return false; }
  virtual std::byte* allocate_later(std::size_t) { return nullptr; }
  // Takes back what allocate() gave; with can_remap(), any part of it.
  virtual void release(std::byte* data, std::size_t nbytes) noexcept = 0;
  // release() may wait for all that is enqueued on a device.
  virtual bool waits_at_release() const { return false; }
  // Moves the memory of `pieces`, which nobody uses, to addresses side by side, at `wanted` where it can stand there;
  // contents become undefined. nullptr, with nothing changed, where that cannot be.
  virtual std::byte* remap(std::span<const Piece> pieces, std::byte* wanted) noexcept;
  // The process is a forked child: what the parent has must not be written to. Called with all locks held.
  virtual void enter_child() noexcept {}
};

// Sealed memfd segments, physically there once allocated.
PC_API std::unique_ptr<Upstream> make_host_upstream();
// Private memory that becomes physical when touched, at most `capacity_nbytes` of it (0 = no limit).
PC_API std::unique_ptr<Upstream> make_lazy_upstream(std::size_t capacity_nbytes);
// Addresses with nothing behind them, at most `capacity_nbytes` (0 = no limit): replays traces larger than the machine.
PC_API std::unique_ptr<Upstream> make_paper_upstream(std::size_t capacity_nbytes);

}  // namespace pipecomm
