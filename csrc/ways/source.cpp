// Offers of segments, and the checks that make notes from a peer safe to follow.
#include "ways/source.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "memory/segment_directory.h"
#include "ways/damage.h"

namespace pipecomm {
bool SourceWriter::offer(const std::byte* data, std::size_t nbytes) {
  while (nbytes > 0) {
    const auto span = SegmentDirectory::instance().find(data);
    if (!span || !offer_segment(span->id, span->fd)) return false;
    const std::size_t found = std::min(nbytes, span->nbytes);
    data += found;
    nbytes -= found;
  }
  return true;
}

bool SourceWriter::offer_segment(std::uint64_t segment_id, int fd) {
  if (offered_.contains(segment_id)) return true;
  if (offered_.size() >= kMaxSourceSegments) return false;
  offered_.insert(segment_id);
  tell_(segment_id, fd);
  return true;
}

SourceNote SourceWriter::note(const std::byte* data, std::size_t nbytes) {
  const auto span = SegmentDirectory::instance().find(data);
  if (!span) throw Error(ErrorKind::transport, "expected memory of a pool under a lent tensor; got none: freed twice?");
  return {span->id, span->offset, std::min({nbytes, span->nbytes, kSourceChunkNbytes})};
}

void SourceWriter::tell_gone() {
  const SegmentDirectory& directory = SegmentDirectory::instance();
  const std::uint64_t num_removed = directory.num_removed();
  if (num_removed == num_removed_seen_) return;
  num_removed_seen_ = num_removed;
  std::erase_if(offered_, [&](std::uint64_t segment_id) {
    if (directory.has(segment_id)) return false;
    tell_(segment_id, -1);
    return true;
  });
}

void SourceReader::add(std::uint64_t segment_id, int fd) {
  if (fd < 0) refuse_damaged("a descriptor with an offered segment", segment_id);
  Segment segment = Segment::adopt_to_read(fd);
  if (segments_.contains(segment_id)) refuse_damaged("a segment not offered before", segment_id);
  if (segments_.size() >= kMaxSourceSegments) refuse_damaged("at most 256 segments of a peer", segments_.size() + 1);
  segments_.emplace(segment_id, std::move(segment));
}

SourceNote SourceReader::read_note(std::span<const std::byte> record, std::uint64_t most) {
  SourceNote note;
  if (record.size() != sizeof(note)) refuse_damaged("a record of 24 bytes that tells of a segment", record.size());
  std::memcpy(&note, record.data(), sizeof(note));
  if (note.nbytes == 0 || note.nbytes > std::min<std::uint64_t>(most, kSourceChunkNbytes)) {
    refuse_damaged("a record that tells of bytes of its tensor, at most 1 MiB", note.nbytes);
  }
  return note;
}

const std::byte* SourceReader::find(const SourceNote& note) const {
  const auto item = segments_.find(note.segment_id);
  if (item == segments_.end()) refuse_damaged("a segment that was offered", note.segment_id);
  const Segment& segment = item->second;
  if (note.offset > segment.nbytes() || note.nbytes > segment.nbytes() - note.offset) {
    refuse_damaged("bytes inside a segment of " + std::to_string(segment.nbytes()), note.offset);
  }
  return segment.data() + note.offset;
}

}  // namespace pipecomm
