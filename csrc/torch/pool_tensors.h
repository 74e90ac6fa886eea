// Tensors whose memory is a pool's, made without a Python object besides them.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "memory/block.h"

namespace pipecomm {

// Bytes of a contiguous tensor; nothing where a dimension is negative or they are too many to count.
inline std::optional<std::size_t> nbytes_of(at::IntArrayRef sizes, std::size_t itemsize) {
  std::size_t nbytes = itemsize;
  bool overflows = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    overflows |= __builtin_mul_overflow(nbytes, static_cast<std::size_t>(size), &nbytes);
  }
  return overflows ? std::nullopt : std::optional(nbytes);
}

// A CPU tensor over the block, which it owns. Resized, it moves to memory of torch's allocator.
inline at::Tensor tensor_over(Block block, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::size_t nbytes = block.nbytes();
  void* data = block.data();
  at::DataPtr owner(
      data, new Block(std::move(block)), [](void* owned) { delete static_cast<Block*>(owned); }, at::kCPU);
  at::Storage storage(at::Storage::use_byte_size_t{}, nbytes, std::move(owner), c10::GetCPUAllocator(), true);
  auto tensor = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        at::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

// As torch.empty, from the pool. Nothing where only the long way can tell: shapes that cannot be, no bytes, quantized
// ones, memory that is short.
inline std::optional<at::Tensor> try_empty(const std::shared_ptr<Pool>& pool, at::IntArrayRef sizes,
                                           at::ScalarType dtype) {
  const auto nbytes = nbytes_of(sizes, c10::elementSize(dtype));
  if (!nbytes || *nbytes == 0 || c10::isQIntType(dtype)) return std::nullopt;
  try {
    if (Block block = try_allocate_block(pool, *nbytes)) return tensor_over(std::move(block), sizes, dtype);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::pool_exhausted) throw;
  }
  return std::nullopt;
}

}  // namespace pipecomm
