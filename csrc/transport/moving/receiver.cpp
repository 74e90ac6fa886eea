// Which record belongs to which tensor, which message to which receive.
#include "transport/moving/receiver.h"

#include <utility>

#include "transport/matching/transfer_errors.h"
#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

// Bytes taken before others get their turn under the progress lock.
constexpr std::size_t kNbytesPerTake = std::size_t{1} << 20;
// Memory that streams still use is asked for this often.
constexpr std::int64_t kMemoryPeriodNs = 200'000;

}  // namespace

bool Receiver::pump(LinkCounters& counters, const std::function<void()>& wake_writer) {
  due_ns_ = INT64_MAX;
  is_blocked_ = false;
  awaits_segment_ = false;
  std::size_t taken_nbytes = 0;
  while (ring_ && !is_stopped_ && taken_nbytes < kNbytesPerTake) {
    const auto record = ring_->front();
    if (!record) break;
    if (record->info.ready_ns > now_ns()) {
      due_ns_ = record->info.ready_ns;
      break;
    }
    if (in_slots_.is_full()) {
      due_ns_ = now_ns() + kMemoryPeriodNs;
      break;
    }
    const std::size_t nbytes = take_record(*record);
    if (nbytes == 0) {
      is_blocked_ = awaits_segment_ || !message_;
      if (!is_blocked_) due_ns_ = now_ns() + kMemoryPeriodNs;
      break;
    }
    if (ring_->pop()) wake_writer();
    taken_nbytes += nbytes;
    if (part_.cursor.is_at_end()) end_part(counters);
  }
  return taken_nbytes > 0;
}

WayIn& Receiver::way_of(const MessageHeader& header) {
  if (header.at_source) return at_source_;
  if (!header.in_slots || header.wire_nbytes == 0) return in_ring_;
  if (in_slots_.is_open()) return in_slots_;
  throw Error(ErrorKind::transport, "expected bytes in the ring; got a message in slots, which there are none of");
}

std::size_t Receiver::take_record(const RingReader::Record& record) {
  std::span<const std::byte> bytes(record.data, record.info.nbytes);
  std::optional<InPart> next;
  if (!is_in_part_) next.emplace(read_header(bytes));
  const std::size_t header_nbytes = next ? next->header.nbytes() : 0;
  bytes = bytes.subspan(header_nbytes);
  WayIn& way = way_of(next ? next->header : part_.header);
  if (!way.has(next ? *next : part_, bytes)) {
    awaits_segment_ = true;
    return 0;
  }
  if (next && !begin_part(std::move(*next))) return 0;
  if (message_->started_ns == 0) message_->started_ns = record.info.sent_ns;
  const Taken taken = way.take(part_, *message_, bytes);
  message_->wire += header_nbytes + taken.wire_nbytes;
  if (taken.error) drop(*message_, *taken.error);
  return header_nbytes + taken.moved_nbytes;
}

bool Receiver::is_drained() {
  try {
    return !ring_ || is_stopped_ || !ring_->front();
  } catch (const Error&) {
    return true;  // pump() tells
  }
}

bool Receiver::begin_part(InPart part) {
  const MessageHeader& header = part.header;
  if (header.seq != next_seq_) {
    throw Error(ErrorKind::transport, "expected message part " + std::to_string(next_seq_) + "; got " +
                                          std::to_string(header.seq) + ": bytes of the channel were lost");
  }
  if (header.part_index == 0 && !message_) {
    message_ = inbox_.open(peer_, header, has_peer_gone_);
    if (!message_) return false;
  } else if (!message_ || message_->parts.size() != header.part_index || message_->num_parts != header.num_parts) {
    throw Error(ErrorKind::transport, "expected the next part of a message; got part " +
                                          std::to_string(header.part_index) + " of " +
                                          std::to_string(header.num_parts));
  }
  const bool is_raw = header.codec.is_raw();
  message_->parts.push_back(
      {{}, header.dtype, header.shape, header.order, is_raw, header.requires_grad, header.absent});
  if (!prepare_target(part)) {
    message_->parts.pop_back();
    return false;
  }
  ++next_seq_;
  is_in_part_ = true;
  message_->payload += header.payload_nbytes;
  const bool is_refused = message_->error.has_value();
  if (header.part_index == 0 && !is_refused && (message_->receiver || message_->is_dropped)) accept_(message_->seq);
  part_ = std::move(part);
  return true;
}

bool Receiver::prepare_target(InPart& part) {
  if (message_->is_dropped) return true;
  const std::size_t index = message_->parts.size() - 1;
  if (message_->is_direct) {
    if (!fits_targets(*message_, index)) return true;
    const TensorView& target = message_->receiver->targets[index];
    if ((target.device != kOnHost) == part.header.in_slots) {
      if (part.header.wire_nbytes > 0 && part.header.in_slots) delivery_.wait_on_device(message_->receiver->ready);
      part.target = static_cast<std::byte*>(target.data);
      return true;
    }
  }
  if (part.header.payload_nbytes == 0) return true;
  try {
    if (!delivery_.allocate(*message_, part.header)) return false;
  } catch (const Error& error) {
    reject(*message_, error);
    return true;
  }
  part.target = static_cast<std::byte*>(message_->parts[index].block.data());
  return true;
}

bool Receiver::fits_targets(InMessage& message, std::size_t index) {
  const ReceivedPart& part = message.parts[index];
  const auto& targets = message.receiver->targets;
  const bool fits = message.num_parts == targets.size() && !part.absent && targets[index].dtype == part.dtype &&
                    targets[index].shape == part.shape && targets[index].order == part.order;
  if (fits) return true;
  reject(message, mismatch_error(message, index));
  return false;
}

void Receiver::reject(InMessage& message, const Error& error) {
  refuse_(message.seq, error);
  drop(message, error);
}

void Receiver::drop(InMessage& message, const Error& error) {
  if (message.receiver) {
    in_slots_.note_last_use_quietly(message);
    message.receiver->set_event(message.last_use);
    message.receiver->fail(error);
  }
  message.receiver.reset();
  message.is_dropped = true;
  message.error = error;
  message.drop_blocks();
  if (&message == message_.get()) part_.target = nullptr;
}

void Receiver::end_part(LinkCounters& counters) {
  is_in_part_ = false;
  if (message_->parts.size() < message_->num_parts) return;
  message_->is_complete = true;
  counters.messages_received += 1;
  counters.payload_nbytes_received += message_->payload;
  counters.wire_nbytes_received += message_->wire;
  const InMessagePtr message = std::move(message_);
  message_.reset();
  if (message->receiver) deliver(message);
}

void Receiver::deliver(const InMessagePtr& message) {
  const TransferPtr receive = message->receiver;
  try {
    for (std::size_t i = 0; receive->has_targets && i < message->parts.size(); ++i) {
      if (!message->is_direct && !fits_targets(*message, i)) return;
      if (message->parts[i].block) delivery_.copy(*message, i);
    }
    in_slots_.note_last_use(*message);
  } catch (const Error& error) {  // nobody else knows of this receive by now
    return reject(*message, error);
  }
  receive->received = std::move(message->parts);
  receive->payload = message->payload;
  receive->wire = message->wire;
  receive->clock.started_ns = message->started_ns;
  receive->set_event(message->last_use);
  in_slots_.note_enqueued(*message, receive);
  receive->finish();
}

void Receiver::release_slots(const Error& cause) {
  if (const auto arrived = in_slots_.lose(cause)) {
    inbox_.lose(peer_, *arrived, cause);
    if (message_ && message_->slot_end > *arrived && !message_->is_dropped) drop(*message_, cause);
  }
  in_slots_.release();
}

void Receiver::attach(const InMessagePtr& message, const TransferPtr& receive) {
  receive->set_peer(peer_);
  if (message->is_dropped) return receive->fail(*message->error);
  message->receiver = receive;
  if (message->is_complete) deliver(message);
  if (!message->error) accept_(message->seq);
}

void Receiver::detach(const TransferPtr& receive) {
  if (!message_ || message_->receiver != receive) return;
  message_->receiver.reset();
  try {
    for (std::size_t i = 0; message_->is_direct && i < message_->parts.size(); ++i) {
      const TensorView& target = receive->targets[i];
      if (target.nbytes() == 0 || message_->parts[i].block) continue;
      delivery_.keep(*message_, target, i);
      if (part_.target == target.data) part_.target = static_cast<std::byte*>(message_->parts[i].block.data());
    }
  } catch (const Error& error) {
    message_->is_dropped = true;
    message_->error = error;
  }
  in_slots_.note_last_use_quietly(*message_);
  receive->set_event(message_->last_use);
  message_->is_direct = false;
  if (const TransferPtr next = inbox_.rematch(message_)) attach(message_, next);
}

void Receiver::fail_current(const Error& error) {
  if (message_) drop(*message_, error);
}

}  // namespace pipecomm
