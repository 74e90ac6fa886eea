// How ranks on several hosts meet.
#pragma once

#include <vector>

#include "sockets/socket.h"
#include "transport/api/options.h"
#include "transport/meeting/address.h"

namespace pipecomm {

// Connects to every rank on another host; result[i] is the stream to rank i (none for this rank and those on this
// host). Throws as Listener::connect does.
std::vector<Fd> shake_hands_remotely(const Fd& listener, const Address& own, int rank,
                                     const std::vector<Address>& addresses, const CommunicatorOptions& options,
                                     Nanoseconds timeout, const InterruptCheck& interrupt);

}  // namespace pipecomm
