// The TCP calls and options.
#include "sockets/tcp_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace pipecomm {
namespace {

constexpr int kTcpBacklog = 128;
constexpr int kKeepIdleS = 5, kKeepIntervalS = 2, kKeepCount = 5;  // together kHostTimeout
// A host that is there answers each probe at once, so two unanswered ones mean something.
constexpr unsigned kMinUnanswered = 2;

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (code != 0) {
    throw Error(ErrorKind::config,
                "expected a numeric IP address and port; got '" + host + "', '" + port + "': " + ::gai_strerror(code));
  }
  return {found, &::freeaddrinfo};
}

Fd make_socket(const addrinfo& address) {
  Fd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_errno("cannot make a TCP socket");
  return fd;
}

std::string port_of(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char port[NI_MAXSERV] = "";
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&address), length, nullptr, 0, port, sizeof(port), NI_NUMERICSERV) != 0)
    throw_errno("cannot tell the port of a TCP socket");
  return port;
}

void set_option(const Fd& socket, int level, int name, int value) {
  if (::setsockopt(socket.get(), level, name, &value, sizeof(value)) != 0) throw_errno("cannot set a TCP option");
}

[[noreturn]] void throw_broken() { throw_errno("the connection broke"); }

}  // namespace

TcpListener listen_tcp(const std::string& host) {
  const AddressList address = resolve(host, "0");
  Fd fd = make_socket(*address);
  if (::bind(fd.get(), address->ai_addr, address->ai_addrlen) != 0) {
    throw Error(ErrorKind::config, "expected an address of this host to listen at; got " + host + ": " +
                                       std::strerror(errno) + "; set PIPECOMM_SOCKET_IFNAME");
  }
  if (::listen(fd.get(), kTcpBacklog) != 0) throw_errno("cannot listen on a TCP socket");
  const std::string shown = address->ai_family == AF_INET6 ? "[" + host + "]" : host;
  std::string endpoint = shown + ":" + port_of(fd);
  return {std::move(fd), std::move(endpoint)};
}

Fd begin_connect_tcp(const std::string& endpoint) {
  const std::size_t colon = std::min(endpoint.rfind(':'), endpoint.size());
  std::string host = endpoint.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  const AddressList address = resolve(host, endpoint.substr(std::min(colon + 1, endpoint.size())));
  Fd fd = make_socket(*address);
  // What fails at once fails again where it is waited for.
  if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) != 0 && errno != EINPROGRESS)
    throw_errno("cannot connect to " + endpoint);
  return fd;
}

int connect_error(const Fd& socket) {
  int code = 0;
  socklen_t length = sizeof(code);
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &length) == 0 ? code : errno;
}

void prepare_stream(const Fd& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, kKeepCount);
  const timeval second{1, 0};
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &second, sizeof(second)) != 0)
    throw_errno("cannot set a TCP option");
  set_blocking(socket);
}

std::size_t write_some(int socket, iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<std::size_t>(count);
  while (true) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent > 0) return static_cast<std::size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw_broken();
  }
}

std::size_t read_some(int socket, iovec* parts, int count) {
  while (true) {
    const ssize_t got = ::readv(socket, parts, count);
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno != EINTR) throw_broken();
  }
}

// Not TCP_USER_TIMEOUT: that would also end the connection to a process that is stopped with its buffers full.
void HostWatch::check() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) return;
  next_look_ = now + std::chrono::seconds(1);
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return;
  const std::chrono::milliseconds silent(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
  if (silent < std::chrono::seconds(2)) retransmits_when_heard_ = info.tcpi_retransmits;
  const unsigned retransmits = info.tcpi_retransmits;
  const unsigned unanswered =
      std::max<unsigned>(info.tcpi_probes, retransmits - std::min(retransmits, retransmits_when_heard_));
  if (silent < kHostTimeout || unanswered < kMinUnanswered) return;
  throw Error(ErrorKind::transport, "its host does not answer, for " + std::to_string(silent.count() / 1000) + " s");
}

}  // namespace pipecomm
