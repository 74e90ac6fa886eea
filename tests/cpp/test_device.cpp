// Streams and events of the host device: order, readiness, waiting across streams, copies.
#include <atomic>
#include <cstdint>
#include <latch>
#include <thread>
#include <vector>

#include "check.h"
#include "device/stream.h"

using namespace pipecomm;

TEST(default_event_is_ready) {
  const Event event;
  CHECK(event.is_ready());
  event.wait();
}

TEST(work_runs_in_posting_order) {
  const auto stream = make_host_stream();
  std::vector<int> seen;
  for (int i = 0; i < 1000; ++i) stream->enqueue([&seen, i] { seen.push_back(i); });
  stream->synchronize();
  CHECK_EQ(seen.size(), std::size_t{1000});
  for (int i = 0; i < 1000; ++i) CHECK_EQ(seen[static_cast<std::size_t>(i)], i);
}

TEST(event_is_ready_only_after_earlier_work) {
  const auto stream = make_host_stream();
  std::latch gate(1);
  stream->enqueue([&gate] { gate.wait(); });
  const Event event = stream->record();
  const Event copy = event;
  CHECK(!event.is_ready());
  CHECK(!copy.is_ready());
  gate.count_down();
  event.wait();
  CHECK(event.is_ready());
  CHECK(copy.is_ready());
}

TEST(event_of_an_idle_stream_becomes_ready) {
  const auto stream = make_host_stream();
  stream->record().wait();
  stream->synchronize();
}

TEST(copy_is_done_when_a_later_event_is_ready) {
  const auto stream = make_host_stream();
  const std::vector<std::uint8_t> source(1 << 20, 7);
  std::vector<std::uint8_t> target(source.size(), 0);
  stream->copy_async(target.data(), source.data(), source.size());
  stream->copy_async(target.data(), nullptr, 0);
  stream->record().wait();
  CHECK(target == source);
}

TEST(stream_waits_for_an_event_of_another_without_blocking_the_caller) {
  const auto first = make_host_stream();
  const auto second = make_host_stream();
  std::latch gate(1);
  std::atomic<int> order{0};
  int first_done = 0;
  int second_done = 0;
  first->enqueue([&] {
    gate.wait();
    first_done = ++order;
  });
  second->wait(first->record());
  second->enqueue([&] { second_done = ++order; });
  const Event last = second->record();
  CHECK(!last.is_ready());
  gate.count_down();
  last.wait();
  CHECK_EQ(first_done, 1);
  CHECK_EQ(second_done, 2);
}

TEST(stream_waits_for_its_own_event) {
  const auto stream = make_host_stream();
  stream->enqueue([] { std::this_thread::yield(); });
  stream->wait(stream->record());
  stream->wait(Event());
  stream->synchronize();
}

TEST(event_outlives_its_stream_and_destruction_runs_what_is_queued) {
  Event event;
  int num_run = 0;
  {
    const auto stream = make_host_stream();
    for (int i = 0; i < 100; ++i) stream->enqueue([&num_run] { ++num_run; });
    event = stream->record();
  }
  CHECK(event.is_ready());
  CHECK_EQ(num_run, 100);
}

TEST(finished_work_gives_up_what_it_holds) {
  const auto stream = make_host_stream();
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = held;
  stream->enqueue([held = std::move(held)] {});
  stream->synchronize();  // recorded after the work, so the work's captures are gone
  CHECK(watched.expired());
}

TEST(threads_post_to_one_stream_and_each_keeps_its_order) {
  const auto stream = make_host_stream();
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  std::vector<std::vector<int>> seen(kThreads);
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) stream->enqueue([&seen, t, i] { seen[t].push_back(i); });
      });
    }
  }
  stream->synchronize();
  for (const auto& values : seen) {
    CHECK_EQ(values.size(), std::size_t{kEach});
    for (int i = 0; i < kEach; ++i) CHECK_EQ(values[static_cast<std::size_t>(i)], i);
  }
}

#ifdef PIPECOMM_HAVE_CUDA
TEST(cuda_stream_copies_or_says_which_device_is_missing) {
  try {
    const auto stream = make_cuda_stream(0);
    const std::vector<std::uint8_t> source(1000, 7);
    std::vector<std::uint8_t> target(source.size(), 0);
    stream->copy_async(target.data(), source.data(), source.size());
    stream->synchronize();
    CHECK(target == source);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::cuda);
    CHECK(std::string(error.what()).find("on CUDA device 0") != std::string::npos);
  }
}
#else
TEST(cuda_stream_without_cuda_says_how_to_build_it) {
  CHECK_ERROR(ErrorKind::not_built, "PIPECOMM_CUDA=on", make_cuda_stream(0));
}
#endif

CHECK_MAIN()
