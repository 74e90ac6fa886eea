// Kernels on the stand-in driver: included in front of each CUDA source, which the host's compiler then understands.
// cudaLaunchKernel gets an overload that knows the kernel's parameters, and runs it as tests/simt does.
#pragma once

#include <cuda_runtime.h>

#undef __global__
#undef __device__
#undef __shared__
#include <functional>
#include <tuple>
#include <type_traits>

#include "base/api.h"
#include "simt.h"

namespace fake_cuda {

// Enqueues `run(device)`, which gives false for an address that the device does not reach. The first launch of a kernel
// loads it, where it is loaded lazily and not there yet.
PC_API cudaError_t launch(const void* kernel, cudaStream_t stream, std::function<bool(int)> run);
// Where the bytes of a kernel's argument lie; nullptr where the device does not reach them.
PC_API std::byte* find_argument(int device, const void* address);

// Pointers of the device become ones that the host follows.
template <typename Value>
bool translate(int device, Value& value) {
  if constexpr (std::is_pointer_v<Value>) {
    value = reinterpret_cast<Value>(find_argument(device, value));
    return value != nullptr;
  }
  return true;
}

template <typename... Parameters>
bool run_kernel(int device, void (*kernel)(Parameters...), unsigned num_blocks, unsigned num_threads,
                std::tuple<Parameters...> arguments) {
  const bool is_reached = std::apply([&](auto&... each) { return (translate(device, each) && ...); }, arguments);
  if (is_reached) simt::launch(num_blocks, num_threads, simt::Order::ascending, [&] { std::apply(kernel, arguments); });
  return is_reached;
}

}  // namespace fake_cuda

template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** pointers, std::size_t,
                             cudaStream_t stream) {
  const auto arguments = [pointers]<std::size_t... i>(std::index_sequence<i...>) {
    return std::tuple<Parameters...>(*static_cast<Parameters*>(pointers[i])...);
  }(std::index_sequence_for<Parameters...>{});
  return fake_cuda::launch(reinterpret_cast<const void*>(kernel), stream, [=](int device) {
    return fake_cuda::run_kernel(device, kernel, grid.x, block.x, arguments);
  });
}
