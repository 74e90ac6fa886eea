// The texts.
#include "transport/matching/transfer_errors.h"

namespace pipecomm {

Error transfer_error(const Error& cause, const TransferState& transfer, const std::string& where) {
  return Error(cause.kind(), std::string(cause.what()) + "; " + (transfer.is_send ? "sending " : "receiving ") +
                                 describe_tensors(transfer) + " (" + describe_key(transfer) + ")" + where);
}

Error timeout_error(const Error& waited, const TransferState& transfer, const std::string& where,
                    const std::string& state) {
  const int peer = transfer.peer();
  std::string text = waited.what();
  text += transfer.is_send     ? " for rank " + std::to_string(peer) + " to take a message"
          : peer == kAnySource ? " for a message from any rank"
                               : " for a message from rank " + std::to_string(peer);
  text += " (" + describe_key(transfer) + "): " + describe_tensors(transfer) + where + state;
  return Error(ErrorKind::link_timeout, text + "; check what that rank does, or raise the timeout");
}

Error mismatch_error(const InMessage& message, std::size_t index) {
  const ReceivedPart& part = message.parts[index];
  const TensorView sent{nullptr, part.dtype, part.shape};
  const std::string what =
      part.absent ? "no tensor"
                  : describe_tensor(part.dtype, part.shape) + " (" + std::to_string(sent.nbytes()) + " bytes)";
  return Error(ErrorKind::message_mismatch,
               "expected " + describe_tensors(*message.receiver) + "; got " + std::to_string(message.num_parts) +
                   " tensor(s), number " + std::to_string(index) + ": " + what + " from rank " +
                   std::to_string(message.source) + " (" + describe_key(*message.receiver) +
                   "); receive into a tensor of the sender's dtype and size");
}

}  // namespace pipecomm
