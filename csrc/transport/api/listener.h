// How ranks meet: an address to publish, then a communicator once everybody's is known.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/api.h"
#include "transport/api/communicator.h"
#include "transport/api/options.h"
#include "transport/api/wait.h"

namespace pipecomm {

// Half-made communicator: an address to publish, then connect() once everybody's is known.
class PC_API Listener {
 public:
  virtual ~Listener() = default;
  // Opaque text: machine identity, socket name, secret, and the TCP endpoint once there is one. To be given to the
  // other ranks only.
  virtual std::string address() const = 0;
  // Listens at an address of this host (a number, not a name) too. Every rank does where some two are remote, before
  // it publishes its address for good.
  virtual void listen_tcp(const std::string& host) = 0;
  // Connects to every rank (addresses[i] is rank i's) and closes the listening sockets. Throws a transport error that
  // names the ranks that did not answer by the deadline, and one for a peer that why_unreachable() is about.
  virtual std::shared_ptr<Communicator> connect(int rank, const std::vector<std::string>& addresses,
                                                CommunicatorOptions options, Nanoseconds timeout,
                                                const InterruptCheck& interrupt = {}) = 0;
};

PC_API std::unique_ptr<Listener> make_listener();
// For the end of the process: returns when ranks on other hosts have what was sent to them, or after 5 s. exit() calls
// it; whoever ends by _exit() has to.
PC_API void finish_bridges();
// Whether two ranks share no memory and need TCP: other hosts, other network namespaces. Symmetric and transitive,
// so that all ranks decide alike.
PC_API bool is_remote(const std::string& own_address, const std::string& peer_address);
// Why `peer_address` cannot be reached at all (another user on this host); empty when it can.
PC_API std::string why_unreachable(const std::string& own_address, const std::string& peer_address);

}  // namespace pipecomm
