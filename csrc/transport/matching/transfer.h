// A transfer's shared state: filled in by whoever polls, read by whoever waits.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/api/communicator.h"
#include "transport/progress/progress.h"

namespace pipecomm {

class TransferState final : public Transfer, public Draining, public std::enable_shared_from_this<TransferState> {
 public:
  using Cancel = std::function<void(const std::shared_ptr<TransferState>&, const Error&)>;

  TransferState(int peer, MessageKey key, bool is_send, Cancel cancel);
  // What nobody has taken goes back to its pool when it is written.
  ~TransferState() override {
    for (ReceivedPart& part : received) part.block.reset(event_);
  }

  bool is_done() const override { return has_ended() && event_.is_ready() && is_settled(); }
  bool has_left() const override { return has_left_.load(std::memory_order_acquire); }
  std::optional<Error> error() const override;
  void wait(Nanoseconds timeout, const InterruptCheck& interrupt) override;
  int peer() const override { return peer_.load(); }
  std::vector<ReceivedPart>& parts() override { return received; }
  std::size_t payload_nbytes() const override { return payload; }
  std::size_t wire_nbytes() const override { return wire; }
  TransferTimes times() const override { return clock; }
  Event event() const override { return event_; }
  // Nothing more is to be done for it on this host.
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }

  // Of the tensors given that lie on the host.
  std::size_t host_nbytes() const;

  // The rest is for those who move it, under the progress lock.
  void finish();
  void fail(const Error& error);
  // The tensors are let go: nobody reads or writes them any more, at the latest once what a stream still does to them
  // is done. finish() and fail() do so for a receive.
  void release() override;
  // A stream reads or writes the tensors until then.
  void set_event(const Event& event);
  const Event& last_use() const { return last_use_; }
  // `has_arrived`: the bytes that the device takes are the peer's. Where they are not, the transfer is done with
  // fail_late(). Before finish().
  void set_arrival(std::function<bool()> has_arrived) { has_arrived_ = std::move(has_arrived); }
  // What was enqueued for it will not be what it should: its peer died.
  void fail_late(const Error& error);
  void set_peer(int peer) { peer_.store(peer); }

  const MessageKey key;
  const bool is_send;
  Iteration iteration;
  std::vector<SendPart> to_send;
  bool is_on_device = false;  // any of to_send; asked for every record, of which there are as many as parts
  std::vector<TensorView> targets;
  bool has_targets = false;
  Event ready;                 // the tensors are not touched before
  Event staged;                // a send's tensors have been copied to the host
  std::vector<Block> staging;  // where to
  bool waits_on_host = false;  // wait() returns when event() is reached
  std::vector<ReceivedPart> received;
  std::shared_ptr<void> keepalive;
  std::size_t payload = 0;
  std::size_t wire = 0;
  TransferTimes clock;
  // Set by a complaint of the receiver; the transfer ends with it once its bytes have left.
  std::optional<Error> complaint;

 private:
  bool is_settled() const { return !has_arrived_ || has_late_error_.load() || has_arrived_(); }

  std::atomic<int> peer_;
  std::atomic<bool> has_ended_{false};
  std::atomic<bool> has_left_{false};
  std::optional<Error> error_;  // written before has_ended_
  Event event_;                 // likewise
  Event last_use_;
  std::function<bool()> has_arrived_;  // written before has_ended_
  std::atomic<bool> has_late_error_{false};
  std::optional<Error> late_error_;  // written before has_late_error_
  const Cancel cancel_;
};

using TransferPtr = std::shared_ptr<TransferState>;

// "forward, stage 2, microbatch 3, iteration 1" without the fields that are not in use; the section, where it is not
// known to belong to an iteration.
std::string describe_key(const MessageKey& key, Iteration iteration);
std::string describe_key(const TransferState& transfer);
// "send to rank 1 (tag 0): float32 [4] (16 bytes), for 3.2 s, 96 bytes written" and a line's end.
std::string describe_pending(const TransferState& transfer);
// What the transfer waits for, as far as it is known: "float32 [4, 16], 256 bytes".
std::string describe_tensors(const TransferState& transfer);

}  // namespace pipecomm
