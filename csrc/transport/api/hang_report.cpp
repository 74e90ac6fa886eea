// A question is a connection to an abstract socket named after the process; the answer is text up to the end of file.
#include "transport/api/hang_report.h"

#include <poll.h>

#include <chrono>

#include "base/error.h"
#include "sockets/socket.h"

namespace pipecomm {
namespace {

Fd connect_to(int pid) {
  Fd socket;
  if (connect_abstract(report_socket_name(pid), socket) == SocketStatus::ok && peer_identity(socket).pid == pid)
    return socket;
  throw Error(ErrorKind::config, "expected a process that uses pipecomm on this host; nobody answers as process " +
                                     std::to_string(pid) + "; check the number, and that its group is made");
}

}  // namespace

std::string report_socket_name(int pid) { return "pipecomm.report." + std::to_string(pid); }

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

}  // namespace pipecomm
