// The host stand-in's memory, pools over any device's memory, and the choice between host and CUDA.
#include "memory/device_memory.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/segment.h"
#ifdef PIPECOMM_HAVE_CUDA
#include "memory/cuda_memory.h"
#endif

namespace pipecomm {
namespace {

// What a device does not have is not asked for again so soon.
constexpr std::chrono::milliseconds kRefusalHolds{100};

struct Asked {
  std::mutex mutex;
  MemoryAsk ask;
};

// Never destroyed: threads may run until the process ends.
Asked& asked() {
  static auto* made = new Asked;
  return *made;
}

bool ask_for_memory() {
  const std::lock_guard lock(asked().mutex);
  return asked().ask && asked().ask();
}

// What others keep in reserve may be just what is missing.
template <typename Attempt>
DeviceMemory with_what_others_keep(const Attempt& attempt) {
  try {
    return attempt();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::pool_exhausted || !ask_for_memory()) throw;
  }
  return attempt();
}

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

// Memory that is allocated on a thread of its own.
class MemoryOnItsWay {
 public:
  ~MemoryOnItsWay() {
    if (thread_.joinable()) thread_.join();
  }
  void begin(std::function<DeviceMemory()> allocate) {
    std::packaged_task<DeviceMemory()> task(std::move(allocate));
    memory_ = task.get_future();
    thread_ = std::thread(std::move(task));
  }
  bool is_under_way() const { return memory_.valid(); }
  bool is_there() const { return memory_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  DeviceMemory take() {
    thread_.join();
    return memory_.get();
  }

 private:
  std::future<DeviceMemory> memory_;
  std::thread thread_;
};

// Segments by themselves; none is joined with another.
class DeviceUpstream final : public Upstream {
 public:
  using Allocate = DeviceMemory (*)(Device&, std::size_t);

  DeviceUpstream(std::shared_ptr<Device> device, Allocate make) : device_(std::move(device)), allocate_(make) {}

  std::size_t granule_nbytes() const override { return page_nbytes(); }

  std::byte* allocate(std::size_t nbytes, std::byte*) override { return keep(allocate_(*device_, nbytes)); }

  std::byte* allocate_later(std::size_t nbytes) override {
    if (refused_ && nbytes >= refused_nbytes_ && Clock::now() < refused_until_) throw Error(*refused_);
    if (on_its_way_.is_under_way() && !on_its_way_.is_there()) return nullptr;
    if (on_its_way_.is_under_way()) take_in();
    const auto spare = std::find_if(spares_.begin(), spares_.end(), [&](const DeviceMemory& memory) {
      return memory.nbytes >= nbytes && memory.nbytes / 2 <= nbytes;
    });
    if (spare != spares_.end()) {
      std::byte* data = keep(std::move(*spare));
      spares_.erase(spare);
      return data;
    }
    on_its_way_nbytes_ = nbytes;
    on_its_way_.begin([device = device_, allocate = allocate_, nbytes] {
      return with_what_others_keep([&] { return allocate(*device, nbytes); });
    });
    return nullptr;
  }

  void release(std::byte* segment, std::size_t) noexcept override { segments_.erase(segment); }
  bool waits_at_release() const override { return !device_->is_host(); }  // cudaFree, cudaHostUnregister
  bool waits_at_allocate() const override { return !device_->is_host(); }

 private:
  using Clock = std::chrono::steady_clock;

  std::byte* keep(DeviceMemory memory) {
    std::byte* data = memory.data;
    segments_.emplace(data, std::move(memory));
    return data;
  }

  void take_in() {
    try {
      spares_.push_back(on_its_way_.take());
    } catch (const Error& error) {
      refused_ = error;
      refused_nbytes_ = on_its_way_nbytes_;
      refused_until_ = Clock::now() + kRefusalHolds;
      throw;
    }
  }

  const std::shared_ptr<Device> device_;
  const Allocate allocate_;
  std::map<std::byte*, DeviceMemory> segments_;
  std::vector<DeviceMemory> spares_;  // that came when something else was asked for
  std::size_t on_its_way_nbytes_ = 0;
  MemoryOnItsWay on_its_way_;
  // Asked for less meanwhile, a device may still have that.
  std::optional<Error> refused_;
  std::size_t refused_nbytes_ = 0;
  Clock::time_point refused_until_;
};

}  // namespace

void set_memory_ask(MemoryAsk ask) {
  const std::lock_guard lock(asked().mutex);
  asked().ask = std::move(ask);
}

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
  if (!device.is_host()) {
    return with_what_others_keep([&] { return share_cuda_memory(device.index(), sharing, nbytes); });
  }
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
