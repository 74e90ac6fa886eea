// Rank i connects to every lower rank and accepts every higher one. A hello is answered by a hello or a refusal.
//
//   higher rank                      lower rank
//     connect, hello + doorbell  ->    checks user, token, version, settings
//     checks                     <-    hello + doorbell (or the text of a refusal)
#include "transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "transport/header.h"
#include "transport/progress.h"

namespace pipecomm {
namespace {

using Clock = std::chrono::steady_clock;

// Callers that have not said hello; beyond this the oldest is dropped, so that idle probes cannot use up descriptors.
constexpr std::size_t kMaxStrangers = 64;
constexpr int kPollMs = 50;

struct Hello {
  char magic[8];
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t is_refusal;
  char token[32];
};
constexpr char kMagic[8] = {'p', 'i', 'p', 'e', 'c', 'o', 'm', 'm'};

std::string read_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text.empty() ? "unknown" : text;
}

std::string read_network_namespace() {
  struct stat info{};
  return ::stat("/proc/self/ns/net", &info) == 0 ? std::to_string(info.st_ino) : "unknown";
}

class Handshake {
 public:
  Handshake(const Fd& listener, const Address& own, int rank, const std::vector<std::string>& addresses,
            const CommunicatorOptions& options)
      : listener_(listener),
        own_(own),
        rank_(rank),
        options_(options),
        links_(addresses.size()),
        calls_(addresses.size()) {
    for (const std::string& address : addresses) addresses_.push_back(Address::parse(address));
  }

  std::vector<std::optional<Lifeline>> run(Nanoseconds timeout, const InterruptCheck& interrupt) {
    const auto deadline = Clock::now() + timeout;
    while (!is_complete()) {
      call_lower_ranks();
      read_answers();
      accept_strangers();
      read_strangers();
      check_connected();
      if (is_complete()) break;
      if (Clock::now() > deadline) fail_missing(timeout);
      if (interrupt) interrupt();
      wait_for_news();
    }
    return std::move(links_);
  }

 private:
  std::string where() const { return " (rank " + std::to_string(rank_) + ", process group '" + options_.name + "')"; }
  int size() const { return static_cast<int>(addresses_.size()); }

  bool is_complete() const {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank_ && !links_[static_cast<std::size_t>(peer)]) return false;
    }
    return true;
  }

  std::string hello_bytes(const std::string& token, const std::string& text, bool is_refusal) const {
    Hello hello{};
    std::memcpy(hello.magic, kMagic, sizeof(kMagic));
    hello.version = kWireVersion;
    hello.rank = rank_;
    hello.size = size();
    hello.is_refusal = is_refusal ? 1 : 0;
    std::memcpy(hello.token, token.data(), std::min(token.size(), sizeof(hello.token)));
    return std::string(reinterpret_cast<const char*>(&hello), sizeof(hello)) + text;
  }

  void call_lower_ranks() {
    for (int peer = 0; peer < rank_; ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      if (links_[index] || calls_[index]) continue;
      const SocketStatus status = connect_abstract(addresses_[index].name, calls_[index]);
      if (status == SocketStatus::closed) fail_lost(peer);
      if (status != SocketStatus::ok) continue;
      check_user(calls_[index], peer);
      send_message(calls_[index], hello_bytes(addresses_[index].token, options_.settings, false), own_doorbell_fd());
    }
  }

  void read_answers() {
    for (int peer = 0; peer < rank_; ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      if (links_[index] || !calls_[index]) continue;
      SocketMessage message;
      const SocketStatus status = receive_message(calls_[index], message);
      if (status == SocketStatus::would_block) continue;
      if (status == SocketStatus::closed) fail_lost(peer);
      const Hello hello = parse_hello(message);
      const std::string text = message.bytes.substr(sizeof(Hello));
      if (hello.is_refusal != 0) throw Error(ErrorKind::config, text);
      check_same(hello, text, peer);
      links_[index].emplace(std::move(calls_[index]), Segment::adopt(message.fd.release(), kDoorbellNbytes));
    }
  }

  void accept_strangers() {
    while (Fd caller = accept_pending(listener_)) {
      if (peer_identity(caller).uid != ::geteuid()) continue;
      if (strangers_.size() >= kMaxStrangers) strangers_.erase(strangers_.begin());
      strangers_.push_back(std::move(caller));
    }
  }

  void read_strangers() {
    std::vector<Fd> waiting;
    for (Fd& stranger : strangers_) {
      SocketMessage message;
      const SocketStatus status = receive_message(stranger, message);
      if (status == SocketStatus::would_block) waiting.push_back(std::move(stranger));
      if (status == SocketStatus::ok) welcome(std::move(stranger), std::move(message));
    }
    strangers_ = std::move(waiting);
  }

  // Whoever does not know the token is dropped without an answer.
  void welcome(Fd caller, SocketMessage message) {
    if (message.bytes.size() < sizeof(Hello)) return;
    const Hello hello = parse_hello(message);
    if (own_.token.compare(0, own_.token.size(), hello.token, sizeof(hello.token)) != 0) return;
    if (hello.rank <= rank_ || hello.rank >= size() || links_[static_cast<std::size_t>(hello.rank)]) return;
    try {
      check_same(hello, message.bytes.substr(sizeof(Hello)), hello.rank);
    } catch (const Error& error) {
      send_message(caller, hello_bytes("", error.what(), true));
      throw;
    }
    send_message(caller, hello_bytes("", options_.settings, false), own_doorbell_fd());
    links_[static_cast<std::size_t>(hello.rank)].emplace(std::move(caller),
                                                         Segment::adopt(message.fd.release(), kDoorbellNbytes));
  }

  static Hello parse_hello(const SocketMessage& message) {
    Hello hello{};
    if (message.bytes.size() >= sizeof(hello)) std::memcpy(&hello, message.bytes.data(), sizeof(hello));
    if (std::memcmp(hello.magic, kMagic, sizeof(kMagic)) != 0) hello = Hello{};
    return hello;
  }

  void check_user(const Fd& socket, int peer) const {
    const uid_t uid = peer_identity(socket).uid;
    if (uid == ::geteuid()) return;
    throw Error(ErrorKind::transport, "expected rank " + std::to_string(peer) + " to run as user id " +
                                          std::to_string(::geteuid()) + "; got " + std::to_string(uid) + where() +
                                          "; start all ranks as one user");
  }

  void check_same(const Hello& hello, const std::string& settings, int peer) const {
    const std::string who = "rank " + std::to_string(peer);
    if (hello.version != kWireVersion) {
      throw Error(ErrorKind::config, "expected wire version " + std::to_string(kWireVersion) + " from " + who +
                                         "; got " + std::to_string(hello.version) + where() +
                                         "; install one pipecomm everywhere");
    }
    if (hello.size != size()) {
      throw Error(ErrorKind::config, "expected " + std::to_string(size()) + " ranks; " + who + " was started for " +
                                         std::to_string(hello.size) + where());
    }
    if (settings != options_.settings) {
      throw Error(ErrorKind::config, "expected the settings '" + options_.settings + "' from " + who + "; got '" +
                                         settings + "'" + where() + "; give every rank the same options");
    }
  }

  [[noreturn]] void fail_lost(int peer) const {
    throw Error(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " ended while connecting" + where() +
                                          "; look at its output for the cause");
  }

  // A rank that connected and died makes the group impossible: no need to wait for the others.
  void check_connected() const {
    for (int peer = 0; peer < size(); ++peer) {
      const auto& link = links_[static_cast<std::size_t>(peer)];
      if (!link) continue;
      // A peer that was done sooner may have left with a goodbye, which is then still to be read.
      char first;
      if (::recv(link->fd(), &first, 1, MSG_PEEK | MSG_DONTWAIT) == 0) fail_lost(peer);
    }
  }

  [[noreturn]] void fail_missing(Nanoseconds timeout) const {
    std::string missing;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank_ && !links_[static_cast<std::size_t>(peer)])
        missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
    }
    throw Error(ErrorKind::link_timeout, "expected all " + std::to_string(size()) + " ranks to connect within " +
                                             std::to_string(timeout.count() / 1'000'000'000) +
                                             " s; no answer from rank " + missing + where() +
                                             "; check that it runs, or raise the timeout");
  }

  void wait_for_news() const {
    std::vector<pollfd> items{{listener_.get(), POLLIN, 0}};
    for (const Fd& call : calls_) {
      if (call) items.push_back({call.get(), POLLIN, 0});
    }
    for (const Fd& stranger : strangers_) items.push_back({stranger.get(), POLLIN, 0});
    ::poll(items.data(), items.size(), kPollMs);
  }

  static int own_doorbell_fd() { return Progress::instance().doorbell().fd(); }

  const Fd& listener_;
  const Address& own_;
  const int rank_;
  const CommunicatorOptions& options_;
  std::vector<Address> addresses_;
  std::vector<std::optional<Lifeline>> links_;
  std::vector<Fd> calls_;
  std::vector<Fd> strangers_;
};

}  // namespace

Address Address::make_own() {
  return {read_boot_id(), read_network_namespace(), std::to_string(::geteuid()), "pipecomm-" + random_hex(16),
          random_hex(16)};
}

std::string Address::to_string() const {
  return boot_id + "|" + network_namespace + "|" + uid + "|" + name + "|" + token;
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
  return address;
}

std::string why_unreachable(const std::string& own_address, const std::string& peer_address) {
  const Address own = Address::parse(own_address);
  const Address peer = Address::parse(peer_address);
  if (own.boot_id != peer.boot_id)
    return "it runs on another host (boot id " + peer.boot_id + ", here " + own.boot_id + ")";
  if (own.network_namespace != peer.network_namespace) {
    return "it runs in another network namespace (" + peer.network_namespace + ", here " + own.network_namespace +
           "), where AF_UNIX sockets cannot reach";
  }
  if (own.uid != peer.uid) return "it runs as user id " + peer.uid + ", here " + own.uid;
  return "";
}

std::vector<std::optional<Lifeline>> shake_hands(const Fd& listener, const Address& own, int rank,
                                                 const std::vector<std::string>& addresses,
                                                 const CommunicatorOptions& options, Nanoseconds timeout,
                                                 const InterruptCheck& interrupt) {
  return Handshake(listener, own, rank, addresses, options).run(timeout, interrupt);
}

}  // namespace pipecomm
