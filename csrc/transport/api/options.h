// What a process group is made with: its limits, the link it emulates, its memory and devices.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "device/device.h"
#include "memory/block.h"
#include "transport/api/wait.h"

namespace pipecomm {

// A slow link, emulated by the sender stamping each chunk with the time it would have arrived.
struct LinkEmulation {
  double bytes_per_s = 0;  // 0 = no limit
  double latency_s = 0;
  bool is_on() const { return bytes_per_s > 0 || latency_s > 0; }
};

// What may be on its way to one peer. Equal on all ranks.
struct FlowLimits {
  std::size_t max_nbytes = std::size_t{4} << 20;  // of records that the peer has not taken: its ring's size
  std::size_t max_messages = 0;                   // whose last byte the peer has not taken; 0 = no limit
  // On their way from this process, over all links of all groups: a link that has something on its way begins no
  // message at or above this. 0 = no limit.
  std::size_t max_process_messages = 0;
  std::size_t max_process_nbytes = 0;
  bool backward_first = true;  // activation gradients overtake what has not begun to leave
  // Rendezvous: a send is done only when its receive is posted. Makes a test hang, and fail by its timeout, wherever
  // the order of sends and receives works only because small messages are eager.
  bool is_strict = false;
};

struct CommunicatorOptions {
  std::string name;  // shown in errors: the process group's
  FlowLimits limits;
  std::size_t max_parked_nbytes = std::size_t{256} << 20;
  LinkEmulation emulation;
  std::shared_ptr<Pool> pool;  // where messages without a target, and unexpected ones, are put
  // Treats tensors of the host as this device's (make_host_device), so that they cross in slots.
  std::shared_ptr<Device> stand_in;
  Nanoseconds finish_timeout = std::chrono::seconds(5);  // close() waits for devices at most this long
  // Opens the device of the first tensor on one; tests put the host there.
  std::function<std::shared_ptr<Device>(int)> open_device = make_cuda_device;
};

}  // namespace pipecomm
