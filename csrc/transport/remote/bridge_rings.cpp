// Records from ring to frame and back, and the positions that travel the other way.
#include "transport/remote/bridge_rings.h"

#include <string>

#include "base/error.h"
#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

// Of a ring: told at once when this much was taken ...
constexpr std::uint64_t kTellParts = 8;
// ... and looked for from here on.
constexpr std::uint64_t kFillingParts = 4;

[[noreturn]] void refuse_rings(const std::string& text) {
  throw Error(ErrorKind::transport, text + ": the peer's process is damaged");
}

}  // namespace

int OutgoingRing::make_ring(std::uint64_t segment_nbytes) {
  const std::size_t control_nbytes = ring_segment_nbytes(0);
  if (made_ || segment_nbytes <= control_nbytes || segment_nbytes - control_nbytes > kMaxRecordNbytes)
    refuse_rings("expected one ring of at most 1 GiB; got " + std::to_string(segment_nbytes) + " bytes");
  made_ = std::make_unique<RingReader>(RingReader::create(segment_nbytes - control_nbytes));
  ring_.store(made_.get());
  return made_->fd();
}

bool OutgoingRing::fill(FrameBatch& batch) {
  due_ns_ = INT64_MAX;
  RingReader* ring = ring_.load();
  while (ring != nullptr && !batch.is_full()) {
    const auto record = ring->front();
    if (!record) break;
    if (record->info.ready_ns > now_ns()) {
      due_ns_ = record->info.ready_ns;
      break;
    }
    batch.add(FrameKind::record, record->data, record->info.nbytes);
    ring->skip();
  }
  if (batch.is_empty()) return false;
  sent_.store(ring->position());  // the answer can come before the call that sends has returned
  return true;
}

bool OutgoingRing::release(std::uint64_t position) {
  RingReader* ring = ring_.load();
  if (ring == nullptr || position < released_ || position > sent_.load())
    refuse_rings("expected a position from " + std::to_string(released_) + " to " + std::to_string(sent_.load()) +
                 "; got " + std::to_string(position));
  released_ = position;
  return ring->release(position);
}

void IncomingRing::set_ring(Segment segment, std::uint64_t segment_nbytes) {
  made_ = std::make_unique<RingWriter>(std::move(segment));
  segment_nbytes_ = segment_nbytes;
  ring_.store(made_.get());
}

std::byte* IncomingRing::reserve(std::size_t nbytes) {
  RingWriter* ring = ring_.load();
  std::byte* out = ring == nullptr ? nullptr : ring->reserve(nbytes);
  if (out == nullptr)
    refuse_rings("expected a record that fits into the ring; got " + std::to_string(nbytes) + " bytes");
  return out;
}

bool IncomingRing::publish(std::uint32_t nbytes) {
  RingWriter* ring = ring_.load();
  // The clocks of two hosts have nothing to do with each other.
  const std::int64_t now = now_ns();
  ring->publish({nbytes, now, now});
  published_.store(ring->published());
  if (is_filling()) ring->want_ring();
  return is_to_tell(ring->taken());
}

std::optional<std::uint64_t> IncomingRing::taken_to_tell() {
  RingWriter* ring = ring_.load();
  if (ring == nullptr) return std::nullopt;
  if (is_filling()) ring->want_ring();
  const std::uint64_t taken = ring->taken();
  if (!is_to_tell(taken)) return std::nullopt;
  told_.store(taken);
  return taken;
}

bool IncomingRing::is_to_tell(std::uint64_t taken) const {
  const std::uint64_t news = taken - told_.load();
  return news > 0 && (tells_each_ || news >= segment_nbytes_ / kTellParts);
}

bool IncomingRing::is_filling() const {
  const std::uint64_t untold = published_.load() - told_.load();
  return untold > 0 && (tells_each_ || untold > segment_nbytes_ / kFillingParts);
}

}  // namespace pipecomm
