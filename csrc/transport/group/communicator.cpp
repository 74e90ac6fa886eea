// Posts, cancels and ends transfers; everything that moves them is under the progress lock.
#include "transport/group/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <utility>

#include "device/scope.h"
#include "transport/group/aborts.h"
#include "transport/group/checks.h"
#include "transport/group/link_set.h"
#include "transport/group/losses.h"
#include "transport/matching/transfer_errors.h"
#include "transport/moving/way_out.h"
#include "transport/progress/progress.h"

namespace pipecomm {
namespace {

// Copying this much takes the posting thread less time than waking another one.
constexpr std::size_t kSmallNbytes = std::size_t{32} << 10;

class CommunicatorImpl final : public Communicator,
                               public Pollable,
                               public std::enable_shared_from_this<CommunicatorImpl> {
 public:
  CommunicatorImpl(int rank, std::vector<std::optional<Lifeline>> lifelines, Bridges bridges,
                   CommunicatorOptions options)
      : options_(std::move(options)),
        rank_(rank),
        size_at_start_(lifelines.size()),
        bridges_(std::move(bridges)),
        tensor_device_(options_.stand_in, options_.pool, options_.open_device),
        inbox_(options_.max_parked_nbytes),
        links_(inbox_),
        losses_(inbox_, links_, where(), [this] { poll_sockets(); }) {
    const Link::Events events{[this](std::uint32_t epoch, const std::string& text) { note_abort(epoch, text); },
                              [this](Link& link) { losses_.end(link); },
                              [this](int peer) { return links_.also_gone(peer, bridges_); }};
    for (std::size_t peer = 0; peer < lifelines.size(); ++peer) {
      std::unique_ptr<Link> link;
      if (lifelines[peer]) {
        link = std::make_unique<Link>(static_cast<int>(peer), std::move(*lifelines[peer]), inbox_, options_,
                                      tensor_device_, shares_memory(static_cast<int>(peer)), events);
      }
      links_.add(std::move(link));
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(size_at_start_); }

  std::shared_ptr<Transfer> send(int peer, const MessageKey& key, std::vector<SendPart> parts,
                                 std::shared_ptr<void> keepalive, const Event& ready) override {
    check_peer(peer, "send to");
    if (parts.empty() || parts.size() > UINT16_MAX) {
      throw Error(ErrorKind::tensor, "expected 1 to 65535 tensors in a message; got " + std::to_string(parts.size()));
    }
    for (SendPart& part : parts) {
      check_part(part, where());
      if (!part.absent) tensor_device_.set_device(part.tensor);
    }
    auto transfer = make_transfer(peer, key, true, ready);
    transfer->to_send = std::move(parts);
    transfer->is_on_device = std::any_of(transfer->to_send.begin(), transfer->to_send.end(), is_on_device);
    transfer->keepalive = std::move(keepalive);
    submit(transfer);
    return transfer;
  }

  std::shared_ptr<Transfer> receive(int peer, const MessageKey& key, std::vector<TensorView> targets,
                                    std::shared_ptr<void> keepalive, const Event& ready) override {
    if (is_closed_) throw closed_error();
    if (peer != kAnySource) check_peer(peer, "receive from");
    auto transfer = make_transfer(peer, key, false, ready);
    for (TensorView& target : targets) {
      tensor_device_.set_device(target);
      transfer->waits_on_host |= target.device == kOnHost;
    }
    transfer->has_targets = !targets.empty();
    transfer->targets = std::move(targets);
    transfer->keepalive = std::move(keepalive);
    submit(transfer);
    return transfer;
  }

  Event record(int device_index, void* native_stream) override {
    return tensor_device_.open(device_index).device->record(native_stream);
  }

  std::shared_ptr<Device> use_device(int device_index) override { return tensor_device_.use(device_index); }

  void begin_epoch(std::uint32_t epoch, Iteration iteration) override {
    Progress::instance().exclusively([&] {
      take_submitted();
      const Error error(ErrorKind::transport, "the section was given up before this transfer was done" + where());
      const auto is_old = [&](const TransferState& transfer) { return transfer.key.epoch < epoch; };
      for (const auto& receive : inbox_.begin_epoch(epoch, iteration)) receive->fail(error);
      links_.for_each([&](Link& link) {
        if (link.receiver().is_current(is_old)) link.receiver().fail_current(error);
        link.sender().fail_if(is_old, error, false);
      });
      aborts_.forget_before(epoch);
    });
  }

  void abort(std::uint32_t epoch, const std::string& text) override {
    Progress::instance().exclusively([&] {
      take_submitted();
      links_.for_each([&](Link& link) { link.lifeline().send(ControlKind::abort, epoch, text); });
      note_abort(epoch, text);
    });
  }

  std::optional<std::string> aborted(std::uint32_t epoch) const override { return aborts_.text(epoch); }

  void set_fail_together(bool value) override { losses_.set_fail_together(value); }

  void check_peers() const override {
    Progress::instance().exclusively([this] { links_.throw_if_gone(); });
  }

  void close() override {
    if (owner_pid_ != ::getpid() || is_closed_.exchange(true)) return;
    links_.finish(options_.finish_timeout);
    LinkSet::Links left;
    Progress::instance().exclusively([&] {
      take_submitted();
      links_.fail_all(closed_error(), true);
      const std::string reason = losses_.together() ? losses_.together()->what() : "";
      links_.for_each([&](Link& link) {
        link.lifeline().send(ControlKind::goodbye, 0, reason);
        link.receiver().fail_enqueued([&](const TransferState&) { return closed_error(); });
        link.sender().forget_in_flight();
        if (link.lifeline().has_hung_up()) link.sender().release_slots();
      });
      left = links_.take_out();
    });
    Progress::instance().remove(this);
    LinkSet::end(std::move(left), shared_from_this());
    bridges_.finish();
  }

  bool shares_memory(int peer) const override { return bridges_.endpoint(peer).empty(); }
  std::string path(int peer) const override {
    std::string text = shares_memory(peer) ? "shared memory" : "TCP to " + bridges_.endpoint(peer);
    if (is_closed_ || tensor_device_.side() == nullptr) return text;
    Progress::instance().exclusively([&] {
      links_.for_each([&](Link& link) { text += link.peer() == peer ? link.sender().describe_device() : ""; });
    });
    return text;
  }

  LinkCounters counters(int peer) const override {
    LinkCounters counters;
    Progress::instance().exclusively(
        [&] { links_.for_each([&](Link& link) { counters = link.peer() == peer ? link.counters() : counters; }); });
    return counters;
  }

  bool poll() override {
    const DeviceScope scope;
    take_submitted();
    bool moved = false;
    links_.for_each([&](Link& link) { moved |= link.poll(); });
    return moved;
  }

  void poll_sockets() override {
    take_submitted();
    links_.for_each([](Link& link) { link.poll_socket(); });
  }

  std::int64_t next_due_ns() const override {
    std::int64_t due = INT64_MAX;
    links_.for_each([&](const Link& link) { due = std::min(due, link.due_ns()); });
    return due;
  }

  std::string describe() const override {
    std::string text =
        "rank " + std::to_string(rank_) + " of process group '" + options_.name + "'\n" + inbox_.describe();
    links_.for_each([&](const Link& link) { text += link.describe(); });
    return text;
  }

  void forget_after_fork() noexcept override {
    links_.for_each([](Link& link) { ::close(link.lifeline().fd()); });
    bridges_.forget_after_fork();
  }

 private:
  std::string where() const {
    return "; where: rank " + std::to_string(rank_) + ", process group '" + options_.name + "'";
  }

  Error closed_error() const { return Error(ErrorKind::transport, "the process group is closed" + where()); }

  void check_peer(int peer, const std::string& what) const {
    if (is_closed_) throw closed_error();
    pipecomm::check_peer(peer, rank_, size_at_start_, what, where());
  }

  TransferState::Cancel cancel_function() {
    return [weak = weak_from_this()](const TransferPtr& transfer, const Error& error) {
      if (const auto self = weak.lock()) self->cancel(transfer, error);
    };
  }

  std::shared_ptr<TransferState> make_transfer(int peer, const MessageKey& key, bool is_send, const Event& ready) {
    auto transfer = std::make_shared<TransferState>(peer, key, is_send, cancel_function());
    transfer->ready = ready;
    transfer->waits_on_host = tensor_device_.has_stand_in() && !tensor_device_.is_used();
    return transfer;
  }

  // A small message leaves at once if it can, so that nobody has to be woken for it.
  void submit(const TransferPtr& transfer) {
    const DeviceScope scope;
    Progress& progress = Progress::instance();
    progress.count_open(1);
    // Enqueuing on a device takes no time, whatever the size.
    const bool is_small = transfer->host_nbytes() <= kSmallNbytes && (transfer->is_send || transfer->has_targets);
    {
      const std::lock_guard lock(submitted_mutex_);
      submitted_.push_back(transfer);
    }
    if (is_closed_) return progress.exclusively([this] { take_submitted(); });
    bool needs_nobody = false;
    if (is_small) {
      progress.exclusively_if_free([&] {
        take_submitted();
        needs_nobody = transfer->is_send ? send_at_once(*transfer) : has_nothing_from(transfer->peer());
      });
    }
    if (!needs_nobody) progress.kick();
  }

  bool send_at_once(const TransferState& transfer) {
    if (transfer.has_ended()) return true;  // refused, perhaps because there are no links any more
    Link& link = links_.to(transfer.peer());
    if (link.sender().num_queued() == 1) link.push();
    return transfer.has_ended();
  }

  bool has_nothing_from(int peer) {
    bool has_something = false;
    links_.for_each([&](Link& link) {
      if (peer == kAnySource || peer == link.peer()) has_something |= !link.receiver().is_drained();
    });
    return !has_something;
  }

  // The posting thread never waits for a copy in progress: it leaves transfers here for whoever polls next.
  void take_submitted() {
    std::vector<TransferPtr> taken;
    {
      const std::lock_guard lock(submitted_mutex_);
      taken.swap(submitted_);
    }
    for (const TransferPtr& transfer : taken) start(transfer);
  }

  void start(const TransferPtr& transfer) {
    transfer->iteration = inbox_.iteration(transfer->key.epoch);
    if (is_closed_) return refuse(transfer, closed_error());
    if (const auto text = aborted(transfer->key.epoch)) return refuse(transfer, Error(ErrorKind::stage_failed, *text));
    transfer->is_send ? start_send(transfer) : start_receive(transfer);
  }

  static void refuse(const TransferPtr& transfer, const Error& error) {
    transfer->fail(error);
    transfer->release();
  }

  void start_send(const TransferPtr& transfer) {
    Link& link = links_.to(transfer->peer());
    const auto& cause = losses_.together() ? losses_.together() : link.gone();
    if (cause) return refuse(transfer, explain(*cause, *transfer));
    link.send(transfer);
  }

  void start_receive(const TransferPtr& transfer) {
    if (const InMessagePtr message = inbox_.post(transfer)) {
      links_.to(message->source).receiver().attach(message, transfer);
    } else {
      links_.for_each([](Link& link) { link.offer_slots(); });
    }
    // What lies in a ring may answer it, even if its sender has gone; if not, this ends the receive.
    links_.for_each([&](Link& link) {
      if (link.gone() && (transfer->peer() == kAnySource || transfer->peer() == link.peer())) link.poll();
    });
    if (!losses_.together() || transfer->has_ended()) return;
    take_back(transfer);
    transfer->fail(explain(*losses_.together(), *transfer));
  }

  void take_back(const TransferPtr& receive) {
    if (inbox_.withdraw(receive)) return;
    links_.for_each([&](Link& link) { link.receiver().detach(receive); });
  }

  void cancel(const TransferPtr& transfer, const Error& error) {
    Progress::instance().exclusively([&] {
      take_submitted();
      if (transfer->has_ended()) return;
      const Error full = error.kind() == ErrorKind::link_timeout
                             ? timeout_error(error, *transfer, where(), waiting_state(*transfer))
                             : explain(error, *transfer);
      if (!transfer->is_send) take_back(transfer);
      transfer->fail(full);
      if (transfer->is_send) links_.to(transfer->peer()).sender().withdraw(transfer);
    });
  }

  // What is known of the peer that a transfer waits for.
  std::string waiting_state(const TransferState& transfer) const {
    const Link* link = links_.find(transfer.peer());
    std::string text = link == nullptr ? "" : link->waiting_state(transfer.is_send);
    const std::string parking = transfer.is_send ? "" : inbox_.describe_parking();
    return parking.empty() ? text : text + "; " + parking;
  }

  Error explain(const Error& cause, const TransferState& transfer) const {
    return transfer_error(cause, transfer, where());
  }

  void note_abort(std::uint32_t epoch, const std::string& text) {
    if (epoch < inbox_.epoch() || !aborts_.add(epoch, text)) return;
    const Error error(ErrorKind::stage_failed, text);
    links_.fail_if([&](const TransferState& transfer) { return transfer.key.epoch == epoch; }, error, false);
  }

  const CommunicatorOptions options_;
  const int rank_;
  const std::size_t size_at_start_;
  const pid_t owner_pid_ = ::getpid();
  std::atomic<bool> is_closed_{false};
  Bridges bridges_;

  std::mutex submitted_mutex_;
  std::vector<TransferPtr> submitted_;  // guarded by submitted_mutex_

  AbortLog aborts_;

  TensorDevice tensor_device_;

  // The rest is guarded by the progress lock.
  Inbox inbox_;
  LinkSet links_;
  Losses losses_;
};

// The last user lets go: the progress engine lets go too.
void close_quietly(CommunicatorImpl& communicator) noexcept {
  try {
    communicator.close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pipecomm: cannot close a process group: %s\n", error.what());
  }
}

}  // namespace

std::shared_ptr<Communicator> make_communicator(int rank, std::vector<std::optional<Lifeline>> lifelines,
                                                Bridges bridges, CommunicatorOptions options) {
  auto made = std::make_shared<CommunicatorImpl>(rank, std::move(lifelines), std::move(bridges), std::move(options));
  Progress::instance().add(made);
  Communicator* pointer = made.get();
  return {pointer, [made = std::move(made)](Communicator*) { close_quietly(*made); }};
}

}  // namespace pipecomm
