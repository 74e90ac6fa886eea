// The ranges by address, and how their mappings are made.
#include "memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "control.h"
#include "forbid.h"

namespace fake_cuda {
namespace {

constexpr std::size_t kPage = 4096;
constexpr const char* kName = "fake_cuda_device_";

std::mutex g_mutex;
std::map<std::uintptr_t, Range> g_ranges;  // by their end
std::map<int, std::size_t> g_allocated;

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// Under the mutex. Ranges of the host are also found at the address that devices use.
const Range* find(const void* address, bool& is_device_address) {
  is_device_address = false;
  const auto after = g_ranges.upper_bound(number(address));
  if (after != g_ranges.end() && after->second.address <= address) return &after->second;
  for (const auto& [end, range] : g_ranges) {
    if (!range.is_on_host() || range.device_address > address) continue;
    if (number(address) - number(range.device_address) >= range.nbytes) continue;
    is_device_address = true;
    return &range;
  }
  return nullptr;
}

}  // namespace

std::byte* reach(int device, const void* address, std::size_t nbytes, Reach how) {
  const std::lock_guard guard(g_mutex);
  bool is_device_address = false;
  const Range* range = find(address, is_device_address);
  auto* data = static_cast<std::byte*>(const_cast<void*>(address));
  if (range == nullptr) return how == Reach::copy || machine().is_coherent ? data : nullptr;
  std::byte* begin = is_device_address ? range->device_address : range->address;
  const auto offset = static_cast<std::size_t>(data - begin);
  if (nbytes > range->nbytes - offset) return nullptr;
  if (range->is_on_host()) {
    const bool is_usable = is_device_address || how == Reach::copy || begin == range->device_address;
    return is_usable || machine().is_coherent ? data : nullptr;
  }
  return range->reached_by.contains(device) ? range->shadow + offset : nullptr;
}

bool is_pageable(const void* address) {
  const std::lock_guard guard(g_mutex);
  bool is_device_address = false;
  return !machine().is_coherent && find(address, is_device_address) == nullptr;
}

int make_memory(int device, std::size_t nbytes) {
  {
    const std::lock_guard guard(g_mutex);
    if (nbytes > machine().memory_nbytes - std::min(machine().memory_nbytes, g_allocated[device])) return -1;
    g_allocated[device] += nbytes;
  }
  const int fd = ::memfd_create((kName + std::to_string(device)).c_str(), MFD_CLOEXEC);
  require(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(nbytes)) == 0, "memfd_create", "works");
  return fd;
}

std::size_t memory_nbytes(int fd) {
  struct stat status{};
  return ::fstat(fd, &status) == 0 ? static_cast<std::size_t>(status.st_size) : 0;
}

int device_of_memory(int fd) {
  char text[256] = {};
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  if (::readlink(path.c_str(), text, sizeof(text) - 1) < 0) return -1;
  const std::string name = text;
  const std::size_t at = name.find(kName);
  return at == std::string::npos ? -1 : std::atoi(name.c_str() + at + std::string(kName).size());
}

void give_back_memory(int device, std::size_t nbytes) {
  const std::lock_guard guard(g_mutex);
  g_allocated[device] -= nbytes;
}

std::size_t allocated_nbytes(int device) {
  const std::lock_guard guard(g_mutex);
  return g_allocated[device];
}

std::byte* reserve(std::size_t nbytes) {
  void* data = ::mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(data != MAP_FAILED, "mmap", "there are addresses left");
  return static_cast<std::byte*>(data);
}

std::byte* map_shared_at(int fd, std::byte* address, std::size_t nbytes) {
  const void* mapped = ::mmap(address, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  require(mapped == address, "mmap", "there is memory left");
  return address;
}

void map_nothing_at(std::byte* address, std::size_t nbytes) {
  ::mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

// With a page behind it that nobody can touch.
std::byte* map_shared(int fd, std::size_t nbytes) { return map_shared_at(fd, reserve(nbytes + kPage), nbytes); }

std::byte* address_for(std::byte* shadow, std::size_t nbytes) {
  return machine().is_coherent ? shadow : reserve(nbytes);
}

void unmap(std::byte* data, std::size_t nbytes) { ::munmap(data, nbytes); }

std::byte* map_again(std::byte* data, std::size_t nbytes) {
  void* made = ::mremap(data, 0, nbytes, MREMAP_MAYMOVE);
  return made == MAP_FAILED ? nullptr : static_cast<std::byte*>(made);
}

void add_range(const Range& range) {
  const std::lock_guard guard(g_mutex);
  g_ranges[number(range.address) + range.nbytes] = range;
}

Range take_range(const void* address, const char* call, const char* rule) {
  const std::lock_guard guard(g_mutex);
  const auto found = g_ranges.upper_bound(number(address));
  require(found != g_ranges.end() && found->second.address == address, call, rule);
  return g_ranges.extract(found).mapped();
}

bool find_range(const void* address, Range& found) {
  const std::lock_guard guard(g_mutex);
  bool is_device_address = false;
  const Range* range = find(address, is_device_address);
  if (range != nullptr) found = *range;
  return range != nullptr;
}

void let_reach(const void* address, std::size_t nbytes, int device) {
  const std::lock_guard guard(g_mutex);
  const auto found = g_ranges.upper_bound(number(address));
  require(found != g_ranges.end() && found->second.address == address && found->second.nbytes == nbytes,
          "cuMemSetAccess", "the range is one that is mapped");
  found->second.reached_by.insert(device);
}

}  // namespace fake_cuda
