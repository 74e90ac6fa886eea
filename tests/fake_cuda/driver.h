// The driver's functions under names of their own: libcuda is never linked, so that driver.cpp gives them out by name.
#pragma once

#include <cuda.h>

#include <cstddef>

namespace fake_cuda {

CUresult memory_granularity(std::size_t* nbytes, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags);
CUresult create_memory(CUmemGenericAllocationHandle* handle, std::size_t nbytes, const CUmemAllocationProp* prop,
                       unsigned long long flags);
CUresult release_memory(CUmemGenericAllocationHandle handle);
CUresult export_memory(void* fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long flags);
CUresult import_memory(CUmemGenericAllocationHandle* handle, void* fd, CUmemAllocationHandleType type);
CUresult reserve_addresses(CUdeviceptr* address, std::size_t nbytes, std::size_t, CUdeviceptr, unsigned long long);
CUresult free_addresses(CUdeviceptr address, std::size_t nbytes);
CUresult map_memory(CUdeviceptr address, std::size_t nbytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags);
CUresult unmap_memory(CUdeviceptr address, std::size_t nbytes);
CUresult set_access(CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc* access, std::size_t count);
CUresult address_range(CUdeviceptr* begin, std::size_t* nbytes, CUdeviceptr address);

}  // namespace fake_cuda
