// The socket calls.
#include "sockets/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace pipecomm {
namespace {

constexpr int kBacklog = 128;

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  // sun_path[0] stays 0: an abstract name, which no file stands for.
  if (name.size() + 1 > sizeof(address.sun_path)) throw Error(ErrorKind::transport, "socket name too long: " + name);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Fd make_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_errno("cannot make an AF_UNIX socket");
  return fd;
}

bool is_hangup(int code) { return code == EPIPE || code == ECONNRESET || code == ENOTCONN; }

// The first descriptor of a message; any others are closed.
Fd take_fd(msghdr& header) {
  Fd first;
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(fd));
      Fd taken(fd);
      if (!first) first = std::move(taken);
    }
  }
  return first;
}

// The kernel leaves a descriptor out of a message that comes to a process without a free number for it.
void check_fd_came(const msghdr& header, const Fd& fd) {
  if (fd || (header.msg_flags & MSG_CTRUNC) == 0) return;
  throw Error(ErrorKind::pool_exhausted,
              "expected a message with a descriptor; it was lost: " + describe_errno(EMFILE));
}

bool is_exhausted(int code) { return code == EMFILE || code == ENFILE || code == ENOBUFS || code == ENOMEM; }

bool is_readable(const Fd& socket) {
  pollfd item{socket.get(), POLLIN, 0};
  return ::poll(&item, 1, 0) > 0;
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int Fd::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::pair<Fd, Fd> make_socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0)
    throw_errno("cannot make a pair of AF_UNIX sockets");
  return {Fd(fds[0]), Fd(fds[1])};
}

void set_blocking(const Fd& socket) {
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) throw_errno("cannot set a socket's mode");
}

Fd listen_abstract(const std::string& name) {
  Fd fd = make_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
    throw_errno("cannot bind an AF_UNIX socket");
  if (::listen(fd.get(), kBacklog) != 0) throw_errno("cannot listen on an AF_UNIX socket");
  return fd;
}

SocketStatus connect_abstract(const std::string& name, Fd& out) {
  Fd fd = make_socket();
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno == EAGAIN || errno == EINTR) return SocketStatus::would_block;
    if (errno == ECONNREFUSED) return SocketStatus::closed;
    throw_errno("cannot connect an AF_UNIX socket");
  }
  out = std::move(fd);
  return SocketStatus::ok;
}

Fd accept_pending(const Fd& listener) {
  Fd caller(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const int code = errno;
  // The kernel looks for a free number before it looks for a caller.
  if (caller || !is_exhausted(code) || !is_readable(listener)) return caller;
  errno = code;
  throw_errno("cannot accept a connection");
}

SocketStatus send_message(const Fd& socket, const std::string& bytes, int fd_to_pass) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd_to_pass >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(item), &fd_to_pass, sizeof(int));
  }
  if (::sendmsg(socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return SocketStatus::ok;
  if (errno == EAGAIN || errno == ENOBUFS || errno == EINTR) return SocketStatus::would_block;
  if (is_hangup(errno)) return SocketStatus::closed;
  throw_errno("cannot send on an AF_UNIX socket");
}

SocketStatus receive_message(const Fd& socket, SocketMessage& out) {
  out.bytes.resize(kMaxSocketMessageNbytes);
  iovec part{out.bytes.data(), out.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  ssize_t got = ::recvmsg(socket.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  // A peer that closed without reading all of ours: the error comes once, then what it had sent.
  if (got < 0 && errno == ECONNRESET) got = ::recvmsg(socket.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return SocketStatus::would_block;
  if (got <= 0) return SocketStatus::closed;
  out.bytes.resize(static_cast<std::size_t>(got));
  out.fd = take_fd(header);
  check_fd_came(header, out.fd);
  return SocketStatus::ok;
}

bool has_hung_up(const Fd& socket) {
  pollfd item{socket.get(), 0, 0};
  return ::poll(&item, 1, 0) > 0 && (item.revents & POLLHUP) != 0;
}

PeerIdentity peer_identity(const Fd& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw_errno("cannot identify the peer");
  return {credentials.uid, credentials.pid};
}

std::string random_hex(std::size_t count) {
  std::vector<unsigned char> bytes(count);
  if (::getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) throw_errno("cannot get random bytes");
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace pipecomm
