// The ways in which the bytes of a tensor leave this rank. A tensor picks its way once, when it begins; who sends it
// does not know what the ways do. Progress lock only.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transport/matching/transfer.h"
#include "transport/moving/device_side.h"
#include "transport/progress/errand.h"
#include "ways/ring.h"
#include "ways/slots.h"
#include "wire/chunks.h"
#include "wire/header.h"

namespace pipecomm {

// There are bytes, and they lie on a device.
inline bool is_on_device(const SendPart& part) { return part.tensor.device != kOnHost && !part.absent; }

// A tensor on its way: how far it is, and the number of its header.
struct OutPart {
  const SendPart* part = nullptr;
  ChunkCursor cursor;
  std::uint64_t seq = 0;
};

class WayOut {
 public:
  virtual ~WayOut() = default;
  // Says in the header which way it is.
  virtual void mark(MessageHeader& header) const = 0;
  // Wire bytes of a chunk that is not raw, at most.
  virtual std::size_t most_coded() const { return kChunkNbytes; }
  // Of `out`, the bytes that the next record stands for.
  virtual Chunk next(const OutPart& out) const = 0;
  // Bytes of the record for a chunk, without a header.
  virtual std::size_t record_nbytes(const Chunk& chunk) const = 0;
  virtual bool has_room(const Chunk&, RingWriter&) { return true; }
  // Moves the chunk, and writes at `record` what the record carries. `ready`: the tensor is not touched before.
  virtual void move(const OutPart& out, const Chunk& chunk, const Event& ready, std::byte* record) = 0;
};

// In the record itself.
class RingWayOut final : public WayOut {
 public:
  void mark(MessageHeader&) const override {}
  Chunk next(const OutPart& out) const override { return out.cursor.front(kRawChunkNbytes); }
  std::size_t record_nbytes(const Chunk& chunk) const override { return chunk.nbytes; }
  void move(const OutPart& out, const Chunk& chunk, const Event& ready, std::byte* record) override;
};

// In slots of the peer's device, of which the record tells.
class SlotWayOut final : public WayOut {
 public:
  explicit SlotWayOut(const TensorDevice& tensor_device) : tensor_device_(tensor_device) {}

  // There are slots.
  bool is_open() const { return slots_ != nullptr; }
  // Begins to map memory that the peer shares; takes `fd` over.
  void begin_opening(RingWriter& ring, SlotOffer offer, const std::string& handle, int fd);
  bool is_opening() const { return opening_.is_under_way(); }
  // True when it has been mapped, once. Throws a transport or CUDA error where it cannot be.
  // `lifeline_fd`: what the end of the peer is seen by.
  bool has_opened(int lifeline_fd);
  // Nothing more is to be enqueued on the device now.
  bool is_full() const { return slots_ && slots_->is_full(); }
  // Throws the error of a device that has failed.
  void check() const {
    if (slots_) slots_->check();
  }
  // The life line is closed here: what waits for the peer is let go.
  void hang_up() {
    if (watch_) watch_->hang_up();
  }
  void mark(MessageHeader& header) const override { header.in_slots = true; }
  std::size_t most_coded() const override { return kDeviceChunkNbytes; }
  Chunk next(const OutPart& out) const override { return out.cursor.front(kDeviceChunkNbytes); }
  std::size_t record_nbytes(const Chunk& chunk) const override { return chunk.nbytes > 0 ? kSlotNoteNbytes : 0; }
  // What the peer's host has not promised to take is not waited for on the device.
  bool has_room(const Chunk& chunk, RingWriter& ring) override;
  void move(const OutPart& out, const Chunk& chunk, const Event& ready, std::byte* record) override;

  std::size_t in_flight_nbytes() const { return slots_ ? slots_->in_flight_nbytes() : 0; }
  // Nothing enqueued on the device is left to be done.
  bool is_idle() const { return !slots_ || slots_->is_idle(); }
  // The peer's device reads no slots any more: this rank's waits for nothing of it.
  void release() {
    if (slots_) slots_->release();
  }
  // All that has been put; `quietly`, where nobody can be told of an error.
  Event record() { return slots_->record(); }
  Event record_quietly() noexcept { return slots_->record_quietly(); }

 private:
  const TensorDevice& tensor_device_;
  Errand<std::unique_ptr<SlotWriter>> opening_;
  std::unique_ptr<SlotWriter> slots_;
  std::optional<WatchedRelease> watch_;
};

}  // namespace pipecomm
