// How many bytes a run of groups takes on the wire, and how tensors are cut into runs.
// A tensor is [rows, cols]: cols is its last dimension. Groups lie inside a row. A run of groups
// [group_begin, group_end), counted row by row, encodes to self-contained bytes, so that a large tensor can cross in
// chunks; the wire format of a whole tensor is the run of all its groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/api.h"
#include "codec/codec_name.h"

namespace pipecomm {

struct RunLayout;

struct Grid {
  std::int64_t rows = 1;
  std::int64_t cols = 1;
};

// Of quantizing codecs only; raw is a plain copy.
PC_API std::int64_t num_groups(const CodecSpec& spec, const Grid& grid);
PC_API std::size_t wire_nbytes(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin,
                               std::int64_t group_end);
// With a transform, a run begins and ends between blocks of kTransformWidth values, or at the end of a row.
// Largest such group_end so that the run from group_begin fits `capacity_nbytes`.
PC_API std::int64_t groups_that_fit(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin,
                                    std::size_t capacity_nbytes);
// What a codec's groups take, whatever the tensor: codes, and before them sections, each padded to kSectionAlignment.
struct GroupSizes {
  int num_values;
  int code_bits;                    // of a value
  std::vector<int> section_nbytes;  // of a group, for each section
};
PC_API GroupSizes group_sizes(const CodecSpec& spec);
// Addresses of the run [group_begin, group_end); throws a config error for raw, a tensor error for a run outside grid
// or across a block.
PC_API RunLayout run_layout(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin, std::int64_t group_end);

}  // namespace pipecomm
