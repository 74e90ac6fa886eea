// Tensors of a device when something ends early: nothing is written to memory that was let go, and nothing that did not
// arrive counts as received.
#include <cstring>

#include "check.h"
#include "communicators.h"
#include "failing_device.h"

namespace {

// Tensors are declared first, since streams use them until the ranks have closed.

// A compute stream that stands still until it is told to go on.
struct Held {
  Held() {
    stream->enqueue([this] { may_run.wait(false); });
  }
  ~Held() { go_on(); }
  void go_on() {
    may_run.store(true);
    may_run.notify_all();
  }
  Event point() const { return stream->record(); }

  std::atomic<bool> may_run{false};
  std::shared_ptr<Stream> stream = make_host_stream();
};

// Rank 0 on a device that fails on demand, rank 1 on one that does not.
struct FailingPair {
  std::shared_ptr<std::atomic<bool>> fails = std::make_shared<std::atomic<bool>>(false);
  std::vector<CommunicatorPtr> ranks = connect_each({on(failing_device(fails)), on(make_host_device())});
};

template <typename Done>
bool comes_true(const Done& done) {
  for (int i = 0; i < 2000 && !done(); ++i) std::this_thread::sleep_for(1ms);
  return done();
}

}  // namespace

TEST(blocks_of_a_message_given_up_half_way_are_not_free_while_a_stream_may_write_them) {
  Floats sent = ramp(2000000);
  CommunicatorOptions options = on(make_host_device());
  options.pool = make_host_pool(0);
  options.emulation.bytes_per_s = 40e6;  // the second slot's record comes 0.1 s after the first
  auto ranks = connect_all(2, options);
  Held compute;
  auto receive = ranks[1]->receive(0, in_epoch(0), {}, nullptr);
  auto send = ranks[0]->send(1, in_epoch(0), {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return options.pool->stats().live_nbytes > 0; }));
  ranks[1]->begin_epoch(1);
  CHECK(comes_true([&] { return options.pool->stats().live_nbytes == 0; }));
  std::this_thread::sleep_for(200ms);
  CHECK_EQ(options.pool->stats().pending_nbytes, 4 * sent.size());
  compute.go_on();
  send->wait(10s);
}

TEST(wait_for_a_device_ends_at_its_timeout) {
  Floats sent = ramp(1000), got(sent.size());
  auto ranks = connect_all(2, on(make_host_device()));
  Held compute;
  auto receive = post_receive(ranks[1], 0, got);
  auto send = ranks[0]->send(1, {}, {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 1; }));
  CHECK_ERROR(ErrorKind::link_timeout, "waited", send->wait(50ms));
  CHECK_ERROR(ErrorKind::link_timeout, "waited", receive->wait(50ms));
  compute.go_on();
  receive->wait(10s);
  send->wait(10s);
  CHECK(got == sent);
}

TEST(closing_the_receiver_loses_nothing_that_it_was_told_of) {
  Floats sent = ramp(1000), got(sent.size(), -1);
  auto ranks = connect_all(2, on(make_host_device()));
  Held compute;
  auto receive = post_receive(ranks[1], 0, got);
  auto send = ranks[0]->send(1, {}, {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 1; }));
  std::thread later([&] {
    std::this_thread::sleep_for(100ms);
    compute.go_on();
  });
  ranks[1]->close();
  later.join();
  CHECK(receive->is_done() && !receive->error());
  CHECK(got == sent);
}

// Rank 1 has promised to empty all slots twice, and has not read the first bytes when rank 0 or itself closes.
void expect_the_first_bytes(int closing_rank) {
  Floats first = ramp(2000000), second(first.size(), -2), got(first.size()), got_second(first.size());
  CommunicatorOptions options = on(make_host_device());
  options.finish_timeout = 10ms;
  auto ranks = connect_all(2, options);
  Held target;
  auto receive = ranks[1]->receive(0, tagged(1), {view(got)}, nullptr, target.point());
  auto second_receive = post_receive(ranks[1], 0, got_second, tagged(2));
  post_send(ranks[0], 1, first, tagged(1))->wait(10s);
  auto second_send = post_send(ranks[0], 1, second, tagged(2));
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 2; }));
  const std::jthread later([&] {
    std::this_thread::sleep_for(200ms);  // what is overwritten too early is so by then
    target.go_on();
  });
  ranks[static_cast<std::size_t>(closing_rank)]->close();
  receive->wait(10s);
  CHECK(got == first);
  CHECK_ERROR(ErrorKind::transport, "", second_receive->wait(10s));
  CHECK(comes_true([&] { return second_send->has_left(); }));
}

TEST(closing_the_sender_does_not_write_over_what_a_late_receiver_has_still_to_read) { expect_the_first_bytes(0); }
TEST(closing_the_receiver_does_not_let_its_sender_write_over_what_it_has_still_to_read) { expect_the_first_bytes(1); }

TEST(message_parked_of_a_rank_that_was_lost_before_it_wrote_is_an_error) {
  Floats sent = ramp(1000), got(sent.size(), -1), other(10);
  FailingPair pair;
  auto& ranks = pair.ranks;
  Held compute;
  auto unrelated = post_receive(ranks[1], 0, other, tagged(2));
  auto send = ranks[0]->send(1, tagged(1), {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 1; }));
  pair.fails->store(true);
  CHECK_ERROR(ErrorKind::cuda, "fails", post_send(ranks[0], 1, other, tagged(3))->wait(10s));
  CHECK_ERROR(ErrorKind::peer_lost, "lost", unrelated->wait(10s));
  CHECK_ERROR(ErrorKind::peer_lost, "lost", post_receive(ranks[1], 0, got, tagged(1))->wait(10s));
}

TEST(receive_enqueued_before_the_receivers_device_fails_ends_with_that) {
  Floats sent = ramp(1000), got(sent.size(), -1), other(10);
  FailingPair pair;
  auto& ranks = pair.ranks;
  Held compute;
  auto receive = post_receive(ranks[0], 1, got, tagged(1));
  auto send = ranks[1]->send(0, tagged(1), {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return ranks[0]->counters(1).messages_received == 1; }));
  pair.fails->store(true);
  auto second = post_receive(ranks[0], 1, other, tagged(2));
  post_send(ranks[1], 0, other, tagged(2));
  CHECK_ERROR(ErrorKind::cuda, "fails", second->wait(10s));
  CHECK_ERROR(ErrorKind::cuda, "fails", receive->wait(10s));
}

TEST(device_that_fails_ends_every_wait_and_closes) {
  Floats sent = ramp(1000), got(sent.size());
  FailingPair pair;
  auto& ranks = pair.ranks;
  auto receive = post_receive(ranks[1], 0, got, tagged(1));
  post_send(ranks[0], 1, sent, tagged(1))->wait(10s);
  receive->wait(10s);
  pair.fails->store(true);
  auto send = post_send(ranks[0], 1, sent, tagged(2));
  CHECK_ERROR(ErrorKind::cuda, "fails", send->wait(10s));
  CHECK_ERROR(ErrorKind::peer_lost, "lost", post_receive(ranks[1], 0, got, tagged(2))->wait(10s));
  ranks[0]->close();
  ranks[1]->close();
}

TEST(wait_that_fails_returns_when_nothing_enqueued_writes_the_tensor_any_more) {
  Floats sent = ramp(6000000), got(sent.size());
  CommunicatorOptions options = on(make_host_device());
  options.emulation.bytes_per_s = 40e6;  // the last slot's record comes 0.5 s after the first
  options.finish_timeout = 10ms;
  auto ranks = connect_all(2, options);
  Held target;
  auto receive = ranks[1]->receive(kAnySource, {}, {view(got)}, nullptr, target.point());
  auto send = post_send(ranks[0], 1, sent);
  CHECK(comes_true([&] { return receive->peer() == 0; }));
  ranks[0]->close();
  const std::jthread later([&] {
    std::this_thread::sleep_for(100ms);
    target.go_on();
  });
  CHECK_ERROR(ErrorKind::transport, "has left", receive->wait(10s));
  CHECK(receive->event().is_ready());
  CHECK(comes_true([&] { return send->has_left(); }));
}

TEST(what_had_arrived_before_its_sender_was_lost_is_received) {
  Floats sent = ramp(1000), got(sent.size(), -1), not_written(sent.size()), other(10);
  FailingPair pair;
  auto& ranks = pair.ranks;
  Held target, compute;
  auto arrived = ranks[1]->receive(0, tagged(1), {view(got)}, nullptr, target.point());
  auto told_of = post_receive(ranks[1], 0, not_written, tagged(2));
  auto unrelated = post_receive(ranks[1], 0, other, tagged(3));
  post_send(ranks[0], 1, sent, tagged(1))->wait(10s);
  auto send = ranks[0]->send(1, tagged(2), {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 2; }));
  pair.fails->store(true);
  CHECK_ERROR(ErrorKind::cuda, "fails", post_send(ranks[0], 1, other, tagged(4))->wait(10s));
  CHECK_ERROR(ErrorKind::peer_lost, "lost", unrelated->wait(10s));
  target.go_on();
  CHECK_ERROR(ErrorKind::peer_lost, "lost", told_of->wait(10s));
  arrived->wait(10s);
  CHECK(got == sent);
}

TEST(pool_whose_blocks_a_stream_still_uses_holds_up_only_the_message_that_needs_them) {
  Floats sent = ramp(2000000), small(4, 1), got_small(4);
  CommunicatorOptions options = on(make_host_device());
  options.pool = make_host_pool(std::size_t{8} << 20);
  auto ranks = connect_all(2, options), others = connect_all(2, on(make_host_device()));
  Held compute;
  auto early = ranks[1]->receive(0, in_epoch(1), {}, nullptr);
  auto send = ranks[0]->send(1, in_epoch(0), {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 1; }));
  ranks[1]->begin_epoch(1);
  CHECK_EQ(options.pool->stats().pending_nbytes, 4 * sent.size());
  auto next = post_send(ranks[0], 1, sent, in_epoch(1));
  CHECK_ERROR(ErrorKind::link_timeout, "waited", early->wait(50ms));
  auto receive = post_receive(others[1], 0, got_small);
  post_send(others[0], 1, small);
  receive->wait(10s);
  CHECK(got_small == small);
  compute.go_on();
  auto late = ranks[1]->receive(0, in_epoch(1), {}, nullptr);
  late->wait(10s);
  CHECK(std::memcmp(late->parts()[0].block.data(), sent.data(), 4 * sent.size()) == 0);
  send->wait(10s);
  next->wait(10s);
}

TEST(receive_whose_memory_a_stream_holds_that_waits_for_a_lost_rank_ends) {
  Floats sent = ramp(1000000), other(10), got(sent.size());
  const auto fails = std::make_shared<std::atomic<bool>>(false);
  CommunicatorOptions options = on(make_host_device());
  options.pool = make_host_pool(std::size_t{4} << 20);
  auto ranks = connect_each({on(failing_device(fails)), options});
  Held compute;
  auto unrelated = ranks[1]->receive(0, in_epoch(1), {}, nullptr);
  auto first = ranks[0]->send(1, in_epoch(0), {part(sent)}, nullptr, compute.point());
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 1; }));
  ranks[1]->begin_epoch(1);  // its memory is free when a stream has written it, and what comes next needs it
  auto second = ranks[0]->send(1, in_epoch(1), {part(sent)}, nullptr, compute.point());
  auto back = ranks[1]->send(0, in_epoch(1), {part(got)}, nullptr);
  CHECK(comes_true([&] { return ranks[0]->counters(1).messages_sent == 2; }));
  fails->store(true);
  CHECK_ERROR(ErrorKind::cuda, "fails", post_send(ranks[0], 1, other, tagged(4))->wait(10s));
  CHECK_ERROR(ErrorKind::peer_lost, "lost", unrelated->wait(10s));
  CHECK(comes_true([&] { return back->is_done(); }));
}

TEST(late_receive_of_half_a_message_ends_where_the_loss_of_any_rank_ends_all) {
  Floats large = ramp(6000000), target(large.size()), other(10), got(10);
  const auto fails = std::make_shared<std::atomic<bool>>(false);
  CommunicatorOptions slow = on(make_host_device()), options = on(make_host_device());
  slow.emulation.bytes_per_s = 10e6;
  options.pool = make_host_pool(0);
  auto ranks = connect_each({on(failing_device(fails)), options, slow});
  ranks[1]->set_fail_together(true);
  auto waiting = post_receive(ranks[1], 2, got, tagged(2));  // so that the other one is taken
  auto half = post_send(ranks[2], 1, large, tagged(1));
  CHECK(comes_true([&] { return options.pool->stats().live_nbytes > 0; }));
  fails->store(true);
  CHECK_ERROR(ErrorKind::cuda, "fails", post_send(ranks[0], 1, other)->wait(10s));
  CHECK_ERROR(ErrorKind::peer_lost, "rank 0 is lost", waiting->wait(10s));
  CHECK_ERROR(ErrorKind::peer_lost, "rank 0 is lost", post_receive(ranks[1], 2, target, tagged(1))->wait(10s));
}

CHECK_MAIN()
