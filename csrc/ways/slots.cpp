// Slot positions and the work enqueued for each.
#include "ways/slots.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "memory/segment.h"
#include "ways/damage.h"

namespace pipecomm {
namespace {

// What copy engines and 16-byte kernels like.
constexpr std::size_t kSlotAlign = 256;

std::uint64_t end_of(std::uint64_t start, std::size_t nbytes) { return start + round_up(nbytes, kSlotAlign); }

}  // namespace

SlotEnd::SlotEnd(Device& device, SlotCounters& counters, Counter& awaited, void* page, DeviceMemory memory)
    : counters_(counters),
      release_(std::make_shared<StreamRelease>(awaited)),
      registration_(device.register_host(page, page_nbytes())),
      memory_(std::move(memory)),
      stream_(device.make_stream()) {}

std::uint64_t SlotEnd::slot_start(std::size_t nbytes) const {
  const std::size_t left_before_wrap = memory_.nbytes - end_ % memory_.nbytes;
  return round_up(nbytes, kSlotAlign) > left_before_wrap ? end_ + left_before_wrap : end_;
}

Event SlotEnd::record_quietly() noexcept {
  try {
    return record();
  } catch (const Error&) {
    return last_ = {};
  }
}

void SlotEnd::check() const {
  if (!last_.is_ready()) return;
  if (const auto error = last_.error()) throw Error(*error);
}

// The peer may still set the counter to less, so once is not enough.
void SlotEnd::let_go() {
  if (end_ > 0) release_->now();
  for (const Event end = end_ > 0 ? record_quietly() : Event{}; !end.is_ready();) {
    release_->now();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  release_->end();
}

bool SlotWriter::has_room(std::size_t nbytes) const {
  const std::uint64_t promised = counters_.promised.load();
  if (promised > end_) refuse_damaged("promises for at most " + std::to_string(end_) + " bytes of slots", promised);
  return end_of(slot_start(nbytes), nbytes) - promised <= memory_.nbytes;
}

std::uint64_t SlotWriter::put(std::size_t nbytes, const Fill& fill) {
  const std::uint64_t start = slot_start(nbytes);
  end_ = end_of(start, nbytes);
  if (end_ > memory_.nbytes && counters_.taken.load() < end_ - memory_.nbytes) {
    stream_->wait_value(counters_.taken, end_ - memory_.nbytes);
  }
  fill(*stream_, memory_.data + start % memory_.nbytes);
  last_ = stream_->write_value(counters_.written, end_);
  return end_;
}

SlotReader::~SlotReader() {
  let_go();
  // cudaFree is undefined while the peer has the handle open, and nobody tells when it has closed it: never freed.
  if (!memory_.handle.empty() && !is_refused_) static_cast<void>(new std::shared_ptr<void>(std::move(memory_.owner)));
}

void SlotReader::take(std::size_t nbytes, std::uint64_t end, const Drain& drain) {
  const std::uint64_t start = slot_start(nbytes);
  if (end != end_of(start, nbytes)) refuse_damaged("a slot that ends at " + std::to_string(end_of(start, nbytes)), end);
  end_ = end;
  stream_->wait_value(counters_.written, end_);
  if (drain) drain(*stream_, memory_.data + start % memory_.nbytes);
  last_ = stream_->write_value(counters_.taken, end_);
  counters_.promised.store(end_);
}

}  // namespace pipecomm
