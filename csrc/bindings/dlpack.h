// Memory of a pool as a DLPack capsule: how torch takes over a device's memory without a header of either.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "device/device.h"
#include "memory/block.h"

namespace pipecomm {

// The block as a vector of bytes on CUDA device `device_index`, or on the host (kOnHost). With a device, it goes back
// to its pool once `stream` has done what it had been given when the last tensor over the memory died.
pybind11::object to_dlpack(Block block, int device_index, std::shared_ptr<Device> device, void* stream);

// Again those that were dropped when nobody could tell when a stream has done with them: under graph capture.
void give_back_kept();

}  // namespace pipecomm
