// The driver's contexts, attributes and stream memory operations; and all its functions by name.
#include "driver.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <string>
#include <utility>

#include "call.h"
#include "control.h"
#include "driver_table.h"
#include "forbid.h"
#include "handles.h"
#include "memory.h"

namespace fake_cuda {
namespace {

CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  Call call("cuDeviceGetAttribute", Needs::nothing, false);
  require(device >= 0 && device < machine().num_devices, "cuDeviceGetAttribute", "the device exists");
  require(attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "cuDeviceGetAttribute",
          "the attribute is one that is known here");
  *value = machine().waits_for_64_bit_values ? 1 : 0;
  return static_cast<CUresult>(call.code());
}

// The value at a device's address. Where it does not reach there, it breaks down.
std::atomic_ref<std::uint64_t> value_at(std::byte* data) {
  return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(data));
}

std::byte* find_value(Context& context, CUdeviceptr address) {
  std::byte* data = reach(context.device, reinterpret_cast<void*>(address), sizeof(std::uint64_t), Reach::stream);
  if (data == nullptr) context.error.store(cudaErrorIllegalAddress);
  return data;
}

void check_operation(CUdeviceptr address, const char* call) {
  require(machine().waits_for_64_bit_values, call, "the device has 64-bit stream memory operations");
  require(address % sizeof(std::uint64_t) == 0, call, "the address is aligned to its value");
}

CUresult wait_value(CUstream handle, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  Call call("cuStreamWaitValue64", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  check_operation(address, "cuStreamWaitValue64");
  require((flags & ~static_cast<unsigned int>(CU_STREAM_WAIT_VALUE_FLUSH)) == CU_STREAM_WAIT_VALUE_GEQ,
          "cuStreamWaitValue64", "the wait is for a value of at least that");
  const auto stream = stream_of(handle, call.context(), "cuStreamWaitValue64");
  stream->push([=, &context = stream->context] {
    std::byte* data = find_value(context, address);
    // Cyclic, as documented: (int64_t)(*address - value) >= 0.
    wait_for(context, [=] { return static_cast<std::int64_t>(value_at(data).load() - value) >= 0; });
  });
  return CUDA_SUCCESS;
}

CUresult batch(CUstream handle, unsigned int count, CUstreamBatchMemOpParams* operations, unsigned int flags) {
  Call call("cuStreamBatchMemOp", Needs::context, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  require(flags == 0 && count > 0 && count <= 256, "cuStreamBatchMemOp", "there are 1 to 256 operations, and no flags");
  const auto stream = stream_of(handle, call.context(), "cuStreamBatchMemOp");
  for (unsigned int i = 0; i < count; ++i) {
    const auto operation = operations[i].writeValue;
    require(operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64 && operation.flags == CU_STREAM_WRITE_VALUE_DEFAULT,
            "cuStreamBatchMemOp", "what was written before is seen before");
    check_operation(operation.address, "cuStreamBatchMemOp");
    stream->push([=, &context = stream->context] {
      if (std::byte* data = find_value(context, operation.address)) value_at(data).store(operation.value64);
    });
  }
  return CUDA_SUCCESS;
}

CUresult retain(CUcontext* context, CUdevice device) {
  Call call("cuDevicePrimaryCtxRetain", Needs::nothing, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  if (device < 0 || device >= machine().num_devices) return CUDA_ERROR_INVALID_DEVICE;
  *context = reinterpret_cast<CUcontext>(&primary_context(device));
  return CUDA_SUCCESS;
}

CUresult current(CUcontext* context) {
  Call call("cuCtxGetCurrent", Needs::nothing, false);
  *context = reinterpret_cast<CUcontext>(thread_state().current());
  return static_cast<CUresult>(call.code());
}

CUresult push(CUcontext context) {
  Call call("cuCtxPushCurrent", Needs::nothing, false);
  if (call.code() != 0) return static_cast<CUresult>(call.code());
  thread_state().contexts.push_back(reinterpret_cast<Context*>(context));
  return CUDA_SUCCESS;
}

CUresult pop(CUcontext* context) {
  Call call("cuCtxPopCurrent", Needs::nothing, false);
  auto& contexts = thread_state().contexts;
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = reinterpret_cast<CUcontext>(contexts.back());
  contexts.pop_back();
  return static_cast<CUresult>(call.code());
}

// The driver's needs no context.
CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
  Call call("cuThreadExchangeStreamCaptureMode", Needs::nothing, false);
  const int before = std::exchange(thread_state().capture_mode, static_cast<int>(*mode));
  *mode = static_cast<CUstreamCaptureMode>(before);
  return static_cast<CUresult>(call.code());
}

template <typename Function>
void* erased(Function function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void* find_driver_function(const char* name) {
  static const std::map<std::string, void*> all = {
      {"cuDeviceGetAttribute", erased(device_attribute)},
      {"cuDevicePrimaryCtxRetain", erased(retain)},
      {"cuCtxGetCurrent", erased(current)},
      {"cuCtxPushCurrent", erased(push)},
      {"cuCtxPopCurrent", erased(pop)},
      {"cuThreadExchangeStreamCaptureMode", erased(exchange_capture_mode)},
      {"cuStreamWaitValue64", erased(wait_value)},
      {"cuStreamBatchMemOp", erased(batch)},
      {"cuMemGetAllocationGranularity", erased(memory_granularity)},
      {"cuMemCreate", erased(create_memory)},
      {"cuMemRelease", erased(release_memory)},
      {"cuMemExportToShareableHandle", erased(export_memory)},
      {"cuMemImportFromShareableHandle", erased(import_memory)},
      {"cuMemAddressReserve", erased(reserve_addresses)},
      {"cuMemAddressFree", erased(free_addresses)},
      {"cuMemMap", erased(map_memory)},
      {"cuMemUnmap", erased(unmap_memory)},
      {"cuMemSetAccess", erased(set_access)},
      {"cuMemGetAddressRange", erased(address_range)},
  };
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace fake_cuda
