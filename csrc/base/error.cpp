// The table from error kinds to Python class names.
#include "base/error.h"

#include <sys/resource.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace pipecomm {
namespace {

std::string describe_limit(const char* name, decltype(RLIMIT_NOFILE) resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return "";
  return std::string("; ") + name + " is " +
         (limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur));
}

}  // namespace

const char* error_class_name(ErrorKind kind) {
  static constexpr std::array<const char*, kNumErrorKinds> kNames = {
      "ConfigError",    "TensorError",   "NotBuiltError",    "PoolExhaustedError", "MessageMismatchError",
      "TransportError", "PeerLostError", "LinkTimeoutError", "StageFailedError",   "CudaError"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::string describe_errno(int code) {
  std::string limit;
  if (code == EMFILE) limit = describe_limit("RLIMIT_NOFILE", RLIMIT_NOFILE);
  if (code == EFBIG) limit = describe_limit("RLIMIT_FSIZE", RLIMIT_FSIZE);
  if (code == ENOMEM) limit = describe_limit("RLIMIT_AS", RLIMIT_AS);
  return std::string(std::strerror(code)) + " (errno " + std::to_string(code) + limit + ")";
}

void throw_errno(const std::string& what) { throw Error(ErrorKind::transport, what + ": " + describe_errno(errno)); }

}  // namespace pipecomm
