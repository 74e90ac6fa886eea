// Hellos are messages of AF_UNIX sockets, a doorbell with each; the kernel tells whose process is at the other end.
#include "transport/meeting/local_handshake.h"

#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "transport/meeting/handshake.h"
#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

class LocalHandshake final : public Handshake {
 public:
  LocalHandshake(const Fd& listener, const Address& own, int rank, const std::vector<Address>& addresses,
                 const CommunicatorOptions& options)
      : Handshake(listener, own, rank, addresses, options, false) {}

 private:
  Fd call(int peer) override {
    Fd socket;
    const SocketStatus status = connect_abstract(address(peer).name, socket);
    if (status == SocketStatus::closed) fail_lost(peer);
    if (status != SocketStatus::ok) return {};
    check_user(socket, peer);
    return socket;
  }

  bool is_through(int, const Fd&) const override { return true; }

  bool lets_in(Visitor& caller) const override { return peer_identity(caller.socket).uid == ::geteuid(); }

  bool say(const Fd& socket, const std::string& bytes) const override {
    return send_message(socket, bytes, Progress::instance().doorbell().fd()) == SocketStatus::ok;
  }

  Reading read(Visitor& visitor) const override {
    SocketMessage message;
    const SocketStatus status = receive_message(visitor.socket, message);
    if (status == SocketStatus::would_block) return Reading::more;
    if (status == SocketStatus::closed) return Reading::closed;
    visitor.bytes = std::move(message.bytes);
    visitor.doorbell = std::move(message.fd);
    return Reading::whole;
  }

  // One that was done sooner may have left with a goodbye, which is then still to be read.
  bool has_ended(const Fd& socket) const override {
    char first;
    return ::recv(socket.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
  }

  void check_user(const Fd& socket, int peer) const {
    const uid_t uid = peer_identity(socket).uid;
    if (uid == ::geteuid()) return;
    throw Error(ErrorKind::transport, "expected rank " + std::to_string(peer) + " to run as user id " +
                                          std::to_string(::geteuid()) + "; got " + std::to_string(uid) +
                                          greeting().where() + "; start all ranks as one user");
  }
};

}  // namespace

std::vector<std::optional<Lifeline>> shake_hands(const Fd& listener, const Address& own, int rank,
                                                 const std::vector<Address>& addresses,
                                                 const CommunicatorOptions& options, Nanoseconds timeout,
                                                 const InterruptCheck& interrupt) {
  std::vector<std::optional<Lifeline>> lifelines;
  for (Visitor& peer : LocalHandshake(listener, own, rank, addresses, options).run(timeout, interrupt)) {
    auto& lifeline = lifelines.emplace_back();
    if (peer.socket) lifeline.emplace(std::move(peer.socket), Segment::adopt(peer.doorbell.release(), kDoorbellNbytes));
  }
  return lifelines;
}

}  // namespace pipecomm
