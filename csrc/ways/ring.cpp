// Records in a byte ring. A record never wraps: where it would, a pad record fills the end.
#include "ways/ring.h"

#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "ways/slots.h"

namespace pipecomm {

struct RingControl {
  alignas(64) std::atomic<std::uint64_t> head;
  alignas(64) std::atomic<std::uint64_t> tail;
  std::atomic<std::uint64_t> ring_at;  // the writer waits for this position; 0: for none
  std::atomic<std::uint32_t> is_revoked;
  SlotCounters slots;
};

namespace {

constexpr std::size_t kControlNbytes = 4096;
constexpr std::size_t kAlign = 64;
constexpr std::uint32_t kPad = 0xffffffffu;

struct RecordPrefix {
  std::uint32_t nbytes;
  std::uint32_t reserved;
  std::int64_t sent_ns;
  std::int64_t ready_ns;
  std::int64_t reserved_2;
};
static_assert(sizeof(RecordPrefix) == 32 && sizeof(RingControl) <= kControlNbytes);

std::size_t record_nbytes(std::size_t payload_nbytes) {
  return (sizeof(RecordPrefix) + payload_nbytes + kAlign - 1) / kAlign * kAlign;
}

std::size_t checked_capacity(const Segment& segment) {
  if (segment.nbytes() <= kControlNbytes || (segment.nbytes() - kControlNbytes) % kAlign != 0) {
    throw Error(ErrorKind::transport, "expected a ring segment of 4096 + a multiple of 64 bytes; got " +
                                          std::to_string(segment.nbytes()) + " from the peer");
  }
  return segment.nbytes() - kControlNbytes;
}

[[noreturn]] void refuse_record(std::size_t nbytes, std::uint64_t available) {
  throw Error(ErrorKind::transport, "expected a record that lies inside the ring; got " + std::to_string(nbytes) +
                                        " bytes with " + std::to_string(available) +
                                        " available: the peer's process is damaged");
}

}  // namespace

std::size_t ring_segment_nbytes(std::size_t capacity) { return kControlNbytes + capacity; }

RingWriter::RingWriter(Segment segment)
    : segment_(std::move(segment)),
      control_(reinterpret_cast<RingControl*>(segment_.data())),
      data_(segment_.data() + kControlNbytes),
      capacity_(checked_capacity(segment_)) {}

std::uint64_t RingWriter::taken() const { return control_->tail.load(); }

void RingWriter::want_ring(std::uint64_t position) {
  const std::uint64_t before = control_->ring_at.load();
  if (before == 0 || position < before) control_->ring_at.store(position);
}

// An exchange, so that what is written to the bytes afterwards stays behind it.
void RingWriter::revoke() { control_->is_revoked.exchange(1); }

SlotCounters& RingWriter::slot_counters() { return control_->slots; }

bool RingWriter::has_room(std::size_t needed) const {
  const std::uint64_t used = head_ - taken();
  if (used > capacity_) refuse_record(0, used);
  return capacity_ - used >= needed;
}

std::byte* RingWriter::reserve(std::size_t nbytes) {
  const std::size_t needed = record_nbytes(nbytes);
  const std::size_t left_before_end = capacity_ - head_ % capacity_;
  const std::size_t pad = needed > left_before_end ? left_before_end : 0;
  if (!has_room(pad + needed)) {
    want_ring();
    if (!has_room(pad + needed)) return nullptr;
  }
  if (pad > 0) {
    std::memcpy(data_ + head_ % capacity_, &kPad, sizeof(kPad));
    head_ += pad;
  }
  record_ = head_;
  return data_ + record_ % capacity_ + sizeof(RecordPrefix);
}

void RingWriter::publish(const RecordInfo& info) {
  const RecordPrefix prefix{info.nbytes, 0, info.sent_ns, info.ready_ns, 0};
  std::memcpy(data_ + record_ % capacity_, &prefix, sizeof(prefix));
  head_ = record_ + record_nbytes(info.nbytes);
  control_->head.store(head_);
}

RingReader::RingReader(Segment segment)
    : segment_(std::move(segment)),
      control_(new (segment_.data()) RingControl{}),
      data_(segment_.data() + kControlNbytes),
      capacity_(checked_capacity(segment_)) {}

RingReader RingReader::create(std::size_t capacity) {
  return RingReader(Segment::create(ring_segment_nbytes(capacity)));
}

SlotCounters& RingReader::slot_counters() { return control_->slots; }

std::optional<RingReader::Record> RingReader::front() {
  const std::uint64_t available = control_->head.load() - tail_;
  if (available == 0) return std::nullopt;
  if (available > capacity_) refuse_record(0, available);
  const std::size_t offset = tail_ % capacity_;
  const std::size_t left_before_end = capacity_ - offset;
  RecordPrefix prefix;
  std::memcpy(&prefix, data_ + offset, sizeof(prefix));
  if (prefix.nbytes == kPad && left_before_end < available) {
    tail_ += left_before_end;
    return front();
  }
  const std::size_t whole = record_nbytes(prefix.nbytes);
  if (whole > available || whole > left_before_end) refuse_record(prefix.nbytes, available);
  next_ = tail_ + whole;
  return Record{{prefix.nbytes, prefix.sent_ns, prefix.ready_ns}, data_ + offset + sizeof(prefix)};
}

// Not a load, so that what was read before stays in front of it.
bool RingReader::is_revoked() const { return control_->is_revoked.fetch_or(0) != 0; }

bool RingReader::pop() {
  tail_ = next_;
  return release(tail_);
}

bool RingReader::release(std::uint64_t position) {
  control_->tail.store(position);
  std::uint64_t wanted = control_->ring_at.load();
  return wanted != 0 && position >= wanted && control_->ring_at.compare_exchange_strong(wanted, 0);
}

}  // namespace pipecomm
