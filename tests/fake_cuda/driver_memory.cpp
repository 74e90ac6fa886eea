// The driver's memory: allocations known by handle and by file descriptor, and ranges of addresses they are mapped
// into.
#include <cuda.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "call.h"
#include "control.h"
#include "driver.h"
#include "forbid.h"
#include "memory.h"

using namespace fake_cuda;

namespace {

constexpr std::size_t kGranule = std::size_t{2} << 20;

struct Allocation {
  int fd;
  std::size_t nbytes;
  int device;
  bool is_own;  // made here, and so counted here
};

std::mutex g_mutex;
std::map<CUmemGenericAllocationHandle, Allocation> g_allocations;
std::map<CUdeviceptr, std::size_t> g_reserved;
CUmemGenericAllocationHandle g_next_handle = 1;

CUmemGenericAllocationHandle add_allocation(const Allocation& allocation) {
  const std::lock_guard guard(g_mutex);
  g_allocations[g_next_handle] = allocation;
  return g_next_handle++;
}

Allocation find_allocation(CUmemGenericAllocationHandle handle, const char* call) {
  const std::lock_guard guard(g_mutex);
  require(g_allocations.contains(handle), call, "the handle is one that was made and not released");
  return g_allocations[handle];
}

std::byte* pointer(CUdeviceptr address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

namespace fake_cuda {

CUresult memory_granularity(std::size_t* nbytes, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags) {
  Call call("cuMemGetAllocationGranularity", Needs::context, false);
  require(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED, "cuMemGetAllocationGranularity", "the memory is pinned");
  *nbytes = kGranule;
  return static_cast<CUresult>(call.code());
}

CUresult create_memory(CUmemGenericAllocationHandle* handle, std::size_t nbytes, const CUmemAllocationProp* prop,
                       unsigned long long flags) {
  Call call("cuMemCreate", Needs::drained, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  require(nbytes > 0 && nbytes % kGranule == 0 && flags == 0, "cuMemCreate",
          "the size is a multiple of the granularity");
  if (prop->requestedHandleTypes != 0 && !machine().exports_memory) return CUDA_ERROR_NOT_SUPPORTED;
  const int fd = make_memory(prop->location.id, nbytes);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = add_allocation({fd, nbytes, prop->location.id, true});
  return CUDA_SUCCESS;
}

// The memory lives as long as a mapping or a handle of it.
CUresult release_memory(CUmemGenericAllocationHandle handle) {
  Call call("cuMemRelease", Needs::context, false);
  const Allocation allocation = find_allocation(handle, "cuMemRelease");
  const std::lock_guard guard(g_mutex);
  g_allocations.erase(handle);
  ::close(allocation.fd);
  if (allocation.is_own) give_back_memory(allocation.device, allocation.nbytes);
  return static_cast<CUresult>(call.code());
}

CUresult export_memory(void* fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long) {
  Call call("cuMemExportToShareableHandle", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  require(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "cuMemExportToShareableHandle", "the type was asked for");
  *static_cast<int*>(fd) = ::dup(find_allocation(handle, "cuMemExportToShareableHandle").fd);
  return CUDA_SUCCESS;
}

CUresult import_memory(CUmemGenericAllocationHandle* handle, void* text, CUmemAllocationHandleType) {
  Call call("cuMemImportFromShareableHandle", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  const int fd = ::dup(static_cast<int>(reinterpret_cast<std::intptr_t>(text)));
  const int device = device_of_memory(fd);
  if (device < 0) {
    ::close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  *handle = add_allocation({fd, memory_nbytes(fd), device, false});
  return CUDA_SUCCESS;
}

CUresult reserve_addresses(CUdeviceptr* address, std::size_t nbytes, std::size_t, CUdeviceptr, unsigned long long) {
  Call call("cuMemAddressReserve", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  require(nbytes > 0 && nbytes % 4096 == 0, "cuMemAddressReserve", "the size is a multiple of the page size");
  *address = reinterpret_cast<CUdeviceptr>(reserve(nbytes));
  const std::lock_guard guard(g_mutex);
  g_reserved[*address] = nbytes;
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr address, std::size_t nbytes) {
  Call call("cuMemAddressFree", Needs::context, false);
  Range range;
  require(!find_range(pointer(address), range), "cuMemAddressFree", "nothing is mapped into the range");
  const std::lock_guard guard(g_mutex);
  require(g_reserved.contains(address) && g_reserved[address] == nbytes, "cuMemAddressFree", "the range was reserved");
  g_reserved.erase(address);
  unmap(pointer(address), nbytes);
  return static_cast<CUresult>(call.code());
}

CUresult map_memory(CUdeviceptr address, std::size_t nbytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
  Call call("cuMemMap", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  const Allocation allocation = find_allocation(handle, "cuMemMap");
  require(offset == 0 && flags == 0, "cuMemMap", "offset and flags are 0");
  if (nbytes != allocation.nbytes || nbytes % kGranule != 0) return CUDA_ERROR_INVALID_VALUE;
  {
    const std::lock_guard guard(g_mutex);
    require(g_reserved.contains(address) && g_reserved[address] >= nbytes, "cuMemMap", "the range was reserved");
  }
  const int fd = ::dup(allocation.fd);
  std::byte* shadow = machine().is_coherent ? map_shared_at(fd, pointer(address), nbytes) : map_shared(fd, nbytes);
  add_range({Kind::mapped, pointer(address), shadow, nullptr, nbytes, allocation.device, {}, fd});
  return CUDA_SUCCESS;
}

// Waits for nobody: "cuMemUnmap ... will not implicitly synchronize", so that what a stream still does to it is a
// fault.
CUresult unmap_memory(CUdeviceptr address, std::size_t) {
  Call call("cuMemUnmap", Needs::context, false);
  const Range range = take_range(pointer(address), "cuMemUnmap", "the range is one that is mapped");
  require(range.kind == Kind::mapped, "cuMemUnmap", "the range is cuMemMap's");
  if (range.shadow == range.address) {
    map_nothing_at(range.address, range.nbytes);
  } else {
    unmap(range.shadow, range.nbytes);
  }
  ::close(range.fd);
  return static_cast<CUresult>(call.code());
}

CUresult set_access(CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc* access, std::size_t count) {
  Call call("cuMemSetAccess", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  Range range;
  require(find_range(pointer(address), range), "cuMemSetAccess", "the range is one that is mapped");
  for (std::size_t i = 0; i < count; ++i) {
    const int device = access[i].location.id;
    if (device != range.device && !machine().reaches_peers) return CUDA_ERROR_INVALID_DEVICE;
    let_reach(pointer(address), nbytes, device);
  }
  return CUDA_SUCCESS;
}

CUresult address_range(CUdeviceptr* begin, std::size_t* nbytes, CUdeviceptr address) {
  Call call("cuMemGetAddressRange", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  Range range;
  if (!find_range(pointer(address), range)) return CUDA_ERROR_NOT_FOUND;
  *begin = reinterpret_cast<CUdeviceptr>(range.address);
  *nbytes = range.nbytes;
  return CUDA_SUCCESS;
}

}  // namespace fake_cuda
