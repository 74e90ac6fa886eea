// A peer has gone: what came whole is delivered, all else that waits for it ends, whenever it is posted.
#include <unistd.h>

#include <string>
#include <thread>

#include "check.h"
#include "communicators.h"
#include "transport/api/hang_report.h"

namespace {

// A message larger than what may be on its way, of which a part arrives.
constexpr std::size_t kTooMany = 6'000'000;
// Far more than what must not wait takes, on a loaded machine too.
constexpr auto kSoon = 10s;

CommunicatorOptions options_of(std::size_t max_parked_nbytes = CommunicatorOptions{}.max_parked_nbytes) {
  CommunicatorOptions options;
  options.limits.max_nbytes = 1 << 20;
  options.max_parked_nbytes = max_parked_nbytes;
  options.finish_timeout = 100ms;
  return options;
}

template <typename Done>
bool comes_true(const Done& done) {
  for (int i = 0; i < 2000 && !done(); ++i) std::this_thread::sleep_for(1ms);
  return done();
}

// Whether the message to rank 1 is being written, as a hang report tells.
bool has_begun(std::int32_t tag) {
  const std::string text = request_hang_report(::getpid(), 10s);
  const auto begin = text.find("  send to rank 1 (tag " + std::to_string(tag) + ")");
  return begin != std::string::npos &&
         text.substr(begin, text.find('\n', begin) - begin).find(" 0 bytes") == std::string::npos;
}

// Rank 0 leaves when it has begun to send the last of these.
struct Left {
  explicit Left(std::vector<CommunicatorPtr> connected, const std::vector<std::size_t>& counts)
      : ranks(std::move(connected)) {
    std::int32_t tag = 0;
    for (const std::size_t count : counts) {
      sent.push_back(ramp(count));
      sends.push_back(post_send(ranks[0], 1, sent.back(), tagged(++tag)));
    }
    CHECK(comes_true([&] { return has_begun(tag); }));
    ranks[0]->close();
  }

  std::shared_ptr<Transfer> receive(int peer, std::int32_t tag, std::size_t count) {
    targets.push_back(std::make_unique<Floats>(count));
    return post_receive(ranks[1], peer, *targets.back(), tagged(tag));
  }
  // Whether message `tag` has come as it was sent.
  bool arrives(std::int32_t tag) {
    const Floats& expected = sent[static_cast<std::size_t>(tag - 1)];
    receive(0, tag, expected.size())->wait(kSoon);
    return *targets.back() == expected;
  }

  std::vector<Floats> sent;
  std::vector<std::unique_ptr<Floats>> targets;
  std::vector<CommunicatorPtr> ranks;
  std::vector<std::shared_ptr<Transfer>> sends;
};

}  // namespace

TEST(receive_posted_after_half_a_message_and_a_goodbye_ends) {
  Left left(connect_all(2, options_of()), {kTooMany});
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 1, kTooMany)->wait(kSoon));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 1, kTooMany)->wait(kSoon));
}

TEST(receive_from_anybody_posted_after_half_a_message_and_a_goodbye_ends) {
  Left left(connect_all(2, options_of()), {kTooMany});
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(kAnySource, 1, kTooMany)->wait(kSoon));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(kAnySource, 1, kTooMany)->wait(kSoon));
}

TEST(receive_into_the_pool_posted_after_half_a_message_and_a_goodbye_ends_and_holds_nothing) {
  CommunicatorOptions options = options_of();
  options.pool = make_host_pool(0);
  Left left(connect_all(2, options), {kTooMany});
  auto receive = left.ranks[1]->receive(0, tagged(1), {}, nullptr);
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", receive->wait(kSoon));
  CHECK(comes_true([&] { return options.pool->stats().live_nbytes == 0; }));
}

TEST(half_a_message_parked_for_a_late_receive_of_another_one_ends_its_receive_and_holds_nothing) {
  CommunicatorOptions options = options_of();
  options.pool = make_host_pool(0);
  Left left(connect_all(2, options), {kTooMany});
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 7, 4)->wait(kSoon));
  CHECK(comes_true([&] { return options.pool->stats().live_nbytes == 0; }));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 1, kTooMany)->wait(kSoon));
}

TEST(whole_messages_before_half_a_one_are_delivered_in_any_order) {
  Left left(connect_all(2, options_of()), {1000, 2000, kTooMany});
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 3, kTooMany)->wait(kSoon));
  CHECK(left.arrives(2));
  CHECK(left.arrives(1));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 1, 1000)->wait(kSoon));
}

TEST(whole_messages_behind_more_than_may_be_parked_are_delivered) {
  Left left(connect_all(2, options_of(1000)), {1000, 1000, 1000, kTooMany});
  CHECK(left.arrives(3));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(kAnySource, 7, 4)->wait(kSoon));
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 7, 4)->wait(kSoon));
  CHECK(left.arrives(2));
  CHECK(left.arrives(1));
}

TEST(every_kind_of_call_ends_after_half_a_message_and_a_goodbye) {
  CommunicatorOptions strict = options_of();
  strict.limits.is_strict = true;
  Left left(connect_all(2, strict), {kTooMany});
  auto half = left.receive(0, 1, kTooMany), other = left.receive(0, 2, 4), any = left.receive(kAnySource, 3, 4);
  Floats values = ramp(4);
  auto send = post_send(left.ranks[1], 0, values);
  for (const auto& transfer : {half, other, any, send}) {
    CHECK_ERROR(ErrorKind::transport, "rank 0 has left", transfer->wait(kSoon));
    CHECK(comes_true([&] { return transfer->has_left(); }));
  }
  left.ranks[1]->close();
}

TEST(late_receive_from_anybody_waits_for_those_who_are_left) {
  Left left(connect_all(3, options_of()), {1000, kTooMany});
  Floats values = ramp(10);
  auto receive = left.receive(kAnySource, 5, 10);
  CHECK_ERROR(ErrorKind::transport, "rank 0 has left", left.receive(0, 2, kTooMany)->wait(kSoon));
  CHECK(!receive->is_done());
  post_send(left.ranks[2], 1, values, tagged(5));
  receive->wait(kSoon);
  auto last = left.receive(kAnySource, 5, 10);
  left.ranks[2]->close();
  CHECK_ERROR(ErrorKind::transport, "has left", last->wait(kSoon));
  CHECK(left.arrives(1));
}

CHECK_MAIN()
