// Streams that wait for a peer are let go when its end of the life line closes, and not before.
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "check.h"
#include "ways/release.h"

using namespace pipecomm;
using namespace std::chrono_literals;

namespace {

struct Lines {
  Lines() { CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0); }
  ~Lines() {
    ::close(ends[0]);
    hang_up();
  }
  void hang_up() {
    if (ends[1] >= 0) ::close(std::exchange(ends[1], -1));
  }

  int ends[2];
};

bool is_released(const Counter& counter) {
  for (int i = 0; i < 2000 && counter.load() != StreamRelease::kReleased; ++i) std::this_thread::sleep_for(1ms);
  return counter.load() == StreamRelease::kReleased;
}

}  // namespace

TEST(what_had_passed_when_a_stream_was_let_go_is_known_from_then_on) {
  Counter counter{3};
  StreamRelease release(counter);
  CHECK_EQ(release.passed(), std::uint64_t{3});
  counter.store(5);
  CHECK_EQ(release.passed(), std::uint64_t{5});
  release.now();
  CHECK_EQ(counter.load(), StreamRelease::kReleased);
  counter.store(7);  // by what the peer's device still does
  CHECK_EQ(release.passed(), std::uint64_t{5});
  release.now();
  CHECK_EQ(counter.load(), StreamRelease::kReleased);
  CHECK_EQ(release.passed(), std::uint64_t{5});
}

TEST(release_outlives_its_counter) {
  auto counter = std::make_unique<Counter>(4);
  StreamRelease release(*counter);
  release.end();
  counter.reset();
  release.now();
  CHECK_EQ(release.passed(), std::uint64_t{4});
}

TEST(stream_is_let_go_when_the_peer_hangs_up_and_again_while_it_is_watched) {
  Lines lines, others;
  Counter counter{1}, other{1};
  const auto release = std::make_shared<StreamRelease>(counter);
  const WatchedRelease watched(lines.ends[0], release);
  const WatchedRelease unrelated(others.ends[0], std::make_shared<StreamRelease>(other));
  CHECK(::send(lines.ends[1], "text", 4, 0) == 4);  // is nobody's end
  std::this_thread::sleep_for(20ms);
  CHECK_EQ(counter.load(), std::uint64_t{1});
  lines.hang_up();
  CHECK(is_released(counter));
  counter.store(2);
  CHECK(is_released(counter));
  CHECK_EQ(release->passed(), std::uint64_t{1});
  CHECK_EQ(other.load(), std::uint64_t{1});
}

TEST(stream_that_is_not_watched_any_more_is_left_alone) {
  Lines lines;
  Counter counter{1}, last{1};
  {
    const WatchedRelease watched(lines.ends[0], std::make_shared<StreamRelease>(counter));
  }
  const WatchedRelease watched(lines.ends[0], std::make_shared<StreamRelease>(last));
  lines.hang_up();
  CHECK(is_released(last));
  CHECK_EQ(counter.load(), std::uint64_t{1});
}

TEST(who_closes_the_life_line_lets_the_stream_go) {
  Lines lines;
  Counter counter{1};
  WatchedRelease watched(lines.ends[0], std::make_shared<StreamRelease>(counter));
  watched.hang_up();
  CHECK_EQ(counter.load(), StreamRelease::kReleased);
}

CHECK_MAIN()
