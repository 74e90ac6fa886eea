// From a published address to a communicator: who can be reached, the handshake, the end of listening.
#include "transport/listener.h"

#include "transport/handshake.h"

namespace pipecomm {
namespace {

class ListenerImpl final : public Listener {
 public:
  ListenerImpl() : own_(Address::make_own()), socket_(listen_abstract(own_.name)) {}

  std::string address() const override { return own_.to_string(); }

  std::shared_ptr<Communicator> connect(int rank, const std::vector<std::string>& addresses,
                                        CommunicatorOptions options, Nanoseconds timeout,
                                        const InterruptCheck& interrupt) override {
    check_reachable(rank, addresses, options);
    if (!options.pool) options.pool = make_host_pool(0);
    auto lifelines = shake_hands(socket_, own_, rank, addresses, options, timeout, interrupt);
    socket_.reset();
    return make_communicator(rank, std::move(lifelines), std::move(options));
  }

 private:
  void check_reachable(int rank, const std::vector<std::string>& addresses, const CommunicatorOptions& options) const {
    if (rank < 0 || rank >= static_cast<int>(addresses.size())) {
      throw Error(ErrorKind::config, "expected a rank from 0 to " + std::to_string(addresses.size()) + " - 1; got " +
                                         std::to_string(rank));
    }
    for (std::size_t peer = 0; peer < addresses.size(); ++peer) {
      const std::string why = why_unreachable(own_.to_string(), addresses[peer]);
      if (why.empty()) continue;
      throw Error(ErrorKind::transport, "expected rank " + std::to_string(peer) +
                                            " to be reachable through shared memory; got: " + why + "; where: rank " +
                                            std::to_string(rank) + ", process group '" + options.name + "'");
    }
  }

  const Address own_;
  Fd socket_;
};

}  // namespace

std::unique_ptr<Listener> make_listener() { return std::make_unique<ListenerImpl>(); }

}  // namespace pipecomm
