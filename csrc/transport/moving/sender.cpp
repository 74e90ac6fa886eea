// Which message leaves next, its headers, and how it ends.
#include "transport/moving/sender.h"

#include <algorithm>
#include <utility>

#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

// Bytes written before others get their turn under the progress lock.
constexpr std::size_t kNbytesPerPump = std::size_t{1} << 20;
// A copy to the host is asked this often whether it is done.
constexpr std::int64_t kStagingPeriodNs = 50'000;
// A stream that has enough before it is looked at this often.
constexpr std::int64_t kFullPeriodNs = 200'000;
// No peer rings for what others have taken, so a sender at the process's limit looks this often.
constexpr std::int64_t kLimitPeriodNs = 200'000;

}  // namespace

bool Sender::pump(LinkCounters& counters, const std::function<void()>& wake_reader) {
  std::size_t written_nbytes = 0;
  due_ns_ = INT64_MAX;
  if (ring_) count_in_flight();
  while (!queue_.empty() && ring_ && !wants_slots() && written_nbytes < kNbytesPerPump) {
    if (is_at_limit()) break;
    const bool is_staged = !goes_through_host_ || staging_.run(queue_);
    if (queue_.empty()) break;
    const TransferPtr transfer = queue_.front();
    if (!is_staged || !transfer->staged.is_ready()) {
      due_ns_ = now_ns() + kStagingPeriodNs;
      break;
    }
    const std::size_t nbytes = write_record(*transfer);
    if (nbytes == 0) {
      if (in_slots_.is_full()) due_ns_ = now_ns() + kFullPeriodNs;
      break;
    }
    wake_reader();
    written_nbytes += nbytes;
    if (part_index_ == transfer->to_send.size()) end_message(counters);
  }
  lent_is_taken();
  return written_nbytes > 0;
}

bool Sender::is_at_limit() {
  if (has_begun()) return false;
  if (flow_.is_at_process_limit()) {
    due_ns_ = now_ns() + kLimitPeriodNs;
    return true;
  }
  return (lender_ && lender_->must_wait(*queue_.front())) || flow_.is_at_message_limit(*ring_);
}

void Sender::count_in_flight() {
  flow_.update(*ring_, in_slots_.in_flight_nbytes() + (lender_ ? lender_->in_flight_nbytes() : 0));
}

std::size_t Sender::write_record(TransferState& transfer) {
  MessageHeader header;
  std::size_t header_nbytes = 0;
  if (!is_part_begun_) {
    pick_way(transfer.to_send[part_index_]);
    header = make_header(transfer);
    header_nbytes = header.nbytes();
  }
  const Chunk chunk = way_->next(part_);
  if (!way_->has_room(chunk, *ring_)) return 0;
  const std::size_t record_nbytes = header_nbytes + way_->record_nbytes(chunk);
  std::byte* record = ring_->reserve(record_nbytes);
  if (record == nullptr) return 0;
  if (!is_part_begun_) begin_part(transfer, header, record);
  way_->move(part_, chunk, transfer.ready, record + header_nbytes);
  part_.cursor.pass(chunk);
  const RecordInfo info = link_.stamp(record_nbytes, header_nbytes + chunk.nbytes);
  if (transfer.clock.started_ns == 0) transfer.clock.started_ns = info.sent_ns;
  transfer.wire += header_nbytes + chunk.nbytes;
  if (part_.cursor.is_at_end()) ++part_index_, is_part_begun_ = false;
  ring_->publish(info);
  return info.nbytes;
}

void Sender::pick_way(const SendPart& part) {
  way_ = &in_ring_;
  if (is_on_device(part)) way_ = &in_slots_;
  if (lender_ && !lender_->lent() && lender_->lends(part)) way_ = &*lender_;
  const std::size_t nbytes = part.absent ? 0 : part.tensor.nbytes();
  part_ = {&part, ChunkCursor(part.codec, part.tensor.shape, nbytes, way_->most_coded()), next_seq_};
}

MessageHeader Sender::make_header(const TransferState& transfer) const {
  const SendPart& part = *part_.part;
  MessageHeader header;
  header.key = transfer.key;
  header.codec = part.codec;
  header.dtype = part.tensor.dtype;
  header.requires_grad = part.requires_grad;
  header.absent = part.absent;
  way_->mark(header);
  header.part_index = static_cast<std::uint16_t>(part_index_);
  header.num_parts = static_cast<std::uint16_t>(transfer.to_send.size());
  header.seq = part_.seq;
  header.shape = part.tensor.shape;
  header.order = part.tensor.order;
  if (part.absent) return header;
  header.payload_nbytes = part.tensor.nbytes();
  header.wire_nbytes = chunked_wire_nbytes(part.codec, part.tensor.dtype, part.tensor.shape, way_->most_coded());
  return header;
}

void Sender::begin_part(TransferState& transfer, const MessageHeader& header, std::byte* record) {
  write_header(header, record);
  if (part_index_ == 0) {
    first_seq_ = header.seq;
    is_accepted_ = false;
  }
  ++next_seq_;
  is_part_begun_ = true;
  transfer.payload += header.payload_nbytes;
}

void Sender::end_message(LinkCounters& counters) {
  const TransferPtr transfer = queue_.front();
  // Where this throws, the message is still there to be ended.
  if (transfer->is_on_device) transfer->set_event(in_slots_.record());
  queue_.pop_front();
  part_index_ = 0;
  counters.messages_sent += 1;
  counters.payload_nbytes_sent += transfer->payload;
  counters.wire_nbytes_sent += transfer->wire;
  flow_.add_message(ring_->published());
  count_in_flight();
  const bool waits_for_receive = limits_.is_strict && !is_accepted_;
  if (lender_ && lender_->keep(ring_->published(), first_seq_, waits_for_receive, transfer)) return;
  end_transfer(transfer, first_seq_, waits_for_receive);
}

void Sender::end_lent() {
  const Lender::Lent lent = lender_->take_back();
  end_transfer(lent.transfer, lent.seq, lent.waits_for_receive);
}

void Sender::end_transfer(const TransferPtr& transfer, std::uint64_t seq, bool waits_for_receive) {
  if (waits_for_receive && !transfer->has_ended()) {
    not_accepted_.emplace(seq, transfer);
  } else {
    transfer->finish();
  }
  transfer->release();
}

bool Sender::wants_slots() const {
  return !queue_.empty() && !in_slots_.is_open() && !goes_through_host_ && queue_.front()->is_on_device;
}

std::string Sender::describe_device() const {
  if (in_slots_.is_open()) return ", in slots of " + tensor_device_.side()->device->name();
  return staging_.is_used() ? ", from " + tensor_device_.side()->device->name() + " through the host" : "";
}

std::string Sender::describe() const {
  std::string text;
  if (lender_ && lender_->lent()) text += describe_pending(*lender_->lent()->transfer);
  for (const auto& item : not_accepted_) text += describe_pending(*item.second);
  for (const TransferPtr& transfer : queue_) text += describe_pending(*transfer);
  return text;
}

void Sender::withdraw(const TransferPtr& transfer) {
  if (!queue_.empty() && queue_.front() == transfer && has_begun()) return;
  if (queue_.remove(transfer)) transfer->release();
  std::erase_if(not_accepted_, [&](const auto& item) { return item.second == transfer; });
}

void Sender::fail_if(const std::function<bool(const TransferState&)>& predicate, const Error& error, bool forget) {
  if (lent_is_taken()) end_lent();  // the peer may have taken it before it went
  // A peer that still reads must not take what is written there next for the message.
  if (forget && is_lending()) ring_->revoke();
  queue_.remove_if([&](const TransferPtr& transfer, std::size_t index) {
    const bool is_under_way = index == 0 && has_begun();
    if (!predicate(*transfer)) return false;
    if (is_under_way && forget && in_slots_.is_open()) transfer->set_event(in_slots_.record_quietly());
    transfer->fail(error);
    if (is_under_way && !forget) return false;
    transfer->release();
    return true;
  });
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

void Sender::accept(std::uint64_t seq) {
  if (has_begun() && first_seq_ == seq) is_accepted_ = true;
  if (Lender::Lent* lent = find_lent(seq)) lent->waits_for_receive = false;
  if (const auto item = not_accepted_.extract(seq)) item.mapped()->finish();
}

bool Sender::complain(std::uint64_t seq, const Error& error) {
  if (Lender::Lent* lent = find_lent(seq)) {
    lent->transfer->complaint = error;
    lent->waits_for_receive = false;
    return true;
  }
  if (const auto item = not_accepted_.extract(seq)) {
    item.mapped()->fail(error);
    return true;
  }
  if (queue_.empty() || !has_begun() || first_seq_ != seq) return false;
  queue_.front()->complaint = error;
  is_accepted_ = true;
  return true;
}

}  // namespace pipecomm
