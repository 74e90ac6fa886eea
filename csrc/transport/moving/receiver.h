// The incoming half of a link: takes records from this rank's ring, checks their order, and puts them where the inbox
// says. Progress lock only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "transport/api/communicator.h"
#include "transport/matching/inbox.h"
#include "transport/moving/delivery.h"
#include "transport/moving/way_in.h"
#include "ways/ring.h"

namespace pipecomm {

class Receiver {
 public:
  // `refuse(seq, error)` tells the sender why a message could not be received.
  using Refuse = std::function<void(std::uint64_t, const Error&)>;
  // `accept(seq)`: a receive is there for that message, or it is dropped on purpose.
  using Accept = std::function<void(std::uint64_t)>;

  Receiver(int peer, Inbox& inbox, std::shared_ptr<Pool> pool, const TensorDevice& tensor_device, Refuse refuse,
           Accept accept)
      : peer_(peer),
        inbox_(inbox),
        refuse_(std::move(refuse)),
        accept_(std::move(accept)),
        at_source_(peer, ring_),
        in_slots_(tensor_device),
        delivery_(std::move(pool), tensor_device, in_slots_) {}
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  RingReader& make_ring(std::size_t capacity) { return ring_.emplace(RingReader::create(capacity)); }
  bool has_ring() const { return ring_.has_value(); }
  // As SlotWayIn::begin_making() and made().
  void begin_slots(Sharing first, std::size_t nbytes) { in_slots_.begin_making(first, nbytes, *ring_); }
  bool is_making_slots() const { return in_slots_.is_making(); }
  std::optional<SlotShare> made_slots(int lifeline_fd) { return in_slots_.made(lifeline_fd); }
  // Throws the error of a device that has failed.
  void check_device() const { in_slots_.check(); }
  // The life line is closed here: no stream waits for the peer any more.
  void hang_up() { in_slots_.hang_up(); }
  bool uses_slots() const { return in_slots_.is_used(); }
  // Segments of the peer that messages lie in.
  SourceReader& sources() { return at_source_.segments(); }
  // A record tells of a segment whose descriptor is still on the life line.
  bool awaits_segment() const { return awaits_segment_; }
  // Nothing more is taken from the ring. Slots stay: streams use them.
  void stop() { is_stopped_ = true; }
  // The peer has gone, and all that it said has been read: what the ring holds is the last of it.
  void expect_no_more() { has_peer_gone_ = true; }
  // Ends, late, the receives whose bytes the peer has told of and has not written.
  void fail_enqueued(const std::function<Error(const TransferState&)>& explain) { in_slots_.fail_enqueued(explain); }
  // Nothing enqueued on the device is left to be done.
  bool is_idle() const { return in_slots_.is_idle(); }
  // The peer is gone: the device waits for nothing of it any more. What it has not written ends with `cause`.
  void release_slots(const Error& cause);
  // Takes records; true if any was taken. Throws a transport error when the peer's bytes cannot be believed.
  bool pump(LinkCounters& counters, const std::function<void()>& wake_writer);
  // True when the ring holds nothing (more).
  bool is_drained();
  // Of a peer that has gone: nothing can be taken any more, whatever is asked for.
  bool is_over() { return is_drained() || awaits_segment_; }
  // True when a record lies in the ring that no posted receive asks for.
  bool is_blocked() const { return is_blocked_; }
  std::int64_t due_ns() const { return due_ns_; }
  // Hands over a parked message, or lets `receive` wait for its rest.
  void attach(const InMessagePtr& message, const TransferPtr& receive);
  // Takes the receive away from a message under way; what has come is kept for the next receive.
  void detach(const TransferPtr& receive);
  // Ends the receive that waits for the rest of a message that will not come.
  void fail_current(const Error& error);
  // The receive that a message under way will answer; none if there is none.
  TransferPtr current_receive() const { return message_ ? message_->receiver : nullptr; }
  bool is_current(const std::function<bool(const TransferState&)>& predicate) const {
    return message_ && message_->receiver && predicate(*message_->receiver);
  }

 private:
  // Bytes that this thread has moved; 0 while the receiver cannot take the record.
  std::size_t take_record(const RingReader::Record& record);
  WayIn& way_of(const MessageHeader& header);
  // False: nobody asks for the message, or (then there is a message_) streams still use the memory for it.
  bool begin_part(InPart part);
  bool prepare_target(InPart& part);
  void end_part(LinkCounters& counters);
  void deliver(const InMessagePtr& message);
  void reject(InMessage& message, const Error& error);
  // What is still to come of it is read and forgotten; a receive that asks for it, now or later, ends with `error`.
  void drop(InMessage& message, const Error& error);
  bool fits_targets(InMessage& message, std::size_t index);

  const int peer_;
  Inbox& inbox_;
  const Refuse refuse_;
  const Accept accept_;
  std::optional<RingReader> ring_;
  RingWayIn in_ring_;
  SourceWayIn at_source_;
  SlotWayIn in_slots_;  // after ring_, whose counters it uses
  Delivery delivery_;
  std::uint64_t next_seq_ = 0;
  std::int64_t due_ns_ = INT64_MAX;
  bool is_blocked_ = false;
  bool awaits_segment_ = false;
  bool is_stopped_ = false;
  bool has_peer_gone_ = false;

  // The message under way, and its part.
  InMessagePtr message_;
  InPart part_;
  bool is_in_part_ = false;
};

}  // namespace pipecomm
