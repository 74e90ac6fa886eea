// The texts.
#include "transport/transfer_errors.h"

namespace pipecomm {

Error transfer_error(const Error& cause, const TransferState& transfer, const std::string& where) {
  return Error(cause.kind(), std::string(cause.what()) + "; " + (transfer.is_send ? "sending " : "receiving ") +
                                 describe_tensors(transfer) + " (" + describe_key(transfer.key) + ")" + where);
}

Error timeout_error(const Error& waited, const TransferState& transfer, const Link* link, const std::string& where) {
  const int peer = transfer.peer();
  std::string text = waited.what();
  text += transfer.is_send     ? " for rank " + std::to_string(peer) + " to take a message"
          : peer == kAnySource ? " for a message from any rank"
                               : " for a message from rank " + std::to_string(peer);
  text += " (" + describe_key(transfer.key) + "): " + describe_tensors(transfer) + where;
  if (link != nullptr) text += "; " + link->last_activity();
  if (link != nullptr && link->is_blocked()) text += ", one that nobody asks for lies in front";
  return Error(ErrorKind::link_timeout, text + "; check what that rank does, or raise the timeout");
}

}  // namespace pipecomm
