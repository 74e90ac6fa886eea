// What a process waits for, told to whoever asks from another process of this user: a text with every pending transfer.
#pragma once

#include <functional>
#include <string>

#include "sockets/socket.h"
#include "transport/communicator.h"

namespace pipecomm {

// Asks a process on this host. Throws a config error when it does not use pipecomm (or belongs to another user), a link
// timeout error when it does not answer.
PC_API std::string request_hang_report(int pid, Nanoseconds timeout);

// The answering end.
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
