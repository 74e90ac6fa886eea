// Memory of a device that another process may map, and in which way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace pipecomm {

// How another process gets at the memory. Part of the control messages: append, never renumber.
enum class Sharing : std::uint8_t {
  none = 0,
  descriptor = 1,  // a file descriptor: memfd, or cuMemCreate's export
  handle = 2,      // the 64 bytes of cudaIpcGetMemHandle
};

// Freed with the last copy of `owner`; never, without one.
struct DeviceMemory {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  int fd = -1;         // with Sharing::descriptor; belongs to the owner
  std::string handle;  // with Sharing::handle
  std::shared_ptr<void> owner;
};

}  // namespace pipecomm
