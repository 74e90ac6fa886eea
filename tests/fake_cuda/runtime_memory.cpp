// The runtime's memory: of devices, registered, and of other processes.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "call.h"
#include "control.h"
#include "forbid.h"
#include "memory.h"

using namespace fake_cuda;

namespace {

constexpr std::size_t kGranule = 512;

cudaError_t result(int code) { return static_cast<cudaError_t>(code); }

// The bytes of cudaIpcMemHandle_t: where the other process finds the memory.
struct IpcHandle {
  pid_t pid;
  int fd;
  std::uint64_t nbytes;
};
static_assert(sizeof(IpcHandle) <= sizeof(cudaIpcMemHandle_t));

void free_memory(Range range) {
  if (range.address != range.shadow) unmap(range.address, range.nbytes);
  unmap(range.shadow, range.nbytes);
  ::close(range.fd);
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t nbytes) {
  Call call("cudaMalloc", Needs::drained, true);
  if (call.code() != 0) return result(call.code());
  require(nbytes > 0, "cudaMalloc", "there are bytes to allocate");
  const int device = call.context().device;
  const std::size_t whole = (nbytes + kGranule - 1) / kGranule * kGranule;
  const int fd = make_memory(device, whole);
  if (fd < 0) return result(call.end(cudaErrorMemoryAllocation));
  std::byte* shadow = map_shared(fd, whole);
  std::byte* address = address_for(shadow, whole);
  add_range({Kind::device, address, shadow, nullptr, whole, device, {device}, fd});
  *data = address;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  Call call("cudaFree", Needs::drained, true);
  if (call.code() != 0 || data == nullptr) return result(call.code());
  const Range range = take_range(data, "cudaFree", "the address is one that cudaMalloc gave, and is not free");
  require(range.kind == Kind::device, "cudaFree", "the memory is cudaMalloc's");
  give_back_memory(range.device, range.nbytes);
  free_memory(range);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, std::size_t nbytes, unsigned int flags) {
  Call call("cudaHostRegister", Needs::drained, true);
  if (call.code() != 0) return result(call.code());
  require(nbytes > 0, "cudaHostRegister", "there are bytes to register");
  require((flags & cudaHostRegisterMapped) != 0, "cudaHostRegister", "devices are to map the memory");
  Range found;
  if (find_range(data, found)) return result(call.end(cudaErrorHostMemoryAlreadyRegistered));
  auto* address = static_cast<std::byte*>(data);
  std::byte* seen = machine().uses_host_addresses ? address : map_again(address, nbytes);
  require(seen != nullptr, "cudaHostRegister", "the memory is shared, which alone has a second address here");
  add_range({Kind::registered, address, address, seen, nbytes, -1, {}, -1});
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* data) {
  Call call("cudaHostUnregister", Needs::drained, true);
  if (call.code() != 0) return result(call.code());
  const Range range = take_range(data, "cudaHostUnregister", "the address is one that was registered");
  require(range.kind == Kind::registered, "cudaHostUnregister", "the memory is registered");
  if (range.device_address != range.address) unmap(range.device_address, range.nbytes);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** data, std::size_t nbytes, unsigned int flags) {
  Call call("cudaHostAlloc", Needs::drained, true);
  if (call.code() != 0) return result(call.code());
  require((flags & cudaHostAllocMapped) != 0 && nbytes > 0, "cudaHostAlloc", "devices are to map the bytes there are");
  const int fd = ::memfd_create("fake_cuda_host", MFD_CLOEXEC);
  require(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(nbytes)) == 0, "memfd_create", "works");
  std::byte* address = map_shared(fd, nbytes);
  std::byte* seen = machine().uses_host_addresses ? address : map_shared(fd, nbytes);
  ::close(fd);
  add_range({Kind::page_locked, address, address, seen, nbytes, -1, {}, -1});
  *data = address;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  Call call("cudaFreeHost", Needs::drained, true);
  if (call.code() != 0 || data == nullptr) return result(call.code());
  const Range range = take_range(data, "cudaFreeHost", "the address is one that cudaHostAlloc gave");
  require(range.kind == Kind::page_locked, "cudaFreeHost", "the memory is cudaHostAlloc's");
  if (range.device_address != range.address) unmap(range.device_address, range.nbytes);
  unmap(range.address, range.nbytes);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** seen, void* data, unsigned int flags) {
  Call call("cudaHostGetDevicePointer", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  require(flags == 0, "cudaHostGetDevicePointer", "there are no flags");
  Range range;
  if (!find_range(data, range) || !range.is_on_host()) return result(call.end(cudaErrorInvalidValue));
  *seen = range.device_address + (static_cast<std::byte*>(data) - range.address);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  Call call("cudaIpcGetMemHandle", Needs::context, true);
  if (call.code() != 0) return result(call.code());
  Range range;
  if (!machine().has_ipc) return result(call.end(cudaErrorNotSupported));
  if (!find_range(data, range) || range.kind != Kind::device) return result(call.end(cudaErrorInvalidValue));
  const IpcHandle text{::getpid(), range.fd, range.nbytes};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &text, sizeof(text));
  return cudaSuccess;
}

// Not in the process that has made it: "cudaErrorInvalidContext"; not twice in a process.
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned int flags) {
  Call call("cudaIpcOpenMemHandle", Needs::drained, true);
  if (call.code() != 0) return result(call.code());
  require(flags == cudaIpcMemLazyEnablePeerAccess, "cudaIpcOpenMemHandle", "the flag is the only one there is");
  IpcHandle text;
  std::memcpy(&text, &handle, sizeof(text));
  if (text.pid == ::getpid()) return result(call.end(cudaErrorDeviceUninitialized));
  const std::string path = "/proc/" + std::to_string(text.pid) + "/fd/" + std::to_string(text.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return result(call.end(cudaErrorInvalidValue));
  const int device = call.context().device, owner = device_of_memory(fd);
  if (owner != device && !machine().reaches_peers) {
    ::close(fd);
    return result(call.end(cudaErrorPeerAccessUnsupported));
  }
  std::byte* shadow = map_shared(fd, text.nbytes);
  std::byte* address = address_for(shadow, text.nbytes);
  add_range({Kind::imported, address, shadow, nullptr, text.nbytes, owner, {device}, fd});
  *data = address;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  Call call("cudaIpcCloseMemHandle", Needs::drained, true);
  if (call.code() != 0) return result(call.code());
  const Range range = take_range(data, "cudaIpcCloseMemHandle", "the address is one that cudaIpcOpenMemHandle gave");
  require(range.kind == Kind::imported, "cudaIpcCloseMemHandle", "the memory is another process's");
  free_memory(range);
  return cudaSuccess;
}

}  // extern "C"
