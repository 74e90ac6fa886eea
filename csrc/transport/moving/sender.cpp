// Headers, chunks and the emulated clock of the link.
#include "transport/moving/sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "codec/codec.h"
#include "transport/progress/progress.h"
#include "ways/slot_codec.h"

namespace pipecomm {
namespace {

// Bytes written before others get their turn under the progress lock.
constexpr std::size_t kNbytesPerPump = std::size_t{1} << 20;
// A copy to the host is asked this often whether it is done.
constexpr std::int64_t kStagingPeriodNs = 50'000;
// Messages that are copied to the host before their turn: one leaves while the next is copied.
constexpr std::size_t kNumStaged = 2;
// No peer rings for what others have taken, so that a sender at the process's limit looks this often.
constexpr std::int64_t kLimitPeriodNs = 200'000;

}  // namespace

void Sender::post(TransferPtr transfer) {
  auto place = queue_.end();
  if (limits_.backward_first && transfer->key.direction == Direction::backward) {
    const auto may_overtake = [](const TransferPtr& other) { return other->key.direction != Direction::backward; };
    place = std::find_if(queue_.begin() + (has_begun() ? 1 : 0), queue_.end(), may_overtake);
  }
  queue_.insert(place, std::move(transfer));
}

void Sender::count_in_flight() {
  std::erase_if(message_ends_, [&](std::uint64_t end) { return end <= ring_->taken(); });
  const std::size_t in_ring = static_cast<std::size_t>(ring_->published() - ring_->taken());
  const std::size_t in_slots = slots_ ? slots_->in_flight_nbytes() : 0;
  const std::size_t lent = lender_ ? lender_->in_flight_nbytes() : 0;
  count_in_flight({message_ends_.size(), in_ring + in_slots + lent});
}

void Sender::count_in_flight(InFlight now) {
  if (now.num_messages == counted_.num_messages && now.nbytes == counted_.nbytes) return;
  InFlight& total = Progress::instance().in_flight();
  total.num_messages += now.num_messages - counted_.num_messages;
  total.nbytes += now.nbytes - counted_.nbytes;
  counted_ = now;
}

// One message at a time may always leave: what others hold must not stop a link for ever.
bool Sender::is_at_process_limit() const {
  if (counted_.num_messages == 0) return false;
  const InFlight& total = Progress::instance().in_flight();
  return (limits_.max_process_messages > 0 && total.num_messages >= limits_.max_process_messages) ||
         (limits_.max_process_nbytes > 0 && total.nbytes >= limits_.max_process_nbytes);
}

// Of the messages in flight; the reader then rings when it has taken one.
bool Sender::is_at_limit() {
  if (has_begun()) return false;
  if (is_at_process_limit()) {
    due_ns_ = now_ns() + kLimitPeriodNs;
    return true;
  }
  if (lender_ && lender_->must_wait(*queue_.front())) return true;
  if (limits_.max_messages == 0) return false;
  const auto is_full = [&] {
    std::erase_if(message_ends_, [&](std::uint64_t end) { return end <= ring_->taken(); });
    return message_ends_.size() >= limits_.max_messages;
  };
  if (!is_full()) return false;
  ring_->want_ring();
  return is_full();
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

bool Sender::pump(LinkCounters& counters, const std::function<void()>& wake_reader) {
  std::size_t written_nbytes = 0;
  due_ns_ = INT64_MAX;
  if (ring_ && has_process_limit()) count_in_flight();
  while (!queue_.empty() && ring_ && !wants_slots() && written_nbytes < kNbytesPerPump) {
    if (is_at_limit()) break;
    const bool is_staged = !stages_ || stage_ahead();
    if (queue_.empty()) break;
    const TransferPtr transfer = queue_.front();
    if (!is_staged || !transfer->staged.is_ready()) {
      due_ns_ = now_ns() + kStagingPeriodNs;
      break;
    }
    const std::size_t nbytes = write_record(*transfer);
    if (nbytes == 0) break;
    wake_reader();
    written_nbytes += nbytes;
    if (part_index_ == transfer->to_send.size()) end_message(counters);
  }
  lent_is_taken();
  return written_nbytes > 0;
}

void Sender::end_message(LinkCounters& counters) {
  const TransferPtr transfer = queue_.front();
  const auto in_slots = [this](const SendPart& part) { return is_in_slots(part); };
  // Where this throws, the message is still there to be ended.
  if (std::any_of(transfer->to_send.begin(), transfer->to_send.end(), in_slots)) transfer->set_event(slots_->record());
  queue_.pop_front();
  part_index_ = 0;
  counters.messages_sent += 1;
  counters.payload_nbytes_sent += transfer->payload;
  counters.wire_nbytes_sent += transfer->wire;
  if (limits_.max_messages > 0 || has_process_limit()) message_ends_.push_back(ring_->published());
  if (has_process_limit()) count_in_flight();
  const bool waits_for_receive = limits_.is_strict && !is_accepted_;
  if (lender_ && lender_->keep(ring_->published(), first_seq_, waits_for_receive, transfer)) return;
  end_transfer(transfer, first_seq_, waits_for_receive);
}

std::size_t Sender::write_record(TransferState& transfer) {
  const SendPart& part = transfer.to_send[part_index_];
  MessageHeader header;
  std::size_t header_nbytes = 0;
  if (!is_part_begun_) {
    is_lent_ = lender_ && !lender_->lent() && lender_->lends(part);
    header = make_header(transfer);
    header_nbytes = header.nbytes();
  }
  const std::size_t nbytes = chunk_nbytes(part);
  const bool in_slots = is_in_slots(part) && nbytes > 0;
  if (in_slots && !has_slot_room(nbytes)) return 0;
  const std::size_t note_nbytes = is_lent_ ? sizeof(SourceNote) : kSlotNoteNbytes;
  const std::size_t record_nbytes = header_nbytes + (in_slots || is_lent_ ? note_nbytes : nbytes);
  std::byte* out = ring_->reserve(record_nbytes);
  if (out == nullptr) return 0;
  if (!is_part_begun_) {
    write_header(header, out);
    if (part_index_ == 0) {
      first_seq_ = header.seq;
      is_accepted_ = false;
    }
    ++next_seq_;
    is_part_begun_ = true;
    transfer.payload += header.payload_nbytes;
  }
  if (in_slots) {
    put_chunk(transfer, out + header_nbytes, nbytes);
  } else {
    write_chunk(part, out + header_nbytes, nbytes);
  }
  RecordInfo info = stamp(header_nbytes + nbytes);
  info.nbytes = static_cast<std::uint32_t>(record_nbytes);
  if (transfer.clock.started_ns == 0) transfer.clock.started_ns = info.sent_ns;
  transfer.wire += header_nbytes + nbytes;
  if (chunk_nbytes(part) == 0) next_part();
  ring_->publish(info);
  return info.nbytes;
}

// Of the peer's memory: what its host has not promised to take is not waited for on the device.
bool Sender::has_slot_room(std::size_t nbytes) {
  if (slots_->has_room(nbytes)) return true;
  ring_->want_ring();
  return slots_->has_room(nbytes);
}

void Sender::put_chunk(const TransferState& transfer, std::byte* out, std::size_t nbytes) {
  const SendPart& part = transfer.to_send[part_index_];
  if (position_ == 0) slots_->stream().wait(transfer.ready);
  const std::uint64_t end = slots_->put(nbytes, [&](Stream& stream, std::byte* slot) {
    if (part.codec.id == CodecId::raw) {
      stream.copy_async(slot, static_cast<const std::byte*>(part.tensor.data) + position_, nbytes);
      position_ += nbytes;
      return;
    }
    const Grid grid = grid_of(part.tensor.shape);
    const auto begin = static_cast<std::int64_t>(position_);
    const std::int64_t group_end = groups_that_fit(part.codec, grid, begin, kDeviceChunkNbytes);
    encode_on(stream, {part.codec, part.tensor.dtype, grid, begin, group_end}, part.tensor.data, slot, next_seq_ - 1);
    position_ = static_cast<std::uint64_t>(group_end);
  });
  std::memcpy(out, &end, sizeof(end));
}

bool Sender::wants_slots() const {
  if (queue_.empty() || slots_ || stages_) return false;
  const auto& parts = queue_.front()->to_send;
  return std::any_of(parts.begin(), parts.end(), [this](const SendPart& part) { return is_in_slots(part); });
}

void Sender::set_slots(SlotOffer offer, const std::string& handle, int fd) {
  Device& device = *place_.side()->device;
  DeviceMemory memory = adopt_memory(device, offer.sharing, offer.nbytes, handle, fd);
  slots_.emplace(device, ring_->slot_counters(), ring_->control_page(), std::move(memory));
  stages_ = false;
}

bool Sender::stage_ahead() {
  for (std::size_t i = 0; i < std::min(queue_.size(), kNumStaged);) {
    const TransferPtr transfer = queue_[i];
    try {
      if (!stage(*transfer)) return i > 0;
      ++i;
    } catch (const Error& error) {  // no memory for it
      std::erase(queue_, transfer);
      transfer->fail(error);
      transfer->release();
    }
  }
  return true;
}

std::string Sender::describe_device() const {
  if (slots_) return ", in slots of " + place_.side()->device->name();
  return staging_stream_ ? ", from " + place_.side()->device->name() + " through the host" : "";
}

bool Sender::stage(TransferState& transfer) {
  for (SendPart& part : transfer.to_send) {
    if (!is_in_slots(part)) continue;
    DeviceSide& side = *place_.side();
    if (!staging_stream_) staging_stream_ = side.device->make_stream();
    Block block = try_allocate_block(side.pinned_pool, part.tensor.nbytes());
    if (!block) return false;
    staging_stream_->wait(transfer.ready);
    staging_stream_->copy_async(block.data(), part.tensor.data, part.tensor.nbytes());
    part.tensor.data = block.data();
    part.tensor.device = kOnHost;
    transfer.staging.push_back(std::move(block));
    transfer.staged = staging_stream_->record();
    transfer.set_event(transfer.staged);
  }
  return true;
}

MessageHeader Sender::make_header(const TransferState& transfer) const {
  const SendPart& part = transfer.to_send[part_index_];
  MessageHeader header;
  header.key = transfer.key;
  header.codec = part.codec;
  header.dtype = part.tensor.dtype;
  header.requires_grad = part.requires_grad;
  header.absent = part.absent;
  header.in_slots = is_in_slots(part);
  header.at_source = is_lent_;
  header.part_index = static_cast<std::uint16_t>(part_index_);
  header.num_parts = static_cast<std::uint16_t>(transfer.to_send.size());
  header.seq = next_seq_;
  header.shape = part.tensor.shape;
  header.order = part.tensor.order;
  header.payload_nbytes = part.absent ? 0 : part.tensor.nbytes();
  header.wire_nbytes = part.absent ? 0
                                   : chunked_wire_nbytes(part.codec, part.tensor.dtype, part.tensor.shape,
                                                         header.in_slots ? kDeviceChunkNbytes : kChunkNbytes);
  return header;
}

// Bytes of the next chunk of `part`; 0 when all of it is written.
std::size_t Sender::chunk_nbytes(const SendPart& part) const {
  if (part.absent || part.tensor.numel() == 0) return 0;
  const bool in_slots = is_in_slots(part);
  if (part.codec.id == CodecId::raw) {
    const std::size_t left = part.tensor.nbytes() - position_;
    if (is_lent_ && left > 0) return Lender::note(part, position_).nbytes;
    return std::min<std::size_t>(in_slots ? kDeviceChunkNbytes : kRawChunkNbytes, left);
  }
  const Grid grid = grid_of(part.tensor.shape);
  const auto begin = static_cast<std::int64_t>(position_);
  if (begin >= num_groups(part.codec, grid)) return 0;
  const std::size_t most = in_slots ? kDeviceChunkNbytes : kChunkNbytes;
  return wire_nbytes(part.codec, grid, begin, groups_that_fit(part.codec, grid, begin, most));
}

void Sender::write_chunk(const SendPart& part, std::byte* out, std::size_t nbytes) {
  if (nbytes == 0) return;
  if (is_lent_) {
    const SourceNote note = Lender::note(part, position_);
    std::memcpy(out, &note, sizeof(note));
    position_ += nbytes;
    lender_->add(note);
    return;
  }
  if (part.codec.id == CodecId::raw) {
    std::memcpy(out, static_cast<const std::byte*>(part.tensor.data) + position_, nbytes);
    position_ += nbytes;
    return;
  }
  const Grid grid = grid_of(part.tensor.shape);
  const auto begin = static_cast<std::int64_t>(position_);
  const std::int64_t end = groups_that_fit(part.codec, grid, begin, kChunkNbytes);
  encode(part.codec, part.tensor.dtype, part.tensor.data, grid, begin, end, out, next_seq_ - 1);
  position_ = static_cast<std::uint64_t>(end);
}

RecordInfo Sender::stamp(std::size_t nbytes) {
  const std::int64_t now = now_ns();
  RecordInfo info{static_cast<std::uint32_t>(nbytes), now, now};
  if (!emulation_.is_on()) return info;
  info.sent_ns = std::max(now, link_free_ns_);
  const double seconds = emulation_.bytes_per_s > 0 ? static_cast<double>(nbytes) / emulation_.bytes_per_s : 0.0;
  link_free_ns_ = info.sent_ns + static_cast<std::int64_t>(seconds * 1e9);
  info.ready_ns = link_free_ns_ + static_cast<std::int64_t>(emulation_.latency_s * 1e9);
  return info;
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
  if (std::erase(queue_, transfer) > 0) transfer->release();
  std::erase_if(not_accepted_, [&](const auto& item) { return item.second == transfer; });
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
