// What a failed transfer says: what it waited for, how long, where, and what to do.
#pragma once

#include <string>

#include "transport/link.h"

namespace pipecomm {

// `cause`, for this transfer; `where` is "; where: rank ...".
Error transfer_error(const Error& cause, const TransferState& transfer, const std::string& where);
// `waited` tells how long; `link` is that of the peer, nullptr for any source; `parking` is the inbox's
// describe_parking().
Error timeout_error(const Error& waited, const TransferState& transfer, const Link* link, const std::string& parking,
                    const std::string& where);
// The message's part of that number is not what its receive asks for.
Error mismatch_error(const InMessage& message, std::size_t index);

}  // namespace pipecomm
