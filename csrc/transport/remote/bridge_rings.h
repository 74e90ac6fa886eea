// The rings at the two ends of a bridge, and the agreement about their room.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "sockets/frames.h"
#include "transport/api/options.h"
#include "ways/ring.h"

namespace pipecomm {

// What the local transport writes into: as large as the peer's. The receiver thread makes it and gives room back; the
// rest is the sender thread's.
class OutgoingRing {
 public:
  // Takes the size of the peer's segment; gives the descriptor for the local transport.
  int make_ring(std::uint64_t segment_nbytes);
  // Adds the records that may leave now; false when there are none.
  bool fill(FrameBatch& batch);
  // When the next record may leave, on an emulated slow link; INT64_MAX: none waits for that.
  std::int64_t due_ns() const { return due_ns_; }
  // The peer has taken the records up to `position`; true when the local transport waits for room.
  bool release(std::uint64_t position);

 private:
  std::unique_ptr<RingReader> made_;
  std::atomic<RingReader*> ring_{nullptr};
  std::int64_t due_ns_ = INT64_MAX;
  std::atomic<std::uint64_t> sent_{0};
  std::uint64_t released_ = 0;
};

// What the local transport reads from: its own ring. The sender thread gets it and tells what was taken; the rest is
// the receiver thread's.
class IncomingRing {
 public:
  explicit IncomingRing(const FlowLimits& limits) : tells_each_(limits.max_messages > 0) {}

  void set_ring(Segment segment, std::uint64_t segment_nbytes);
  // Throws a transport error when the record does not fit: the peer does not keep to the agreement.
  std::byte* reserve(std::size_t nbytes);
  // True when the sender thread has something to tell.
  bool publish(std::uint32_t nbytes);
  // The position that the peer must learn of now, once.
  std::optional<std::uint64_t> taken_to_tell();

 private:
  bool is_to_tell(std::uint64_t taken) const;
  // The peer may run short of room: the local transport rings from now on.
  bool is_filling() const;

  const bool tells_each_;  // the number of messages is limited, so each one counts
  std::unique_ptr<RingWriter> made_;
  std::atomic<RingWriter*> ring_{nullptr};
  std::uint64_t segment_nbytes_ = 0;
  std::atomic<std::uint64_t> published_{0};
  std::atomic<std::uint64_t> told_{0};
};

}  // namespace pipecomm
