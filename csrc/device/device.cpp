// The host as a device: a stand-in for a GPU.
#include "device/device.h"

#include <utility>

#include "base/error.h"

namespace pipecomm {
namespace {

class HostDevice final : public Device {
 public:
  explicit HostDevice(StreamFactory make_stream) : make_stream_(std::move(make_stream)) {}

  int index() const override { return 0; }
  std::string name() const override { return "host"; }
  bool is_host() const override { return true; }
  std::shared_ptr<Stream> make_stream() override { return make_stream_(); }
  Event record(void*) override { return {}; }
  std::shared_ptr<void> register_host(void*, std::size_t) override { return nullptr; }

 private:
  const StreamFactory make_stream_;
};

}  // namespace

std::shared_ptr<Device> make_host_device(StreamFactory make_stream) {
  return std::make_shared<HostDevice>(std::move(make_stream));
}

#ifndef PIPECOMM_HAVE_CUDA
std::shared_ptr<Device> make_cuda_device(int device_index) {
  throw Error(ErrorKind::not_built, "expected a build with CUDA for tensors on cuda:" + std::to_string(device_index) +
                                        "; got one without. Build again with PIPECOMM_CUDA=on and nvcc on PATH");
}
#endif

}  // namespace pipecomm
