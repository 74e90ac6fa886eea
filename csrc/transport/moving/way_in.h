// The ways in which the bytes of a tensor reach this rank; its header says which one it has taken. Progress lock only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/matching/inbox.h"
#include "transport/moving/device_side.h"
#include "transport/progress/errand.h"
#include "ways/ring.h"
#include "ways/slots.h"
#include "ways/source.h"
#include "wire/chunks.h"
#include "wire/header.h"

namespace pipecomm {

// A tensor on its way, and how far it is.
struct InPart {
  InPart() = default;
  explicit InPart(MessageHeader of);

  MessageHeader header;
  ChunkCursor cursor;
  std::byte* target = nullptr;  // none: its bytes are dropped
};

// What a record stood for.
struct Taken {
  std::size_t wire_nbytes = 0;   // that crossed
  std::size_t moved_nbytes = 0;  // by this thread
  std::optional<Error> error;    // why they are not what they should be
};

class WayIn {
 public:
  virtual ~WayIn() = default;
  // False until what the record tells of can be reached. Throws a transport error for what no sound peer writes.
  virtual bool has(const InPart&, std::span<const std::byte>) const { return true; }
  // Moves it to the target, or drops it; throws likewise.
  virtual Taken take(InPart& part, InMessage& message, std::span<const std::byte> record) = 0;
};

// In the record itself.
class RingWayIn final : public WayIn {
 public:
  Taken take(InPart& part, InMessage& message, std::span<const std::byte> record) override;
};

// In the sender's memory, of which the record tells where.
class SourceWayIn final : public WayIn {
 public:
  SourceWayIn(int peer, const std::optional<RingReader>& ring) : peer_(peer), ring_(ring) {}

  // Segments of the peer that messages lie in.
  SourceReader& segments() { return segments_; }
  bool has(const InPart& part, std::span<const std::byte> record) const override;
  Taken take(InPart& part, InMessage& message, std::span<const std::byte> record) override;

 private:
  static SourceNote note_of(const InPart& part, std::span<const std::byte> record);

  const int peer_;
  const std::optional<RingReader>& ring_;
  SourceReader segments_;
};

// In slots of this rank's device, of which the record tells.
class SlotWayIn final : public WayIn {
 public:
  explicit SlotWayIn(const TensorDevice& tensor_device) : tensor_device_(tensor_device) {}

  // Begins to make slots for the peer, in its way of sharing or a later one that works. Those from before end.
  void begin_making(Sharing first, std::size_t nbytes, RingReader& ring);
  bool is_making() const { return making_.is_under_way(); }
  // What has been made, once; none: text says why. `lifeline_fd`: what the end of the peer is seen by.
  std::optional<SlotShare> made(int lifeline_fd);
  bool is_open() const { return slots_ != nullptr; }
  // Nothing more is to be enqueued on the device now.
  bool is_full() const { return slots_ && slots_->is_full(); }
  bool is_used() const { return slots_ && slots_->is_used(); }
  // Nothing enqueued on the device is left to be done.
  bool is_idle() const { return !slots_ || slots_->is_idle(); }
  // A stream of the device of this rank; only where there is one.
  Stream& stream();
  Taken take(InPart& part, InMessage& message, std::span<const std::byte> record) override;

  // A receive is done once the device has come to the last slot of its message.
  void note_enqueued(const InMessage& message, const TransferPtr& receive);
  // Ends, late, the receives whose bytes the peer has told of and has not written.
  void fail_enqueued(const std::function<Error(const TransferState&)>& explain);
  // The peer has gone: what it has not written ends with `cause`. Gives the last position that it has written, once.
  std::optional<std::uint64_t> lose(const Error& cause);
  // Throws the error of a device that has failed.
  void check() const {
    if (slots_) slots_->check();
  }
  // The life line is closed here: what waits for the peer is let go.
  void hang_up() {
    if (watch_) watch_->hang_up();
  }
  // The point after what has been enqueued for the message, for streams too. Throws the device's errors.
  void note_last_use(InMessage& message) {
    if (slots_ && message.slot_end > 0) message.last_use = slots_->record();
  }
  // The same where the message has failed already.
  void note_last_use_quietly(InMessage& message) {
    if (slots_ && message.slot_end > 0) message.last_use = slots_->record_quietly();
  }
  // The device waits for nothing of the peer any more.
  void release() {
    if (!is_idle()) slots_->release();
  }

 private:
  struct Enqueued {
    std::weak_ptr<TransferState> receive;
    std::uint64_t slot_end;
  };

  bool has_arrived(std::uint64_t slot_end) const { return !slots_ || slots_->written() >= slot_end; }

  struct Made {
    std::unique_ptr<SlotReader> slots;
    SlotShare share;
  };

  static Made make(Device& device, Sharing first, std::size_t nbytes, SlotCounters& counters, void* page);

  const TensorDevice& tensor_device_;
  Errand<Made> making_;
  std::unique_ptr<SlotReader> slots_;
  std::optional<WatchedRelease> watch_;
  std::shared_ptr<Stream> copy_stream_;  // without slots
  std::vector<Enqueued> enqueued_;
  std::uint64_t arrived_ = UINT64_MAX;  // slots that were written when the peer had gone
  std::optional<Error> lost_;           // why no more were
};

}  // namespace pipecomm
