// The host stand-in's memory, pools over any device's memory, and the choice between host and CUDA.
#include "memory/device_memory.h"

#include <unistd.h>

#include <cstdlib>
#include <map>
#include <utility>

#include "base/error.h"
#include "memory/segment.h"
#ifdef PIPECOMM_HAVE_CUDA
#include "memory/cuda_memory.h"
#endif

namespace pipecomm {
namespace {

DeviceMemory own_segment(Segment segment) {
  auto owner = std::make_shared<Segment>(std::move(segment));
  return {owner->data(), owner->nbytes(), owner->fd(), "", owner};
}

DeviceMemory allocate_on(Device& device, std::size_t nbytes) {
#ifdef PIPECOMM_HAVE_CUDA
  if (!device.is_host()) return allocate_cuda_memory(device.index(), nbytes);
#else
  static_cast<void>(device);
#endif
  return own_segment(Segment::create(nbytes));
}

DeviceMemory allocate_pinned(Device& device, std::size_t nbytes) {
#ifdef PIPECOMM_HAVE_CUDA
  if (!device.is_host()) return allocate_pinned_memory(device.index(), nbytes);
#endif
  DeviceMemory memory = own_segment(Segment::create(nbytes));
  struct Pinned {
    std::shared_ptr<void> segment;
    std::shared_ptr<void> registration;  // ends first
  };
  auto registration = device.register_host(memory.data, memory.nbytes);
  memory.owner = std::make_shared<Pinned>(Pinned{std::move(memory.owner), std::move(registration)});
  return memory;
}

// Segments by themselves; none is joined with another.
class DeviceUpstream final : public Upstream {
 public:
  using Allocate = DeviceMemory (*)(Device&, std::size_t);

  DeviceUpstream(std::shared_ptr<Device> device, Allocate make) : device_(std::move(device)), allocate_(make) {}

  std::size_t granule_nbytes() const override { return page_nbytes(); }

  std::byte* allocate(std::size_t nbytes, std::byte*) override {
    DeviceMemory memory = allocate_(*device_, nbytes);
    std::byte* data = memory.data;
    segments_.emplace(data, std::move(memory));
    return data;
  }

  void release(std::byte* segment, std::size_t) noexcept override { segments_.erase(segment); }
  bool waits_at_release() const override { return !device_->is_host(); }  // cudaFree, cudaHostUnregister

 private:
  const std::shared_ptr<Device> device_;
  const Allocate allocate_;
  std::map<std::byte*, DeviceMemory> segments_;
};

}  // namespace

std::vector<Sharing> sharings_of(const Device& device) {
  const std::map<std::string, std::vector<Sharing>> ways = {{"auto", {Sharing::descriptor, Sharing::handle}},
                                                            {"descriptor", {Sharing::descriptor}},
                                                            {"handle", {Sharing::handle}},
                                                            {"none", {}}};
  const char* value = std::getenv("PIPECOMM_DEVICE_SHARING");
  const std::string text = value == nullptr || *value == '\0' ? "auto" : value;
  const auto found = ways.find(text);
  if (found == ways.end()) {
    throw Error(ErrorKind::config,
                "expected auto, descriptor, handle or none in PIPECOMM_DEVICE_SHARING; got '" + text + "'");
  }
  std::vector<Sharing> sharings = found->second;
  if (device.is_host()) std::erase(sharings, Sharing::handle);
  return sharings;
}

DeviceMemory share_memory(Device& device, Sharing sharing, std::size_t nbytes) {
#ifdef PIPECOMM_HAVE_CUDA
  if (!device.is_host()) return share_cuda_memory(device.index(), sharing, nbytes);
#endif
  if (device.is_host() && sharing == Sharing::descriptor) return own_segment(Segment::create(nbytes));
  throw Error(ErrorKind::config, "expected a way to share memory of " + device.name() + "; got number " +
                                     std::to_string(static_cast<int>(sharing)));
}

DeviceMemory adopt_memory(Device& device, Sharing sharing, std::size_t nbytes, const std::string& handle, int fd) {
#ifdef PIPECOMM_HAVE_CUDA
  if (!device.is_host()) return adopt_cuda_memory(device.index(), sharing, nbytes, handle, fd);
#else
  static_cast<void>(handle);
#endif
  if (device.is_host() && sharing == Sharing::descriptor) return own_segment(Segment::adopt(fd, nbytes));
  if (fd >= 0) ::close(fd);
  throw Error(ErrorKind::transport, "expected memory that " + device.name() + " can map; got sharing number " +
                                        std::to_string(static_cast<int>(sharing)) + " from the peer");
}

std::shared_ptr<Pool> make_device_pool(std::shared_ptr<Device> device) {
  return std::make_shared<Pool>(std::make_unique<DeviceUpstream>(std::move(device), allocate_on));
}

std::shared_ptr<Pool> make_pinned_pool(std::shared_ptr<Device> device) {
  return std::make_shared<Pool>(std::make_unique<DeviceUpstream>(std::move(device), allocate_pinned));
}

}  // namespace pipecomm
