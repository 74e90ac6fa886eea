// The one loop of every meeting.
#include "transport/meeting/handshake.h"

#include <poll.h>

#include <chrono>
#include <utility>

#include "base/error.h"

namespace pipecomm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollMs = 50;

}  // namespace

Handshake::Handshake(const Fd& listener, const Address& own, int rank, const std::vector<Address>& addresses,
                     const CommunicatorOptions& options, bool meets_remote)
    : listener_(listener),
      own_(own),
      rank_(rank),
      addresses_(addresses),
      meets_remote_(meets_remote),
      greeting_(rank, addresses.size(), options),
      connected_(addresses.size()),
      calls_(addresses.size()) {}

std::vector<Visitor> Handshake::run(Nanoseconds timeout, const InterruptCheck& interrupt) {
  const auto deadline = Clock::now() + timeout;
  while (!missing().empty()) {
    call_lower_ranks();
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
  return std::move(connected_);
}

std::string Handshake::name(int peer) const {
  return std::to_string(peer) + (meets_remote_ ? " at " + address(peer).endpoint : "");
}

bool Handshake::is_missing(int peer) const {
  return peer != rank_ && !connection(peer) && is_remote(own_, address(peer)) == meets_remote_;
}

std::vector<std::string> Handshake::missing() const {
  std::vector<std::string> names;
  for (int peer = 0; peer < size(); ++peer) {
    if (is_missing(peer)) names.push_back(name(peer));
  }
  return names;
}

bool Handshake::greet(const Fd& socket, int peer, const std::string& refusal) const {
  return say(socket, hello_bytes(rank_, size(), address(peer).token, refusal));
}

void Handshake::call_lower_ranks() {
  for (int peer = 0; peer < rank_; ++peer) {
    Visitor& callee = calls_[static_cast<std::size_t>(peer)].visitor;
    if (is_missing(peer) && !callee.socket) callee.socket = call(peer);
  }
}

void Handshake::greet_lower_ranks() {
  for (int peer = 0; peer < rank_; ++peer) {
    Call& made = calls_[static_cast<std::size_t>(peer)];
    if (!made.visitor.socket || made.is_greeted || !is_through(peer, made.visitor.socket)) continue;
    if (!greet(made.visitor.socket, peer, "")) fail_lost(peer);
    made.is_greeted = true;
  }
}

void Handshake::read_answers() {
  for (int peer = 0; peer < rank_; ++peer) {
    Call& made = calls_[static_cast<std::size_t>(peer)];
    if (!made.visitor.socket || !made.is_greeted) continue;
    switch (read(made.visitor)) {
      case Reading::more:
        break;
      case Reading::closed:
        fail_lost(peer);
      case Reading::whole:
        take_answer(peer, made.visitor);
    }
  }
}

void Handshake::take_answer(int peer, Visitor& answer) {
  if (!answer.knows(own_.token)) {
    throw Error(ErrorKind::transport,
                "expected rank " + name(peer) + " to answer; got an answer of somebody else" + greeting_.where());
  }
  const Hello hello = answer.hello();
  if (hello.is_refusal != 0) throw Error(ErrorKind::config, answer.text());
  greeting_.check_same(hello.version, hello.size, peer);
  connected_[static_cast<std::size_t>(peer)] = std::move(answer);
}

void Handshake::accept_strangers() {
  while (Fd socket = accept_pending(listener_)) {
    Visitor caller{std::move(socket), Clock::time_point::max(), "", {}};
    if (!lets_in(caller)) continue;
    if (strangers_.size() >= kMaxStrangers) strangers_.erase(strangers_.begin());
    strangers_.push_back(std::move(caller));
  }
}

void Handshake::read_strangers() {
  std::vector<Visitor> waiting;
  for (Visitor& stranger : strangers_) {
    const Reading reading = read(stranger);
    if (reading == Reading::whole) welcome(stranger);
    if (reading == Reading::more && Clock::now() < stranger.until) waiting.push_back(std::move(stranger));
  }
  strangers_ = std::move(waiting);
}

// Whoever does not know the token is dropped without an answer.
void Handshake::welcome(Visitor& caller) {
  if (!caller.knows(own_.token)) return;
  const Hello hello = caller.hello();
  if (hello.rank <= rank_ || hello.rank >= size() || !is_missing(hello.rank)) return;
  try {
    greeting_.check_same(hello.version, hello.size, hello.rank);
  } catch (const Error& error) {
    greet(caller.socket, hello.rank, error.what());
    throw;
  }
  greet(caller.socket, hello.rank, "");  // one that has gone shows as connected and ended
  connected_[static_cast<std::size_t>(hello.rank)] = std::move(caller);
}

// A rank that connected and died makes the group impossible: no need to wait for the others.
void Handshake::check_connected() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (connection(peer) && has_ended(connection(peer))) fail_lost(peer);
  }
}

void Handshake::fail_lost(int lost) const {
  std::vector<std::string> others;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == lost) continue;
    if (is_missing(peer) || (connection(peer) && has_hung_up(connection(peer)))) others.push_back(std::to_string(peer));
  }
  greeting_.fail_lost(lost, others);
}

void Handshake::wait_for_news() const {
  std::vector<pollfd> items{{listener_.get(), POLLIN, 0}};
  for (const Call& made : calls_) {
    const short news = made.is_greeted ? POLLIN : POLLOUT;
    if (made.visitor.socket) items.push_back({made.visitor.socket.get(), news, 0});
  }
  for (const Visitor& stranger : strangers_) items.push_back({stranger.socket.get(), POLLIN, 0});
  ::poll(items.data(), items.size(), kPollMs);
}

}  // namespace pipecomm
