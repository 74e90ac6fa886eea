// How transfers of a communicator end before, or after, their time. Under the progress lock, but the last two.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/group/link.h"

namespace pipecomm {

using Links = std::vector<std::unique_ptr<Link>>;  // by rank; none for this one

inline bool any_transfer(const TransferState&) { return true; }

// Ends what has not ended and answers the predicate; with `forget`, also what is half way out.
template <typename Predicate>
void fail_transfers(Inbox& inbox, const Links& links, const Predicate& predicate, const Error& error, bool forget) {
  for (const auto& receive : inbox.take_if(predicate)) receive->fail(error);
  for (const auto& link : links) {
    if (!link) continue;
    if (link->receiver().is_current(predicate)) link->receiver().fail_current(error);
    link->sender().fail_if(predicate, error, forget);
  }
}

// A receive that nobody can answer any more, now that this peer is gone. One from anybody waits for whoever is left.
bool waits_for(const TransferState& receive, int gone_peer, const Links& links);
// "; also gone: rank 2, 3", or nothing. Who ends because of a loss is soon lost too, to others that wait for it.
std::string also_gone(int peer, const Links& links);
// Throws the error of a peer that is gone.
void throw_if_gone(const Links& links);
// Returns when the device has written what was sent, for which the peers' devices wait, and has what was told of; or
// after the timeout; and when peers have read the tensors lent to them, or after 0.5 s. Takes the lock.
void finish_shared(const Links& links, Nanoseconds timeout);
// Ends links that said goodbye, once they may end: those of late peers on a thread of their own. `owner` is what they
// refer to. Call without the lock.
void end_links(Links links, std::shared_ptr<void> owner);

}  // namespace pipecomm
