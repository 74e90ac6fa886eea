// What a rank publishes about itself, and by which path two ranks can reach each other.
#pragma once

#include <string>
#include <vector>

#include "base/api.h"

namespace pipecomm {

struct Address {
  std::string boot_id;
  std::string network_namespace;
  std::string uid;
  std::string name;      // of the abstract socket
  std::string token;     // a caller must know it
  std::string endpoint;  // "host:port" of the TCP listener; empty where there is none

  std::string to_string() const;
  static Address parse(const std::string& text);  // throws a transport error
  // With PIPECOMM_TRANSPORT=tcp this rank looks to all others as if it were on another host.
  static Address make_own();
};

// Not on one host, or not in one network namespace: AF_UNIX sockets do not reach, TCP may.
bool is_remote(const Address& own, const Address& peer);

}  // namespace pipecomm
