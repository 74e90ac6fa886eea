// A process tells what it waits for.
#include <unistd.h>

#include <string>

#include "check.h"
#include "communicators.h"
#include "transport/api/hang_report.h"

namespace {

// The report once it says `part`; the last one if it never does.
std::string report_with(const std::string& part) {
  std::string text;
  for (int round = 0; round < 100 && text.find(part) == std::string::npos; ++round) {
    text = request_hang_report(::getpid(), 10s);
  }
  return text;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(report_names_every_pending_transfer_with_peer_key_tensors_and_age) {
  Floats large = ramp(3000000), got(4), parked(8);
  auto ranks = connect_all(3);  // ends before the tensors that are still on their way
  auto send = post_send(ranks[0], 1, large, tagged(7));
  auto receive = post_receive(ranks[2], kAnySource, got, tagged(9));
  auto activation = ranks[2]->receive(1, {0, Direction::forward, 3, 0}, {}, nullptr);
  post_send(ranks[0], 2, parked, tagged(5));
  const std::string text = report_with("(tag 5) of 32 bytes, that no receive asks for");
  CHECK(has(text, "process " + std::to_string(::getpid())));
  CHECK(has(text, "send to rank 1 (tag 7): float32 [3000000] (12000000 bytes), for "));
  CHECK(has(text, "receive from any rank (tag 9): float32 [4] (16 bytes), for "));
  CHECK(has(text, "receive from rank 1 (forward, microbatch 3, section 0): any tensors, for "));
  CHECK(has(text, "message from rank 0 (tag 5) of 32 bytes, that no receive asks for"));
  CHECK(has(text, "last message from rank 1: none so far"));
}

TEST(report_says_iteration_where_the_section_belongs_to_one) {
  Floats parked(8);
  auto ranks = connect_all(2);
  for (const auto& rank : ranks) rank->begin_epoch(41, 17);
  auto now = ranks[1]->receive(0, in_epoch(41), {}, nullptr);
  auto later = ranks[1]->receive(0, in_epoch(42), {}, nullptr);
  post_send(ranks[0], 1, parked, {0, Direction::backward, 2, 41});
  const std::string text = report_with("that no receive asks for");
  CHECK(has(text, "receive from rank 0 (forward, microbatch 0, iteration 17): any tensors, for "));
  CHECK(has(text, "receive from rank 0 (forward, microbatch 0, section 42): any tensors, for "));
  CHECK(has(text, "message from rank 0 (backward, microbatch 2, iteration 17) of 32 bytes, that no receive asks for"));
  CHECK_ERROR(ErrorKind::link_timeout, "(forward, microbatch 0, iteration 17)", now->wait(1ms));
  ranks[1]->begin_epoch(42);  // of no iteration
  CHECK(has(report_with("section 42"), "(forward, microbatch 0, section 42)"));
}

TEST(report_forgets_what_is_done) {
  auto ranks = connect_all(2);
  Floats values = ramp(4), got(4);
  auto receive = post_receive(ranks[1], 0, got, tagged(6));
  CHECK(has(report_with("(tag 6)"), "(tag 6)"));
  post_send(ranks[0], 1, values, tagged(6))->wait(10s);
  receive->wait(10s);
  const std::string text = report_with("last message from rank 0: 0.");
  CHECK(!has(text, "(tag 6)"));
}

TEST(process_that_does_not_use_it_is_named) {
  CHECK_ERROR(ErrorKind::config, "nobody answers as process 1;", request_hang_report(1, 1s));
}

CHECK_MAIN()
