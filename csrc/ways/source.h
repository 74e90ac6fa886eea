// Bytes of a message that stay where they are: in memory of the sender's pools, which the receiver maps and reads.
//
//   sender: segment's descriptor over the life line, once -> record in the ring: segment, offset, bytes
//   receiver: checks the record against the segment -> copies from there -> pops the record
//   sender: the ring's `taken` has passed the record -> the tensor may be written again
//
// One copy instead of two, by the receiver's core: for tensors that do not fit into the ring, whose senders have to
// wait until they are taken anyway. Used under the progress lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>

#include "base/api.h"
#include "memory/segment.h"

namespace pipecomm {

// Bytes that one record tells of, at most: copied in one go, while others wait for the progress lock.
inline constexpr std::size_t kSourceChunkNbytes = std::size_t{1} << 20;
// Segments that one peer keeps mapped; tensors in others are copied through the ring.
inline constexpr std::size_t kMaxSourceSegments = 256;

// What a record carries in place of the bytes.
struct SourceNote {
  std::uint64_t segment_id;
  std::uint64_t offset;
  std::uint64_t nbytes;
};

class PC_API SourceWriter {
 public:
  // Gives the peer a segment's descriptor; -1: the segment is gone.
  using Tell = std::function<void(std::uint64_t segment_id, int fd)>;

  explicit SourceWriter(Tell tell) : tell_(std::move(tell)) {}
  // True when the peer can read all of it, now that it has been told of the segments.
  bool offer(const std::byte* data, std::size_t nbytes);
  // The beginning of bytes that have been offered.
  static SourceNote note(const std::byte* data, std::size_t nbytes);
  // Tells the peer of segments that have gone back to the system, so that it lets go of them too.
  void tell_gone();

 private:
  bool offer_segment(std::uint64_t segment_id, int fd);

  const Tell tell_;
  std::set<std::uint64_t> offered_;
  std::uint64_t num_removed_seen_ = 0;
};

// The numbers come from a peer: none is used before it has been checked.
class PC_API SourceReader {
 public:
  // Takes over the descriptor; throws a transport error for one that cannot be read safely.
  void add(std::uint64_t segment_id, int fd);
  void remove(std::uint64_t segment_id) { segments_.erase(segment_id); }
  void clear() { segments_.clear(); }
  // The note in a record; throws a transport error where it is none, or tells of no bytes or of more than `most`.
  static SourceNote read_note(std::span<const std::byte> record, std::uint64_t most);
  // False until its descriptor has come.
  bool has(const SourceNote& note) const { return segments_.contains(note.segment_id); }
  // Where the bytes are; throws a transport error where they are not inside the segment.
  const std::byte* find(const SourceNote& note) const;

 private:
  std::map<std::uint64_t, Segment> segments_;
};

}  // namespace pipecomm
