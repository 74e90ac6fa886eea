// The table from error kinds to Python class names.
#include "base/error.h"

#include <array>
#include <cerrno>
#include <cstring>

namespace pipecomm {

const char* error_class_name(ErrorKind kind) {
  static constexpr std::array<const char*, kNumErrorKinds> kNames = {
      "ConfigError",    "TensorError",   "NotBuiltError",    "PoolExhaustedError", "MessageMismatchError",
      "TransportError", "PeerLostError", "LinkTimeoutError", "StageFailedError",   "CudaError"};
  return kNames.at(static_cast<std::size_t>(kind));
}

void throw_errno(const std::string& what) {
  const int code = errno;
  throw Error(ErrorKind::transport, what + ": " + std::strerror(code) + " (errno " + std::to_string(code) + ")");
}

}  // namespace pipecomm
