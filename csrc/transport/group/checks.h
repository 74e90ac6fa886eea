// Whether what a caller asks for is possible, said before anything is done. `where` ends the text of every error.
#pragma once

#include <string>

#include "wire/message.h"

namespace pipecomm {

// Throws a config error unless `peer` is another rank. `what` is "send to" or "receive from".
void check_peer(int peer, int rank, std::size_t size, const std::string& what, const std::string& where);
// Throws a tensor error for what no header can describe or no codec can carry.
void check_part(const SendPart& part, const std::string& where);

}  // namespace pipecomm
