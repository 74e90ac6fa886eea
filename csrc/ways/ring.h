// One direction of a channel: records of bytes in a shared segment that the receiver owns.
// head and tail are byte positions that only grow (never flags): credit = capacity - (head - tail).
//
//   writer: reserve -> fill -> publish        reader: front -> use -> pop
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "memory/segment.h"

namespace pipecomm {

struct RecordInfo {
  std::uint32_t nbytes = 0;
  std::int64_t sent_ns = 0;   // CLOCK_MONOTONIC when it went onto the link
  std::int64_t ready_ns = 0;  // not to be read before: later than sent_ns on an emulated link only
};

struct RingControl;
struct SlotCounters;

// Bytes of a segment for a ring that holds `capacity` bytes of records.
PC_API std::size_t ring_segment_nbytes(std::size_t capacity);

class PC_API RingWriter {
 public:
  // Takes over a segment received from a peer; throws a transport error if its size is not that of a ring.
  explicit RingWriter(Segment segment);
  // Room for one record, or nullptr when there is no credit; the reader then rings when there is.
  std::byte* reserve(std::size_t nbytes);
  // Makes the reserved record visible.
  void publish(const RecordInfo& info);
  // Bytes of records ever published, and of those that the reader has taken.
  std::uint64_t published() const { return head_; }
  std::uint64_t taken() const;
  // The reader rings once when it has taken what ends at `position`, by default the next record; look at taken() once
  // more after this. The lowest position counts.
  void want_ring(std::uint64_t position = 1);
  // What records tell of without carrying it (source.h) must not be believed any more.
  void revoke();
  // For the slots of this direction; they lie in the page that control_page() begins.
  SlotCounters& slot_counters();
  void* control_page() { return control_; }

 private:
  bool has_room(std::size_t needed) const;

  Segment segment_;
  RingControl* control_;
  std::byte* data_;
  std::size_t capacity_;
  std::uint64_t head_ = 0;
  std::uint64_t record_ = 0;  // position of the reserved record
};

class PC_API RingReader {
 public:
  static RingReader create(std::size_t capacity);
  int fd() const { return segment_.fd(); }
  // Once the writer's process has it.
  void close_fd() { segment_.close_fd(); }
  SlotCounters& slot_counters();
  void* control_page() { return control_; }

  struct Record {
    RecordInfo info;
    const std::byte* data;
  };
  // The oldest record. Throws a transport error when what the writer left there cannot be a record.
  std::optional<Record> front();
  // The writer has revoked what is not taken; asked after the bytes have been read.
  bool is_revoked() const;
  // Gives its room back; true when the writer waits for credit and must be woken.
  bool pop();

  // For a relay, which gives room back later than it goes on: instead of pop(), skip() and then, from any thread,
  // release() up to a position that has been passed.
  void skip() { tail_ = next_; }
  std::uint64_t position() const { return tail_; }
  bool release(std::uint64_t position);

 private:
  explicit RingReader(Segment segment);

  Segment segment_;
  RingControl* control_;
  const std::byte* data_;
  std::size_t capacity_;
  std::uint64_t tail_ = 0;
  std::uint64_t next_ = 0;  // tail after the record at the front
};

}  // namespace pipecomm
