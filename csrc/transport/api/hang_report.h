// Asks a process what it waits for: a text with every pending transfer.
#pragma once

#include <string>

#include "base/api.h"
#include "transport/api/wait.h"

namespace pipecomm {

// Asks a process on this host. Throws a config error when it does not use pipecomm (or belongs to another user), a link
// timeout error when it does not answer.
PC_API std::string request_hang_report(int pid, Nanoseconds timeout);

// The abstract socket at which a process answers.
std::string report_socket_name(int pid);

}  // namespace pipecomm
