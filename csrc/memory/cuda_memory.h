// The CUDA half of device_memory.h; only built where nvcc is. Not yet run on a GPU.
#pragma once

#include "memory/sharing.h"

namespace pipecomm {

DeviceMemory share_cuda_memory(int device_index, Sharing sharing, std::size_t nbytes);
DeviceMemory adopt_cuda_memory(int device_index, Sharing sharing, std::size_t nbytes, const std::string& handle,
                               int fd);
DeviceMemory allocate_cuda_memory(int device_index, std::size_t nbytes);
// Of the host, page-locked.
DeviceMemory allocate_pinned_memory(int device_index, std::size_t nbytes);

}  // namespace pipecomm
