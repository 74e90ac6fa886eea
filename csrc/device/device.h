// One device as the transport sees it: its streams, the points of its callers' streams, host memory that it may touch.
// The CUDA half (cuda_device.cu) runs over a stand-in driver (tests/fake_cuda); not yet run on a GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "device/stream.h"

namespace pipecomm {

class PC_API Device {
 public:
  virtual ~Device() = default;

  virtual int index() const = 0;
  // "cuda:0"; "host" for the stand-in.
  virtual std::string name() const = 0;
  // Host memory with worker threads for streams: what runs and tests the device's host logic without a GPU.
  virtual bool is_host() const = 0;
  // Callers' tensors lie on the host, where the device is to treat them as its own.
  virtual bool has_host_tensors() const { return is_host(); }
  virtual std::shared_ptr<Stream> make_stream() = 0;
  // The point that `native_stream` (a cudaStream_t of this device) has reached. Throws a config error for a stream
  // under graph capture: sequence numbers grow, so a replay would wait for numbers long past.
  virtual Event record(void* native_stream) = 0;
  // Until the last copy of the result dies, this device may copy from and to the range, and its streams may wait for
  // and set counters there. Throws a CUDA error.
  virtual std::shared_ptr<void> register_host(void* data, std::size_t nbytes) = 0;
};

// The host as a device. Its streams may be given another make, which tests use to delay them.
using StreamFactory = std::function<std::shared_ptr<Stream>()>;
PC_API std::shared_ptr<Device> make_host_device(StreamFactory make_stream = make_host_stream);
// Throws a not built error where nvcc was not there at build time, a CUDA error where driver or device is missing.
PC_API std::shared_ptr<Device> make_cuda_device(int device_index);

}  // namespace pipecomm
