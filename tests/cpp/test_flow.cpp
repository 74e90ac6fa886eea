// How much may be on its way, what goes first, and when a send counts as done.
#include <thread>
#include <vector>

#include "check.h"
#include "communicators.h"

namespace {

MessageKey key_of(Direction direction, std::int32_t microbatch) { return {0, direction, microbatch, 0}; }

CommunicatorOptions strict() {
  CommunicatorOptions options;
  options.limits.is_strict = true;
  return options;
}

// Behind a large message: does the gradient, posted last, arrive before the activation?
bool gradient_arrives_first(const CommunicatorOptions& options) {
  auto ranks = connect_all(2, options);
  Floats large = ramp(3000000), small = ramp(8);
  Floats got_large(large.size()), got_activation(8), got_gradient(8);
  auto front = ranks[1]->receive(0, key_of(Direction::forward, 0), {view(got_large)}, nullptr);
  auto activation = ranks[1]->receive(0, key_of(Direction::forward, 1), {view(got_activation)}, nullptr);
  auto gradient = ranks[1]->receive(0, key_of(Direction::backward, 0), {view(got_gradient)}, nullptr);
  post_send(ranks[0], 1, large, key_of(Direction::forward, 0));
  post_send(ranks[0], 1, small, key_of(Direction::forward, 1));
  post_send(ranks[0], 1, small, key_of(Direction::backward, 0));
  for (const auto& receive : {front, activation, gradient}) receive->wait(20s);
  CHECK(got_large == large && got_activation == small && got_gradient == small);
  return gradient->times().done_ns < activation->times().done_ns;
}

}  // namespace

TEST(gradient_overtakes_activations_that_have_not_begun_to_leave) {
  CommunicatorOptions slow;
  slow.emulation.bytes_per_s = 100e6;
  CHECK(gradient_arrives_first(slow));
  slow.limits.backward_first = false;
  CHECK(!gradient_arrives_first(slow));
}

TEST(messages_of_one_key_never_overtake_each_other) {
  auto ranks = connect_all(2);
  std::vector<Floats> values;
  for (int i = 0; i < 20; ++i) values.push_back(Floats(100000, static_cast<float>(i)));
  for (Floats& value : values) post_send(ranks[0], 1, value, key_of(Direction::backward, 0));
  for (const Floats& value : values) {
    Floats got(value.size());
    post_receive(ranks[1], 0, got, key_of(Direction::backward, 0))->wait(20s);
    CHECK(got == value);
  }
}

TEST(no_more_messages_are_in_flight_than_allowed) {
  CommunicatorOptions options;
  options.limits.max_messages = 2;
  auto ranks = connect_all(2, options);
  Floats values = ramp(4), got(4);
  std::vector<std::shared_ptr<Transfer>> sends;
  for (int i = 0; i < 5; ++i) sends.push_back(post_send(ranks[0], 1, values));
  sends[0]->wait(10s);
  sends[1]->wait(10s);
  CHECK_ERROR(ErrorKind::link_timeout, "", sends[4]->wait(50ms));
  CHECK(!sends[2]->is_done() && !sends[3]->is_done());
  for (int i = 0; i < 4; ++i) post_receive(ranks[1], 0, got)->wait(10s);
  for (int i = 0; i < 4; ++i) sends[static_cast<std::size_t>(i)]->wait(10s);
}

TEST(a_process_at_its_limit_lets_each_link_have_one_message_on_its_way) {
  for (const bool counts_bytes : {false, true}) {
    CommunicatorOptions options;
    options.limits.max_process_messages = counts_bytes ? 0 : 3;
    options.limits.max_process_nbytes = counts_bytes ? 3000 : 0;
    auto ranks = connect_all(3, options);
    Floats values = ramp(300), got(values.size());  // 1200 bytes and a header
    std::vector<std::shared_ptr<Transfer>> sends;
    for (int i = 0; i < 5; ++i) sends.push_back(post_send(ranks[0], 1, values));
    sends[2]->wait(10s);
    CHECK_ERROR(ErrorKind::link_timeout, "", sends[4]->wait(50ms));
    post_send(ranks[0], 2, values)->wait(10s);
    auto second = post_send(ranks[0], 2, values);
    CHECK_ERROR(ErrorKind::link_timeout, "", second->wait(50ms));
    for (int i = 0; i < 4; ++i) post_receive(ranks[1], 0, got)->wait(10s);
    sends[3]->wait(10s);
    CHECK(got == values);
  }
}

TEST(what_a_gone_peer_had_not_taken_does_not_count_any_more) {
  CommunicatorOptions options;
  options.limits.max_process_messages = 2;
  auto ranks = connect_all(3, options);
  Floats values = ramp(4), got(4);
  for (int i = 0; i < 2; ++i) post_send(ranks[0], 1, values)->wait(10s);
  ranks[1]->close();
  for (int i = 0; i < 2; ++i) post_send(ranks[0], 2, values)->wait(10s);
  post_receive(ranks[2], 0, got)->wait(10s);
}

TEST(no_more_bytes_are_in_flight_than_allowed) {
  CommunicatorOptions options;
  options.limits.max_nbytes = 1 << 20;
  auto ranks = connect_all(2, options);
  Floats half(in_slots() ? 960000 : 120000), got(half.size());
  auto first = post_send(ranks[0], 1, half), second = post_send(ranks[0], 1, half),
       third = post_send(ranks[0], 1, half);
  second->wait(10s);
  CHECK_ERROR(ErrorKind::link_timeout, "", third->wait(50ms));
  // On the host the third had begun; in slots it had not, and is withdrawn.
  for (int i = 0; i < (in_slots() ? 2 : 3); ++i) post_receive(ranks[1], 0, got)->wait(10s);
  options.limits.max_nbytes = 1000;
  auto listener = make_listener();
  CHECK_ERROR(ErrorKind::config, "1000 bytes", listener->connect(0, {listener->address()}, options, 10s));
}

TEST(strict_send_is_done_only_when_its_receive_is_posted) {
  auto ranks = connect_all(2, strict());
  Floats values = ramp(16), got(16);
  auto send = post_send(ranks[0], 1, values);
  CHECK_ERROR(ErrorKind::link_timeout, "rank 1 to take", post_send(ranks[0], 1, values, tagged(1))->wait(100ms));
  CHECK(!send->is_done());
  post_receive(ranks[1], 0, got)->wait(10s);
  send->wait(10s);
  CHECK(got == values);
}

TEST(strict_messages_may_still_be_asked_for_in_another_order) {
  auto ranks = connect_all(2, strict());
  Floats ones(8, 1), twos(8, 2), large(3000000, 3), got(8), got_large(large.size());
  auto first = post_send(ranks[0], 1, ones, tagged(1));
  auto second = post_send(ranks[0], 1, twos, tagged(2));
  auto third = post_send(ranks[0], 1, large, tagged(3));
  post_receive(ranks[1], 0, got_large, tagged(3))->wait(10s);
  third->wait(10s);
  CHECK(!first->is_done() && !second->is_done() && got_large == large);
  post_receive(ranks[1], 0, got, tagged(2))->wait(10s);
  second->wait(10s);
  CHECK(!first->is_done() && got == twos);
  post_receive(ranks[1], 0, got, tagged(1))->wait(10s);
  first->wait(10s);
}

TEST(strict_order_that_only_eager_messages_allow_ends_in_timeouts) {
  auto ranks = connect_all(2, strict());
  Floats values = ramp(4), got(4);
  std::thread other([&] { CHECK_ERROR(ErrorKind::link_timeout, "", post_send(ranks[1], 0, values)->wait(200ms)); });
  CHECK_ERROR(ErrorKind::link_timeout, "", post_send(ranks[0], 1, values)->wait(200ms));
  other.join();
}

TEST(strict_send_ends_with_its_peer_its_step_and_its_group) {
  auto ranks = connect_all(3, strict());
  for (const auto& rank : ranks) rank->begin_epoch(1);
  Floats values = ramp(4);
  auto to_gone = post_send(ranks[0], 1, values, in_epoch(1));
  auto of_step = post_send(ranks[0], 2, values, in_epoch(1));
  auto of_group = post_send(ranks[2], 0, values, in_epoch(2));
  ranks[1]->close();
  CHECK_ERROR(ErrorKind::transport, "has left", to_gone->wait(10s));
  ranks[0]->abort(1, "boom");
  CHECK_ERROR(ErrorKind::stage_failed, "boom", of_step->wait(10s));
  ranks[2]->close();
  CHECK_ERROR(ErrorKind::transport, "closed", of_group->wait(10s));
}

TEST(strict_message_that_does_not_fit_is_an_error_at_the_sender) {
  auto ranks = connect_all(2, strict());
  Floats values = ramp(4), got(3);
  auto send = post_send(ranks[0], 1, values);
  CHECK_ERROR(ErrorKind::message_mismatch, "", post_receive(ranks[1], 0, got)->wait(10s));
  CHECK_ERROR(ErrorKind::message_mismatch, "rank 1 refused", send->wait(10s));
}

CHECK_MAIN()
