// One neighbour, both directions: its life line, what goes out, what comes in. Used under the progress lock.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "sockets/lifeline.h"
#include "transport/api/options.h"
#include "transport/moving/receiver.h"
#include "transport/moving/sender.h"

namespace pipecomm {

class Link {
 public:
  struct Events {
    // Another rank gave up an epoch.
    std::function<void(std::uint32_t, const std::string&)> on_abort;
    // This peer is gone, unexpectedly or after a goodbye: what waits for it is to end. Once more for what is posted
    // later.
    std::function<void(Link&)> on_gone;
    // Told with the end of a peer: which others are gone.
    std::function<std::string(int)> also_gone;
  };

  // `shares_memory`: the peer is on this host.
  Link(int peer, Lifeline lifeline, Inbox& inbox, const CommunicatorOptions& options, const TensorDevice& tensor_device,
       bool shares_memory, Events events);

  bool poll();
  // Writes what is to be sent, as far as there is credit; true if anything was.
  bool push();
  void poll_socket();
  std::int64_t due_ns() const { return std::min(receiver_.due_ns(), sender_.due_ns()); }
  // Answers a peer that asked for slots, once it is known whether this rank has a device; again when it has one later.
  void offer_slots();
  // Nothing enqueued on the device is left to be done.
  bool is_idle() const { return sender_.is_idle() && receiver_.is_idle(); }
  bool has_lent_nothing() const { return !sender_.is_lending(); }
  // The peer is gone, and nothing waits for it any more; but what its device still reads is not written over.
  void let_go();
  // Streams of neither rank use what would end with this link, which this rank has left. Without the lock.
  bool may_end() const { return sender_.is_idle() || lifeline_.has_hung_up(); }

  void send(const TransferPtr& transfer);
  // Why nothing can be sent to, or will come from, this peer (any more); none while it is there.
  const std::optional<Error>& gone() const { return gone_; }
  bool is_lost() const { return gone_ && gone_->kind() != ErrorKind::transport; }
  // True when a record waits in front that nobody asks for.
  bool is_blocked() const { return receiver_.is_blocked(); }
  // What is pending, a line each.
  std::string describe() const;
  // "; last message from rank 1: 0.3 s ago" or "... none so far", and what stands in the way of a transfer with this
  // peer.
  std::string waiting_state(bool of_send) const;

  Sender& sender() { return sender_; }
  Receiver& receiver() { return receiver_; }
  const Receiver& receiver() const { return receiver_; }
  Lifeline& lifeline() { return lifeline_; }
  LinkCounters counters() const { return counters_; }
  int peer() const { return peer_; }

 private:
  // "last message from rank 1: 0.3 s ago" or "... none so far".
  std::string last_activity() const;
  // "; rank 1 takes no more: ..." while the peer says so, else empty.
  std::string peers_parking() const;
  void end_lent();
  void handle(Control& control);
  // The part of it that brings, asks for or takes back memory.
  void handle_memory(Control& control);
  void offer_ring();
  void ask_for_channel();
  void tell_of_parking();
  void take_slots(Control& control);
  void open_slots();
  void break_off(const Error& error);
  void hang_up();
  void mark_gone(ErrorKind kind, const std::string& text);
  void settle();

  const int peer_;
  Inbox& inbox_;
  const CommunicatorOptions& options_;
  const TensorDevice& tensor_device_;
  const Events events_;
  Lifeline lifeline_;
  Sender sender_;
  Receiver receiver_;
  LinkCounters counters_;
  bool is_ring_requested_ = false;
  bool are_slots_requested_ = false;
  std::optional<Sharing> wanted_sharing_;    // of the peer's request for slots
  Sharing offered_sharing_ = Sharing::none;  // by the peer, last
  bool has_told_of_no_device_ = false;
  bool has_announced_end_ = false;
  std::optional<Error> gone_;
  std::int64_t last_received_ns_ = 0;
  std::int64_t held_up_ns_ = 0;  // since when the limit of what may be parked stops the peer's messages; 0: it does not
  bool has_told_of_parking_ = false;
  std::string peers_parking_;  // what the peer said last of that
};

}  // namespace pipecomm
