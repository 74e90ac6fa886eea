// What a test tells the stand-in driver, and asks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/api.h"

namespace fake_cuda {

// What the machine is like. Read from FAKE_CUDA in the environment at first use: "num_devices=2,loads_lazily=0".
struct Machine {
  int num_devices = 2;
  std::size_t memory_nbytes = std::size_t{1} << 30;  // of each device, for this process
  bool waits_for_64_bit_values = true;
  bool exports_memory = true;       // cuMemCreate with a descriptor
  bool has_ipc = true;              // cudaIpcGetMemHandle
  bool uses_host_addresses = true;  // devices see registered memory where the host sees it
  bool reaches_peers = true;        // devices map each other's memory
  bool loads_lazily = true;         // a kernel is loaded at its first launch
  bool is_coherent = false;         // devices and host see all memory at one address, as where ATS is on
  std::size_t queue_length = 1024;  // operations of a stream
  std::size_t max_delay_us = 0;     // before operations, at random
};
PC_API Machine& machine();

// The call of that name gives `code` instead of doing anything: `times` times, after it has worked `after` times.
PC_API void refuse(const std::string& call, int code, int times = 1, int after = 0);
// Since the last forget_calls(); of all calls without a name.
PC_API std::uint64_t num_calls(const std::string& call = "");
PC_API void forget_calls();
// "cudaEventRecord 2, cudaMemcpyAsync 1", by name.
PC_API std::string calls_text();
// Calls and operations that were delayed at random.
PC_API std::uint64_t num_delays();
// Primary contexts of this process on the device: 0 or 1.
PC_API int num_contexts(int device);
// As an illegal access of a kernel that runs there would.
PC_API void break_device(int device, int code);
// Capture, which the sources never begin. `mode` is a cudaStreamCaptureMode; the end is false where it was invalidated.
PC_API void begin_capture(void* stream, int mode);
PC_API bool end_capture(void* stream);
// Bytes that cudaMalloc, cuMemCreate and the like hold.
PC_API std::size_t allocated_nbytes(int device);
// Operations that a stream has not done, the one under way included.
PC_API std::size_t num_queued(void* stream);

// For a child that a test has forked: the parent's contexts, and their streams' threads, are not there.
PC_API void begin_anew();

}  // namespace fake_cuda
