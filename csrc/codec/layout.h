// Where the bytes of an encoded run of groups lie; shared by the host loops and the kernels.
//   scales  bf16[num_groups]                padded with zeros to 16 bytes
//   zeros   bf16[num_groups], int4 only     padded with zeros to 16 bytes
//   codes   group after group, no padding: a group of n values takes n bytes (int8) or ceil(n / 2) (int4)
// Values are little-endian. docs/wire_format.md draws this.
#pragma once

#include <cstdint>

#include "base/api.h"

namespace pipecomm {

inline constexpr std::int64_t kSectionAlignment = 16;

PC_HD constexpr std::int64_t code_nbytes(int num_values, int code_bits) {
  return (static_cast<std::int64_t>(num_values) * code_bits + 7) / 8;
}

// One group: its first value, counted from the tensor's first, and its first code byte, counted from the run's.
struct GroupPlace {
  std::int64_t element;
  std::int64_t code;
  int num_values;
};

struct RunLayout {
  std::int64_t group_begin;
  std::int64_t num_groups;
  std::int64_t cols;
  std::int64_t groups_per_row;
  std::int64_t row_code_nbytes;
  std::int64_t zeros_offset;
  std::int64_t codes_offset;
  std::int64_t nbytes;
  int group_size;
  int code_bits;
  bool has_zeros;
  // Rows are whole groups, so that rows need not be told apart.
  bool is_dense;

  PC_HD std::int64_t full_code_nbytes() const { return code_nbytes(group_size, code_bits); }

  // Code bytes of all groups before `group`, counted from the tensor's first group.
  PC_HD std::int64_t code_position(std::int64_t group) const {
    if (is_dense) return group * full_code_nbytes();
    return group / groups_per_row * row_code_nbytes + group % groups_per_row * full_code_nbytes();
  }

  // `index` counts from the run's first group.
  PC_HD GroupPlace place(std::int64_t index) const {
    const std::int64_t group = group_begin + index;
    const std::int64_t code = codes_offset + code_position(group) - code_position(group_begin);
    if (is_dense) return {group * group_size, code, group_size};
    const std::int64_t col = group % groups_per_row * group_size;
    const std::int64_t left = cols - col;
    return {group / groups_per_row * cols + col, code, left < group_size ? static_cast<int>(left) : group_size};
  }
};

}  // namespace pipecomm
