// How ranks come together and part: handshakes, sections given up, goodbyes, what is kept alive and for how long.
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "communicators.h"

TEST(abort_ends_the_step_on_every_rank_and_the_next_one_works) {
  auto ranks = connect_all(3);
  Floats values(4, 1), got(4);
  for (const auto& rank : ranks) rank->begin_epoch(1);
  auto waiting = post_receive(ranks[1], 0, got, in_epoch(1));
  post_send(ranks[0], 2, values, in_epoch(1));
  ranks[0]->abort(1, "stage 0: ValueError: boom");
  CHECK_ERROR(ErrorKind::stage_failed, "boom", waiting->wait(10s));
  auto later = post_receive(ranks[2], 1, got, in_epoch(1));
  CHECK_ERROR(ErrorKind::stage_failed, "boom", later->wait(10s));
  for (const auto& rank : ranks) rank->begin_epoch(2);
  values.assign(4, 2);
  post_send(ranks[0], 2, values, in_epoch(2));
  post_receive(ranks[2], 0, got, in_epoch(2))->wait(10s);
  CHECK(got == values);
}

TEST(abort_of_a_step_not_yet_begun_here_waits_for_it) {
  auto ranks = connect_all(2);
  ranks[0]->begin_epoch(5);
  ranks[0]->abort(5, "no data");
  Floats got(4);
  auto receive = post_receive(ranks[1], 0, got, in_epoch(5));
  CHECK_ERROR(ErrorKind::stage_failed, "no data", receive->wait(10s));
  CHECK(ranks[1]->aborted(5) == "no data");
  CHECK(!ranks[1]->aborted(4));
}

TEST(messages_of_a_step_given_up_are_dropped) {
  auto ranks = connect_all(2);
  Floats old(200000, 1), fresh(4, 2), got(4);
  post_send(ranks[0], 1, old, in_epoch(1));
  post_send(ranks[0], 1, fresh, in_epoch(2));
  ranks[1]->begin_epoch(2);
  post_receive(ranks[1], 0, got, in_epoch(2))->wait(10s);
  CHECK(got == fresh);
}

TEST(closing_ends_what_is_pending_on_both_sides) {
  CommunicatorOptions slow;  // so that the large message is still leaving
  slow.emulation.bytes_per_s = 100e6;
  auto ranks = connect_all(2, slow);
  Floats got(4), large = ramp(8000000);
  auto own = post_receive(ranks[0], 1, got);
  auto peers = post_receive(ranks[1], 0, got);
  auto leaving = post_send(ranks[0], 1, large, tagged(5));
  ranks[0]->close();
  CHECK_ERROR(ErrorKind::transport, "closed", own->wait(10s));
  CHECK_ERROR(ErrorKind::transport, "closed", leaving->wait(10s));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", peers->wait(10s));
  CHECK_ERROR(ErrorKind::transport, "closed", post_send(ranks[0], 1, got));
  ranks[0]->close();
}

TEST(what_was_sent_before_closing_still_arrives) {
  auto ranks = connect_all(2);
  Floats values = ramp(1000), got(1000);
  post_send(ranks[0], 1, values, tagged(1))->wait(10s);
  post_send(ranks[0], 1, values, tagged(2))->wait(10s);
  ranks[0].reset();
  post_receive(ranks[1], 0, got, tagged(2))->wait(10s);
  CHECK(got == values);
  post_receive(ranks[1], 0, got, tagged(1))->wait(10s);
  CHECK_ERROR(ErrorKind::transport, "has left", post_receive(ranks[1], 0, got, tagged(1))->wait(10s));
}

TEST(ranks_of_groups_of_other_sizes_refuse_each_other) {
  auto first = make_listener(), second = make_listener(), third = make_listener();
  const std::vector<std::string> two = {first->address(), second->address()};
  const std::vector<std::string> three = {two[0], two[1], third->address()};
  std::thread other([&] {
    CHECK_ERROR(ErrorKind::config, "expected 2 ranks; rank 1 was started for 3", second->connect(1, three, {}, 10s));
  });
  CHECK_ERROR(ErrorKind::config, "expected 2 ranks; rank 1 was started for 3", first->connect(0, two, {}, 10s));
  other.join();
}

TEST(rank_that_does_not_come_is_named) {
  auto first = make_listener(), second = make_listener();
  const std::vector<std::string> addresses = {first->address(), second->address()};
  CHECK_ERROR(ErrorKind::link_timeout, "no answer from rank 1", first->connect(0, addresses, {}, 100ms));
}

TEST(rank_that_has_gone_is_named_at_once) {
  auto first = make_listener(), second = make_listener();
  const std::vector<std::string> addresses = {first->address(), second->address()};
  first.reset();
  CHECK_ERROR(ErrorKind::peer_lost, "rank 0 ended", second->connect(1, addresses, {}, 10s));
}

TEST(other_hosts_are_told_from_this_one) {
  const std::string own = "boot|net|0|name|token";
  CHECK(!is_remote(own, own));
  CHECK(is_remote(own, "other|net|0|name|token"));
  CHECK(is_remote(own, "boot|other|0|name|token|10.0.0.1:80"));
  CHECK_ERROR(ErrorKind::transport, "five fields", is_remote(own, "nonsense"));
}

TEST(other_user_is_refused_on_this_host_only) {
  const std::string own = "boot|net|0|name|token";
  CHECK(why_unreachable(own, own).empty());
  CHECK(why_unreachable(own, "boot|net|1|name|token").find("user id 1, here 0") != std::string::npos);
  CHECK(why_unreachable(own, "boot|other|1|name|token").find("user id") != std::string::npos);
  CHECK(why_unreachable(own, "other|net|1|name|token").empty());
}

TEST(handle_outlives_its_communicator) {
  auto ranks = connect_all(2);
  Floats got(4);
  auto receive = post_receive(ranks[0], 1, got);
  ranks.clear();
  CHECK_ERROR(ErrorKind::transport, "", receive->wait(10s));
  CHECK(receive->is_done());
}

TEST(keepalive_is_dropped_when_the_tensors_have_left) {
  auto ranks = connect_all(2);
  Floats values(4), got(4);
  auto owner = std::make_shared<int>(1);
  ranks[0]->send(1, {}, {part(values)}, owner);
  post_receive(ranks[1], 0, got)->wait(10s);
  for (int round = 0; round < 1000 && owner.use_count() > 1; ++round) std::this_thread::sleep_for(1ms);
  CHECK_EQ(owner.use_count(), 1L);
}

TEST(failed_send_keeps_its_tensors_until_its_bytes_have_left) {
  auto ranks = connect_all(2);
  for (const auto& rank : ranks) rank->begin_epoch(1);
  Floats large = ramp(4000000), small(4, 1), got_small(4);
  post_send(ranks[0], 1, small, in_epoch(1));  // after it, the next one begins at once
  post_receive(ranks[1], 0, got_small, in_epoch(1))->wait(10s);
  auto owner = std::make_shared<int>(1);
  auto send = ranks[0]->send(1, in_epoch(1), {part(large)}, owner);
  CHECK_ERROR(ErrorKind::link_timeout, "", send->wait(20ms));
  CHECK(send->is_done() && !send->has_left());
  Floats got(4000000);
  auto receive = post_receive(ranks[1], 0, got, in_epoch(1));
  // Half a message cannot be taken back: the rest is read from the tensors and arrives.
  for (int round = 0; round < 2000 && !send->has_left(); ++round) std::this_thread::sleep_for(1ms);
  CHECK(send->has_left());
  for (int round = 0; round < 1000 && owner.use_count() > 1; ++round) std::this_thread::sleep_for(1ms);
  CHECK_EQ(owner.use_count(), 1L);
  receive->wait(10s);
  CHECK(got == large);
}

TEST(parked_message_that_will_not_be_whole_is_an_error_and_not_a_wait) {
  CommunicatorOptions slow;
  slow.emulation.bytes_per_s = 2e6;
  auto ranks = connect_all(2, slow);
  Floats large = ramp(4000000), got(4), target(large.size());
  auto other = post_receive(ranks[1], 0, got, tagged(1));
  post_send(ranks[0], 1, large, tagged(2));
  std::this_thread::sleep_for(50ms);
  ranks[0]->close();
  CHECK_ERROR(ErrorKind::transport, "has left", other->wait(10s));
  CHECK_ERROR(ErrorKind::transport, "has left", post_receive(ranks[1], 0, target, tagged(2))->wait(10s));
}

TEST(goodbyes_of_many_ranks_end_what_waits_for_them_in_a_pipeline) {
  auto ranks = connect_all(4);
  for (const auto& rank : ranks) rank->set_fail_together(true);
  Floats got(4);
  std::vector<std::shared_ptr<Transfer>> waiting;
  for (int peer = 1; peer < 4; ++peer) waiting.push_back(post_receive(ranks[0], peer, got));
  for (int peer = 1; peer < 4; ++peer) ranks[static_cast<std::size_t>(peer)]->close();
  for (const auto& receive : waiting) CHECK_ERROR(ErrorKind::transport, "has left", receive->wait(10s));
}

CHECK_MAIN()
