// How ranks meet, on one host or on several: rank i calls every lower rank and is called by every higher one. Nothing
// that a caller says is believed before it has shown the token of whom it calls.
//
//   higher rank                         lower rank
//     connect, the callee's token  ->     checks token, version, size
//     checks                       <-     the caller's token, and why it refuses if it does
#pragma once

#include <string>
#include <vector>

#include "sockets/socket.h"
#include "transport/api/options.h"
#include "transport/meeting/address.h"
#include "transport/meeting/greeting.h"
#include "transport/meeting/hello.h"

namespace pipecomm {

// The ranks that one kind of socket leads to; the kind says how words cross it.
class Handshake {
 public:
  virtual ~Handshake() = default;
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  // Connects to all of them; result[i] is the connection to rank i, without a socket for this rank and all others.
  // Throws as Listener::connect does.
  std::vector<Visitor> run(Nanoseconds timeout, const InterruptCheck& interrupt);

 protected:
  enum class Reading { more, whole, closed };

  Handshake(const Fd& listener, const Address& own, int rank, const std::vector<Address>& addresses,
            const CommunicatorOptions& options, bool meets_remote);

  // Begins to connect; an empty socket where that is to be tried again, a throw where nobody listens any more.
  virtual Fd call(int peer) = 0;
  // The call has got through: words can be said.
  virtual bool is_through(int peer, const Fd& socket) const = 0;
  // Whether the caller may speak; if so, sets until when.
  virtual bool lets_in(Visitor& caller) const = 0;
  virtual bool say(const Fd& socket, const std::string& bytes) const = 0;
  // Takes what there is of a hello and its text, and not one byte more: other things may follow.
  virtual Reading read(Visitor& visitor) const = 0;
  virtual bool has_ended(const Fd& socket) const = 0;

  const Address& address(int peer) const { return addresses_[static_cast<std::size_t>(peer)]; }
  // "2", or "2 at 10.0.0.1:40001".
  std::string name(int peer) const;
  const std::string& own_token() const { return own_.token; }
  const Greeting& greeting() const { return greeting_; }
  [[noreturn]] void fail_lost(int lost) const;

 private:
  struct Call {
    Visitor visitor;
    bool is_greeted = false;
  };

  int size() const { return greeting_.size(); }
  const Fd& connection(int peer) const { return connected_[static_cast<std::size_t>(peer)].socket; }
  bool is_missing(int peer) const;
  std::vector<std::string> missing() const;
  bool greet(const Fd& socket, int peer, const std::string& refusal) const;
  void call_lower_ranks();
  void greet_lower_ranks();
  void read_answers();
  void take_answer(int peer, Visitor& answer);
  void accept_strangers();
  void read_strangers();
  void welcome(Visitor& caller);
  void check_connected() const;
  void wait_for_news() const;

  const Fd& listener_;
  const Address& own_;
  const int rank_;
  const std::vector<Address>& addresses_;
  const bool meets_remote_;
  const Greeting greeting_;
  std::vector<Visitor> connected_;
  std::vector<Call> calls_;
  std::vector<Visitor> strangers_;
};

}  // namespace pipecomm
