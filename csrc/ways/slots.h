// One direction of a link between two devices: memory of the receiver's device that both ranks map, cut into slots of
// any length, and a stream at each end that fills or empties them. Used under the progress lock.
//
//   writer's stream: wait for credit -> copy or encode into the slot -> set `written`
//   reader's stream: wait for `written` -> copy or decode out of it -> set `taken`
//
// Positions are bytes that only grow, as in ring.h. A stream is only ever made to wait for what the peer has enqueued
// already: the writer's for slots up to `promised`, the reader's for slots that a record in the ring has told of. So
// however the device queues its streams, no wait stands in front of what it waits for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "device/device.h"
#include "memory/device_memory.h"
#include "ways/release.h"

namespace pipecomm {

// Slots whose work a stream may have before it, at most: a queue of 1,024 entries must not become full, since whoever
// enqueues one more waits for room.
inline constexpr std::size_t kMaxEnqueuedSlots = 128;

// In the control page of the link's ring. `written` and `taken` are set by streams, `promised` by the reader's host.
struct SlotCounters {
  alignas(64) Counter written;
  alignas(64) Counter taken;
  alignas(64) Counter promised;
};

// Bytes of slots for each byte of the link's ring; devices are faster, and have more on the way.
inline constexpr std::size_t kSlotNbytesPerRingByte = 8;

// How the receiver's memory is offered, in one number.
struct SlotOffer {
  Sharing sharing = Sharing::none;  // none: in no way
  std::uint64_t nbytes = 0;

  std::uint64_t packed() const { return (std::uint64_t{static_cast<std::uint8_t>(sharing)} << 56) | nbytes; }
  static SlotOffer unpack(std::uint64_t value) {
    return {static_cast<Sharing>(value >> 56), value & ((std::uint64_t{1} << 56) - 1)};
  }
};

struct SlotShare {
  SlotOffer offer;
  std::string text;  // the handle; without an offer, why there is none
  int fd = -1;
};

class PC_API SlotEnd {
 public:
  Stream& stream() { return *stream_; }
  // Lets the stream pass its waits; for the watch over the peer's life line.
  const std::shared_ptr<StreamRelease>& letting_go() const { return release_; }
  // The point after the last slot, for hosts alone.
  const Event& last() const { return last_; }
  // Throws the error of a device that has failed.
  void check() const;
  // The point after all that is enqueued; remembered for is_idle().
  Event record() { return last_ = stream_->record(); }
  // The same where nobody can be told of an error: a device that fails does nothing more.
  Event record_quietly() noexcept;
  bool is_idle() const { return last_.is_ready(); }
  bool is_used() const { return end_ > 0; }
  // Nothing more is to be enqueued now.
  bool is_full() const { return stream_->num_pending() >= kMaxEnqueuedSlots; }

 protected:
  SlotEnd(Device& device, SlotCounters& counters, Counter& awaited, void* page, DeviceMemory memory);
  ~SlotEnd() = default;
  // Where a slot of `nbytes` begins that does not wrap, after the last one.
  std::uint64_t slot_start(std::size_t nbytes) const;
  // Lets the stream pass its waits, whatever the peer does, until it has ended.
  void let_go();

  SlotCounters& counters_;
  const std::shared_ptr<StreamRelease> release_;
  std::shared_ptr<void> registration_;
  DeviceMemory memory_;
  std::shared_ptr<Stream> stream_;
  Event last_;
  std::uint64_t end_ = 0;  // of the last slot
};

class PC_API SlotWriter : public SlotEnd {
 public:
  using Fill = std::function<void(Stream&, std::byte*)>;

  SlotWriter(Device& device, SlotCounters& counters, void* page, DeviceMemory memory)
      : SlotEnd(device, counters, counters.taken, page, std::move(memory)) {}
  ~SlotWriter() { let_go(); }
  // False while the peer has not promised to empty what lies there. Throws a transport error for counters of a
  // damaged peer.
  bool has_room(std::size_t nbytes) const;
  // Of the slots that the peer has not promised to empty.
  std::size_t in_flight_nbytes() const {
    return static_cast<std::size_t>(end_ - std::min(end_, counters_.promised.load()));
  }
  // Enqueues one slot; gives the position of its end, which the record tells the reader.
  std::uint64_t put(std::size_t nbytes, const Fill& fill);
  // After the peer has gone: nothing of it is waited for any more.
  void release() { release_->now(); }
};

class PC_API SlotReader : public SlotEnd {
 public:
  using Drain = std::function<void(Stream&, const std::byte*)>;

  SlotReader(Device& device, SlotCounters& counters, void* page, DeviceMemory memory)
      : SlotEnd(device, counters, counters.written, page, std::move(memory)) {}
  ~SlotReader();
  // Enqueues the emptying of the next slot, which must end at `end`, and promises its room to the writer. `drain` may
  // be empty: what is there is dropped. Throws a transport error for another end.
  void take(std::size_t nbytes, std::uint64_t end, const Drain& drain);
  // The peer has not mapped the memory, and will not.
  void refuse() { is_refused_ = true; }
  // What the peer has written; once its stream is let go, what it had written by then.
  std::uint64_t written() const { return release_->passed(); }
  void release() { release_->now(); }

 private:
  bool is_refused_ = false;
};

}  // namespace pipecomm
