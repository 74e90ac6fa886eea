// Where devices see memory of the host: they may have another address for it than the host has (WSL 2, some drivers).
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>

#include "device/stream.h"

namespace pipecomm {

// Memory of the host that the device may copy from and to, until the last copy of the result dies. Throws a CUDA error.
std::shared_ptr<void> register_host_memory(int device_index, void* data, std::size_t nbytes);
// Throws a CUDA error for memory that is not registered with the device.
CUdeviceptr device_address(int device_index, const Counter& counter);
// A counter of its own in page-locked memory, at 0.
std::shared_ptr<Counter> make_cuda_counter(int device_index);

}  // namespace pipecomm
