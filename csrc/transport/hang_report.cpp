// A question is a connection to an abstract socket named after the process; the answer is text up to the end of file.
#include "transport/hang_report.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"

namespace pipecomm {
namespace {

// What fits a socket's buffer whatever its limit: an answer never waits for whoever asked.
constexpr std::size_t kMaxReportNbytes = std::size_t{96} << 10;

std::string socket_name(int pid) { return "pipecomm.report." + std::to_string(pid); }

void answer(const Fd& caller, const std::string& text) {
  const std::size_t end = std::min(text.size(), kMaxReportNbytes);
  for (std::size_t begin = 0; begin < end; begin += kMaxSocketMessageNbytes) {
    const std::size_t nbytes = std::min(kMaxSocketMessageNbytes, end - begin);
    if (send_message(caller, text.substr(begin, nbytes)) != SocketStatus::ok) return;
  }
}

Fd connect_to(int pid) {
  Fd socket;
  if (connect_abstract(socket_name(pid), socket) == SocketStatus::ok && peer_identity(socket).pid == pid) return socket;
  throw Error(ErrorKind::config, "expected a process that uses pipecomm on this host; nobody answers as process " +
                                     std::to_string(pid) + "; check the number, and that its group is made");
}

}  // namespace

std::string request_hang_report(int pid, Nanoseconds timeout) {
  const Fd socket = connect_to(pid);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::string text;
  while (true) {
    SocketMessage message;
    const SocketStatus status = receive_message(socket, message);
    if (status == SocketStatus::closed && !text.empty()) return text;
    if (status == SocketStatus::closed) {
      throw Error(ErrorKind::config, "expected an answer from process " + std::to_string(pid) +
                                         "; it refused: it belongs to another user; ask as that user or root");
    }
    text += message.bytes.substr(0, status == SocketStatus::ok ? message.bytes.size() : 0);
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      throw Error(ErrorKind::link_timeout,
                  "expected an answer from process " + std::to_string(pid) + " in time; got none: it may be stopped");
    }
    pollfd item{socket.get(), POLLIN, 0};
    ::poll(&item, 1, static_cast<int>(left.count()));
  }
}

ReportSocket::ReportSocket() noexcept {
  try {
    socket_ = listen_abstract(socket_name(::getpid()));
  } catch (const Error&) {
  }
}

void ReportSocket::serve(const std::function<std::string()>& make_text) noexcept {
  if (!socket_) return;
  try {
    while (const Fd caller = accept_pending(socket_)) {
      const uid_t uid = peer_identity(caller).uid;
      if (uid == ::geteuid() || uid == 0) answer(caller, make_text());
    }
  } catch (const std::exception&) {
    // Whoever asked has gone, or there is no memory for a text: the transfers matter more.
  }
}

void ReportSocket::forget_after_fork() noexcept {
  if (socket_) ::close(socket_.get());
}

}  // namespace pipecomm
