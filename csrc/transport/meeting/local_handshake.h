// How the ranks of a process group on one host meet.
#pragma once

#include <optional>
#include <vector>

#include "sockets/lifeline.h"
#include "transport/api/options.h"
#include "transport/meeting/address.h"

namespace pipecomm {

// Connects to every other rank on this host; result[i] is rank i's life line (none for this rank and remote ones).
std::vector<std::optional<Lifeline>> shake_hands(const Fd& listener, const Address& own, int rank,
                                                 const std::vector<Address>& addresses,
                                                 const CommunicatorOptions& options, Nanoseconds timeout,
                                                 const InterruptCheck& interrupt);

}  // namespace pipecomm
