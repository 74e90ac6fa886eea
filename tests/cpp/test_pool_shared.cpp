// The pool with several users: frees that wait for a stream, threads, and random histories against a model.
#include <algorithm>
#include <array>
#include <cstring>
#include <latch>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "device/stream.h"
#include "pools.h"

using namespace pipecomm;

namespace {

// A host stream whose work waits until open().
struct GatedStream {
  std::latch gate{1};
  std::shared_ptr<Stream> stream = make_host_stream();
  GatedStream() {
    stream->enqueue([this] { gate.wait(); });
  }
  void open() { gate.count_down(); }
};

// Fills what it takes with a number of its own and looks for it before it gives back.
struct Marked {
  Block block;
  std::uint8_t mark = 0;
};

Marked take_marked(const std::shared_ptr<Pool>& pool, std::size_t nbytes, std::uint8_t mark) {
  Marked result{allocate_block(pool, nbytes), mark};
  fill(result.block, mark);
  return result;
}

// Blocks on their way from the thread that took them to the one that frees them.
struct Exchange {
  std::mutex mutex;
  std::vector<Marked> blocks;

  void put(Marked marked) {
    const std::scoped_lock lock(mutex);
    blocks.push_back(std::move(marked));
  }
  Marked get() {
    const std::scoped_lock lock(mutex);
    if (blocks.empty()) return {};
    Marked result = std::move(blocks.back());
    blocks.pop_back();
    return result;
  }
};

void allocate_and_exchange(const std::shared_ptr<Pool>& pool, Exchange& exchange, std::uint8_t seed, int& num_wrong) {
  std::mt19937 random(seed);
  std::vector<Marked> own(40);
  for (int i = 0; i < 10000; ++i) {
    const std::size_t nbytes = std::size_t{1} << (random() % 17);
    Marked marked = take_marked(pool, nbytes + random() % nbytes, static_cast<std::uint8_t>(random()));
    if (random() % 2 == 0) {
      exchange.put(std::move(marked));
      marked = exchange.get();
    } else {
      std::swap(marked, own[random() % own.size()]);
    }
    if (marked.block && !holds(marked.block, marked.mark)) ++num_wrong;
  }
}

// One random history: takes, frees, frees on a stream and trims.
void random_history(const std::shared_ptr<Pool>& pool, unsigned seed) {
  std::mt19937 random(seed);
  const auto stream = make_host_stream();
  std::vector<Marked> live;
  for (int i = 0; i < 1500; ++i) {
    const unsigned what = random() % 100;
    if (what < 55) {
      const std::size_t nbytes = random() % (std::size_t{1} << (random() % 23));
      try {
        live.push_back(take_marked(pool, nbytes, static_cast<std::uint8_t>(i)));
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::pool_exhausted);
      }
    } else if (what < 99 && !live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      CHECK(holds(live.back().block, live.back().mark));
      if (what < 70) live.back().block.reset(stream->record());
      live.pop_back();
    } else {
      pool->trim();
    }
    if (i % 16 == 0) pool->check();
    CHECK(pool->stats().reserved_nbytes <= pool->limit_nbytes());
  }
  for (const Marked& marked : live) CHECK(holds(marked.block, marked.mark));
  live.clear();
  stream->synchronize();
  pool->trim();
  CHECK_EQ(pool->stats().reserved_nbytes, std::size_t{0});
}

}  // namespace

TEST(memory_freed_on_a_stream_is_not_handed_out_before_its_work_is_done) {
  for (const auto& pool : all_pools(0)) {
    for (int round = 0; round < 200; ++round) {
      GatedStream side;
      Block source = allocate_block(pool, 100000);
      fill(source, 1);
      std::vector<std::uint8_t> copy(100000);
      side.stream->copy_async(copy.data(), source.data(), copy.size());
      const void* address = source.data();
      source.reset(side.stream->record());
      const Block other = allocate_block(pool, 100000);
      CHECK(other.data() != address);
      fill(other, 2);
      side.open();
      side.stream->synchronize();
      CHECK(std::all_of(copy.begin(), copy.end(), [](std::uint8_t byte) { return byte == 1; }));
      CHECK(allocate_block(pool, 100000).data() == address);
    }
    pool->check();
    CHECK_EQ(pool->stats().pending_nbytes, std::size_t{0});
    CHECK_EQ(pool->stats().num_segments, std::size_t{1});
  }
}

TEST(slow_stream_does_not_hold_back_what_another_has_freed) {
  const auto pool = make_host_pool(0);
  GatedStream slow;
  const auto fast = make_host_stream();
  Block first = allocate_block(pool, 4 * kMiB);
  Block second = allocate_block(pool, 4 * kMiB);
  const void* address = second.data();
  first.reset(slow.stream->record());
  second.reset(fast->record());
  fast->synchronize();
  CHECK(allocate_block(pool, 4 * kMiB).data() == address);
  CHECK_EQ(pool->stats().pending_nbytes, 4 * kMiB);
  CHECK_EQ(pool->stats().live_nbytes, std::size_t{0});
  slow.open();
}

TEST(large_request_waits_for_another_streams_frees_instead_of_failing) {
  for (const auto& pool : all_pools(64 * kMiB)) {
    GatedStream first;
    auto blocks = take(pool, 64, kMiB);
    for (Block& block : blocks) block.reset(first.stream->record());
    std::jthread opener([&first] { first.open(); });
    const Block large = allocate_block(pool, 48 * kMiB);
    CHECK(large.data() != nullptr);
    pool->check();
  }
}

TEST(pending_block_freed_again_is_refused) {
  const auto pool = make_host_pool(0);
  GatedStream side;
  void* data = pool->allocate(100);
  pool->deallocate(data, side.stream->record());
  CHECK_ERROR(ErrorKind::config, "freed already", pool->deallocate(data));
  pool->check();
  side.open();
}

TEST(pool_with_pending_frees_dies_after_their_work) {
  GatedStream side;
  bool is_done = false;
  auto pool = make_host_pool(0);
  Block block = allocate_block(pool, kMiB);
  side.stream->enqueue([data = block.data(), &is_done] {
    std::memset(data, 1, kMiB);
    is_done = true;
  });
  block.reset(side.stream->record());
  std::jthread opener([&side] { side.open(); });
  pool.reset();
  CHECK(is_done);
}

TEST(threads_free_each_others_blocks_and_none_overlap) {
  for (const auto& pool : all_pools(0)) {
    Exchange exchange;
    std::array<int, 4> num_wrong{};
    {
      std::vector<std::jthread> threads;
      for (std::uint8_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] { allocate_and_exchange(pool, exchange, t, num_wrong[t]); });
      }
    }
    for (const int wrong : num_wrong) CHECK_EQ(wrong, 0);
    exchange.blocks.clear();
    CHECK_EQ(pool->stats().live_nbytes, std::size_t{0});
    pool->check();
  }
}

TEST(random_histories_keep_the_books_and_the_contents_right) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    for (const auto& pool : all_pools(24 * kMiB)) random_history(pool, seed);
  }
}

TEST(random_histories_with_refusals_of_the_system_keep_the_books_and_the_contents_right) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const auto pool = std::make_shared<Pool>(std::make_unique<RefusingUpstream>(seed), 24 * kMiB);
    random_history(pool, seed);
    CHECK(pool->stats().num_remaps > 0);
  }
}

CHECK_MAIN()
