// The ranges that are registered, by device, and pages for counters.
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "device/cuda_address.h"
#include "device/cuda_guard.h"

namespace pipecomm {
namespace {

// Counters of 1,024 streams: page-locked memory must not be needed later, when it may have to wait for them.
constexpr std::size_t kPageNbytes = std::size_t{64} << 10;
constexpr std::size_t kCounterNbytes = 64;  // a cache line each

struct Seen {
  std::size_t nbytes;
  CUdeviceptr address;
};

class HostRanges {
 public:
  void add(int device_index, void* data, std::size_t nbytes, void* seen) {
    const std::lock_guard lock(mutex_);
    ranges_[{device_index, data}] = {nbytes, reinterpret_cast<CUdeviceptr>(seen)};
  }
  void remove(int device_index, const void* data) {
    const std::lock_guard lock(mutex_);
    ranges_.erase({device_index, data});
  }
  CUdeviceptr find(int device_index, const void* address) {
    const std::lock_guard lock(mutex_);
    auto after = ranges_.upper_bound({device_index, address});
    if (after != ranges_.begin() && (--after)->first.first == device_index) {
      const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(address) -
                                                   static_cast<const std::byte*>(after->first.second));
      if (offset < after->second.nbytes) return after->second.address + offset;
    }
    throw Error(ErrorKind::cuda, "expected a counter in memory that is registered with CUDA device " +
                                     std::to_string(device_index) + "; got another one");
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, Seen> ranges_;
};

HostRanges& host_ranges() {
  static auto* all = new HostRanges;
  return *all;
}

void note(int device_index, void* data, std::size_t nbytes) {
  void* seen = nullptr;
  check_cuda(cudaHostGetDevicePointer(&seen, data, 0), "cudaHostGetDevicePointer", device_index);
  host_ranges().add(device_index, data, nbytes, seen);
}

}  // namespace

std::shared_ptr<void> register_host_memory(int device_index, void* data, std::size_t nbytes) {
  const DeviceGuard guard(device_index);
  check_cuda(cudaHostRegister(data, nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "cudaHostRegister",
             device_index);
  std::shared_ptr<void> registration(data, [device_index](void* pointer) {
    host_ranges().remove(device_index, pointer);
    quietly_on(device_index, [pointer] { return cudaHostUnregister(pointer); });
  });
  note(device_index, data, nbytes);
  return registration;
}

CUdeviceptr device_address(int device_index, const Counter& counter) {
  return host_ranges().find(device_index, &counter);
}

// A page for many: page-locked memory may wait for all that is enqueued. Pages stay, since events outlive streams.
std::shared_ptr<Counter> make_cuda_counter(int device_index) {
  struct Page {
    std::byte* data = nullptr;
    std::size_t used = kPageNbytes;
  };
  static std::mutex mutex;
  static auto* pages = new std::map<int, Page>;
  const std::lock_guard lock(mutex);
  Page& page = (*pages)[device_index];
  if (page.used == kPageNbytes) {
    const DeviceGuard guard(device_index);
    void* data = nullptr;
    check_cuda(cudaHostAlloc(&data, kPageNbytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc",
               device_index);
    note(device_index, data, kPageNbytes);
    page = {static_cast<std::byte*>(data), 0};
  }
  auto* counter = new (page.data + page.used) Counter(0);
  page.used += kCounterNbytes;
  return {counter, [](Counter*) {}};
}

}  // namespace pipecomm
