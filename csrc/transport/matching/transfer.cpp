// Waiting for a transfer, ending one, and telling about one.
#include "transport/matching/transfer.h"

#include <cstdio>

#include "wire/header.h"

namespace pipecomm {

TransferState::TransferState(int peer, MessageKey message_key, bool sends, Cancel cancel)
    : key(message_key), is_send(sends), peer_(peer), cancel_(std::move(cancel)) {
  clock.posted_ns = now_ns();
}

std::optional<Error> TransferState::error() const {
  if (!is_done()) return std::nullopt;
  return has_late_error_.load(std::memory_order_acquire) ? late_error_ : error_;
}

void TransferState::finish() {
  if (has_ended()) return;
  error_ = complaint;
  clock.done_ns = now_ns();
  if (!is_send) release();
  has_ended_.store(true, std::memory_order_release);
  Progress::instance().count_open(-1);
  Progress::instance().kick();
}

void TransferState::fail(const Error& error) {
  if (has_ended()) return;
  if (!complaint) complaint = error;  // a receiver that refused it and left then has refused it
  finish();
}

std::size_t TransferState::host_nbytes() const {
  std::size_t nbytes = 0;
  const auto add = [&](const TensorView& tensor) { nbytes += tensor.device == kOnHost ? tensor.nbytes() : 0; };
  for (const SendPart& part : to_send) add(part.tensor);
  for (const TensorView& target : targets) add(target);
  return nbytes;
}

void TransferState::set_event(const Event& event) {
  last_use_ = event;
  if (!has_ended()) event_ = event;
}

void TransferState::fail_late(const Error& error) {
  if (has_late_error_.load()) return;
  late_error_ = error;
  has_late_error_.store(true, std::memory_order_release);
}

void TransferState::release() {
  if (!last_use_.is_ready()) return Progress::instance().release_later(shared_from_this());
  for (Block& block : staging) block.reset();
  Progress::instance().drop_later(std::move(keepalive));
  has_left_.store(true, std::memory_order_release);
}

void TransferState::wait(Nanoseconds timeout, const InterruptCheck& interrupt) {
  const auto done = [this] { return has_ended(); };
  const std::int64_t start = now_ns();
  const bool is_limited = timeout.count() >= 0 && timeout < std::chrono::hours(24 * 365);
  const std::int64_t deadline = is_limited ? start + timeout.count() : INT64_MAX;
  if (!done()) {
    const TransferPtr self = shared_from_this();
    try {
      if (!Progress::instance().wait_until(done, deadline, interrupt)) {
        const double waited_s = static_cast<double>(now_ns() - start) / 1e9;
        cancel_(self, Error(ErrorKind::link_timeout, "waited " + std::to_string(waited_s) + " s"));
      }
    } catch (...) {
      cancel_(self, Error(ErrorKind::transport, "the wait was interrupted"));
      throw;
    }
  }
  const bool is_over =
      !waits_on_host || Progress::instance().wait_until([this] { return is_done(); }, deadline, interrupt);
  if (error_) throw Error(*error_);
  if (!is_over) {
    throw Error(ErrorKind::link_timeout,
                "waited " + std::to_string(static_cast<double>(now_ns() - start) / 1e9) +
                    " s for a device to do what was enqueued for this transfer: " + describe_pending(*this));
  }
  if (has_late_error_.load(std::memory_order_acquire)) throw Error(*late_error_);
}

std::string describe_key(const MessageKey& key, Iteration iteration) {
  std::string text;
  if (key.direction != Direction::none) text += std::string(direction_name(key.direction)) + ", ";
  if (key.stage != kNoStage) text += "stage " + std::to_string(key.stage) + ", ";
  if (key.microbatch != kNoMicrobatch) text += "microbatch " + std::to_string(key.microbatch) + ", ";
  if (key.direction == Direction::none) return text + "tag " + std::to_string(key.tag);
  return text + (iteration ? "iteration " + std::to_string(*iteration) : "section " + std::to_string(key.epoch));
}

std::string describe_key(const TransferState& transfer) { return describe_key(transfer.key, transfer.iteration); }

std::string describe_pending(const TransferState& transfer) {
  const std::string peer = transfer.peer() == kAnySource ? "any rank" : "rank " + std::to_string(transfer.peer());
  char age[32];
  std::snprintf(age, sizeof(age), "%.1f s", static_cast<double>(now_ns() - transfer.clock.posted_ns) / 1e9);
  return (transfer.is_send ? "  send to " : "  receive from ") + peer + " (" + describe_key(transfer) +
         "): " + describe_tensors(transfer) + ", for " + age +
         (transfer.is_send ? ", " + std::to_string(transfer.wire) + " bytes written\n" : "\n");
}

std::string describe_tensors(const TransferState& transfer) {
  std::string text;
  std::size_t nbytes = 0;
  const auto add = [&](const TensorView& tensor) {
    text += (text.empty() ? "" : ", ") + describe_tensor(tensor.dtype, tensor.shape);
    nbytes += tensor.nbytes();
  };
  for (const SendPart& part : transfer.to_send) add(part.tensor);
  for (const TensorView& target : transfer.targets) add(target);
  if (text.empty()) return "any tensors";
  return text + " (" + std::to_string(nbytes) + " bytes)";
}

}  // namespace pipecomm
