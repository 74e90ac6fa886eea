// The links of one communicator, and how its transfers end before their time. Under the progress lock, but where a
// function says that it takes it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/group/link.h"
#include "transport/remote/bridges.h"

namespace pipecomm {

class LinkSet {
 public:
  using Predicate = std::function<bool(const TransferState&)>;
  using Links = std::vector<std::unique_ptr<Link>>;  // by rank; none for this one

  explicit LinkSet(Inbox& inbox) : inbox_(inbox) {}

  // That of the next rank; none for this one.
  void add(std::unique_ptr<Link> link) { links_.push_back(std::move(link)); }
  Link& to(int peer) { return *links_[static_cast<std::size_t>(peer)]; }
  // nullptr for any source.
  const Link* find(int peer) const {
    return peer == kAnySource ? nullptr : links_[static_cast<std::size_t>(peer)].get();
  }
  template <typename Fn>
  void for_each(Fn&& fn) const {
    for (const auto& link : links_) {
      if (link) fn(*link);
    }
  }

  // Ends what has not ended and satisfies the predicate; with `forget`, also what is halfway out.
  void fail_if(const Predicate& predicate, const Error& error, bool forget);
  void fail_all(const Error& error, bool forget) {
    fail_if([](const TransferState&) { return true; }, error, forget);
  }
  // A receive that nobody can answer any more, now that this peer is gone. One from anybody waits for whoever is left.
  bool can_only_wait_for(const TransferState& receive, int gone_peer) const;
  // "; also gone: rank 2, 3", or nothing. A rank that ends because of a loss is soon lost too, to others that wait for
  // it. A bridge may have to pass on more before the end of its link is seen: what it knows counts already.
  std::string also_gone(int peer, const Bridges& bridges) const;
  // Throws the error of a peer that is gone.
  void throw_if_gone() const;

  // Returns when the device has written what was sent, for which the peers' devices wait, and has what was told of; or
  // after the timeout; and when peers have read the tensors lent to them, or after 0.5 s. Takes the lock.
  void finish(Nanoseconds timeout) const;
  // They are nobody's any more: end() ends them.
  Links take_out() { return std::exchange(links_, {}); }
  // Ends links that said goodbye, once they may end: those of late peers on a thread of their own. `owner` is what they
  // refer to. Call without the lock, which may be needed to end what their streams wait for.
  static void end(Links links, std::shared_ptr<void> owner);

 private:
  void wait_for_all(Nanoseconds timeout, bool (Link::*is_finished)() const) const;

  Inbox& inbox_;
  Links links_;
};

}  // namespace pipecomm
