// How the ranks of a process group find each other on one host: addresses, hello messages, checks of who calls.
#pragma once

#include <string>
#include <vector>

#include "transport/communicator.h"
#include "transport/lifeline.h"

namespace pipecomm {

// What a published address says.
struct Address {
  std::string boot_id;
  std::string network_namespace;
  std::string uid;
  std::string name;   // of the abstract socket
  std::string token;  // a caller must know it

  std::string to_string() const;
  static Address parse(const std::string& text);  // throws a transport error
  static Address make_own();
};

// Connects to every other rank; result[i] is rank i's life line (none for this rank).
std::vector<std::optional<Lifeline>> shake_hands(const Fd& listener, const Address& own, int rank,
                                                 const std::vector<std::string>& addresses,
                                                 const CommunicatorOptions& options, Nanoseconds timeout,
                                                 const InterruptCheck& interrupt);

}  // namespace pipecomm
