// Element types that travel, named as torch names them, and the one dispatch over the float types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/api.h"
#include "base/error.h"
#include "base/float_bits.h"

namespace pipecomm {

// The values are part of the wire format: append, never renumber.
enum class DType : std::uint8_t {
  uint8 = 0,
  int8 = 1,
  int16 = 2,
  int32 = 3,
  int64 = 4,
  bool_ = 5,
  float16 = 6,
  bfloat16 = 7,
  float32 = 8,
  float64 = 9,
  complex64 = 10,
  complex128 = 11,
  uint16 = 12,
  uint32 = 13,
  uint64 = 14,
  float8_e4m3fn = 15,
  float8_e5m2 = 16,
  float8_e4m3fnuz = 17,
  float8_e5m2fnuz = 18,
  float8_e8m0fnu = 19,
};

inline constexpr int kNumDTypes = 20;

// Bytes of one element.
PC_API std::size_t dtype_nbytes(DType dtype);
// "float32", "bool", ...: torch's name without the "torch." prefix.
PC_API const char* dtype_name(DType dtype);
// Inverse of dtype_name; throws a tensor error that lists the known names.
PC_API DType dtype_from_name(const std::string& name);
// True for a value the wire may hold.
constexpr bool is_known_dtype(std::uint8_t value) { return value < kNumDTypes; }
// True for the types a quantizing codec accepts: float16, bfloat16, float32.
constexpr bool is_quantizable(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32;
}

// Calls fn(T{}) with the value type of a quantizable dtype (float, Bf16, Fp16).
template <typename Fn>
decltype(auto) dispatch_float(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::float32:
      return fn(float{});
    case DType::bfloat16:
      return fn(Bf16{});
    case DType::float16:
      return fn(Fp16{});
    default:
      throw Error(ErrorKind::tensor, std::string("expected float32, bfloat16 or float16 for a quantizing codec; got ") +
                                         dtype_name(dtype));
  }
}

}  // namespace pipecomm
