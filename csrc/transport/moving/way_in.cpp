// Copies and decoders out of the ring, out of slots and out of the sender's memory.
#include "transport/moving/way_in.h"

#include <cstring>
#include <utility>

#include "codec/codec.h"
#include "ways/slot_codec.h"

namespace pipecomm {

InPart::InPart(MessageHeader of)
    : header(std::move(of)),
      cursor(header.codec, header.shape, header.payload_nbytes, header.in_slots ? kDeviceChunkNbytes : kChunkNbytes) {}

// A raw chunk may have any length; an empty one only brings the header of an empty tensor.
Taken RingWayIn::take(InPart& part, InMessage& message, std::span<const std::byte> record) {
  const Chunk chunk = part.cursor.front(record.empty() ? kChunkNbytes : record.size());
  if (record.size() != chunk.nbytes) {
    throw Error(ErrorKind::transport,
                "expected a chunk of " + std::to_string(chunk.nbytes) + " bytes; got " + std::to_string(record.size()));
  }
  if (part.target != nullptr && !record.empty() && !message.is_dropped) {
    if (part.cursor.is_raw()) {
      std::memcpy(part.target + chunk.begin, record.data(), chunk.nbytes);
    } else {
      decode(part.header.codec, part.header.dtype, record.data(), part.cursor.grid(), chunk.begin, chunk.end,
             part.target);
    }
  }
  part.cursor.pass(chunk);
  return {chunk.nbytes, chunk.nbytes, {}};
}

SourceNote SourceWayIn::note_of(const InPart& part, std::span<const std::byte> record) {
  return SourceReader::read_note(record,
                                 part.header.payload_nbytes - static_cast<std::uint64_t>(part.cursor.position()));
}

bool SourceWayIn::has(const InPart& part, std::span<const std::byte> record) const {
  return segments_.has(note_of(part, record));
}

Taken SourceWayIn::take(InPart& part, InMessage& message, std::span<const std::byte> record) {
  const SourceNote note = note_of(part, record);
  const std::byte* data = segments_.find(note);
  const Chunk chunk = part.cursor.front(note.nbytes);
  Taken taken{chunk.nbytes, chunk.nbytes, {}};
  part.cursor.pass(chunk);
  if (part.target == nullptr || message.is_dropped) return taken;
  std::memcpy(part.target + chunk.begin, data, chunk.nbytes);
  if (ring_->is_revoked()) {
    taken.error.emplace(ErrorKind::transport, "rank " + std::to_string(peer_) +
                                                  " has left: its tensor was not taken before it closed the group");
  }
  return taken;
}

void SlotWayIn::begin_making(Sharing first, std::size_t nbytes, RingReader& ring) {
  watch_.reset();
  if (slots_) slots_->refuse();
  making_.begin([=, device = tensor_device_.side()->device, &counters = ring.slot_counters(),
                 page = ring.control_page(),
                 refused = std::make_shared<std::unique_ptr<SlotReader>>(std::move(slots_))] {
    refused->reset();
    return make(*device, first, nbytes, counters, page);
  });
}

std::optional<SlotShare> SlotWayIn::made(int lifeline_fd) {
  if (!making_.is_done()) return std::nullopt;
  Made made = making_.take();
  slots_ = std::move(made.slots);
  if (slots_) watch_.emplace(lifeline_fd, slots_->letting_go());
  return made.share;
}

SlotWayIn::Made SlotWayIn::make(Device& device, Sharing first, std::size_t nbytes, SlotCounters& counters, void* page) {
  std::string text = "no way to share memory of " + device.name() + " worked";
  for (const Sharing sharing : sharings_of(device)) {
    if (sharing < first) continue;
    try {
      DeviceMemory memory = share_memory(device, sharing, nbytes);
      SlotShare share{{sharing, memory.nbytes}, memory.handle, memory.fd};
      return {std::make_unique<SlotReader>(device, counters, page, std::move(memory)), std::move(share)};
    } catch (const Error& error) {
      text += std::string("; ") + error.what();
    }
  }
  return {nullptr, {{}, text, -1}};
}

Stream& SlotWayIn::stream() {
  if (slots_) return slots_->stream();
  if (!copy_stream_) copy_stream_ = tensor_device_.side()->device->make_stream();
  return *copy_stream_;
}

Taken SlotWayIn::take(InPart& part, InMessage& message, std::span<const std::byte> record) {
  std::uint64_t slot_end = 0;
  if (record.size() != sizeof(slot_end)) {
    throw Error(ErrorKind::transport,
                "expected a record that tells of a slot; got " + std::to_string(record.size()) + " bytes");
  }
  std::memcpy(&slot_end, record.data(), sizeof(slot_end));
  const Chunk chunk = part.cursor.front(kDeviceChunkNbytes);
  Taken taken{chunk.nbytes, record.size(), {}};
  if (slot_end > arrived_ && !message.is_dropped) taken.error = lost_;
  SlotReader::Drain drain;
  if (part.target != nullptr && !message.is_dropped && !taken.error) {
    const GroupRun run{part.header.codec, part.header.dtype, part.cursor.grid(), chunk.begin, chunk.end};
    drain = [&part, run, chunk](Stream& device_stream, const std::byte* slot) {
      part.cursor.is_raw() ? device_stream.copy_async(part.target + chunk.begin, slot, chunk.nbytes)
                           : decode_on(device_stream, run, slot, part.target);
    };
  }
  slots_->take(chunk.nbytes, slot_end, drain);
  message.slot_end = slot_end;
  message.last_use = slots_->last();
  part.cursor.pass(chunk);
  return taken;
}

void SlotWayIn::note_enqueued(const InMessage& message, const TransferPtr& receive) {
  std::erase_if(enqueued_, [this](const Enqueued& item) { return has_arrived(item.slot_end); });
  if (has_arrived(message.slot_end)) return;
  enqueued_.push_back({receive, message.slot_end});
  // Let go, the stream reads what has not arrived before anybody here knows of the loss.
  receive->set_arrival([release = slots_->letting_go(), end = message.slot_end] { return release->passed() >= end; });
}

void SlotWayIn::fail_enqueued(const std::function<Error(const TransferState&)>& explain) {
  for (const Enqueued& item : enqueued_) {
    const TransferPtr receive = item.receive.lock();
    if (receive && !has_arrived(item.slot_end)) receive->fail_late(explain(*receive));
  }
}

std::optional<std::uint64_t> SlotWayIn::lose(const Error& cause) {
  if (!slots_ || lost_) return std::nullopt;
  lost_ = cause;
  return arrived_ = slots_->written();
}

}  // namespace pipecomm
