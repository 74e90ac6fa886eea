// All memory that devices know, and who may reach it under which address.
//
// A device's memory is a memfd. Its address, which the sources get, is a range that nobody can touch ("dereferencing a
// device pointer in host code is an error"); what devices do to it goes to a second mapping, with nothing behind its
// end. Registered and page-locked memory of the host has a second mapping too, where uses_host_addresses is off: "the
// device pointer ... may differ from the host pointer" (cudaHostGetDevicePointer). Streams and kernels then reach it
// there alone, cudaMemcpyAsync at both (unified addressing).
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>

namespace fake_cuda {

enum class Kind { device, registered, page_locked, imported, mapped };

struct Range {
  Kind kind = Kind::device;
  std::byte* address = nullptr;         // what the sources know
  std::byte* shadow = nullptr;          // where the bytes are; on the host, the same as the address
  std::byte* device_address = nullptr;  // of memory of the host
  std::size_t nbytes = 0;
  int device = 0;
  std::set<int> reached_by;
  int fd = -1;

  bool is_on_host() const { return kind == Kind::registered || kind == Kind::page_locked; }
};

// Who reaches for it.
enum class Reach { copy, stream };

// Where `nbytes` from `address` lie, for the device; nullptr where they do not, or it must not reach them. Memory that
// nobody has told of is the host's, pageable: a copy's alone, unless the machine is coherent.
std::byte* reach(int device, const void* address, std::size_t nbytes, Reach how);
// Not known to any device.
bool is_pageable(const void* address);

// A memfd for that many bytes of the device. Throws nothing: -1 where there is no more.
int make_memory(int device, std::size_t nbytes);
std::size_t memory_nbytes(int fd);
// The device whose memory it is; -1 for any other descriptor.
int device_of_memory(int fd);
void give_back_memory(int device, std::size_t nbytes);

std::byte* map_shared(int fd, std::size_t nbytes);
// Into a range that was reserved, and out of it.
std::byte* map_shared_at(int fd, std::byte* address, std::size_t nbytes);
void map_nothing_at(std::byte* address, std::size_t nbytes);
// A range of addresses that nobody can touch.
std::byte* reserve(std::size_t nbytes);
// The address for memory whose bytes lie at `shadow`, as the machine has it.
std::byte* address_for(std::byte* shadow, std::size_t nbytes);
void unmap(std::byte* data, std::size_t nbytes);
// The same pages a second time; nullptr where they are not shared.
std::byte* map_again(std::byte* data, std::size_t nbytes);

void add_range(const Range& range);
// The range that begins there, which is nobody's any more; forbids the call where there is none.
Range take_range(const void* address, const char* call, const char* rule);
// The range that has the address; false: none.
bool find_range(const void* address, Range& found);
void let_reach(const void* address, std::size_t nbytes, int device);

}  // namespace fake_cuda
