// Host loops for any processor: what the compiler makes of the scalar code.
#include "codec/host_loops.h"

namespace pipecomm {
namespace {

struct Portable {
  template <int kCount, typename T>
  static std::uint32_t max_magnitude(const std::byte* x, T) {
    return Scalar<T>::max_magnitude(x, kCount);
  }
  template <typename T>
  static Extremes extremes(const std::byte* x, T) {
    return Scalar<T>::extremes(x, kBlockSize);
  }
  template <typename T>
  static void quantize_int8(const std::byte* x, T, float inverse, std::byte* codes) {
    Scalar<T>::quantize_int8(x, kBlockSize, inverse, codes);
  }
  template <typename T>
  static void quantize_int4(const std::byte* x, T, float half_zero, float inverse, std::byte* codes) {
    Scalar<T>::quantize_int4(x, kBlockSize, half_zero, inverse, codes);
  }
  template <typename T>
  static void dequantize_int8(const std::byte* codes, float scale, std::byte* x, T) {
    Scalar<T>::dequantize_int8(codes, kBlockSize, scale, x);
  }
  template <typename T>
  static void dequantize_int4(const std::byte* codes, float scale, float zero, std::byte* x, T) {
    Scalar<T>::dequantize_int4(codes, kBlockSize, scale, zero, x);
  }
};

}  // namespace

const HostLoops kPortableLoops = {"portable", &encode_with<Portable>, &decode_with<Portable>};

}  // namespace pipecomm
