// TCP streams to ranks on other hosts, and the question whether the other host still answers.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <string>

#include "sockets/socket.h"

namespace pipecomm {

// Nothing heard for this long, and asked: the other host is unreachable. A stopped process does not matter here, its
// kernel answers.
inline constexpr std::chrono::seconds kHostTimeout{15};

struct TcpListener {
  Fd socket;
  std::string endpoint;  // "10.0.0.1:40001" or "[fd00::1]:40001"
};

// Listens at a free port of one address of this host, given as a number. Throws a config error for anything else.
TcpListener listen_tcp(const std::string& host);
// Begins to connect; the socket becomes writable when that is decided, and connect_error() then tells.
Fd begin_connect_tcp(const std::string& endpoint);
// 0 or errno.
int connect_error(const Fd& socket);

// An established connection: blocking reads, writes that block at most a second, no delay, keep-alive.
void prepare_stream(const Fd& socket);
// Bytes written, at least 1; 0 when nothing could be for a second. Throws a transport error when the stream is broken.
std::size_t write_some(int socket, iovec* parts, int count);
// Bytes read, at least 1; 0 at the end of the stream. Throws a transport error when it is broken.
std::size_t read_some(int socket, iovec* parts, int count);

// Watches whether the kernel on the other side answers. For one thread.
class HostWatch {
 public:
  explicit HostWatch(int socket) : socket_(socket) {}
  // Throws a transport error when the other host is unreachable. Looks at most once a second.
  void check();

 private:
  const int socket_;
  std::chrono::steady_clock::time_point next_look_{};
  unsigned retransmits_when_heard_ = 0;
};

}  // namespace pipecomm
