// CUDA memory for one process, or for two: cuMemCreate's descriptors first, cudaMalloc with IPC handles otherwise.
// Runs over a stand-in driver (tests/fake_cuda); not yet run on a GPU.
#include <unistd.h>

#include <cstring>
#include <utility>

#include "device/cuda_guard.h"
#include "memory/cuda_memory.h"
#include "memory/segment.h"

namespace pipecomm {
namespace {

// A range of addresses with physical memory mapped into it. Every member is undone in the destructor, as far as it
// was done.
class Mapping {
 public:
  explicit Mapping(int device_index) : device_index_(device_index) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    try {
      const DeviceGuard guard(device_index_);
      if (is_mapped_) PC_DRIVER(cuMemUnmap, device_index_)(address_, nbytes_);
      if (address_ != 0) PC_DRIVER(cuMemAddressFree, device_index_)(address_, nbytes_);
      if (has_handle_) PC_DRIVER(cuMemRelease, device_index_)(handle_);
    } catch (const Error&) {  // A destructor has nobody to tell.
    }
    if (fd_ >= 0) ::close(fd_);
  }

  void create(std::size_t nbytes) {
    const CUmemAllocationProp prop = properties();
    std::size_t granularity = 0;
    PC_DRIVER(cuMemGetAllocationGranularity, device_index_)
    (&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    nbytes_ = round_up(nbytes, granularity);
    PC_DRIVER(cuMemCreate, device_index_)(&handle_, nbytes_, &prop, 0ULL);
    has_handle_ = true;
    PC_DRIVER(cuMemExportToShareableHandle, device_index_)
    (static_cast<void*>(&fd_), handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ULL);
    map();
  }

  void import(int fd, std::size_t nbytes) {
    nbytes_ = nbytes;
    PC_DRIVER(cuMemImportFromShareableHandle, device_index_)
    (&handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    has_handle_ = true;
    map();
  }

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }

 private:
  CUmemAllocationProp properties() const {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = location();
    return prop;
  }

  CUmemLocation location() const {
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device_index_;
    return location;
  }

  // Fails here where this device cannot reach the other's memory.
  void map() {
    PC_DRIVER(cuMemAddressReserve, device_index_)
    (&address_, nbytes_, std::size_t{0}, CUdeviceptr{0}, 0ULL);
    PC_DRIVER(cuMemMap, device_index_)(address_, nbytes_, std::size_t{0}, handle_, 0ULL);
    is_mapped_ = true;
    CUmemAccessDesc access{};
    access.location = location();
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    PC_DRIVER(cuMemSetAccess, device_index_)(address_, nbytes_, &access, std::size_t{1});
  }

  const int device_index_;
  CUmemGenericAllocationHandle handle_ = 0;
  bool has_handle_ = false;
  CUdeviceptr address_ = 0;
  bool is_mapped_ = false;
  std::size_t nbytes_ = 0;
  int fd_ = -1;
};

DeviceMemory own_mapping(std::shared_ptr<Mapping> mapping) {
  DeviceMemory memory{mapping->data(), mapping->nbytes(), mapping->fd(), "", nullptr};
  memory.owner = std::move(mapping);
  return memory;
}

[[noreturn]] void refuse(Sharing sharing) {
  throw Error(ErrorKind::transport, "expected CUDA memory by descriptor or IPC handle; got sharing number " +
                                        std::to_string(static_cast<int>(sharing)) + " from the peer");
}

// What is shared is of no use to a device whose streams cannot wait for a peer's counters: some virtual GPUs.
void require_counters(int device_index) {
  int can_count = 0;
  PC_DRIVER(cuDeviceGetAttribute, device_index)
  (&can_count, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, CUdevice{device_index});
  if (can_count != 0) return;
  throw Error(ErrorKind::cuda, "expected a CUDA device whose streams wait for 64-bit values; got device " +
                                   std::to_string(device_index));
}

// Only what a pool can do something about is called exhausted.
void check_memory(cudaError_t status, const char* call, std::size_t nbytes, int device_index) {
  if (status != cudaErrorMemoryAllocation) return check_cuda(status, call, device_index);
  cudaGetLastError();
  throw Error(ErrorKind::pool_exhausted, "expected " + std::to_string(nbytes) + " bytes by " + call +
                                             " for CUDA device " + std::to_string(device_index) +
                                             "; got out of memory");
}

// Closed when the import has ended, whichever way: the mapping does not need it.
class ClosedAtEnd {
 public:
  explicit ClosedAtEnd(int fd) : fd_(fd) {}
  ~ClosedAtEnd() {
    if (fd_ >= 0) ::close(fd_);
  }
  ClosedAtEnd(const ClosedAtEnd&) = delete;
  ClosedAtEnd& operator=(const ClosedAtEnd&) = delete;

 private:
  const int fd_;
};

}  // namespace

DeviceMemory allocate_cuda_memory(int device_index, std::size_t nbytes) {
  const DeviceGuard guard(device_index);
  void* data = nullptr;
  check_memory(cudaMalloc(&data, nbytes), "cudaMalloc", nbytes, device_index);
  DeviceMemory memory{static_cast<std::byte*>(data), nbytes, -1, "", nullptr};
  memory.owner = std::shared_ptr<void>(
      data, [device_index](void* pointer) { quietly_on(device_index, [pointer] { return cudaFree(pointer); }); });
  return memory;
}

DeviceMemory allocate_pinned_memory(int device_index, std::size_t nbytes) {
  const DeviceGuard guard(device_index);
  void* data = nullptr;
  check_memory(cudaHostAlloc(&data, nbytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc", nbytes,
               device_index);
  DeviceMemory memory{static_cast<std::byte*>(data), nbytes, -1, "", nullptr};
  memory.owner = std::shared_ptr<void>(
      data, [device_index](void* pointer) { quietly_on(device_index, [pointer] { return cudaFreeHost(pointer); }); });
  return memory;
}

DeviceMemory share_cuda_memory(int device_index, Sharing sharing, std::size_t nbytes) {
  const DeviceGuard guard(device_index);
  require_counters(device_index);
  if (sharing == Sharing::descriptor) {
    auto mapping = std::make_shared<Mapping>(device_index);
    mapping->create(nbytes);
    return own_mapping(std::move(mapping));
  }
  if (sharing != Sharing::handle) refuse(sharing);
  DeviceMemory memory = allocate_cuda_memory(device_index, nbytes);
  cudaIpcMemHandle_t handle{};
  check_cuda(cudaIpcGetMemHandle(&handle, memory.data), "cudaIpcGetMemHandle", device_index);
  memory.handle.assign(reinterpret_cast<const char*>(&handle), sizeof(handle));
  return memory;
}

DeviceMemory adopt_cuda_memory(int device_index, Sharing sharing, std::size_t nbytes, const std::string& text, int fd) {
  const ClosedAtEnd closed(fd);
  const DeviceGuard guard(device_index);
  require_counters(device_index);
  if (sharing == Sharing::descriptor && fd >= 0) {
    auto mapping = std::make_shared<Mapping>(device_index);
    mapping->import(fd, nbytes);
    return own_mapping(std::move(mapping));
  }
  cudaIpcMemHandle_t handle{};
  if (sharing != Sharing::handle || text.size() != sizeof(handle)) refuse(sharing);
  std::memcpy(&handle, text.data(), sizeof(handle));
  void* data = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle", device_index);
  DeviceMemory memory{static_cast<std::byte*>(data), nbytes, -1, "", nullptr};
  memory.owner = std::shared_ptr<void>(data, [device_index](void* pointer) {
    quietly_on(device_index, [pointer] { return cudaIpcCloseMemHandle(pointer); });
  });
  CUdeviceptr begin = 0;
  std::size_t opened_nbytes = 0;
  PC_DRIVER(cuMemGetAddressRange, device_index)(&begin, &opened_nbytes, reinterpret_cast<CUdeviceptr>(data));
  if (opened_nbytes >= nbytes) return memory;
  throw Error(ErrorKind::transport, "expected an IPC handle of " + std::to_string(nbytes) + " bytes; got " +
                                        std::to_string(opened_nbytes) + " from the peer");
}

}  // namespace pipecomm
