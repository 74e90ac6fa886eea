// Rank i calls every lower remote rank and is called by every higher one. Nothing of a greeting's text is read before
// its token is known to be right.
//
//   higher rank                         lower rank
//     connect, the callee's token  ->     checks token, version, settings
//     checks                       <-     the caller's token (and perhaps the text of a refusal)
#include "transport/meeting/remote_handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "sockets/tcp_socket.h"
#include "transport/meeting/greeting.h"
#include "wire/header.h"

namespace pipecomm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollMs = 50;
// Callers that have not proved that they belong here by then are dropped.
constexpr auto kGreetingTimeout = std::chrono::seconds(5);
constexpr std::uint32_t kMaxTextNbytes = 32u << 10;
constexpr char kMagic[8] = {'p', 'c', 'b', 'r', 'i', 'd', 'g', '1'};

struct Hello {
  char magic[8];
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t is_refusal;
  std::uint32_t text_nbytes;
  std::uint32_t reserved;
  char token[32];
};
static_assert(sizeof(Hello) == 64);

// Somebody at the other end of a stream, of whom the hello and then its text are read.
struct Visitor {
  Fd socket;
  Clock::time_point until;
  std::string bytes;

  Hello hello() const {
    Hello hello;
    std::memcpy(&hello, bytes.data(), sizeof(hello));
    return hello;
  }
  std::string text() const { return bytes.substr(sizeof(Hello)); }
};

enum class Reading { more, whole, refused, closed };

bool knows(const Hello& hello, const std::string& token) {
  return std::memcmp(hello.magic, kMagic, sizeof(kMagic)) == 0 && hello.text_nbytes <= kMaxTextNbytes &&
         token.compare(0, token.size(), hello.token, sizeof(hello.token)) == 0;
}

// Not one byte more than belongs to the greeting: frames may follow.
Reading read_greeting(Visitor& visitor, const std::string& token) {
  while (true) {
    const std::size_t have = visitor.bytes.size();
    if (have >= sizeof(Hello) && !knows(visitor.hello(), token)) return Reading::refused;
    const std::size_t whole = sizeof(Hello) + (have < sizeof(Hello) ? 0 : visitor.hello().text_nbytes);
    if (have >= sizeof(Hello) && have == whole) return Reading::whole;
    visitor.bytes.resize(whole);
    const ssize_t got = ::recv(visitor.socket.get(), visitor.bytes.data() + have, whole - have, MSG_DONTWAIT);
    visitor.bytes.resize(have + static_cast<std::size_t>(got > 0 ? got : 0));
    if (got > 0) continue;
    return got < 0 && (errno == EAGAIN || errno == EINTR) ? Reading::more : Reading::closed;
  }
}

class RemoteHandshake {
 public:
  RemoteHandshake(const Fd& listener, const Address& own, int rank, const std::vector<Address>& addresses,
                  const CommunicatorOptions& options)
      : listener_(listener),
        own_(own),
        rank_(rank),
        addresses_(addresses),
        greeting_(rank, addresses.size(), options),
        streams_(addresses.size()),
        calls_(addresses.size()),
        is_greeted_(addresses.size()) {}

  std::vector<Fd> run(Nanoseconds timeout, const InterruptCheck& interrupt) {
    const auto deadline = Clock::now() + timeout;
    call_lower_ranks();
    while (true) {
      greet_lower_ranks();
      read_answers();
      accept_strangers();
      read_strangers();
      check_connected();
      if (missing().empty()) break;
      if (Clock::now() > deadline) greeting_.fail_missing(missing(), timeout);
      if (interrupt) interrupt();
      wait_for_news();
    }
    for (const Fd& stream : streams_) {
      if (stream) prepare_stream(stream);
    }
    return std::move(streams_);
  }

 private:
  int size() const { return greeting_.size(); }
  static std::size_t at(int peer) { return static_cast<std::size_t>(peer); }

  bool is_missing(int peer) const {
    return peer != rank_ && !streams_[at(peer)] && is_remote(own_, addresses_[at(peer)]);
  }

  std::vector<std::string> missing() const {
    std::vector<std::string> names;
    for (int peer = 0; peer < size(); ++peer) {
      if (is_missing(peer)) names.push_back(std::to_string(peer) + " at " + addresses_[at(peer)].endpoint);
    }
    return names;
  }

  std::string hello_bytes(const std::string& token, const std::string& text, bool is_refusal) const {
    Hello hello{};
    std::memcpy(hello.magic, kMagic, sizeof(kMagic));
    hello.version = kWireVersion;
    hello.rank = rank_;
    hello.size = size();
    hello.is_refusal = is_refusal ? 1 : 0;
    hello.text_nbytes = static_cast<std::uint32_t>(std::min<std::size_t>(text.size(), kMaxTextNbytes));
    std::memcpy(hello.token, token.data(), std::min(token.size(), sizeof(hello.token)));
    return std::string(reinterpret_cast<const char*>(&hello), sizeof(hello)) + text.substr(0, kMaxTextNbytes);
  }

  // A fresh stream has room for it.
  static bool say(const Fd& socket, const std::string& bytes) {
    return ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
  }

  void call_lower_ranks() {
    for (int peer = 0; peer < rank_; ++peer) {
      if (is_missing(peer)) calls_[at(peer)].socket = begin_connect_tcp(addresses_[at(peer)].endpoint);
    }
  }

  void greet_lower_ranks() {
    for (int peer = 0; peer < rank_; ++peer) {
      const Fd& socket = calls_[at(peer)].socket;
      if (!socket || is_greeted_[at(peer)]) continue;
      pollfd item{socket.get(), POLLOUT, 0};
      if (::poll(&item, 1, 0) <= 0) continue;
      if (const int code = connect_error(socket)) fail_to_connect(peer, code);
      if (!say(socket, hello_bytes(addresses_[at(peer)].token, greeting_.settings(), false))) greeting_.fail_lost(peer);
      is_greeted_[at(peer)] = true;
    }
  }

  void read_answers() {
    for (int peer = 0; peer < rank_; ++peer) {
      Visitor& call = calls_[at(peer)];
      if (!call.socket || !is_greeted_[at(peer)]) continue;
      switch (read_greeting(call, own_.token)) {
        case Reading::more:
          break;
        case Reading::closed:
          greeting_.fail_lost(peer);
        case Reading::refused:
          throw Error(ErrorKind::transport, "expected rank " + std::to_string(peer) + " to answer at " +
                                                addresses_[at(peer)].endpoint + "; got an answer of somebody else" +
                                                greeting_.where());
        case Reading::whole:
          take_answer(peer, call);
          break;
      }
    }
  }

  void take_answer(int peer, Visitor& call) {
    const Hello hello = call.hello();
    if (hello.is_refusal != 0) throw Error(ErrorKind::config, call.text());
    greeting_.check_same(hello.version, hello.size, call.text(), peer);
    streams_[at(peer)] = std::move(call.socket);
  }

  void accept_strangers() {
    while (Fd caller = accept_pending(listener_)) {
      if (strangers_.size() >= kMaxStrangers) strangers_.erase(strangers_.begin());
      strangers_.push_back({std::move(caller), Clock::now() + kGreetingTimeout, ""});
    }
  }

  void read_strangers() {
    std::vector<Visitor> waiting;
    for (Visitor& stranger : strangers_) {
      const Reading reading = read_greeting(stranger, own_.token);
      if (reading == Reading::whole) welcome(stranger);
      if (reading == Reading::more && Clock::now() < stranger.until) waiting.push_back(std::move(stranger));
    }
    strangers_ = std::move(waiting);
  }

  void welcome(Visitor& caller) {
    const Hello hello = caller.hello();
    if (hello.rank <= rank_ || hello.rank >= size() || !is_missing(hello.rank)) return;
    const std::string& token = addresses_[at(hello.rank)].token;
    try {
      greeting_.check_same(hello.version, hello.size, caller.text(), hello.rank);
    } catch (const Error& error) {
      say(caller.socket, hello_bytes(token, error.what(), true));
      throw;
    }
    if (say(caller.socket, hello_bytes(token, greeting_.settings(), false)))
      streams_[at(hello.rank)] = std::move(caller.socket);
  }

  [[noreturn]] void fail_to_connect(int peer, int code) const {
    if (code == ECONNREFUSED || code == ECONNRESET) greeting_.fail_lost(peer);
    throw Error(ErrorKind::transport, "expected rank " + std::to_string(peer) + " to be reachable at " +
                                          addresses_[at(peer)].endpoint + "; got: " + std::strerror(code) +
                                          greeting_.where() +
                                          "; set PIPECOMM_SOCKET_IFNAME to the interface that leads there");
  }

  // A rank that connected and died makes the group impossible: no need to wait for the others.
  void check_connected() const {
    for (int peer = 0; peer < size(); ++peer) {
      const Fd& stream = streams_[at(peer)];
      char first;
      if (!stream) continue;
      const ssize_t got = ::recv(stream.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) greeting_.fail_lost(peer);
    }
  }

  void wait_for_news() const {
    std::vector<pollfd> items{{listener_.get(), POLLIN, 0}};
    for (std::size_t peer = 0; peer < calls_.size(); ++peer) {
      const short news = is_greeted_[peer] ? POLLIN : POLLOUT;
      if (calls_[peer].socket) items.push_back({calls_[peer].socket.get(), news, 0});
    }
    for (const Visitor& stranger : strangers_) items.push_back({stranger.socket.get(), POLLIN, 0});
    ::poll(items.data(), items.size(), kPollMs);
  }

  const Fd& listener_;
  const Address& own_;
  const int rank_;
  const std::vector<Address>& addresses_;
  const Greeting greeting_;
  std::vector<Fd> streams_;
  std::vector<Visitor> calls_;
  std::vector<bool> is_greeted_;
  std::vector<Visitor> strangers_;
};

}  // namespace

std::vector<Fd> shake_hands_remotely(const Fd& listener, const Address& own, int rank,
                                     const std::vector<Address>& addresses, const CommunicatorOptions& options,
                                     Nanoseconds timeout, const InterruptCheck& interrupt) {
  return RemoteHandshake(listener, own, rank, addresses, options).run(timeout, interrupt);
}

}  // namespace pipecomm
