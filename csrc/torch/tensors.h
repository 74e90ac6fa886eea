// The border for tensors: what may be sent and received, and how its memory is described to the transport.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <torch/version.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "torch/device.h"
#include "wire/message.h"

namespace pipecomm {

struct DTypePair {
  at::ScalarType torch;
  DType own;
};

// Every dtype of plain numbers that this torch has.
inline constexpr DTypePair kDTypes[] = {
    {at::kByte, DType::uint8},
    {at::kChar, DType::int8},
    {at::kShort, DType::int16},
    {at::kInt, DType::int32},
    {at::kLong, DType::int64},
    {at::kUInt16, DType::uint16},
    {at::kUInt32, DType::uint32},
    {at::kUInt64, DType::uint64},
    {at::kBool, DType::bool_},
    {at::kHalf, DType::float16},
    {at::kBFloat16, DType::bfloat16},
    {at::kFloat, DType::float32},
    {at::kDouble, DType::float64},
    {at::kComplexFloat, DType::complex64},
    {at::kComplexDouble, DType::complex128},
    {at::kFloat8_e4m3fn, DType::float8_e4m3fn},
    {at::kFloat8_e5m2, DType::float8_e5m2},
    {at::kFloat8_e4m3fnuz, DType::float8_e4m3fnuz},
    {at::kFloat8_e5m2fnuz, DType::float8_e5m2fnuz},
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7
    {at::kFloat8_e8m0fnu, DType::float8_e8m0fnu},
#endif
};

inline DType dtype_of(const at::Tensor& tensor) {
  for (const DTypePair& pair : kDTypes) {
    if (tensor.scalar_type() == pair.torch) return pair.own;
  }
  throw Error(ErrorKind::tensor, std::string("expected a tensor of plain numbers; got dtype ") +
                                     c10::toString(tensor.scalar_type()) +
                                     "; send its bytes with tensor.view(torch.uint8)");
}

inline std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << " tensor of shape " << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

// What the tensor is, if its elements do not lie at its address; else nothing. A class with a __torch_dispatch__
// of its own (the key Python) alone knows what its values are; others that only stand for a tensor have no memory.
inline std::string why_not_addressable(const at::Tensor& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::Python)) return "a class with a __torch_dispatch__ of its own";
  std::ostringstream text;
  if (tensor.layout() != at::kStrided) {
    text << "layout " << tensor.layout();
    return text.str();
  }
  if (tensor.is_nested()) return "a nested tensor";
  if (!tensor.has_storage()) return "a tensor without memory of its own";
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (tensor.numel() == 0) return "";
  const std::size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                              static_cast<std::size_t>(tensor.storage_offset()));
  if (storage->nbytes() < needed) {
    text << "a tensor whose storage has " << storage->nbytes() << " bytes, where shape " << tensor.sizes() << " needs "
         << needed;
    return text.str();
  }
  return storage->_mutable_data_ptr_no_checks().get() == nullptr ? "a tensor without memory of its own" : "";
}

// The one tensor of a point-to-point call; throws unless it is a dense CPU or CUDA tensor. `action` is "send" or
// "receive into".
inline const at::Tensor& checked_tensor(const std::vector<at::Tensor>& tensors, const char* action) {
  if (tensors.size() != 1) {
    throw Error(ErrorKind::tensor, std::string("expected exactly one tensor to ") + action + "; got " +
                                       std::to_string(tensors.size()) + "; make one call for each");
  }
  const at::Tensor& tensor = tensors[0];
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    throw Error(ErrorKind::tensor,
                std::string("expected a CPU or CUDA tensor to ") + action + "; got a " + describe(tensor));
  }
  if (const std::string refused = why_not_addressable(tensor); !refused.empty()) {
    throw Error(ErrorKind::tensor, std::string("expected a dense tensor to ") + action + "; got " + refused +
                                       "; give a plain tensor made from it");
  }
  return tensor;
}

// A tensor whose memory holds the values to send in order: `tensor` itself where that is so, else a copy.
inline at::Tensor ready_to_send(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return tensor;
  const at::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// Throws unless arriving bytes can be put into the tensor's memory as they are.
inline void check_receivable(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    std::ostringstream text;
    text << "expected a contiguous tensor to receive into; got strides " << tensor.strides() << " for shape "
         << tensor.sizes() << "; receive into torch.empty(shape), then copy_()";
    throw Error(ErrorKind::tensor, text.str());
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    throw Error(ErrorKind::tensor,
                "expected a plain tensor to receive into; got a lazy conjugate or negative view of a " +
                    describe(tensor) + "; receive into torch.empty(shape), then copy_()");
  }
}

// The transport only reads what is sent; const_data_ptr keeps lazily copied memory shared.
inline TensorView view_to_send(const at::Tensor& tensor) {
  return TensorView{const_cast<void*>(tensor.const_data_ptr()), dtype_of(tensor), tensor.sizes().vec(),
                    device_index_of(tensor)};
}

inline TensorView view_to_receive(const at::Tensor& tensor) {
  return TensorView{tensor.mutable_data_ptr(), dtype_of(tensor), tensor.sizes().vec(), device_index_of(tensor)};
}

}  // namespace pipecomm
