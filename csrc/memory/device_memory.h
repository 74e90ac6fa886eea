// A device's memory: of this process alone, pinned on the host, or such that two processes map it, one copying into
// what the other owns.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/api.h"
#include "device/device.h"
#include "memory/block.h"
#include "memory/sharing.h"

namespace pipecomm {

// Ways to share, best first; which of them works for two devices is found out by trying. PIPECOMM_DEVICE_SHARING names
// the only one to try, or none: tensors then go through the host. Throws a config error for another text.
PC_API std::vector<Sharing> sharings_of(const Device& device);
// Memory of this process for one other to adopt; at least `nbytes`. What is shared by handle must not be freed while
// the other may have it open. Throws a pool exhausted or CUDA error.
PC_API DeviceMemory share_memory(Device& device, Sharing sharing, std::size_t nbytes);
// Maps what another process shares. Takes `fd` (or -1) over, also when it throws: a transport or CUDA error.
PC_API DeviceMemory adopt_memory(Device& device, Sharing sharing, std::size_t nbytes, const std::string& handle,
                                 int fd);

// Called without locks when a device has no memory left, once for each try: true where others may have given some back.
// Of the process; none takes it away. Waits for a call under way.
using MemoryAsk = std::function<bool()>;
PC_API void set_memory_ask(MemoryAsk ask);

// A pool of the device's memory; Block::reset(event) gives back what its streams still use.
PC_API std::shared_ptr<Pool> make_device_pool(std::shared_ptr<Device> device);
// A pool of host memory that the device copies from and to asynchronously.
PC_API std::shared_ptr<Pool> make_pinned_pool(std::shared_ptr<Device> device);

}  // namespace pipecomm
