// Where this process tells what it waits for, to whoever asks from another process of this user.
#pragma once

#include <functional>
#include <string>

#include "sockets/socket.h"

namespace pipecomm {

class ReportSocket {
 public:
  // Without the socket (its name may be taken) the process goes on, and nobody can ask.
  ReportSocket() noexcept;
  // Answers those who have asked since. Only this user and root get an answer.
  void serve(const std::function<std::string()>& make_text) noexcept;
  // Async-signal-safe.
  void forget_after_fork() noexcept;

 private:
  Fd socket_;
};

}  // namespace pipecomm
