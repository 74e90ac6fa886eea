// Where chunks begin and end.
#include "wire/chunks.h"

#include <algorithm>

#include "base/error.h"

namespace pipecomm {

Grid grid_of(const std::vector<std::int64_t>& shape) {
  Grid grid;
  if (shape.empty()) return grid;
  grid.cols = shape.back();
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) grid.rows *= shape[i];
  return grid;
}

ChunkCursor::ChunkCursor(const CodecSpec& codec, const std::vector<std::int64_t>& shape, std::size_t nbytes,
                         std::size_t most_coded)
    : codec_(codec), grid_(grid_of(shape)), most_coded_(most_coded) {
  if (nbytes > 0) end_ = is_raw() ? static_cast<std::int64_t>(nbytes) : num_groups(codec_, grid_);
}

Chunk ChunkCursor::front(std::size_t most_raw) const {
  if (is_at_end()) return {position_, position_, 0};
  if (is_raw()) {
    const std::size_t nbytes = std::min(most_raw, static_cast<std::size_t>(end_ - position_));
    return {position_, position_ + static_cast<std::int64_t>(nbytes), nbytes};
  }
  const std::int64_t end = groups_that_fit(codec_, grid_, position_, most_coded_);
  if (end <= position_) throw Error(ErrorKind::transport, "expected groups that fit a chunk; got one that does not");
  return {position_, end, wire_nbytes(codec_, grid_, position_, end)};
}

}  // namespace pipecomm
