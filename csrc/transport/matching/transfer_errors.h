// What a failed transfer says: what it waited for, how long, where, and what to do.
#pragma once

#include <string>

#include "transport/matching/inbox.h"

namespace pipecomm {

// `cause`, for this transfer; `where` is "; where: rank ...".
Error transfer_error(const Error& cause, const TransferState& transfer, const std::string& where);
// `waited` tells how long, `state` what is known of the peer and of what it waits for.
Error timeout_error(const Error& waited, const TransferState& transfer, const std::string& where,
                    const std::string& state);
// The message's part of that number is not what its receive asks for.
Error mismatch_error(const InMessage& message, std::size_t index);

}  // namespace pipecomm
