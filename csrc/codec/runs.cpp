// Sizes of encoded runs.
#include "codec/runs.h"

#include <algorithm>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "codec/layout.h"

namespace pipecomm {
namespace {

int code_bits(CodecId id) { return id == CodecId::int8 || id == CodecId::fp8 ? 8 : 4; }

std::int64_t padded(std::int64_t nbytes) {
  return (nbytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
}

std::int64_t groups_per_row(const CodecSpec& spec, const Grid& grid) {
  return grid.cols / spec.group_size + (grid.cols % spec.group_size != 0 ? 1 : 0);
}

void check_quantizing(const CodecSpec& spec) {
  if (!spec.is_raw() && codec_from_wire(wire_id(spec), spec.group_size)) return;
  throw Error(ErrorKind::config, "expected a quantizing codec; got " + codec_to_string(spec));
}

void check_grid(const Grid& grid) {
  std::int64_t numel = 0;
  // A factor of 8 leaves room for every byte count.
  const bool fits = grid.rows >= 0 && grid.cols >= 0 && !__builtin_mul_overflow(grid.rows, grid.cols, &numel) &&
                    numel <= INT64_MAX / 8;
  if (fits) return;
  throw Error(ErrorKind::tensor, "expected a shape with extents >= 0 and fewer than 2^60 elements; got " +
                                     std::to_string(grid.rows) + " rows of " + std::to_string(grid.cols));
}

// Groups of the row before `group` that share its transform block.
std::int64_t groups_into_block(const CodecSpec& spec, const Grid& grid, std::int64_t group) {
  if (!spec.has_transform || grid.cols == 0) return 0;
  return group % groups_per_row(spec, grid) % (kTransformWidth / spec.group_size);
}

// The run is within the grid.
RunLayout layout_of(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin, std::int64_t group_end) {
  RunLayout run{};
  run.group_begin = group_begin;
  run.num_groups = group_end - group_begin;
  run.cols = grid.cols;
  run.group_size = spec.group_size;
  run.code_bits = code_bits(spec.id);
  run.num_spikes = spec.num_spikes;
  run.has_zeros = spec.id == CodecId::int4;
  run.groups_per_row = groups_per_row(spec, grid);
  run.has_transform = spec.has_transform;
  run.is_dense = grid.cols % spec.group_size == 0;
  run.row_code_nbytes = grid.cols / spec.group_size * run.full_code_nbytes() +
                        code_nbytes(static_cast<int>(grid.cols % spec.group_size), run.code_bits);
  const std::int64_t section = padded(run.num_groups * 2);
  run.zeros_offset = section;
  run.spikes_offset = run.has_zeros ? 2 * section : section;
  const std::int64_t all_spikes = run.num_groups * run.num_spikes;
  run.places_offset = run.spikes_offset + padded(all_spikes * 2);
  run.codes_offset = run.places_offset + padded(all_spikes);
  run.nbytes = run.codes_offset;
  if (run.num_groups > 0) run.nbytes += run.code_position(group_end) - run.code_position(group_begin);
  return run;
}

}  // namespace

std::int64_t num_groups(const CodecSpec& spec, const Grid& grid) {
  check_quantizing(spec);
  check_grid(grid);
  return grid.cols == 0 ? 0 : grid.rows * groups_per_row(spec, grid);
}

GroupSizes group_sizes(const CodecSpec& spec) {
  const RunLayout run = run_layout(spec, {1, 0}, 0, 0);
  GroupSizes sizes{run.group_size, run.code_bits, {2}};
  if (run.has_zeros) sizes.section_nbytes.push_back(2);
  if (run.num_spikes > 0) sizes.section_nbytes.insert(sizes.section_nbytes.end(), {2 * run.num_spikes, run.num_spikes});
  return sizes;
}

RunLayout run_layout(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin, std::int64_t group_end) {
  const std::int64_t all = num_groups(spec, grid);
  if (group_begin < 0 || group_end < group_begin || group_end > all) {
    throw Error(ErrorKind::tensor, "expected a run within " + std::to_string(all) + " groups; got [" +
                                       std::to_string(group_begin) + ", " + std::to_string(group_end) + ")");
  }
  if (groups_into_block(spec, grid, group_begin) != 0 ||
      (group_end < all && groups_into_block(spec, grid, group_end) != 0)) {
    throw Error(ErrorKind::tensor, "expected a run of whole transform blocks; got [" + std::to_string(group_begin) +
                                       ", " + std::to_string(group_end) + ")");
  }
  return layout_of(spec, grid, group_begin, group_end);
}

std::size_t wire_nbytes(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin, std::int64_t group_end) {
  return static_cast<std::size_t>(run_layout(spec, grid, group_begin, group_end).nbytes);
}

std::int64_t groups_that_fit(const CodecSpec& spec, const Grid& grid, std::int64_t group_begin,
                             std::size_t capacity_nbytes) {
  const std::int64_t all = num_groups(spec, grid);
  // No group takes fewer than two bytes, its scale's.
  const auto capacity = static_cast<std::int64_t>(std::min<std::size_t>(capacity_nbytes, INT64_MAX));
  const std::int64_t most = capacity / 2;
  std::int64_t fits = group_begin;
  std::int64_t exceeds = std::min(most, all - group_begin) + group_begin + 1;
  while (fits + 1 < exceeds) {
    const std::int64_t middle = fits + (exceeds - fits) / 2;
    (layout_of(spec, grid, group_begin, middle).nbytes <= capacity ? fits : exceeds) = middle;
  }
  return fits < all ? std::max(group_begin, fits - groups_into_block(spec, grid, fits)) : fits;
}

}  // namespace pipecomm
