// One error type for the whole library: a kind, which names a Python class, and a text.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

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
class PC_API Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string text) : kind_(kind), text_(std::move(text)) {}
  ErrorKind kind() const noexcept { return kind_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  ErrorKind kind_;
  std::string text_;
};

// "Too many open files (errno 24; RLIMIT_NOFILE is 1024)": names the limit of the process that was reached, if any.
PC_API std::string describe_errno(int code);
// Throws a transport error that carries errno's description: "<what>: <description>".
[[noreturn]] PC_API void throw_errno(const std::string& what);

}  // namespace pipecomm
