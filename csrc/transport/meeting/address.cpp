// Addresses to text and back, and what they say about the way between two ranks.
#include "transport/meeting/address.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "sockets/socket.h"
#include "transport/api/listener.h"

namespace pipecomm {
namespace {

std::string read_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text.empty() ? "unknown" : text;
}

bool is_tcp_forced() {
  const char* value = std::getenv("PIPECOMM_TRANSPORT");
  const std::string text = value == nullptr ? "" : value;
  if (text.empty() || text == "auto") return false;
  if (text == "tcp") return true;
  throw Error(ErrorKind::config, "expected auto or tcp in PIPECOMM_TRANSPORT; got '" + text + "'");
}

// "4026531840", or "<random>@4026531840", which no other rank shares.
std::string read_network_namespace() {
  struct stat info{};
  const std::string name = ::stat("/proc/self/ns/net", &info) == 0 ? std::to_string(info.st_ino) : "unknown";
  return is_tcp_forced() ? random_hex(8) + "@" + name : name;
}

}  // namespace

Address Address::make_own() {
  return {read_boot_id(),
          read_network_namespace(),
          std::to_string(::geteuid()),
          "pipecomm-" + random_hex(16),
          random_hex(16),
          ""};
}

std::string Address::to_string() const {
  return boot_id + "|" + network_namespace + "|" + uid + "|" + name + "|" + token +
         (endpoint.empty() ? "" : "|" + endpoint);
}

Address Address::parse(const std::string& text) {
  std::istringstream stream(text);
  Address address;
  for (std::string* field :
       {&address.boot_id, &address.network_namespace, &address.uid, &address.name, &address.token}) {
    if (!std::getline(stream, *field, '|')) {
      throw Error(ErrorKind::transport, "expected an address of five fields; got '" + text + "'");
    }
  }
  std::getline(stream, address.endpoint);
  return address;
}

bool is_remote(const Address& own, const Address& peer) {
  return own.boot_id != peer.boot_id || own.network_namespace != peer.network_namespace;
}

bool is_remote(const std::string& own_address, const std::string& peer_address) {
  return is_remote(Address::parse(own_address), Address::parse(peer_address));
}

std::string why_unreachable(const std::string& own_address, const std::string& peer_address) {
  const Address own = Address::parse(own_address);
  const Address peer = Address::parse(peer_address);
  if (own.boot_id == peer.boot_id && own.uid != peer.uid)
    return "it runs on this host as user id " + peer.uid + ", here " + own.uid;
  return "";
}

}  // namespace pipecomm
