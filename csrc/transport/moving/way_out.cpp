// Copies and encoders into the ring and into slots.
#include "transport/moving/way_out.h"

#include <cstring>
#include <utility>

#include "codec/codec.h"
#include "ways/slot_codec.h"

namespace pipecomm {

void RingWayOut::move(const OutPart& out, const Chunk& chunk, const Event&, std::byte* record) {
  const TensorView& tensor = out.part->tensor;
  if (chunk.nbytes == 0) return;
  if (out.cursor.is_raw()) {
    std::memcpy(record, static_cast<const std::byte*>(tensor.data) + chunk.begin, chunk.nbytes);
  } else {
    encode(out.cursor.codec(), tensor.dtype, tensor.data, out.cursor.grid(), chunk.begin, chunk.end, record, out.seq);
  }
}

void SlotWayOut::begin_opening(RingWriter& ring, SlotOffer offer, const std::string& handle, int fd) {
  opening_.begin(
      [=, device = tensor_device_.side()->device, &counters = ring.slot_counters(), page = ring.control_page()] {
        DeviceMemory memory = adopt_memory(*device, offer.sharing, offer.nbytes, handle, fd);
        return std::make_unique<SlotWriter>(*device, counters, page, std::move(memory));
      });
}

bool SlotWayOut::has_opened(int lifeline_fd) {
  if (!opening_.is_done()) return false;
  slots_ = opening_.take();
  watch_.emplace(lifeline_fd, slots_->letting_go());
  return true;
}

bool SlotWayOut::has_room(const Chunk& chunk, RingWriter& ring) {
  if (is_full()) return false;
  if (chunk.nbytes == 0 || slots_->has_room(chunk.nbytes)) return true;
  ring.want_ring();
  return slots_->has_room(chunk.nbytes);
}

void SlotWayOut::move(const OutPart& out, const Chunk& chunk, const Event& ready, std::byte* record) {
  if (chunk.nbytes == 0) return;
  const TensorView& tensor = out.part->tensor;
  if (chunk.begin == 0) slots_->stream().wait(ready);
  const std::uint64_t end = slots_->put(chunk.nbytes, [&](Stream& stream, std::byte* slot) {
    if (out.cursor.is_raw()) {
      stream.copy_async(slot, static_cast<const std::byte*>(tensor.data) + chunk.begin, chunk.nbytes);
    } else {
      const GroupRun run{out.cursor.codec(), tensor.dtype, out.cursor.grid(), chunk.begin, chunk.end};
      encode_on(stream, run, tensor.data, slot, out.seq);
    }
  });
  std::memcpy(record, &end, sizeof(end));
}

}  // namespace pipecomm
