// Sends at once; receives when the ring has given all that it can.
#include "transport/group/losses.h"

#include <utility>

#include "transport/matching/transfer_errors.h"

namespace pipecomm {

void Losses::end(Link& link) {
  look_for_losses(link);
  const Error& cause = *link.gone();
  link.sender().fail_if([](const TransferState&) { return true; }, Error(cause.kind(), cause.what() + where_), true);
  // Before its streams are let go, which may then write anything. Memory that they use may hold up what is in the ring.
  link.receiver().fail_enqueued([&](const TransferState& transfer) { return transfer_error(cause, transfer, where_); });
  link.let_go();
  if (link.receiver().is_over() || link.receiver().is_blocked()) end_receives(link);
}

// A survivor's goodbye can overtake the end of the rank that it has lost: that is the cause to tell.
void Losses::look_for_losses(const Link& link) {
  if (link.is_lost() || !fails_together_ || together_ || std::exchange(looks_for_losses_, true)) return;
  poll_sockets_();
  looks_for_losses_ = false;
}

void Losses::end_receives(Link& link) {
  const Error& cause = *link.gone();
  const auto explain = [&](const TransferState& transfer) { return transfer_error(cause, transfer, where_); };
  const TransferPtr current = link.receiver().current_receive();
  link.receiver().fail_current(current ? explain(*current) : cause);
  if (link.is_lost() && fails_together_ && !together_) {
    together_ = cause;
    links_.fail_all(Error(cause.kind(), cause.what() + where_), false);
    // Before this process ends of it: its own end, seen first, would be taken for the cause.
    links_.for_each([&](Link& other) { other.lifeline().send(ControlKind::gave_up, 0, cause.what()); });
  }
  const auto is_waiting = [&](const TransferState& receive) { return links_.can_only_wait_for(receive, link.peer()); };
  for (const TransferPtr& receive : inbox_.take_if(is_waiting)) receive->fail(explain(*receive));
}

}  // namespace pipecomm
