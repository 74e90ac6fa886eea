// The outgoing half of a link: turns posted messages into records of the peer's ring, in order. Progress lock only.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "transport/api/communicator.h"
#include "transport/moving/emulated_link.h"
#include "transport/moving/flow.h"
#include "transport/moving/lender.h"
#include "transport/moving/send_queue.h"
#include "transport/moving/staging.h"

namespace pipecomm {

class Sender {
 public:
  // Without shared memory, tensors of a device cross as tensors of the host, to which they are copied first, and those
  // of a pool in the ring.
  Sender(LinkEmulation emulation, const FlowLimits& limits, const TensorDevice& tensor_device, bool shares_memory,
         SourceWriter::Tell tell_source)
      : limits_(limits),
        tensor_device_(tensor_device),
        queue_(limits.backward_first),
        flow_(limits),
        link_(emulation),
        staging_(tensor_device),
        in_slots_(tensor_device),
        goes_through_host_(!shares_memory) {
    if (shares_memory && !emulation.is_on()) lender_.emplace(limits.max_nbytes, std::move(tell_source));
  }

  void post(TransferPtr transfer) { queue_.post(std::move(transfer), has_begun()); }
  bool wants_ring() const { return !queue_.empty() && !ring_; }
  bool has_ring() const { return ring_.has_value(); }
  void set_ring(RingWriter ring) { ring_.emplace(std::move(ring)); }
  // The first message has tensors on a device, and there are no slots for them.
  bool wants_slots() const;
  // False for what only a damaged peer offers.
  bool expects(const SlotOffer& offer) const {
    return ring_ && !in_slots_.is_open() && !in_slots_.is_opening() &&
           offer.nbytes >= limits_.max_nbytes * kSlotNbytesPerRingByte;
  }
  // As SlotWayOut::begin_opening() and has_opened().
  void begin_slots(SlotOffer offer, const std::string& handle, int fd) {
    in_slots_.begin_opening(*ring_, offer, handle, fd);
  }
  void open_slots(int lifeline_fd) {
    if (in_slots_.has_opened(lifeline_fd)) goes_through_host_ = false;
  }
  // Throws the error of a device that has failed.
  void check_device() const { in_slots_.check(); }
  // The life line is closed here: no stream waits for the peer any more.
  void hang_up() { in_slots_.hang_up(); }
  // There are no slots, at least for now.
  void go_through_host() { goes_through_host_ = true; }
  // The peer is gone: nothing is on its way to it.
  void forget_in_flight() { flow_.forget(); }
  // The peer's device reads no slots any more: this rank's waits for nothing of it.
  void release_slots() { in_slots_.release(); }
  // ", in slots of cuda:0"; empty before the first tensor of a device.
  std::string describe_device() const;
  // Nothing enqueued on the device is left to be done.
  bool is_idle() const { return in_slots_.is_idle(); }
  // The peer may read a tensor of this rank where it lies.
  bool is_lending() const { return lender_ && lender_->is_lending(); }
  // It has been taken; until then the peer is to ring for it.
  bool lent_is_taken() { return lender_ && ring_ && lender_->is_taken(*ring_); }
  // Ends the message of a tensor that has been taken. What the peer has said of it before must have been read.
  void end_lent();
  // Lets the peer unmap what has gone back to the system.
  void tell_gone_sources() {
    if (lender_) lender_->tell_gone();
  }
  std::int64_t due_ns() const { return due_ns_; }
  // The pending messages, a line each.
  std::string describe() const;
  std::size_t num_queued() const { return queue_.size(); }
  // The first message of the queue has, and is to go on.
  bool has_begun() const { return part_index_ > 0 || is_part_begun_; }
  // Writes records while there is credit; true if any was written.
  bool pump(LinkCounters& counters, const std::function<void()>& wake_reader);
  // Takes back a message that has not begun; one that has goes on, since half a message cannot be taken back.
  void withdraw(const TransferPtr& transfer);
  // Ends unfinished messages; with `forget`, also the one under way (the peer is gone).
  void fail_if(const std::function<bool(const TransferState&)>& predicate, const Error& error, bool forget);
  // A receive is posted for message number `seq`; only told in strict mode.
  void accept(std::uint64_t seq);
  // The receiver refused message number `seq`; false when it has already ended.
  bool complain(std::uint64_t seq, const Error& error);

 private:
  // The first message of the queue is to wait for others that are on their way.
  bool is_at_limit();
  void count_in_flight();
  // Bytes of the record; 0 when there is no credit.
  std::size_t write_record(TransferState& transfer);
  void pick_way(const SendPart& part);
  MessageHeader make_header(const TransferState& transfer) const;
  void begin_part(TransferState& transfer, const MessageHeader& header, std::byte* record);
  void end_message(LinkCounters& counters);
  void end_transfer(const TransferPtr& transfer, std::uint64_t seq, bool waits_for_receive);
  Lender::Lent* find_lent(std::uint64_t seq) { return lender_ ? lender_->find(seq) : nullptr; }

  const FlowLimits& limits_;
  const TensorDevice& tensor_device_;
  SendQueue queue_;
  Flow flow_;
  EmulatedLink link_;
  Staging staging_;
  std::optional<RingWriter> ring_;
  RingWayOut in_ring_;
  SlotWayOut in_slots_;                                // after ring_, whose counters it uses
  std::optional<Lender> lender_;                       // only where the peer can map this rank's memory
  bool goes_through_host_;                             // tensors of a device
  std::map<std::uint64_t, TransferPtr> not_accepted_;  // written, by number; only in strict mode
  std::int64_t due_ns_ = INT64_MAX;
  // Where the first message of the queue stands.
  std::size_t part_index_ = 0;
  bool is_part_begun_ = false;
  WayOut* way_ = nullptr;  // of the part
  OutPart part_;
  std::uint64_t first_seq_ = 0;
  bool is_accepted_ = false;
  std::uint64_t next_seq_ = 0;
};

}  // namespace pipecomm
