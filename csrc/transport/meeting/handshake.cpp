// Rank i connects to every lower rank and accepts every higher one. A hello is answered by a hello or a refusal.
//
//   higher rank                      lower rank
//     connect, hello + doorbell  ->    checks user, token, version, settings
//     checks                     <-    hello + doorbell (or the text of a refusal)
#include "transport/meeting/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "transport/meeting/greeting.h"
#include "transport/progress/progress.h"
#include "wire/header.h"

namespace pipecomm {
namespace {

using Clock = std::chrono::steady_clock;

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

class Handshake {
 public:
  Handshake(const Fd& listener, const Address& own, int rank, const std::vector<Address>& addresses,
            const CommunicatorOptions& options)
      : listener_(listener),
        own_(own),
        rank_(rank),
        addresses_(addresses),
        greeting_(rank, addresses.size(), options),
        links_(addresses.size()),
        calls_(addresses.size()) {}

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
  int size() const { return greeting_.size(); }

  bool is_missing(int peer) const {
    const auto index = static_cast<std::size_t>(peer);
    return peer != rank_ && !links_[index] && !is_remote(own_, addresses_[index]);
  }

  bool is_complete() const {
    for (int peer = 0; peer < size(); ++peer) {
      if (is_missing(peer)) return false;
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
      if (!is_missing(peer) || calls_[index]) continue;
      const SocketStatus status = connect_abstract(addresses_[index].name, calls_[index]);
      if (status == SocketStatus::closed) fail_lost(peer);
      if (status != SocketStatus::ok) continue;
      check_user(calls_[index], peer);
      send_message(calls_[index], hello_bytes(addresses_[index].token, greeting_.settings(), false), own_doorbell_fd());
    }
  }

  void read_answers() {
    for (int peer = 0; peer < rank_; ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      if (!is_missing(peer) || !calls_[index]) continue;
      SocketMessage message;
      const SocketStatus status = receive_message(calls_[index], message);
      if (status == SocketStatus::would_block) continue;
      if (status == SocketStatus::closed) fail_lost(peer);
      const Hello hello = parse_hello(message);
      const std::string text = message.bytes.substr(sizeof(Hello));
      if (hello.is_refusal != 0) throw Error(ErrorKind::config, text);
      greeting_.check_same(hello.version, hello.size, text, peer);
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
    if (hello.rank <= rank_ || hello.rank >= size() || !is_missing(hello.rank)) return;
    try {
      greeting_.check_same(hello.version, hello.size, message.bytes.substr(sizeof(Hello)), hello.rank);
    } catch (const Error& error) {
      send_message(caller, hello_bytes("", error.what(), true));
      throw;
    }
    send_message(caller, hello_bytes("", greeting_.settings(), false), own_doorbell_fd());
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
                                          std::to_string(::geteuid()) + "; got " + std::to_string(uid) +
                                          greeting_.where() + "; start all ranks as one user");
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

  [[noreturn]] void fail_lost(int lost) const {
    std::vector<std::string> others;
    for (int peer = 0; peer < size(); ++peer) {
      const auto& link = links_[static_cast<std::size_t>(peer)];
      if (peer != lost && (is_missing(peer) || (link && link->has_hung_up()))) others.push_back(std::to_string(peer));
    }
    greeting_.fail_lost(lost, others);
  }

  [[noreturn]] void fail_missing(Nanoseconds timeout) const {
    std::vector<std::string> missing;
    for (int peer = 0; peer < size(); ++peer) {
      if (is_missing(peer)) missing.push_back(std::to_string(peer));
    }
    greeting_.fail_missing(missing, timeout);
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
  const std::vector<Address>& addresses_;
  const Greeting greeting_;
  std::vector<std::optional<Lifeline>> links_;
  std::vector<Fd> calls_;
  std::vector<Fd> strangers_;
};

}  // namespace

std::vector<std::optional<Lifeline>> shake_hands(const Fd& listener, const Address& own, int rank,
                                                 const std::vector<Address>& addresses,
                                                 const CommunicatorOptions& options, Nanoseconds timeout,
                                                 const InterruptCheck& interrupt) {
  return Handshake(listener, own, rank, addresses, options).run(timeout, interrupt);
}

}  // namespace pipecomm
