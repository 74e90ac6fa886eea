// What is sent arrives where it was asked for: sizes, matching, order, timeouts, mismatches.
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "communicators.h"

TEST(message_arrives_whole_at_every_size) {
  auto ranks = connect_all(2);
  for (const std::size_t count :
       {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{65536}, std::size_t{3000001}}) {
    Floats sent = ramp(count);
    Floats got(count, -1);
    auto receive = post_receive(ranks[1], 0, got);
    auto send = post_send(ranks[0], 1, sent);
    receive->wait(10s);
    send->wait(10s);
    CHECK(got == sent);
    CHECK_EQ(receive->payload_nbytes(), count * 4);
  }
}

TEST(message_without_target_brings_dtype_shape_and_flags) {
  auto ranks = connect_all(2);
  Floats values = ramp(6);
  SendPart first = part(values);
  first.tensor.shape = {2, 3};
  first.requires_grad = true;
  SendPart missing;
  missing.absent = true;
  std::vector<std::int64_t> ids = {5, 6};
  const SendPart third{{ids.data(), DType::int64, {2, 1}}, {}, false, false};
  ranks[0]->send(1, {}, {first, missing, third}, nullptr);
  auto receive = ranks[1]->receive(0, {}, {}, nullptr);
  receive->wait(10s);
  auto& parts = receive->parts();
  CHECK_EQ(parts.size(), std::size_t{3});
  CHECK((parts[0].shape == std::vector<std::int64_t>{2, 3}));
  CHECK(parts[0].requires_grad && parts[0].dtype == DType::float32);
  CHECK(std::memcmp(parts[0].block.data(), values.data(), 24) == 0);
  CHECK(parts[1].absent);
  CHECK(parts[2].dtype == DType::int64 && !parts[2].requires_grad);
  CHECK(std::memcmp(parts[2].block.data(), ids.data(), 16) == 0);
}

TEST(quantized_message_in_many_chunks_decodes_within_its_step) {
  auto ranks = connect_all(2);
  Floats sent(700 * 1001);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<float>(i % 97) / 97.0f - 0.5f;
  for (const char* codec : {"int8", "int4"}) {
    SendPart outgoing = part(sent, codec);
    outgoing.tensor.shape = {700, 1001};
    auto send = ranks[0]->send(1, {}, {outgoing}, nullptr);
    auto receive = ranks[1]->receive(0, {}, {}, nullptr);
    receive->wait(10s);
    const auto* got = static_cast<const float*>(receive->parts()[0].block.data());
    float worst = 0;
    for (std::size_t i = 0; i < sent.size(); ++i) worst = std::max(worst, std::abs(got[i] - sent[i]));
    CHECK(worst > 0 && worst < 0.05f);
    CHECK(receive->wire_nbytes() < receive->payload_nbytes() / 3);
    CHECK_EQ(send->wire_nbytes(), receive->wire_nbytes());
  }
}

TEST(messages_match_by_tag_and_keep_order_within_one) {
  auto ranks = connect_all(2);
  Floats ones(8, 1), twos(8, 2), threes(8, 3), got(8);
  post_send(ranks[0], 1, ones, tagged(1));
  post_send(ranks[0], 1, twos, tagged(2));
  post_send(ranks[0], 1, threes, tagged(1));
  post_receive(ranks[1], 0, got, tagged(2))->wait(10s);
  CHECK(got == twos);
  post_receive(ranks[1], 0, got, tagged(1))->wait(10s);
  CHECK(got == ones);
  post_receive(ranks[1], 0, got, tagged(1))->wait(10s);
  CHECK(got == threes);
}

TEST(receive_from_anybody_tells_from_whom) {
  auto ranks = connect_all(3);
  Floats values(4, 7), got(4);
  post_send(ranks[2], 0, values);
  auto receive = post_receive(ranks[0], kAnySource, got);
  receive->wait(10s);
  CHECK_EQ(receive->peer(), 2);
  CHECK(got == values);
}

TEST(large_messages_cross_in_both_directions_at_once) {
  auto ranks = connect_all(2);
  Floats a = ramp(2000000), b = ramp(2000000, 5), got_a(a.size()), got_b(b.size());
  auto send_a = post_send(ranks[0], 1, a);
  auto send_b = post_send(ranks[1], 0, b);
  auto receive_b = post_receive(ranks[0], 1, got_b);
  auto receive_a = post_receive(ranks[1], 0, got_a);
  for (const auto& transfer : {receive_a, receive_b, send_a, send_b}) transfer->wait(10s);
  CHECK(got_a == a && got_b == b);
}

TEST(eager_message_is_done_before_anybody_asks_for_it) {
  auto ranks = connect_all(2);
  Floats values = ramp(16), got(16);
  post_send(ranks[0], 1, values)->wait(10s);
  values.assign(16, -1);
  post_receive(ranks[1], 0, got)->wait(10s);
  CHECK(got == ramp(16));
}

TEST(other_dtype_or_size_is_refused_and_the_next_message_is_whole) {
  auto ranks = connect_all(2);
  Floats three = ramp(3), four(4, -1), got(3);
  post_send(ranks[0], 1, three);
  auto receive = post_receive(ranks[1], 0, four);
  CHECK_ERROR(ErrorKind::message_mismatch, "float32 [4] (16 bytes)", receive->wait(10s));
  CHECK_ERROR(ErrorKind::message_mismatch, "float32 [3] (12 bytes)", receive->wait(10s));
  CHECK(four == Floats(4, -1));
  std::vector<std::int32_t> ints(3);
  post_send(ranks[0], 1, three);
  CHECK_ERROR(ErrorKind::message_mismatch, "int32",
              ranks[1]->receive(0, {}, {{ints.data(), DType::int32, {3}}}, nullptr)->wait(10s));
  post_send(ranks[0], 1, three);
  post_receive(ranks[1], 0, got)->wait(10s);
  CHECK(got == three);
}

TEST(order_of_memory_arrives_and_a_target_in_another_order_is_not_written_to) {
  auto ranks = connect_all(2);
  Floats values = ramp(6), got(6, -1);
  SendPart part;
  part.tensor = {values.data(), DType::float32, {2, 3}, kOnHost, {1, 0}};
  ranks[0]->send(1, {}, {part}, nullptr);
  auto receive = ranks[1]->receive(0, {}, {}, nullptr);
  receive->wait(10s);
  CHECK(receive->parts()[0].order == DimOrder({1, 0}) && receive->parts()[0].is_raw);
  ranks[0]->send(1, {}, {part}, nullptr);
  CHECK_ERROR(ErrorKind::message_mismatch, "",
              ranks[1]->receive(0, {}, {{got.data(), DType::float32, {2, 3}}}, nullptr)->wait(10s));
  CHECK(got == Floats(6, -1));
  part.tensor.order = {1, 1};
  CHECK_ERROR(ErrorKind::tensor, "every dimension once", ranks[0]->send(1, {}, {part}, nullptr));
}

TEST(refused_message_that_is_still_leaving_is_an_error_at_the_sender_too) {
  CommunicatorOptions slow;
  slow.emulation.bytes_per_s = 100e6;
  auto ranks = connect_all(2, slow);
  Floats large = ramp(4000000), small(3);
  auto send = post_send(ranks[0], 1, large);
  CHECK_ERROR(ErrorKind::message_mismatch, "", post_receive(ranks[1], 0, small)->wait(10s));
  CHECK_ERROR(ErrorKind::message_mismatch, "rank 1 refused", send->wait(10s));
}

TEST(timeout_names_ranks_key_and_tensors) {
  auto ranks = connect_all(2);
  Floats got(4);
  auto receive = post_receive(ranks[0], 1, got, tagged(9));
  CHECK_ERROR(ErrorKind::link_timeout, "from rank 1 (tag 9): float32 [4] (16 bytes); where: rank 0",
              receive->wait(50ms));
  CHECK_ERROR(ErrorKind::link_timeout, "", receive->wait(50ms));
}

TEST(message_that_comes_after_a_timeout_goes_to_the_next_receive) {
  auto ranks = connect_all(2);
  Floats ones(4, 1), late(4, -1), next(4);
  CHECK_ERROR(ErrorKind::link_timeout, "", post_receive(ranks[0], 1, late)->wait(20ms));
  post_send(ranks[1], 0, ones);
  post_receive(ranks[0], 1, next)->wait(10s);
  CHECK(next == ones);
  CHECK(late == Floats(4, -1));
}

TEST(message_half_received_at_a_timeout_goes_whole_to_the_next_receive) {
  CommunicatorOptions slow;
  slow.emulation.bytes_per_s = 20e6;
  auto ranks = connect_all(2, slow);
  Floats sent = ramp(1000000), first(sent.size()), next(sent.size());
  auto send = post_send(ranks[0], 1, sent);
  CHECK_ERROR(ErrorKind::link_timeout, "", post_receive(ranks[1], 0, first)->wait(60ms));
  post_receive(ranks[1], 0, next)->wait(10s);
  CHECK(next == sent);
}

TEST(emulated_link_takes_the_time_its_numbers_say) {
  CommunicatorOptions slow;
  slow.emulation = {10e6, 0.03};
  auto ranks = connect_all(2, slow);
  Floats sent = ramp(100000), got(sent.size());
  auto send = post_send(ranks[0], 1, sent);
  auto receive = post_receive(ranks[1], 0, got);
  receive->wait(10s);
  const TransferTimes times = receive->times();
  CHECK(got == sent);
  CHECK(times.done_ns - times.started_ns > 69'000'000);
}

TEST(transfers_go_on_while_nobody_waits_also_right_after_blocking_calls) {
  Floats small = ramp(8), got(8), large = ramp(2000000), got_large(large.size());
  auto ranks = connect_all(2);
  for (int round = 0; round < 20; ++round) {
    auto receive = post_receive(ranks[1], 0, got);
    post_send(ranks[0], 1, small)->wait(10s);
    receive->wait(10s);
  }
  const std::vector<std::shared_ptr<Transfer>> transfers = {
      post_receive(ranks[1], 0, got, tagged(1)), post_receive(ranks[1], 0, got_large, tagged(2)),
      post_send(ranks[0], 1, large, tagged(2)), post_send(ranks[0], 1, small, tagged(1))};
  for (const auto& transfer : transfers) {
    for (int round = 0; round < 5000 && !transfer->is_done(); ++round) std::this_thread::sleep_for(1ms);
    CHECK(transfer->is_done());
  }
  CHECK(got_large == large);
}

TEST(unknown_peers_and_oneself_are_refused) {
  auto ranks = connect_all(2);
  Floats values(4);
  CHECK_ERROR(ErrorKind::config, "got this rank", post_send(ranks[0], 0, values));
  CHECK_ERROR(ErrorKind::config, "from 0 to 1; got 2", post_send(ranks[0], 2, values));
  CHECK_ERROR(ErrorKind::config, "got -7", post_receive(ranks[0], -7, values));
  CHECK_ERROR(ErrorKind::tensor, "1 to 65535", ranks[0]->send(1, {}, {}, nullptr));
}

TEST(many_threads_share_one_communicator) {
  auto ranks = connect_all(2);
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int tag = 0; tag < 4; ++tag) {
    threads.emplace_back([&, tag] {
      for (int round = 0; round < 100; ++round) {
        Floats values(static_cast<std::size_t>(1 + round * 97), static_cast<float>(round));
        post_send(ranks[0], 1, values, tagged(tag))->wait(20s);
      }
    });
    threads.emplace_back([&, tag] {
      for (int round = 0; round < 100; ++round) {
        Floats got(static_cast<std::size_t>(1 + round * 97));
        post_receive(ranks[1], 0, got, tagged(tag))->wait(20s);
        if (got.back() != static_cast<float>(round)) ++num_wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_wrong.load(), 0);
}

TEST(wait_can_be_interrupted_and_the_receive_is_taken_back) {
  auto ranks = connect_all(2);
  Floats got(4, -1), values(4, 1), next(4);
  auto receive = post_receive(ranks[0], 1, got);
  bool was_interrupted = false;
  try {
    receive->wait(10s, [] { throw std::runtime_error("stop"); });
  } catch (const std::runtime_error& error) {
    was_interrupted = std::string(error.what()) == "stop";
  }
  CHECK(was_interrupted);
  post_send(ranks[1], 0, values);
  post_receive(ranks[0], 1, next)->wait(10s);
  CHECK(next == values && got == Floats(4, -1));
}

TEST(parked_message_without_memory_is_an_error_of_the_receive_that_asks_for_it) {
  CommunicatorOptions small;
  small.pool = make_host_pool(2 << 20);
  auto ranks = connect_all(2, small);
  Floats large(800000, 1), got(4), target(800000);
  auto other = post_receive(ranks[1], 0, got, tagged(1));
  auto send = post_send(ranks[0], 1, large, tagged(2));
  for (int i = 0; i < 10000 && !send->is_done(); ++i) std::this_thread::sleep_for(1ms);
  CHECK_ERROR(ErrorKind::link_timeout, "", other->wait(100ms));
  CHECK_ERROR(ErrorKind::pool_exhausted, "", post_receive(ranks[1], 0, target, tagged(2))->wait(10s));
}

TEST(message_that_does_not_fit_the_receivers_pool_is_the_same_error_on_both_sides) {
  CommunicatorOptions small;
  small.limits.max_nbytes = 1 << 20;
  small.pool = make_host_pool(2 << 20);
  auto ranks = connect_all(2, small);
  Floats large(4000000, 1);
  auto send = post_send(ranks[0], 1, large);
  CHECK_ERROR(ErrorKind::pool_exhausted, "", ranks[1]->receive(0, {}, {}, nullptr)->wait(10s));
  CHECK_ERROR(ErrorKind::pool_exhausted, "rank 1 refused a message: ", send->wait(10s));
}

TEST(refusing_a_parked_message_leaves_the_one_under_way_whole) {
  CommunicatorOptions slow;
  slow.emulation.bytes_per_s = 40e6;
  auto ranks = connect_all(2, slow);
  Floats small(4, 1), large = ramp(1000000), got(large.size(), -1);
  std::vector<std::int32_t> ints(4);
  auto receive = post_receive(ranks[1], 0, got, tagged(1));
  post_send(ranks[0], 1, small, tagged(2));
  auto send = post_send(ranks[0], 1, large, tagged(1));
  std::this_thread::sleep_for(30ms);
  CHECK_ERROR(ErrorKind::message_mismatch, "int32",
              ranks[1]->receive(0, tagged(2), {{ints.data(), DType::int32, {4}}}, nullptr)->wait(10s));
  receive->wait(10s);
  CHECK(got == large);
}

TEST(message_half_received_at_a_timeout_goes_to_a_receive_that_is_posted_already) {
  CommunicatorOptions slow;
  slow.emulation.bytes_per_s = 20e6;
  auto ranks = connect_all(2, slow);
  Floats sent = ramp(1000000), first(sent.size()), next(sent.size());
  auto early = post_receive(ranks[1], 0, first);
  auto later = post_receive(ranks[1], 0, next);
  post_send(ranks[0], 1, sent);
  CHECK_ERROR(ErrorKind::link_timeout, "", early->wait(60ms));
  later->wait(10s);
  CHECK(next == sent);
}

CHECK_MAIN()
