// The walk over a tensor's bytes on the wire, chunk by chunk; both ends cut alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/api.h"
#include "codec/runs.h"

namespace pipecomm {

// Wire bytes of whole groups per record, at most. Both ends split alike, so it is part of the format.
inline constexpr std::size_t kChunkNbytes = std::size_t{256} << 10;
// The same, and bytes of a raw tensor, per slot of a device: long for a copy engine, short enough that copies in and
// out overlap.
inline constexpr std::size_t kDeviceChunkNbytes = std::size_t{4} << 20;
// Bytes of a raw tensor per record: small enough that the copies in and out overlap. A reader takes any length.
inline constexpr std::size_t kRawChunkNbytes = std::size_t{64} << 10;

// [rows, cols] of a shape: cols is the last dimension, a scalar is 1 x 1.
PC_API Grid grid_of(const std::vector<std::int64_t>& shape);

struct Chunk {
  std::int64_t begin = 0;  // bytes of a raw tensor, groups of any other
  std::int64_t end = 0;
  std::size_t nbytes = 0;  // on the wire; 0: nothing is left
};

// A raw tensor's position counts bytes, any other's groups.
class PC_API ChunkCursor {
 public:
  // Of no bytes.
  ChunkCursor() = default;
  // `most_coded`: wire bytes of a chunk that is not raw, at most. `nbytes` of the tensor.
  ChunkCursor(const CodecSpec& codec, const std::vector<std::int64_t>& shape, std::size_t nbytes,
              std::size_t most_coded);

  const CodecSpec& codec() const { return codec_; }
  const Grid& grid() const { return grid_; }
  bool is_raw() const { return codec_.is_raw(); }
  std::int64_t position() const { return position_; }
  bool is_at_end() const { return position_ == end_; }
  // The next chunk; of a raw tensor, at most `most_raw` bytes. Throws a tensor error where no group fits a chunk.
  Chunk front(std::size_t most_raw) const;
  void pass(const Chunk& chunk) { position_ = chunk.end; }

 private:
  CodecSpec codec_;
  Grid grid_;
  std::int64_t end_ = 0;
  std::int64_t position_ = 0;
  std::size_t most_coded_ = 0;
};

}  // namespace pipecomm
