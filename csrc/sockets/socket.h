// AF_UNIX message sockets in the abstract name space: no file, gone with their process, reachable only by this user.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "base/api.h"

namespace pipecomm {

// A file descriptor that closes itself.
class PC_API Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// Longest message on such a socket; longer texts are cut before they are sent.
inline constexpr std::size_t kMaxSocketMessageNbytes = std::size_t{32} << 10;

struct SocketMessage {
  std::string bytes;
  Fd fd;
};

enum class SocketStatus { ok, would_block, closed };

// Two connected ends.
std::pair<Fd, Fd> make_socket_pair();
void set_blocking(const Fd& socket);
Fd listen_abstract(const std::string& name);
// Empty when nobody listens there (any more); throws for other failures. would_block when the backlog is full.
SocketStatus connect_abstract(const std::string& name, Fd& out);
// Empty when nobody calls; throws when this process has no descriptor left to accept with.
Fd accept_pending(const Fd& listener);
SocketStatus send_message(const Fd& socket, const std::string& bytes, int fd_to_pass = -1);
// Throws a pool exhausted error when the message's descriptor was lost for want of a free number.
SocketStatus receive_message(const Fd& socket, SocketMessage& out);

// The peer has closed its end, whether or not all it said before has been read.
bool has_hung_up(const Fd& socket);

struct PeerIdentity {
  uid_t uid;
  pid_t pid;
};
PeerIdentity peer_identity(const Fd& socket);

// `count` random bytes as hexadecimal digits.
std::string random_hex(std::size_t count);

}  // namespace pipecomm
