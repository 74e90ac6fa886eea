// One error type for the whole library: a kind, which names a Python class, and a text.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/api.h"

namespace pipecomm {

enum class ErrorKind : std::uint8_t {
  config,
  tensor,
  not_built,
  pool_exhausted,
  message_mismatch,
  transport,
  peer_lost,
  link_timeout,
  stage_failed,
  cuda,
};

inline constexpr int kNumErrorKinds = 10;

// Name of the Python class in pipecomm.errors that stands for `kind`.
PC_API const char* error_class_name(ErrorKind kind);

// Text = expected; got (values); where (rank, stage, peer, microbatch); what to do.
// Copyable, because an error raised by the comm thread is thrown again by every waiter.
class PC_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

// Throws a transport error that carries errno's text: "<what>: <strerror> (errno N)".
[[noreturn]] PC_API void throw_errno(const std::string& what);

}  // namespace pipecomm
