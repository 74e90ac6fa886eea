// Makes a communicator of the life lines that a handshake has brought.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "sockets/lifeline.h"
#include "transport/api/communicator.h"
#include "transport/api/options.h"
#include "transport/remote/bridges.h"

namespace pipecomm {

// lifelines[i] leads to rank i, by a bridge where it is remote; none for `rank` itself. The communicator closes when
// its last user lets go.
std::shared_ptr<Communicator> make_communicator(int rank, std::vector<std::optional<Lifeline>> lifelines,
                                                Bridges bridges, CommunicatorOptions options);

}  // namespace pipecomm
