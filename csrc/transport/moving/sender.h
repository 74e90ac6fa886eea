// The outgoing half of a link: turns posted messages into records of the peer's ring, in order. Progress lock only.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>

#include "transport/api/options.h"
#include "transport/matching/transfer.h"
#include "transport/moving/device_side.h"
#include "transport/moving/lender.h"
#include "ways/ring.h"
#include "ways/slots.h"
#include "wire/header.h"

namespace pipecomm {

class Sender {
 public:
  // Without shared memory, tensors of a device cross as tensors of the host, to which they are copied first, and those
  // of a pool in the ring.
  Sender(LinkEmulation emulation, const FlowLimits& limits, const DevicePlace& place, bool shares_memory,
         SourceWriter::Tell tell_source)
      : emulation_(emulation), limits_(limits), place_(place), stages_(!shares_memory) {
    if (shares_memory && !emulation.is_on()) lender_.emplace(limits.max_nbytes, std::move(tell_source));
  }

  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;
  ~Sender() { forget_in_flight(); }

  void post(TransferPtr transfer);
  bool wants_ring() const { return !queue_.empty() && !ring_; }
  bool has_ring() const { return ring_.has_value(); }
  void set_ring(RingWriter ring) { ring_.emplace(std::move(ring)); }
  // The first message has tensors on a device, and there are no slots for them.
  bool wants_slots() const;
  // False for what only a damaged peer offers.
  bool expects(const SlotOffer& offer) const {
    return ring_ && !slots_ && offer.nbytes >= limits_.max_nbytes * kSlotNbytesPerRingByte;
  }
  // Memory that the peer shares. Throws a transport or CUDA error where it cannot be mapped.
  void set_slots(SlotOffer offer, const std::string& handle, int fd);
  // There are no slots, at least for now.
  void stage_from_now() { stages_ = true; }
  // The peer is gone: nothing is on its way to it.
  void forget_in_flight() { count_in_flight(InFlight{}); }
  // The peer's device reads no slots any more: this rank's waits for nothing of it.
  void release_slots() {
    if (slots_) slots_->release();
  }
  // ", in slots of cuda:0"; empty before the first tensor of a device.
  std::string describe_device() const;
  // Nothing enqueued on the device is left to be done.
  bool is_idle() const { return !slots_ || slots_->is_idle(); }
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
  template <typename Predicate>
  void fail_if(Predicate&& predicate, const Error& error, bool forget);
  // A receive is posted for message number `seq`; only told in strict mode.
  void accept(std::uint64_t seq);
  // The receiver refused message number `seq`; false when it has already ended.
  bool complain(std::uint64_t seq, const Error& error);

 private:
  // Bytes of the record; 0 when there is no credit.
  std::size_t write_record(TransferState& transfer);
  bool has_slot_room(std::size_t nbytes);
  // The chunk goes into slots; the record at `out` tells where they end.
  void put_chunk(const TransferState& transfer, std::byte* out, std::size_t nbytes);
  // False: streams still use the memory for the first message.
  bool stage_ahead();
  bool stage(TransferState& transfer);
  bool is_in_slots(const SendPart& part) const { return part.tensor.device != kOnHost && !part.absent; }
  Lender::Lent* find_lent(std::uint64_t seq) { return lender_ ? lender_->find(seq) : nullptr; }
  void end_transfer(const TransferPtr& transfer, std::uint64_t seq, bool waits_for_receive);
  MessageHeader make_header(const TransferState& transfer) const;
  std::size_t chunk_nbytes(const SendPart& part) const;
  void write_chunk(const SendPart& part, std::byte* out, std::size_t nbytes);
  RecordInfo stamp(std::size_t nbytes);
  void next_part() { ++part_index_, position_ = 0, is_part_begun_ = false; }
  bool is_at_limit();
  bool is_at_process_limit() const;
  bool has_process_limit() const { return limits_.max_process_messages > 0 || limits_.max_process_nbytes > 0; }
  void count_in_flight();
  void count_in_flight(InFlight now);
  void end_message(LinkCounters& counters);

  const LinkEmulation emulation_;
  const FlowLimits& limits_;
  const DevicePlace& place_;
  bool stages_;
  std::deque<TransferPtr> queue_;
  std::deque<std::uint64_t> message_ends_;             // in the ring, of messages not yet taken; only with a limit
  InFlight counted_;                                   // in the process's total; only with a limit on that
  std::optional<Lender> lender_;                       // only where the peer can map this rank's memory
  std::map<std::uint64_t, TransferPtr> not_accepted_;  // written, by number; only in strict mode
  std::optional<RingWriter> ring_;
  std::optional<SlotWriter> slots_;  // after ring_, whose counters it uses
  std::shared_ptr<Stream> staging_stream_;
  std::int64_t due_ns_ = INT64_MAX;
  // Where the first message of the queue stands.
  std::size_t part_index_ = 0;
  bool is_part_begun_ = false;
  bool is_lent_ = false;        // the part
  std::uint64_t position_ = 0;  // bytes (raw) or groups (quantized) of the part already written
  std::uint64_t first_seq_ = 0;
  bool is_accepted_ = false;
  std::uint64_t next_seq_ = 0;
  std::int64_t link_free_ns_ = 0;
};

template <typename Predicate>
void Sender::fail_if(Predicate&& predicate, const Error& error, bool forget) {
  if (lent_is_taken()) end_lent();  // the peer may have taken it before it went
  // A peer that still reads must not take what is written there next for the message.
  if (forget && is_lending()) ring_->revoke();
  std::deque<TransferPtr> kept;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const TransferPtr& transfer = queue_[i];
    const bool goes_on = i == 0 && has_begun() && !forget;
    if (!predicate(*transfer)) {
      kept.push_back(transfer);
      continue;
    }
    if (slots_ && i == 0 && has_begun() && forget) transfer->set_event(slots_->record_quietly());
    transfer->fail(error);
    if (goes_on) {
      kept.push_back(transfer);
    } else {
      transfer->release();
    }
  }
  queue_ = std::move(kept);
  if (lender_ && lender_->lent() && predicate(*lender_->lent()->transfer)) {
    lender_->lent()->transfer->fail(error);
    if (forget) lender_->take_back().transfer->release();
  }
  std::erase_if(not_accepted_, [&](const auto& item) {
    if (!predicate(*item.second)) return false;
    item.second->fail(error);
    return true;
  });
}

}  // namespace pipecomm
