// Ranks that reach each other through TCP have all that ranks on one host have, and nothing is left behind.
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <vector>

#include "check.h"
#include "communicators.h"

namespace {

constexpr const char* kSetting = "PIPECOMM_TRANSPORT";

// Ranks below `num_local` share memory; each of the others is a host of its own.
Listeners listen(std::size_t num_local, std::size_t size) {
  Listeners listeners;
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (rank >= num_local) ::setenv(kSetting, "tcp", 1);
    listeners.push_back(make_listener());
    ::unsetenv(kSetting);
    listeners.back()->listen_tcp("127.0.0.1");
  }
  return listeners;
}

std::vector<CommunicatorPtr> connect_remote(std::size_t size, const CommunicatorOptions& options = {}) {
  return connect_listeners(listen(0, size), options);
}

std::size_t count_entries(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

bool stays_undone(const std::shared_ptr<Transfer>& transfer) {
  std::this_thread::sleep_for(100ms);
  return !transfer->is_done();
}

}  // namespace

TEST(message_arrives_whole_at_every_size) {
  auto ranks = connect_remote(2);
  CHECK(ranks[0]->path(1).find("TCP to 127.0.0.1:") == 0);
  for (const std::size_t count :
       {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{65536}, std::size_t{3000001}}) {
    Floats sent = ramp(count), got(count, -1);
    auto receive = post_receive(ranks[1], 0, got);
    auto send = post_send(ranks[0], 1, sent);
    receive->wait(10s);
    send->wait(10s);
    CHECK(got == sent);
  }
}

TEST(quantized_message_crosses_in_few_bytes) {
  auto ranks = connect_remote(2);
  Floats sent(700 * 1001);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<float>(i % 255) / 255.0f - 0.5f;
  SendPart outgoing = part(sent, "int8");
  outgoing.tensor.shape = {700, 1001};
  auto send = ranks[0]->send(1, {}, {outgoing}, nullptr);
  auto receive = ranks[1]->receive(0, {}, {}, nullptr);
  receive->wait(10s);
  const auto* got = static_cast<const float*>(receive->parts()[0].block.data());
  float worst = 0;
  for (std::size_t i = 0; i < sent.size(); ++i) worst = std::max(worst, std::abs(got[i] - sent[i]));
  CHECK(worst > 0 && worst < 0.05f);
  CHECK(receive->wire_nbytes() < receive->payload_nbytes() / 3);
}

TEST(large_messages_cross_in_both_directions_at_once) {
  auto ranks = connect_remote(2);
  Floats a = ramp(4000000), b = ramp(4000000, 5), got_a(a.size()), got_b(b.size());
  auto send_a = post_send(ranks[0], 1, a);
  auto send_b = post_send(ranks[1], 0, b);
  auto receive_b = post_receive(ranks[0], 1, got_b);
  auto receive_a = post_receive(ranks[1], 0, got_a);
  for (const auto& transfer : {receive_a, receive_b, send_a, send_b}) transfer->wait(20s);
  CHECK(got_a == a && got_b == b);
}

TEST(many_messages_of_all_sizes_arrive_in_order) {
  auto ranks = connect_remote(2);
  std::thread sender([&] {
    for (std::size_t round = 0; round < 400; ++round) {
      Floats values = ramp(round * round % 30011, static_cast<float>(round));
      post_send(ranks[0], 1, values)->wait(20s);
    }
  });
  std::size_t num_wrong = 0;
  for (std::size_t round = 0; round < 400; ++round) {
    Floats got(round * round % 30011);
    post_receive(ranks[1], 0, got)->wait(20s);
    if (got != ramp(got.size(), static_cast<float>(round))) ++num_wrong;
  }
  sender.join();
  CHECK_EQ(num_wrong, std::size_t{0});
}

TEST(paths_mix_in_one_group) {
  auto ranks = connect_listeners(listen(2, 4));
  CHECK_EQ(ranks[0]->path(1), std::string("shared memory"));
  CHECK(ranks[0]->path(2).find("TCP") == 0 && ranks[2]->path(3).find("TCP") == 0);
  for (std::size_t from = 0; from < 4; ++from) {
    for (std::size_t to = 0; to < 4; ++to) {
      if (from == to) continue;
      Floats values(4, static_cast<float>(10 * from + to)), got(4);
      auto receive = post_receive(ranks[to], kAnySource, got);
      post_send(ranks[from], static_cast<int>(to), values)->wait(10s);
      receive->wait(10s);
      CHECK(got == values);
      CHECK_EQ(receive->peer(), static_cast<int>(from));
    }
  }
}

TEST(messages_match_by_tag) {
  auto ranks = connect_remote(2);
  Floats ones(8, 1), twos(8, 2), got(8);
  post_send(ranks[0], 1, ones, tagged(1));
  post_send(ranks[0], 1, twos, tagged(2));
  post_receive(ranks[1], 0, got, tagged(2))->wait(10s);
  CHECK(got == twos);
  post_receive(ranks[1], 0, got, tagged(1))->wait(10s);
  CHECK(got == ones);
}

TEST(mismatch_is_an_error_on_both_sides) {
  CommunicatorOptions slow;
  slow.emulation.bytes_per_s = 100e6;
  auto ranks = connect_remote(2, slow);
  Floats large = ramp(4000000), small(3);
  auto send = post_send(ranks[0], 1, large);
  CHECK_ERROR(ErrorKind::message_mismatch, "", post_receive(ranks[1], 0, small)->wait(10s));
  CHECK_ERROR(ErrorKind::message_mismatch, "rank 1 refused", send->wait(10s));
}

TEST(emulated_link_takes_its_time_here_too) {
  CommunicatorOptions slow;
  slow.emulation = {10e6, 0.03};
  auto ranks = connect_remote(2, slow);
  Floats sent = ramp(100000), got(sent.size());
  const auto started = std::chrono::steady_clock::now();
  auto send = post_send(ranks[0], 1, sent);
  post_receive(ranks[1], 0, got)->wait(10s);
  CHECK(got == sent);
  CHECK(std::chrono::steady_clock::now() - started > 69ms);
}

TEST(what_may_be_on_its_way_is_limited_from_end_to_end) {
  CommunicatorOptions small;
  small.limits.max_nbytes = std::size_t{1} << 20;
  auto ranks = connect_remote(2, small);
  Floats half = ramp(100000), got(half.size());
  post_send(ranks[0], 1, half)->wait(10s);
  post_send(ranks[0], 1, half)->wait(10s);
  auto third = post_send(ranks[0], 1, half);
  CHECK(stays_undone(third));
  for (int round = 0; round < 3; ++round) {
    post_receive(ranks[1], 0, got)->wait(10s);
    CHECK(got == half);
  }
  third->wait(10s);
}

TEST(number_of_messages_on_their_way_is_limited_from_end_to_end) {
  CommunicatorOptions two;
  two.limits.max_messages = 2;
  auto ranks = connect_remote(2, two);
  Floats values(4, 1), got(4);
  std::vector<std::shared_ptr<Transfer>> sends;
  for (int i = 0; i < 6; ++i) sends.push_back(post_send(ranks[0], 1, values));
  sends[1]->wait(10s);
  CHECK(stays_undone(sends[2]));
  for (int i = 0; i < 6; ++i) post_receive(ranks[1], 0, got)->wait(10s);
  for (const auto& send : sends) send->wait(10s);
}

TEST(strict_send_is_done_only_with_its_receive) {
  CommunicatorOptions strict;
  strict.limits.is_strict = true;
  auto ranks = connect_remote(2, strict);
  Floats values(4, 1), got(4);
  auto send = post_send(ranks[0], 1, values);
  CHECK(stays_undone(send));
  post_receive(ranks[1], 0, got)->wait(10s);
  send->wait(10s);
}

TEST(abort_passes_a_full_ring) {
  auto ranks = connect_remote(3);
  for (const auto& rank : ranks) rank->begin_epoch(1);
  Floats large = ramp(4000000), got(4);
  auto stuck = post_send(ranks[0], 1, large, in_epoch(1));
  auto waiting = post_receive(ranks[1], 2, got, in_epoch(1));
  CHECK(stays_undone(stuck));
  ranks[0]->abort(1, "stage 0: ValueError: boom");
  CHECK_ERROR(ErrorKind::stage_failed, "boom", waiting->wait(10s));
  CHECK_ERROR(ErrorKind::stage_failed, "boom", stuck->wait(10s));
  for (const auto& rank : ranks) rank->begin_epoch(2);
  Floats fresh(4, 2);
  post_send(ranks[0], 1, fresh, in_epoch(2));
  post_receive(ranks[1], 0, got, in_epoch(2))->wait(10s);
  CHECK(got == fresh);
}

TEST(what_was_sent_before_closing_still_arrives) {
  auto ranks = connect_remote(2);
  Floats values = ramp(in_slots() ? 200000 : 900000), got(values.size());
  post_send(ranks[0], 1, values)->wait(10s);
  ranks[0]->close();
  ranks[0].reset();
  post_receive(ranks[1], 0, got)->wait(10s);
  CHECK(got == values);
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", post_receive(ranks[1], 0, got)->wait(10s));
}

TEST(closing_ends_what_is_pending_on_both_sides) {
  CommunicatorOptions slow;  // so that the large message is still leaving
  slow.emulation.bytes_per_s = 100e6;
  auto ranks = connect_remote(2, slow);
  Floats got(4), large = ramp(8000000);
  auto own = post_receive(ranks[0], 1, got);
  auto peers = post_receive(ranks[1], 0, got);
  auto leaving = post_send(ranks[1], 0, large, tagged(5));
  ranks[0]->close();
  CHECK_ERROR(ErrorKind::transport, "closed", own->wait(10s));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", peers->wait(10s));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", leaving->wait(10s));
}

TEST(ranks_of_groups_of_other_sizes_refuse_each_other) {
  const Listeners listeners = listen(0, 3);
  const std::vector<std::string> two = {listeners[0]->address(), listeners[1]->address()};
  const std::vector<std::string> three = {two[0], two[1], listeners[2]->address()};
  const char* const text = "expected 2 ranks; rank 1 was started for 3";
  std::thread other([&] { CHECK_ERROR(ErrorKind::config, text, listeners[1]->connect(1, three, {}, 10s)); });
  CHECK_ERROR(ErrorKind::config, text, listeners[0]->connect(0, two, {}, 10s));
  other.join();
}

TEST(rank_that_does_not_come_is_named_with_its_address) {
  const Listeners listeners = listen(0, 2);
  const std::vector<std::string> addresses = {listeners[0]->address(), listeners[1]->address()};
  CHECK_ERROR(ErrorKind::link_timeout,
              "no answer from rank 1 at 127.0.0.1:", listeners[0]->connect(0, addresses, {}, 100ms));
}

TEST(rank_that_has_gone_is_named_at_once) {
  Listeners listeners = listen(0, 2);
  const std::vector<std::string> addresses = {listeners[0]->address(), listeners[1]->address()};
  listeners[0].reset();
  CHECK_ERROR(ErrorKind::peer_lost, "rank 0 ended", listeners[1]->connect(1, addresses, {}, 10s));
}

TEST(both_families_of_addresses_work_and_names_are_refused) {
  Listeners listeners = listen(0, 2);
  CHECK_ERROR(ErrorKind::config, "numeric IP address", listeners[0]->listen_tcp("localhost"));
  CHECK_ERROR(ErrorKind::config, "an address of this host", listeners[0]->listen_tcp("192.0.2.1"));
  for (const auto& listener : listeners) listener->listen_tcp("::1");
  auto ranks = connect_listeners(listeners);
  CHECK(ranks[1]->path(0).find("TCP to [::1]:") == 0);
  Floats values(4, 1), got(4);
  post_send(ranks[0], 1, values);
  post_receive(ranks[1], 0, got)->wait(10s);
}

TEST(unknown_transport_is_refused) {
  ::setenv(kSetting, "carrier pigeon", 1);
  CHECK_ERROR(ErrorKind::config, "carrier pigeon", make_listener());
  ::unsetenv(kSetting);
}

TEST(nothing_is_left_of_closed_bridges) {
  std::size_t num_fds = 0, num_threads = 0;
  for (int round = 0; round < 12; ++round) {
    auto ranks = connect_remote(3);
    Floats values(1000, 1), got(1000);
    post_send(ranks[0], 1, values);
    post_receive(ranks[1], 0, got)->wait(10s);
    for (const auto& rank : ranks) rank->close();
    ranks.clear();
    if (round == 1) num_fds = count_entries("/proc/self/fd"), num_threads = count_entries("/proc/self/task");
  }
  CHECK_EQ(count_entries("/proc/self/fd"), num_fds);
  // What makes a pool grow ends by itself, soon after.
  for (int i = 0; i < 1000 && count_entries("/proc/self/task") > num_threads; ++i) std::this_thread::sleep_for(10ms);
  CHECK(count_entries("/proc/self/task") <= num_threads);
}

CHECK_MAIN()
