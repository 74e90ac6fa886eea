// A CUDA device. Runs over a stand-in driver (tests/fake_cuda);
// not yet run on a GPU.
#include <string>

#include "device/cuda_address.h"
#include "device/cuda_event.h"
#include "device/cuda_guard.h"
#include "device/device.h"

namespace pipecomm {
namespace {

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int device_index) : device_index_(device_index) {
    int num_devices = 0;
    check_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount", device_index);
    if (device_index >= 0 && device_index < num_devices) return;
    throw Error(ErrorKind::cuda, "expected a CUDA device from 0 to " + std::to_string(num_devices - 1) + "; got " +
                                     std::to_string(device_index));
  }

  int index() const override { return device_index_; }
  std::string name() const override { return "cuda:" + std::to_string(device_index_); }
  bool is_host() const override { return false; }
  std::shared_ptr<Stream> make_stream() override { return make_cuda_stream(device_index_); }

  Event record(void* native_stream) override {
    const DeviceGuard guard(device_index_);
    const auto stream = static_cast<cudaStream_t>(native_stream);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing", device_index_);
    if (status != cudaStreamCaptureStatusNone) {
      throw Error(ErrorKind::config,
                  "expected a send or receive outside of CUDA graph capture; got one on a capturing stream of " +
                      name() + ": a transfer waits for numbers that grow, which a replay cannot; capture the compute " +
                      "between transfers instead");
    }
    return record_cuda_event(stream, device_index_);
  }

  std::shared_ptr<void> register_host(void* data, std::size_t nbytes) override {
    return register_host_memory(device_index_, data, nbytes);
  }

 private:
  const int device_index_;
};

}  // namespace

std::shared_ptr<Device> make_cuda_device(int device_index) { return std::make_shared<CudaDevice>(device_index); }

}  // namespace pipecomm
