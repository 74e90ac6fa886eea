// Hellos are the first bytes of a TCP stream, which anybody can open.
#include "transport/meeting/remote_handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "sockets/tcp_socket.h"
#include "transport/meeting/handshake.h"

namespace pipecomm {
namespace {

// Callers that have not proved that they belong here by then are dropped.
constexpr auto kGreetingTimeout = std::chrono::seconds(5);

bool is_to_come(ssize_t got) { return got < 0 && (errno == EAGAIN || errno == EINTR); }

class RemoteHandshake final : public Handshake {
 public:
  RemoteHandshake(const Fd& listener, const Address& own, int rank, const std::vector<Address>& addresses,
                  const CommunicatorOptions& options)
      : Handshake(listener, own, rank, addresses, options, true) {}

 private:
  Fd call(int peer) override { return begin_connect_tcp(address(peer).endpoint); }

  bool is_through(int peer, const Fd& socket) const override {
    pollfd item{socket.get(), POLLOUT, 0};
    if (::poll(&item, 1, 0) <= 0) return false;
    const int code = connect_error(socket);
    if (code == 0) return true;
    if (code == ECONNREFUSED || code == ECONNRESET) fail_lost(peer);
    throw Error(ErrorKind::transport, "expected rank " + std::to_string(peer) + " to be reachable at " +
                                          address(peer).endpoint + "; got: " + std::strerror(code) +
                                          greeting().where() +
                                          "; set PIPECOMM_SOCKET_IFNAME to the interface that leads there");
  }

  bool lets_in(Visitor& caller) const override {
    caller.until = std::chrono::steady_clock::now() + kGreetingTimeout;
    return true;
  }

  // A fresh stream has room for it.
  bool say(const Fd& socket, const std::string& bytes) const override {
    return ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
  }

  // Of a hello that is not for this rank, nothing more.
  Reading read(Visitor& visitor) const override {
    while (true) {
      const std::size_t have = visitor.bytes.size();
      if (have >= sizeof(Hello) && (have == visitor.whole_nbytes() || !visitor.knows(own_token())))
        return Reading::whole;
      const std::size_t whole = visitor.whole_nbytes();
      visitor.bytes.resize(whole);
      const ssize_t got = ::recv(visitor.socket.get(), visitor.bytes.data() + have, whole - have, MSG_DONTWAIT);
      visitor.bytes.resize(have + static_cast<std::size_t>(got > 0 ? got : 0));
      if (got <= 0) return is_to_come(got) ? Reading::more : Reading::closed;
    }
  }

  bool has_ended(const Fd& socket) const override {
    char first;
    const ssize_t got = ::recv(socket.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
    return got <= 0 && !is_to_come(got);
  }
};

}  // namespace

std::vector<Fd> shake_hands_remotely(const Fd& listener, const Address& own, int rank,
                                     const std::vector<Address>& addresses, const CommunicatorOptions& options,
                                     Nanoseconds timeout, const InterruptCheck& interrupt) {
  std::vector<Fd> streams;
  for (Visitor& peer : RemoteHandshake(listener, own, rank, addresses, options).run(timeout, interrupt)) {
    if (peer.socket) prepare_stream(peer.socket);
    streams.push_back(std::move(peer.socket));
  }
  return streams;
}

}  // namespace pipecomm
