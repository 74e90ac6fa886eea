// Messages that nobody asks for: as much is kept as may be, and then both sides and the hang report say so.
#include <unistd.h>

#include <string>

#include "check.h"
#include "communicators.h"
#include "transport/api/hang_report.h"

namespace {

constexpr std::size_t kCount = 64 << 10;  // of floats, 256 KiB

// Rank 0 sends 40 messages of which rank 1 asks for the last, and parks no more than 1 MiB.
struct HeldUp {
  HeldUp() {
    CommunicatorOptions options;
    options.limits.max_nbytes = 1 << 20;
    options.max_parked_nbytes = 1 << 20;
    ranks = connect_all(2, options);
    last = post_receive(ranks[1], 0, got, tagged(39));
    for (std::int32_t tag = 0; tag < 40; ++tag) sends.push_back(post_send(ranks[0], 1, sent, tagged(tag)));
  }

  Floats sent = ramp(kCount), got = Floats(kCount);
  std::vector<CommunicatorPtr> ranks;
  std::shared_ptr<Transfer> last;
  std::vector<std::shared_ptr<Transfer>> sends;
};

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(timeouts_of_both_sides_name_the_limit_what_is_parked_and_the_way_out) {
  HeldUp held;
  const char* text =
      "5 messages that no receive asks for are parked (1310720 bytes), which is all that may be (1048576 bytes): "
      "nothing more is taken until some are received; receive in about the order of sending, or send less ahead";
  CHECK_ERROR(ErrorKind::link_timeout, (std::string("rank 1 takes no more: ") + text).c_str(),
              held.sends[39]->wait(1s));
  CHECK_ERROR(ErrorKind::link_timeout, text, held.last->wait(10ms));
}

TEST(hang_report_of_both_sides_names_the_limit_and_what_is_parked) {
  HeldUp held;
  std::string text;
  for (int round = 0; round < 100 && !has(text, "takes no more"); ++round) text = request_hang_report(::getpid(), 10s);
  CHECK(has(text, "\n  5 messages that no receive asks for are parked (1310720 bytes)"));
  CHECK(has(text, "rank 1 takes no more: 5 messages that no receive asks for are parked (1310720 bytes)"));
}

TEST(messages_go_on_and_the_texts_are_as_before_when_the_parked_ones_are_received) {
  HeldUp held;
  std::this_thread::sleep_for(200ms);
  for (std::int32_t tag = 0; tag < 39; ++tag) {
    Floats next(kCount);
    post_receive(held.ranks[1], 0, next, tagged(tag))->wait(10s);
    CHECK(next == held.sent);
  }
  held.last->wait(10s);
  CHECK(held.got == held.sent);
  Floats large = ramp(2 << 20);
  auto send = post_send(held.ranks[0], 1, large, tagged(50));
  try {
    send->wait(300ms);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::link_timeout && !has(error.what(), "parked"));
  }
  post_receive(held.ranks[1], 0, large, tagged(50))->wait(10s);
}

CHECK_MAIN()
