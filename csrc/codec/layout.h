// Where the bytes of an encoded run of groups lie; shared by the host loops and the kernels.
//   scales  bf16[num_groups]                padded with zeros to 16 bytes
//   zeros   bf16[num_groups], int4 only     padded with zeros to 16 bytes
//   spikes  bf16[num_groups * num_spikes]   and then their places, u8 each; with spikes=, padded likewise
//   codes   group after group, no padding: a group of n values takes n bytes (8 bits a code) or ceil(n / 2) (4 bits)
// With a transform, whole blocks of kTransformWidth values of a row are transformed; what is left of a row is not.
// Values are little-endian. docs/wire_format.md draws this.
#pragma once

#include <cstdint>

#include "base/api.h"
#include "codec/hadamard.h"

namespace pipecomm {

inline constexpr std::int64_t kSectionAlignment = 16;

PC_HD constexpr std::int64_t code_nbytes(int num_values, int code_bits) {
  return (static_cast<std::int64_t>(num_values) * code_bits + 7) / 8;
}

// One group: its first value, counted from the tensor's first, and its first code byte, counted from the run's.
struct Group {
  std::int64_t element;
  std::int64_t code;
  int num_values;
  bool is_transformed;
};

struct RunLayout {
  std::int64_t group_begin;
  std::int64_t num_groups;
  std::int64_t cols;
  std::int64_t groups_per_row;
  std::int64_t row_code_nbytes;
  std::int64_t zeros_offset;
  std::int64_t spikes_offset;
  std::int64_t places_offset;
  std::int64_t codes_offset;
  std::int64_t nbytes;
  int group_size;
  int code_bits;
  int num_spikes;  // of each group
  bool has_zeros;
  // Rows are whole groups, so that rows need not be told apart.
  bool is_dense;
  bool has_transform;

  PC_HD std::int64_t full_code_nbytes() const { return code_nbytes(group_size, code_bits); }

  // Code bytes of all groups before `group`, counted from the tensor's first group.
  PC_HD std::int64_t code_position(std::int64_t group) const {
    if (is_dense) return group * full_code_nbytes();
    return group / groups_per_row * row_code_nbytes + group % groups_per_row * full_code_nbytes();
  }

  // Whether the block that column `col` lies in is a whole one.
  PC_HD bool is_transformed(std::int64_t col) const {
    return has_transform && col / kTransformWidth * kTransformWidth + kTransformWidth <= cols;
  }

  // Blocks of `width` values, or what a row has left of one, before `group`, which begins one; a multiple of the group.
  PC_HD std::int64_t block_position(std::int64_t group, int width) const {
    const std::int64_t blocks_per_row = cols / width + (cols % width != 0 ? 1 : 0);
    return group / groups_per_row * blocks_per_row + group % groups_per_row / (width / group_size);
  }

  // `index` counts from the run's first group.
  PC_HD Group group(std::int64_t index) const {
    const std::int64_t number = group_begin + index;
    const std::int64_t code = codes_offset + code_position(number) - code_position(group_begin);
    if (is_dense && !has_transform) return {number * group_size, code, group_size, false};
    const std::int64_t col = number % groups_per_row * group_size;
    const std::int64_t left = cols - col;
    const int num_values = left < group_size ? static_cast<int>(left) : group_size;
    return {number / groups_per_row * cols + col, code, num_values, is_transformed(col)};
  }
};

}  // namespace pipecomm
