// From a published address to a communicator: who can be reached, the handshake, the end of listening.
#include "transport/api/listener.h"

#include <algorithm>
#include <chrono>

#include "sockets/tcp_socket.h"
#include "transport/group/communicator.h"
#include "transport/meeting/local_handshake.h"
#include "transport/meeting/remote_handshake.h"
#include "transport/remote/bridges.h"

namespace pipecomm {
namespace {

// Any record fits, wherever in the ring it begins.
constexpr std::size_t kMinRingNbytes = std::size_t{1} << 20;

class ListenerImpl final : public Listener {
 public:
  ListenerImpl() : own_(Address::make_own()), socket_(listen_abstract(own_.name)) {}

  std::string address() const override { return own_.to_string(); }

  void listen_tcp(const std::string& host) override {
    TcpListener made = pipecomm::listen_tcp(host);
    tcp_socket_ = std::move(made.socket);
    own_.endpoint = std::move(made.endpoint);
  }

  std::shared_ptr<Communicator> connect(int rank, const std::vector<std::string>& texts, CommunicatorOptions options,
                                        Nanoseconds timeout, const InterruptCheck& interrupt) override {
    std::vector<Address> addresses;
    for (const std::string& text : texts) addresses.push_back(Address::parse(text));
    check_reachable(rank, texts, options);
    check_limits(options.limits);
    if (!options.pool) options.pool = make_host_pool(0);
    Fd socket = std::move(socket_);  // closes when this fails, too
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    auto lifelines = shake_hands(socket, own_, rank, addresses, options, timeout, interrupt);
    socket.reset();
    const Nanoseconds left = deadline - std::chrono::steady_clock::now();
    Bridges bridges = connect_remotely(rank, addresses, options, left, interrupt);
    bridges.fill(lifelines);
    return make_communicator(rank, std::move(lifelines), std::move(bridges), std::move(options));
  }

 private:
  Bridges connect_remotely(int rank, const std::vector<Address>& addresses, const CommunicatorOptions& options,
                           Nanoseconds timeout, const InterruptCheck& interrupt) {
    Bridges bridges;
    const auto is_other_host = [&](const Address& address) { return is_remote(own_, address); };
    if (std::none_of(addresses.begin(), addresses.end(), is_other_host)) return bridges;
    const Fd socket = std::move(tcp_socket_);
    std::vector<Fd> streams = shake_hands_remotely(socket, own_, rank, addresses, options, timeout, interrupt);
    for (std::size_t peer = 0; peer < streams.size(); ++peer) {
      if (streams[peer]) bridges.add(peer, std::move(streams[peer]), addresses[peer].endpoint, options.limits);
    }
    return bridges;
  }

  static void check_limits(const FlowLimits& limits) {
    if (limits.max_nbytes >= kMinRingNbytes && limits.max_nbytes % kMinRingNbytes == 0) return;
    throw Error(ErrorKind::config, "expected a whole number of MiB, at least 1, that may be in flight on a link; got " +
                                       std::to_string(limits.max_nbytes) + " bytes");
  }

  void check_reachable(int rank, const std::vector<std::string>& addresses, const CommunicatorOptions& options) const {
    if (rank < 0 || rank >= static_cast<int>(addresses.size())) {
      throw Error(ErrorKind::config, "expected a rank from 0 to " + std::to_string(addresses.size()) + " - 1; got " +
                                         std::to_string(rank));
    }
    for (std::size_t peer = 0; peer < addresses.size(); ++peer) {
      const std::string why = why_unreachable(own_.to_string(), addresses[peer]);
      if (why.empty()) continue;
      throw Error(ErrorKind::transport, "expected rank " + std::to_string(peer) + " to be reachable; got: " + why +
                                            "; where: rank " + std::to_string(rank) + ", process group '" +
                                            options.name + "'");
    }
  }

  Address own_;
  Fd socket_;
  Fd tcp_socket_;
};

}  // namespace

std::unique_ptr<Listener> make_listener() { return std::make_unique<ListenerImpl>(); }

}  // namespace pipecomm
