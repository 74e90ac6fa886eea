// With FAKE_CUDA_STAND_IN=1, what the tests take for a device on the host is a CUDA device over this driver: the tests
// of the transport and of Python, whose tensors lie on the host, run through it. The machine must be coherent.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

#include "base/error.h"
#include "control.h"
#include "device/device.h"
#include "forbid.h"

namespace pipecomm {

std::shared_ptr<Device> make_plain_host_device(StreamFactory make_stream);

namespace {

std::atomic<bool> g_is_capturing{false};

class StandIn final : public Device {
 public:
  explicit StandIn(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  int index() const override { return device_->index(); }
  std::string name() const override { return "host"; }
  bool is_host() const override { return false; }
  bool has_host_tensors() const override { return true; }
  std::shared_ptr<Stream> make_stream() override { return device_->make_stream(); }
  Event record(void*) override {
    if (g_is_capturing.load()) throw Error(ErrorKind::config, "expected no capture; got one, of the caller's stream");
    return {};
  }
  std::shared_ptr<void> register_host(void* data, std::size_t nbytes) override {
    return device_->register_host(data, nbytes);
  }

 private:
  const std::shared_ptr<Device> device_;
};

}  // namespace

// For Python: the caller's stream, of which hosts have none, is captured.
extern "C" void fake_cuda_set_capturing(int value) { g_is_capturing.store(value != 0); }

// As refuse().
extern "C" void fake_cuda_refuse(const char* call, int code, int times) { fake_cuda::refuse(call, code, times); }

std::shared_ptr<Device> make_host_device(StreamFactory make_stream) {
  const char* text = std::getenv("FAKE_CUDA_STAND_IN");
  if (text == nullptr || *text != '1') return make_plain_host_device(std::move(make_stream));
  fake_cuda::require(fake_cuda::machine().is_coherent, "FAKE_CUDA_STAND_IN", "FAKE_CUDA has is_coherent=1");
  return std::make_shared<StandIn>(make_cuda_device(0));
}

}  // namespace pipecomm
