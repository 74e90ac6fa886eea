// What ends when a peer has gone. The rule: what came whole is delivered, whenever it is asked for; everything else
// that waits for the peer ends with its error, whenever it is posted. Used under the progress lock.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>

#include "transport/group/link_set.h"

namespace pipecomm {

class Losses {
 public:
  // `where` ends the text of every error; `poll_sockets` reads what all peers have said.
  Losses(Inbox& inbox, LinkSet& links, std::string where, std::function<void()> poll_sockets)
      : inbox_(inbox), links_(links), where_(std::move(where)), poll_sockets_(std::move(poll_sockets)) {}

  // As Communicator::set_fail_together(). Any thread.
  void set_fail_together(bool value) { fails_together_.store(value); }
  // The loss that all transfers end with; none so far.
  const std::optional<Error>& together() const { return together_; }
  // Ends what waits for the peer of this link, which has gone. What may still be taken from its ring is waited for.
  void end(Link& link);

 private:
  void look_for_losses(const Link& link);
  void end_receives(Link& link);

  Inbox& inbox_;
  LinkSet& links_;
  const std::string where_;
  const std::function<void()> poll_sockets_;
  std::atomic<bool> fails_together_{false};
  std::optional<Error> together_;
  bool looks_for_losses_ = false;
};

}  // namespace pipecomm
