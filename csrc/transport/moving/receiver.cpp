// Records to tensors.
#include "transport/moving/receiver.h"

#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "transport/matching/transfer_errors.h"
#include "transport/progress/progress.h"
#include "ways/slot_codec.h"

namespace pipecomm {
namespace {

// Bytes taken before others get their turn under the progress lock.
constexpr std::size_t kNbytesPerTake = std::size_t{1} << 20;
// Memory that streams still use is asked for this often.
constexpr std::int64_t kMemoryPeriodNs = 200'000;

// Waiting for a stream under the progress lock would hold up what that stream waits for.
Block allocate_now(const std::shared_ptr<Pool>& pool, std::size_t nbytes) {
  Block block = try_allocate_block(pool, nbytes);
  if (block) return block;
  throw Error(ErrorKind::pool_exhausted, "expected " + std::to_string(nbytes) +
                                             " bytes of a pool; got none that streams do not still use; "
                                             "keep fewer messages live");
}

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
    const std::size_t nbytes = take_record(*record);
    if (nbytes == 0) {
      is_blocked_ = awaits_segment_ || !message_;
      if (!is_blocked_) due_ns_ = now_ns() + kMemoryPeriodNs;
      break;
    }
    if (ring_->pop()) wake_writer();
    taken_nbytes += nbytes;
    if (wire_left_ == 0) end_part(counters);
  }
  return taken_nbytes > 0;
}

std::size_t Receiver::take_record(const RingReader::Record& record) {
  std::span<const std::byte> bytes(record.data, record.info.nbytes);
  MessageHeader header;
  if (!is_in_part_) header = read_header(bytes);
  const bool at_source = (is_in_part_ ? header_ : header).at_source;
  const auto chunk = bytes.subspan(is_in_part_ ? 0 : header.nbytes());
  SourceNote note;
  if (at_source) note = SourceReader::read_note(chunk, is_in_part_ ? wire_left_ : header.wire_nbytes);
  if (at_source && !sources_.has(note)) {
    awaits_segment_ = true;
    return 0;
  }
  if (!is_in_part_ && !begin_part(header)) return 0;
  if (message_->started_ns == 0) message_->started_ns = record.info.sent_ns;
  const std::uint64_t left_before = wire_left_;
  message_->wire += bytes.size();
  if (!at_source) {
    take_chunk(chunk.data(), chunk.size());
    return bytes.size();
  }
  take_source(note);
  return static_cast<std::size_t>(left_before - wire_left_);
}

bool Receiver::is_drained() {
  try {
    return !ring_ || is_stopped_ || !ring_->front();
  } catch (const Error&) {
    return true;  // pump() tells
  }
}

bool Receiver::begin_part(const MessageHeader& header) {
  if (header.seq != next_seq_) {
    throw Error(ErrorKind::transport, "expected message part " + std::to_string(next_seq_) + "; got " +
                                          std::to_string(header.seq) + ": bytes of the channel were lost");
  }
  if (header.part_index == 0 && !message_) {
    message_ = inbox_.open(source_, header, has_peer_gone_);
    if (!message_) return false;
  } else if (!message_ || message_->parts.size() != header.part_index || message_->num_parts != header.num_parts) {
    throw Error(ErrorKind::transport, "expected the next part of a message; got part " +
                                          std::to_string(header.part_index) + " of " +
                                          std::to_string(header.num_parts));
  }
  if (header.in_slots && header.wire_nbytes > 0 && !slots_) {
    throw Error(ErrorKind::transport, "expected bytes in the ring; got a message in slots, which there are none of");
  }
  header_ = header;
  const bool is_raw = header.codec.id == CodecId::raw;
  message_->parts.push_back(
      {{}, header.dtype, header.shape, header.order, is_raw, header.requires_grad, header.absent});
  if (!prepare_target()) {
    message_->parts.pop_back();
    return false;
  }
  ++next_seq_;
  cursor_ = ChunkCursor(header.codec, header.shape, header.payload_nbytes,
                        header.in_slots ? kDeviceChunkNbytes : kChunkNbytes);
  wire_left_ = header.wire_nbytes;
  is_in_part_ = true;
  message_->payload += header.payload_nbytes;
  const bool is_refused = message_->error.has_value();
  if (header.part_index == 0 && !is_refused && (message_->receiver || message_->is_dropped)) accept_(message_->seq);
  return true;
}

bool Receiver::prepare_target() {
  target_ = nullptr;
  if (message_->is_dropped) return true;
  const std::size_t index = message_->parts.size() - 1;
  if (message_->is_direct) {
    if (!fits_targets(*message_, index)) return true;
    const TensorView& target = message_->receiver->targets[index];
    if ((target.device != kOnHost) == header_.in_slots) {
      if (header_.wire_nbytes > 0 && header_.in_slots) stream().wait(message_->receiver->ready);
      target_ = static_cast<std::byte*>(target.data);
      return true;
    }
  }
  return header_.payload_nbytes == 0 || allocate_target(message_->parts[index]);
}

bool Receiver::allocate_target(ReceivedPart& part) {
  const bool goes_to_device = !header_.in_slots && (message_->is_direct || (message_->receiver && place_.is_used()));
  try {
    if (header_.in_slots) part.device = place_.side()->device->index();
    const auto& pool = goes_to_device ? place_.side()->pinned_pool : pool_at(part.device);
    part.block = try_allocate_block(pool, header_.payload_nbytes);
    target_ = static_cast<std::byte*>(part.block.data());
  } catch (const Error& error) {
    reject(*message_, error);
    return true;
  }
  return target_ != nullptr;
}

const std::shared_ptr<Pool>& Receiver::pool_at(int device) const {
  return device == kOnHost ? pool_ : place_.side()->pool;
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
    message.receiver->set_event(message.last_use);
    message.receiver->fail(error);
  }
  message.receiver.reset();
  message.is_dropped = true;
  message.error = error;
  message.drop_blocks();
  if (&message == message_.get()) target_ = nullptr;
}

void Receiver::take_chunk(const std::byte* data, std::size_t nbytes) {
  if (header_.in_slots && wire_left_ > 0) return take_slot(data, nbytes);
  // A raw chunk may have any length; an empty one only brings the header of an empty tensor.
  const Chunk chunk = cursor_.front(nbytes == 0 ? wire_left_ : nbytes);
  if (nbytes != chunk.nbytes) {
    throw Error(ErrorKind::transport,
                "expected a chunk of " + std::to_string(chunk.nbytes) + " bytes; got " + std::to_string(nbytes));
  }
  wire_left_ -= nbytes;
  if (target_ != nullptr && nbytes > 0 && !message_->is_dropped) {
    if (cursor_.is_raw()) {
      std::memcpy(target_ + chunk.begin, data, nbytes);
    } else {
      decode(header_.codec, header_.dtype, data, cursor_.grid(), chunk.begin, chunk.end, target_);
    }
  }
  cursor_.pass(chunk);
}

void Receiver::take_source(const SourceNote& note) {
  const std::byte* data = sources_.find(note);
  const Chunk chunk = cursor_.front(note.nbytes);
  if (target_ != nullptr && !message_->is_dropped) {
    std::memcpy(target_ + chunk.begin, data, note.nbytes);
    if (ring_->is_revoked()) {
      fail_current(Error(ErrorKind::transport, "rank " + std::to_string(source_) +
                                                   " has left: its tensor was not taken before it closed the group"));
    }
  }
  message_->wire += note.nbytes - sizeof(note);
  wire_left_ -= note.nbytes;
  cursor_.pass(chunk);
}

void Receiver::take_slot(const std::byte* note, std::size_t nbytes) {
  std::uint64_t slot_end = 0;
  if (nbytes != sizeof(slot_end)) {
    throw Error(ErrorKind::transport,
                "expected a record that tells of a slot; got " + std::to_string(nbytes) + " bytes");
  }
  std::memcpy(&slot_end, note, sizeof(slot_end));
  const Chunk chunk = cursor_.front(kDeviceChunkNbytes);
  const GroupRun run{header_.codec, header_.dtype, cursor_.grid(), chunk.begin, chunk.end};
  message_->slot_end = slot_end;
  if (slot_end > arrived_ && !message_->is_dropped) reject(*message_, *lost_);
  SlotReader::Drain drain;
  if (target_ != nullptr && !message_->is_dropped) {
    drain = [&](Stream& device_stream, const std::byte* slot) {
      cursor_.is_raw() ? device_stream.copy_async(target_ + chunk.begin, slot, chunk.nbytes)
                       : decode_on(device_stream, run, slot, target_);
    };
  }
  slots_->take(chunk.nbytes, slot_end, drain);
  message_->last_use = slots_->record();
  message_->wire += chunk.nbytes - kSlotNoteNbytes;
  wire_left_ -= chunk.nbytes;
  cursor_.pass(chunk);
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
      if (message->parts[i].block) copy_part(*message, i);
    }
  } catch (const Error& error) {  // nobody else knows of this receive any more
    return reject(*message, error);
  }
  receive->received = std::move(message->parts);
  receive->payload = message->payload;
  receive->wire = message->wire;
  receive->clock.started_ns = message->started_ns;
  receive->set_event(message->last_use);
  note_enqueued(*message, receive);
  receive->finish();
}

void Receiver::note_enqueued(const InMessage& message, const TransferPtr& receive) {
  std::erase_if(enqueued_, [this](const Enqueued& item) { return has_arrived(item.slot_end); });
  if (!has_arrived(message.slot_end)) enqueued_.push_back({receive, message.slot_end});
}

void Receiver::fail_enqueued(const std::function<Error(const TransferState&)>& explain) {
  for (const Enqueued& item : enqueued_) {
    const TransferPtr receive = item.receive.lock();
    if (receive && !has_arrived(item.slot_end)) receive->fail_late(explain(*receive));
  }
}

// From where it was parked to its target.
void Receiver::copy_part(InMessage& message, std::size_t index) {
  ReceivedPart& part = message.parts[index];
  const TensorView& target = message.receiver->targets[index];
  const std::size_t nbytes = target.nbytes();
  if (part.device == kOnHost && target.device == kOnHost) {
    std::memcpy(target.data, part.block.data(), nbytes);
    return part.block.reset();
  }
  // A device's copy from or to other memory of the host than pinned makes the caller wait, who holds the lock.
  Block pinned;
  const bool is_pinned = part.device == kOnHost && message.is_direct;
  if (part.device != target.device && !is_pinned) pinned = allocate_now(place_.side()->pinned_pool, nbytes);
  stream().wait(message.last_use);
  stream().wait(message.receiver->ready);
  if (target.device == kOnHost) {
    stream().copy_async(pinned.data(), part.block.data(), nbytes);
    stream().enqueue([to = target.data, from = pinned.data(), nbytes] { std::memcpy(to, from, nbytes); });
  } else {
    if (pinned) std::memcpy(pinned.data(), part.block.data(), nbytes);
    stream().copy_async(target.data, pinned ? pinned.data() : part.block.data(), nbytes);
  }
  message.last_use = stream().record();
  pinned.reset(message.last_use);
  part.block.reset(message.last_use);
}

Stream& Receiver::stream() {
  if (slots_) return slots_->stream();
  if (!copy_stream_) copy_stream_ = place_.side()->device->make_stream();
  return *copy_stream_;
}

SlotShare Receiver::make_slots(Sharing first, std::size_t nbytes) {
  Device& device = *place_.side()->device;
  slots_.reset();
  std::string text = "no way to share memory of " + device.name() + " worked";
  for (const Sharing sharing : sharings_of(device)) {
    if (sharing < first) continue;
    try {
      DeviceMemory memory = share_memory(device, sharing, nbytes);
      SlotShare share{{sharing, memory.nbytes}, memory.handle, memory.fd};
      slots_.emplace(device, ring_->slot_counters(), ring_->control_page(), std::move(memory));
      return share;
    } catch (const Error& error) {
      text += std::string("; ") + error.what();
    }
  }
  return {{}, text, -1};
}

void Receiver::release_slots(const Error& cause) {
  if (!slots_) return;
  if (!lost_) {
    lost_ = cause;
    arrived_ = slots_->written();
    inbox_.lose(source_, arrived_, cause);
    if (message_ && message_->slot_end > arrived_ && !message_->is_dropped) reject(*message_, cause);
  }
  if (!slots_->is_idle()) slots_->release();
}

void Receiver::attach(const InMessagePtr& message, const TransferPtr& receive) {
  receive->set_peer(source_);
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
      if (receive->targets[i].nbytes() > 0 && !message_->parts[i].block) move_to_block(receive->targets[i], i);
    }
  } catch (const Error& error) {
    message_->is_dropped = true;
    message_->error = error;
  }
  receive->set_event(message_->last_use);
  message_->is_direct = false;
  if (const TransferPtr next = inbox_.rematch(message_)) attach(message_, next);
}

void Receiver::move_to_block(const TensorView& target, std::size_t index) {
  Block block = allocate_now(pool_at(target.device), target.nbytes());
  if (target.device == kOnHost) {
    std::memcpy(block.data(), target.data, target.nbytes());
  } else {
    stream().copy_async(block.data(), target.data, target.nbytes());
    message_->last_use = stream().record();
  }
  if (target_ == target.data) target_ = static_cast<std::byte*>(block.data());
  message_->parts[index].block = std::move(block);
  message_->parts[index].device = target.device;
}

void Receiver::fail_current(const Error& error) {
  if (message_) drop(*message_, error);
}

}  // namespace pipecomm
