// Each caller gets the text and the end of file.
#include "transport/progress/report_socket.h"

#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "transport/api/hang_report.h"

namespace pipecomm {
namespace {

// What fits a socket's buffer whatever its limit: an answer never waits for whoever asked.
constexpr std::size_t kMaxReportNbytes = std::size_t{96} << 10;

void answer(const Fd& caller, const std::string& text) {
  const std::size_t end = std::min(text.size(), kMaxReportNbytes);
  for (std::size_t begin = 0; begin < end; begin += kMaxSocketMessageNbytes) {
    const std::size_t nbytes = std::min(kMaxSocketMessageNbytes, end - begin);
    if (send_message(caller, text.substr(begin, nbytes)) != SocketStatus::ok) return;
  }
}

}  // namespace

ReportSocket::ReportSocket() noexcept {
  try {
    socket_ = listen_abstract(report_socket_name(::getpid()));
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
