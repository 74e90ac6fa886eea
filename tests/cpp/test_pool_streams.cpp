// One pool for several streams: a block freed on one and wanted on another waits on the streams, never on the host.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <latch>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "device/stream.h"
#include "pools.h"

using namespace pipecomm;
using namespace std::chrono_literals;

TEST(block_of_a_busy_stream_serves_another_that_waits_while_the_host_does_not) {
  const auto pool = make_host_pool(0);
  std::latch gate(1);
  const auto first = make_host_stream();
  const auto second = make_host_stream();
  Block block = allocate_block(pool, 100000);
  void* data = block.data();
  std::uint8_t seen = 0;
  first->enqueue([&] {
    gate.wait();
    std::memset(data, 1, 100000);
    seen = *static_cast<std::uint8_t*>(data);
  });
  block.reset(first->record());
  // Nothing else fits, so that the pool would have to grow or wait.
  pool->set_limit_nbytes(2 << 20);
  const Block filler = allocate_block(pool, (2 << 20) - 100000 / 512 * 512 - 1024);
  Block taken = allocate_block_on(pool, *second, 100000);  // returns although `first` is held up
  CHECK(taken.data() == data);
  second->enqueue([&] { std::memset(data, 2, 100000); });
  gate.count_down();
  second->synchronize();
  CHECK_EQ(seen, std::uint8_t{1});
  CHECK(holds(taken, 2));
  CHECK_EQ(pool->stats().pending_nbytes, std::size_t{0});
  taken.reset(second->record());
  second->synchronize();
  pool->check();
}

TEST(free_memory_comes_before_a_block_that_is_still_used) {
  const auto pool = make_host_pool(0);
  std::latch gate(1);
  const auto first = make_host_stream();
  const auto second = make_host_stream();
  first->enqueue([&] { gate.wait(); });
  Block block = allocate_block(pool, 100000);
  void* data = block.data();
  block.reset(first->record());
  CHECK(allocate_block_on(pool, *second, 100000).data() != data);
  CHECK_EQ(pool->stats().pending_nbytes, std::size_t{100000});
  gate.count_down();
}

TEST(block_twice_too_large_is_left_to_its_stream) {
  const auto pool = make_host_pool(4 << 20);
  std::latch gate(1);
  const auto first = make_host_stream();
  const auto second = make_host_stream();
  first->enqueue([&] { gate.wait(); });
  allocate_block(pool, 4 << 20).reset(first->record());
  std::jthread opener([&] {
    std::this_thread::sleep_for(20ms);
    gate.count_down();
  });
  // It has to wait: all that there is belongs to a block that is far too large.
  const Block block = allocate_block_on(pool, *second, 1 << 20);
  CHECK(block.data() != nullptr);
}

// Streams with random lags fill blocks and look whether they still hold what was filled in.
TEST(streams_with_random_lags_never_see_each_others_bytes) {
  const auto pool = make_host_pool(8 << 20);
  std::mt19937 random(0);
  std::array<std::shared_ptr<Stream>, 4> streams;
  for (auto& stream : streams) stream = make_lagging_stream(std::chrono::microseconds(random() % 300));
  std::atomic<int> num_wrong{0};
  for (int round = 0; round < 1500; ++round) {
    Stream& stream = *streams[random() % streams.size()];
    const std::size_t nbytes = std::size_t{1000} << (random() % 11);
    Block block = allocate_block_on(pool, stream, nbytes);
    auto* data = static_cast<std::uint8_t*>(block.data());
    const auto mark = static_cast<std::uint8_t>(round);
    stream.enqueue([data, nbytes, mark] { std::memset(data, mark, nbytes); });
    stream.enqueue([data, nbytes, mark, &num_wrong] {
      if (std::any_of(data, data + nbytes, [mark](std::uint8_t byte) { return byte != mark; })) ++num_wrong;
    });
    block.reset(stream.record());
    if (round % 100 == 0) pool->check();
  }
  for (const auto& stream : streams) stream->synchronize();
  CHECK_EQ(num_wrong.load(), 0);
  CHECK(pool->stats().peak_reserved_nbytes <= std::size_t{8} << 20);
}

CHECK_MAIN()
