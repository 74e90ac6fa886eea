// The pool over every upstream: reuse, split and coalesce, limit, stitching, errors.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "pools.h"

using namespace pipecomm;

TEST(freed_block_serves_the_same_size_again_without_upstream) {
  for (const auto& pool : all_pools(0)) {
    const void* first = allocate_block(pool, 100000).data();
    const auto calls = pool->stats().num_upstream_calls;
    CHECK(allocate_block(pool, 100000).data() == first);
    CHECK_EQ(pool->stats().num_upstream_calls, calls);
    pool->check();
  }
}

TEST(split_blocks_join_again_whatever_the_order_of_frees) {
  for (const auto& pool : all_pools(0)) {
    std::array<std::size_t, 4> order{0, 1, 2, 3};
    do {
      auto blocks = take(pool, 4, kMiB / 2);
      CHECK_EQ(pool->stats().largest_free_nbytes, std::size_t{0});
      for (const std::size_t index : order) {
        blocks[index].reset();
        pool->check();
      }
      CHECK_EQ(pool->stats().largest_free_nbytes, 2 * kMiB);
    } while (std::next_permutation(order.begin(), order.end()));
    CHECK_EQ(pool->stats().num_upstream_calls, 1u);
  }
}

TEST(blocks_are_aligned_and_distinct_down_to_zero_bytes) {
  for (const auto& pool : all_pools(0)) {
    std::vector<Block> blocks;
    std::set<void*> addresses;
    for (std::size_t i = 0; i < 100000; ++i) {
      blocks.push_back(allocate_block(pool, i % 2));
      addresses.insert(blocks.back().data());
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().data()) % Pool::kAlignment, 0u);
    }
    CHECK_EQ(addresses.size(), blocks.size());
    CHECK(!addresses.contains(nullptr));
    pool->check();
    blocks.clear();
    CHECK_EQ(pool->trim(), pool->stats().peak_reserved_nbytes);
    CHECK_EQ(pool->stats().reserved_nbytes, std::size_t{0});
  }
}

TEST(huge_request_is_refused_and_costs_no_cache) {
  for (const std::size_t limit : {std::size_t{0}, 64 * kMiB}) {
    for (const auto& pool : all_pools(limit)) {
      allocate_block(pool, kMiB);
      for (const std::size_t nbytes : {SIZE_MAX, SIZE_MAX - 1000, std::size_t{1} << 63, (std::size_t{1} << 62) + 1}) {
        CHECK_ERROR(ErrorKind::pool_exhausted, std::to_string(nbytes).c_str(), pool->allocate(nbytes));
      }
      CHECK_EQ(pool->stats().reserved_nbytes, 2 * kMiB);
      CHECK_ERROR(ErrorKind::pool_exhausted, "", pool->allocate(std::size_t{1} << 58));
      pool->check();
      CHECK(allocate_block(pool, kMiB).data() != nullptr);
    }
  }
}

TEST(address_that_is_not_a_live_block_is_refused_and_changes_nothing) {
  for (const auto& pool : all_pools(0)) {
    auto* data = static_cast<std::byte*>(pool->allocate(5000));
    int on_stack = 0;
    CHECK_ERROR(ErrorKind::config, "did not hand out", pool->deallocate(&on_stack));
    CHECK_ERROR(ErrorKind::config, "did not hand out", pool->deallocate(nullptr));
    CHECK_ERROR(ErrorKind::config, "did not hand out", pool->deallocate(data + 512));
    void* neighbour = pool->allocate(5000);
    pool->deallocate(data);
    CHECK_ERROR(ErrorKind::config, "freed already", pool->deallocate(data));
    CHECK_EQ(pool->stats().live_nbytes, std::size_t{5000});
    pool->check();
    pool->deallocate(neighbour);
  }
}

TEST(block_moves_and_keeps_its_pool_alive) {
  auto pool = make_host_pool(0);
  const std::weak_ptr<Pool> watched = pool;
  Block block = allocate_block(pool, 100);
  Block moved = std::move(block);
  CHECK(!block);
  CHECK_EQ(moved.nbytes(), std::size_t{100});
  pool.reset();
  CHECK(!watched.expired());
  std::memset(moved.data(), 1, 100);
  moved = Block();
  CHECK(watched.expired());
  moved.reset();
}

TEST(large_freed_block_is_not_cut_up_by_small_ones) {
  for (const auto& pool : all_pools(150 * kMiB)) {
    for (int round = 0; round < 50; ++round) {
      allocate_block(pool, 110 * kMiB);
      auto small = take(pool, 30, kMiB / 2);
      small.resize(6);
      allocate_block(pool, 110 * kMiB);
    }
    pool->check();
  }
}

TEST(limit_with_everything_free_serves_one_large_request) {
  for (const auto& pool : all_pools(64 * kMiB)) {
    take(pool, 64, kMiB);
    CHECK(allocate_block(pool, 60 * kMiB).data() != nullptr);
    CHECK(pool->stats().peak_reserved_nbytes <= 64 * kMiB);
    pool->check();
  }
}

TEST(limit_with_scattered_free_memory_serves_a_large_request_by_stitching) {
  for (const auto& pool : remapping_pools(16 * kMiB)) {
    auto blocks = take(pool, 16, kMiB);
    for (std::size_t i = 0; i < 16; i += 2) blocks[i].reset();
    for (std::size_t i = 1; i < 16; i += 2) fill(blocks[i], static_cast<std::uint8_t>(i));
    {
      const Block large = allocate_block(pool, 8 * kMiB);
      fill(large, 0xee);
      CHECK(holds(large, 0xee));
      pool->check();
      CHECK_ERROR(ErrorKind::pool_exhausted, "limit", pool->allocate(kMiB));
      CHECK_ERROR(ErrorKind::config, "", pool->deallocate(static_cast<std::byte*>(large.data()) + kMiB));
    }
    for (std::size_t i = 1; i < 16; i += 2) CHECK(holds(blocks[i], static_cast<std::uint8_t>(i)));
    pool->check();
    CHECK_EQ(pool->stats().free_nbytes, 8 * kMiB);
    blocks.clear();
    CHECK_EQ(pool->trim(), 16 * kMiB);
  }
}

TEST(stitching_uses_room_under_the_limit_together_with_scattered_memory) {
  for (const auto& pool : remapping_pools(10 * kMiB)) {
    auto blocks = take(pool, 6, kMiB);
    for (std::size_t i = 0; i < 6; i += 2) blocks[i].reset();
    const Block large = allocate_block(pool, 7 * kMiB);
    fill(large, 1);
    CHECK_EQ(pool->stats().reserved_nbytes, 10 * kMiB);
    pool->check();
  }
}

TEST(exhausted_error_names_the_numbers_and_advises_only_what_helps) {
  const auto pool = make_heap_pool(8 * kMiB);
  auto blocks = take(pool, 8, kMiB);
  for (std::size_t i = 0; i < 8; i += 2) blocks[i].reset();
  CHECK_ERROR(ErrorKind::pool_exhausted, "expected 3145728 bytes", pool->allocate(3 * kMiB));
  CHECK_ERROR(ErrorKind::pool_exhausted, "4194304 bytes (4 MiB) live", pool->allocate(3 * kMiB));
  CHECK_ERROR(ErrorKind::pool_exhausted, "8388608 bytes (8 MiB) reserved", pool->allocate(3 * kMiB));
  CHECK_ERROR(ErrorKind::pool_exhausted, "largest free block 1048576 bytes", pool->allocate(3 * kMiB));
  CHECK_ERROR(ErrorKind::pool_exhausted, "limit 8388608 bytes (8 MiB). Raise", pool->allocate(3 * kMiB));
  CHECK_ERROR(ErrorKind::pool_exhausted, "keep fewer blocks live", pool->allocate(3 * kMiB));
  const auto unlimited = make_heap_pool(0, 4 * kMiB);
  CHECK_ERROR(ErrorKind::pool_exhausted, "no limit. The system: the heap is full", unlimited->allocate(5 * kMiB));
  pool->check();
}

TEST(full_upstream_gets_smaller_requests_then_freed_segments_back) {
  const auto pool = make_heap_pool(0, 5 * kMiB);
  {
    const Block first = allocate_block(pool, 3 * kMiB);  // 4 MiB would be the segment, 1 MiB is left
    const Block second = allocate_block(pool, kMiB);
    CHECK(first && second);
  }
  const Block whole = allocate_block(pool, 5 * kMiB);
  CHECK_EQ(pool->stats().reserved_nbytes, 5 * kMiB);
}

TEST(trying_waits_neither_for_a_stream_nor_for_a_device_that_is_given_segments_back) {
  for (const bool waits_at_release : {false, true}) {
    const auto pool = std::make_shared<Pool>(std::make_unique<HeapUpstream>(4 * kMiB, waits_at_release));
    take(pool, 2, 2 * kMiB).clear();
    if (waits_at_release) {
      CHECK_ERROR(ErrorKind::pool_exhausted, "the heap is full", try_allocate_block(pool, 3 * kMiB));
    } else {
      CHECK(try_allocate_block(pool, 3 * kMiB));
    }
    std::atomic<bool> may_run{false};
    const auto stream = make_host_stream();
    stream->enqueue([&] { may_run.wait(false); });
    allocate_block(pool, 3 * kMiB).reset(stream->record());
    CHECK(!try_allocate_block(pool, 3 * kMiB));
    may_run.store(true);
    may_run.notify_all();
    stream->synchronize();
    CHECK(try_allocate_block(pool, 3 * kMiB));
    pool->check();
  }
}

TEST(lowered_limit_gives_free_segments_back_and_holds_for_later_requests) {
  for (const auto& pool : all_pools(0)) {
    const Block kept = allocate_block(pool, 10 * kMiB);
    allocate_block(pool, 20 * kMiB);
    pool->set_limit_nbytes(12 * kMiB);
    CHECK_EQ(pool->limit_nbytes(), 12 * kMiB);
    CHECK_EQ(pool->stats().reserved_nbytes, 10 * kMiB);
    CHECK_ERROR(ErrorKind::pool_exhausted, "12582912", pool->allocate(3 * kMiB));
    pool->set_limit_nbytes(4 * kMiB);
    CHECK_ERROR(ErrorKind::pool_exhausted, "4194304", pool->allocate(2 * kMiB));
    pool->check();
  }
}

TEST(varying_lengths_leave_little_reserved_memory_unused) {
  for (const std::size_t scale : {std::size_t{1}, std::size_t{64}}) {
    const auto pool = std::make_shared<Pool>(make_lazy_upstream(0));
    std::mt19937 random(0);
    std::uniform_int_distribution<std::size_t> length(128, 4096);
    PoolStats at_200;
    for (int step = 0; step < 1000; ++step) {
      auto blocks = take(pool, 72, length(random) * 1024 * 2 / scale);
      while (!blocks.empty()) blocks.pop_back();
      if (step == 200) at_200 = pool->stats();
    }
    const PoolStats stats = pool->stats();
    CHECK(stats.reserved_nbytes <=
          at_200.reserved_nbytes + stats.peak_live_nbytes - at_200.peak_live_nbytes + 2 * kMiB);
    CHECK(stats.peak_reserved_nbytes * 100 <= stats.peak_live_nbytes * 104 + 200 * kMiB);
    pool->check();
  }
}

TEST(waves_of_random_sizes_freed_out_of_order_reserve_little_more_than_is_live) {
  for (const auto& pool : remapping_pools(0)) {
    std::mt19937 random(0);
    std::uniform_int_distribution<std::size_t> size(4000, 2'700'000);
    std::vector<Block> live;
    std::size_t live_nbytes = 0;
    for (int i = 0; i < 20000; ++i) {
      const std::size_t nbytes = size(random);
      if (live.empty() || (random() % 100 < 52 && live_nbytes + nbytes <= 200'000'000)) {
        live.push_back(allocate_block(pool, nbytes));
        live_nbytes += nbytes;
      } else {
        std::swap(live[random() % live.size()], live.back());
        live_nbytes -= live.back().nbytes();
        live.pop_back();
      }
      if (i % 1000 == 0) pool->check();
    }
    const PoolStats stats = pool->stats();
    CHECK(stats.peak_live_nbytes > 150'000'000);
    CHECK(stats.peak_reserved_nbytes * 100 <= stats.peak_live_nbytes * 105);
  }
}

CHECK_MAIN()
