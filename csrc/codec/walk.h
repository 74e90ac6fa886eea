// Steps through a run in batches of groups, without a division per group: values and codes of consecutive groups are
// consecutive. Local to the including file for the reason given in host_loops.h.
#pragma once

#include <cstddef>

#include "codec/layout.h"

namespace pipecomm {
namespace {

// Groups are coded in batches, so that the compiler computes the scales of a batch side by side. It does where they
// are stored as 32 bits, and no type of another width is in the loop.
inline constexpr int kBatchSize = 16;

// A group's place in its transform block.
enum class InBlock { none, first, rest };

// The next groups of a run. X and Byte are std::byte or const std::byte.
template <typename X, typename Byte>
struct Batch {
  int size = 0;
  bool is_full = false;      // kBatchSize groups of full size
  std::int64_t first_group;  // counted from the tensor's first
  X* x[kBatchSize];
  int count[kBatchSize];  // values of the group
  Byte* codes[kBatchSize];
  InBlock in_block[kBatchSize];
};

using EncodeBatch = Batch<const std::byte, std::byte>;
using DecodeBatch = Batch<std::byte, const std::byte>;

template <typename X, typename Byte>
class Walk {
 public:
  // `run` has a group.
  Walk(const RunLayout& run, std::int64_t value_nbytes, X* tensor, Byte* wire)
      : run_(run),
        value_nbytes_(value_nbytes),
        x_(tensor + run.group(0).element * value_nbytes),
        codes_(wire + run.codes_offset),
        cols_(is_one_row(run) ? run.num_groups * run.group_size : run.cols),
        col_(is_one_row(run) ? 0 : run.group_begin % run.groups_per_row * run.group_size) {}

  // The batch after `batch`, with whole transform blocks.
  void next(std::int64_t num_left, Batch<X, Byte>& batch) {
    const bool is_whole = !run_.has_transform || col_ % kTransformWidth == 0;
    const bool was_full = batch.is_full;
    batch.is_full = num_left >= kBatchSize && cols_ - col_ >= kBatchSize * run_.group_size && is_whole;
    if (batch.is_full && was_full) return move_on(batch);
    if (batch.is_full) return next_full(batch);
    const int limit = num_left < kBatchSize ? static_cast<int>(num_left) : kBatchSize;
    int g = 0;
    for (; g < limit; ++g) {
      const std::int64_t left = cols_ - col_;
      const int count = left < run_.group_size ? static_cast<int>(left) : run_.group_size;
      batch.in_block[g] = InBlock::none;
      if (run_.has_transform && run_.is_transformed(col_ % run_.cols)) {
        batch.in_block[g] = col_ % kTransformWidth == 0 ? InBlock::first : InBlock::rest;
        if (batch.in_block[g] == InBlock::first && g + kTransformWidth / run_.group_size > limit) break;
      }
      batch.x[g] = x_;
      batch.count[g] = count;
      batch.codes[g] = codes_;
      x_ += count * value_nbytes_;
      codes_ += code_nbytes(count, run_.code_bits);
      col_ = left == count ? 0 : col_ + count;
    }
    batch.size = g;
  }

  void next_full(Batch<X, Byte>& batch) {
    const std::int64_t group_nbytes = run_.group_size * value_nbytes_;
    const std::int64_t group_codes = run_.full_code_nbytes();
    const int groups_per_block = run_.has_transform ? kTransformWidth / run_.group_size : 1;
    for (int g = 0; g < kBatchSize; ++g) {
      batch.x[g] = x_ + g * group_nbytes;
      batch.codes[g] = codes_ + g * group_codes;
      batch.count[g] = run_.group_size;
      batch.in_block[g] = !run_.has_transform         ? InBlock::none
                          : g % groups_per_block == 0 ? InBlock::first
                                                      : InBlock::rest;
    }
    batch.size = kBatchSize;
    step();
  }

  // From a full batch to the full one behind it.
  void move_on(Batch<X, Byte>& batch) {
    for (int g = 0; g < kBatchSize; ++g) batch.x[g] += kBatchSize * run_.group_size * value_nbytes_;
    for (int g = 0; g < kBatchSize; ++g) batch.codes[g] += kBatchSize * run_.full_code_nbytes();
    step();
  }

  void step() {
    x_ += kBatchSize * run_.group_size * value_nbytes_;
    codes_ += kBatchSize * run_.full_code_nbytes();
    col_ += kBatchSize * run_.group_size;
    col_ = col_ == cols_ ? 0 : col_;
  }

 private:
  // Rows of whole groups, and of whole transform blocks, need not be told apart.
  static bool is_one_row(const RunLayout& run) {
    return run.is_dense && (!run.has_transform || run.cols % kTransformWidth == 0);
  }

  const RunLayout& run_;
  std::int64_t value_nbytes_;
  X* x_;
  Byte* codes_;
  std::int64_t cols_;  // of a row, or of all rows as one
  std::int64_t col_;
};

// Calls fn(batch, scales, zeros) for the run's groups, batch after batch.
template <typename X, typename Byte, typename Fn>
void for_each_batch(const RunLayout& run, std::int64_t value_nbytes, X* tensor, Byte* wire, const Fn& fn) {
  if (run.num_groups == 0) return;
  Walk<X, Byte> walk(run, value_nbytes, tensor, wire);
  Batch<X, Byte> batch;
  for (std::int64_t index = 0; index < run.num_groups; index += batch.size) {
    walk.next(run.num_groups - index, batch);
    batch.first_group = run.group_begin + index;
    Byte* scales = wire + index * 2;
    fn(batch, scales, scales + run.zeros_offset);
  }
}

}  // namespace
}  // namespace pipecomm
