// Control messages, and what is left to do when a peer goes.
#include "transport/group/link.h"

#include <cstdio>
#include <utility>

#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

// A sender is told that nothing more is taken when that has lasted this long.
constexpr std::int64_t kHeldUpNs = 50'000'000;

}  // namespace

Link::Link(int peer, Lifeline lifeline, Inbox& inbox, const CommunicatorOptions& options,
           const TensorDevice& tensor_device, bool shares_memory, Events events)
    : peer_(peer),
      inbox_(inbox),
      options_(options),
      tensor_device_(tensor_device),
      events_(std::move(events)),
      lifeline_(std::move(lifeline)),
      sender_(options.emulation, options.limits, tensor_device, shares_memory,
              [this](std::uint64_t segment_id, int fd) {
                lifeline_.send(fd < 0 ? ControlKind::source_gone : ControlKind::source_made, segment_id, "", fd);
              }),
      receiver_(
          peer, inbox, options.pool, tensor_device,
          [this](std::uint64_t seq, const Error& error) { lifeline_.send(ControlKind::refused, seq, error); },
          [this](std::uint64_t seq) {
            if (options_.limits.is_strict) lifeline_.send(ControlKind::accepted, seq, "");
          }) {}

bool Link::poll() {
  bool moved = push();
  if (receiver_.awaits_segment()) poll_socket();
  if (gone_ && has_announced_end_) let_go();  // again: its device may have set counters to less
  try {
    if (!gone_) receiver_.check_device();
    const std::uint64_t received_before = counters_.messages_received;
    moved |= receiver_.pump(counters_, [this] { lifeline_.wake_peer(); });
    if (counters_.messages_received != received_before) last_received_ns_ = now_ns();
    settle();
  } catch (const Error& error) {
    break_off(error);
  }
  return moved;
}

bool Link::push() {
  try {
    end_lent();
    if (!gone_) sender_.check_device();
    // A refusal of its beginning is on the socket before there is room for its end: the sender learns of it in time.
    if (sender_.has_begun()) poll_socket();
    return !gone_ && sender_.pump(counters_, [this] { lifeline_.wake_peer(); });
  } catch (const Error& error) {
    break_off(error);
    return false;
  }
}

// A refusal is on the socket before the message is taken from the ring: it is read before the message ends well.
void Link::end_lent() {
  if (!sender_.lent_is_taken()) return;
  poll_socket();
  sender_.end_lent();
}

void Link::poll_socket() {
  try {
    sender_.tell_gone_sources();
    lifeline_.flush();
    while (auto control = lifeline_.receive()) handle(*control);
    if (!lifeline_.is_open()) hang_up();
    ask_for_channel();
    open_slots();
    offer_slots();
    tell_of_parking();
    if (!lifeline_.is_open()) mark_gone(ErrorKind::peer_lost, "its process ended without a goodbye");
    settle();
  } catch (const Error& error) {
    break_off(error);
  }
}

void Link::send(const TransferPtr& transfer) {
  sender_.post(transfer);
  ask_for_channel();
}

void Link::ask_for_channel() {
  if (!lifeline_.is_open()) return;
  if (sender_.wants_ring() && !std::exchange(is_ring_requested_, true)) {
    lifeline_.send(ControlKind::ring_wanted, 0, "");
  }
  if (sender_.wants_slots() && !std::exchange(are_slots_requested_, true)) {
    lifeline_.send(ControlKind::slots_wanted, 0, "");
  }
}

// Not at once: the receive that is posted next may end it.
void Link::tell_of_parking() {
  const bool is_held_up = receiver_.is_blocked() && inbox_.is_over_parking_limit();
  if (!is_held_up) held_up_ns_ = 0;
  if (is_held_up && held_up_ns_ == 0) held_up_ns_ = now_ns();
  const bool is_to_know = is_held_up && now_ns() - held_up_ns_ > kHeldUpNs;
  if (std::exchange(has_told_of_parking_, is_to_know) == is_to_know) return;
  lifeline_.send(ControlKind::parking, 0, is_to_know ? inbox_.describe_parking() : "");
}

void Link::handle(Control& control) {
  switch (control.kind) {
    case ControlKind::refused: {
      const Error error(control.error, "rank " + std::to_string(peer_) + " refused a message: " + control.text);
      if (!sender_.complain(control.value, error)) std::fprintf(stderr, "pipecomm: %s\n", error.what());
      break;
    }
    case ControlKind::accepted:
      sender_.accept(control.value);
      break;
    case ControlKind::parking:
      peers_parking_ = control.text;
      break;
    case ControlKind::abort:
      events_.on_abort(static_cast<std::uint32_t>(control.value), control.text);
      break;
    case ControlKind::goodbye:
      if (control.text.empty()) mark_gone(ErrorKind::transport, "it closed the process group");
      [[fallthrough]];
    case ControlKind::gave_up:
      if (!gone_) gone_ = Error(ErrorKind::peer_lost, control.text);  // why that one has given up
      break;
    case ControlKind::lost:
      mark_gone(ErrorKind::peer_lost, control.text);
      break;
    default:
      handle_memory(control);
  }
}

void Link::handle_memory(Control& control) {
  switch (control.kind) {
    case ControlKind::ring_wanted:
      return offer_ring();
    case ControlKind::ring_made:
      if (control.fd && !sender_.has_ring()) {  // streams use the first one
        sender_.set_ring(RingWriter(Segment::adopt(control.fd.release(), control.value)));
      }
      break;
    case ControlKind::slots_wanted:
      if (receiver_.uses_slots() || receiver_.is_making_slots()) {
        throw Error(ErrorKind::transport, "expected one request for slots; got another: the peer's process is damaged");
      }
      wanted_sharing_ = static_cast<Sharing>(control.value);
      return offer_slots();
    case ControlKind::slots_made:
      if (are_slots_requested_) take_slots(control);
      break;
    case ControlKind::source_made:
      return receiver_.sources().add(control.value, control.fd.release());
    case ControlKind::source_gone:
      return receiver_.sources().remove(control.value);
    default:
      break;
  }
}

void Link::offer_ring() {
  if (receiver_.has_ring()) return;
  RingReader& ring = receiver_.make_ring(options_.limits.max_nbytes);
  lifeline_.send(ControlKind::ring_made, ring_segment_nbytes(options_.limits.max_nbytes), "", ring.fd());
  ring.close_fd();
}

void Link::offer_slots() {
  if (const auto share = receiver_.made_slots(lifeline_.fd())) {
    lifeline_.send(ControlKind::slots_made, share->offer.packed(), share->text, share->fd);
  }
  if (!wanted_sharing_ || !receiver_.has_ring()) return;
  if (tensor_device_.side() == nullptr) {
    // The first receive shows whether this rank has one; one into the host's memory does not wait for that.
    if (!inbox_.expects_from(peer_) || std::exchange(has_told_of_no_device_, true)) return;
    return lifeline_.send(ControlKind::slots_made, SlotOffer{}.packed(), "this rank has no device so far");
  }
  receiver_.begin_slots(*wanted_sharing_, options_.limits.max_nbytes * kSlotNbytesPerRingByte);
  wanted_sharing_.reset();
}

void Link::take_slots(Control& control) {
  const SlotOffer offer = SlotOffer::unpack(control.value);
  if (offer.sharing == Sharing::none) return sender_.go_through_host();
  if (!sender_.expects(offer)) {
    throw Error(ErrorKind::transport, "expected slots where they fit; got an offer of " + std::to_string(offer.nbytes) +
                                          " bytes: the peer's process is damaged");
  }
  offered_sharing_ = offer.sharing;
  sender_.begin_slots(offer, control.text, control.fd.release());
}

// A way of sharing that does not work between the two devices is not the last one.
void Link::open_slots() {
  try {
    sender_.open_slots(lifeline_.fd());
  } catch (const Error&) {
    lifeline_.send(ControlKind::slots_wanted, static_cast<std::uint64_t>(offered_sharing_) + 1, "");
  }
}

void Link::let_go() {
  sender_.forget_in_flight();
  if (!sender_.is_idle() && lifeline_.has_hung_up()) sender_.release_slots();
  receiver_.release_slots(*gone_);
}

// What came from the peer cannot be believed, or this rank has nothing to go on with: nothing more is taken from it.
void Link::break_off(const Error& error) {
  const bool is_failure_here = error.kind() == ErrorKind::pool_exhausted || error.kind() == ErrorKind::cuda;
  if (is_failure_here && !gone_) {
    gone_ = Error(error.kind(), "the link to rank " + std::to_string(peer_) + " has failed here: " + error.what());
    lifeline_.send(ControlKind::lost, 0, std::string("its end of the link has failed: ") + error.what());
  }
  lifeline_.close();
  hang_up();
  receiver_.stop();
  receiver_.sources().clear();
  mark_gone(ErrorKind::peer_lost, error.what());
  has_announced_end_ = false;
  settle();
}

// At once, and before any call of CUDA.
void Link::hang_up() {
  sender_.hang_up();
  receiver_.hang_up();
}

void Link::mark_gone(ErrorKind kind, const std::string& text) {
  if (gone_) return;
  const std::string verb = kind == ErrorKind::peer_lost ? " is lost: " : " has left: ";
  gone_ = Error(kind, "rank " + std::to_string(peer_) + verb + text + events_.also_gone(peer_));
}

// What the peer had sent before it went still counts; only then its absence ends what waits for it.
void Link::settle() {
  if (!gone_) return;
  const bool is_awaited = inbox_.expects_from(peer_) || receiver_.current_receive();
  if (has_announced_end_ && !is_awaited) return;
  receiver_.expect_no_more();
  while (receiver_.pump(counters_, [] {})) {
  }
  if (receiver_.is_drained()) receiver_.sources().clear();
  has_announced_end_ = true;
  events_.on_gone(*this);
}

std::string Link::describe() const {
  std::string text = sender_.describe();
  if (const TransferPtr receive = receiver_.current_receive()) text += describe_pending(*receive);
  text += "  " + last_activity() + peers_parking();
  if (gone_) text += std::string("; ") + gone_->what();
  return text + (is_blocked() ? "; the next one, that no receive asks for, waits in the ring\n" : "\n");
}

std::string Link::waiting_state(bool of_send) const {
  return "; " + last_activity() + (is_blocked() ? ", one that nobody asks for lies in front" : "") +
         (of_send ? peers_parking() : "");
}

std::string Link::peers_parking() const {
  return peers_parking_.empty() ? "" : "; rank " + std::to_string(peer_) + " takes no more: " + peers_parking_;
}

std::string Link::last_activity() const {
  const std::string who = "last message from rank " + std::to_string(peer_) + ": ";
  if (last_received_ns_ == 0) return who + "none so far";
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s ago", static_cast<double>(now_ns() - last_received_ns_) / 1e9);
  return who + text;
}

}  // namespace pipecomm
