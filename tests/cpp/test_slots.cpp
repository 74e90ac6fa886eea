// Tensors of a device cross in slots: what the streams are made to wait for, and that nothing is lost or late.
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>

#include "check.h"
#include "communicators.h"
#include "memory/segment.h"
#include "ways/slots.h"

namespace {

// One direction in one process: both ends over the same memory and counters.
struct Pair {
  explicit Pair(std::size_t nbytes, std::shared_ptr<Device> device = make_host_device())
      : page(Segment::create(page_nbytes())),
        memory(Segment::create(nbytes)),
        counters(*reinterpret_cast<SlotCounters*>(page.data())),
        writer(std::make_unique<SlotWriter>(*device, counters, page.data(), shared())),
        reader(std::make_unique<SlotReader>(*device, counters, page.data(), shared())) {}

  DeviceMemory shared() const { return {memory.data(), memory.nbytes(), -1, "", nullptr}; }

  std::uint64_t put(const std::string& bytes) {
    return writer->put(bytes.size(), [&](Stream& stream, std::byte* slot) {
      stream.enqueue([slot, bytes] { std::memcpy(slot, bytes.data(), bytes.size()); });
    });
  }
  std::string take(std::size_t nbytes, std::uint64_t end) {
    std::string got(nbytes, '?');
    reader->take(nbytes, end,
                 [&](Stream& stream, const std::byte* slot) { stream.copy_async(got.data(), slot, nbytes); });
    reader->record().wait();
    return got;
  }

  Segment page;
  Segment memory;
  SlotCounters& counters;
  std::unique_ptr<SlotWriter> writer;
  std::unique_ptr<SlotReader> reader;
};

// The host as a device that counts what it is asked to pin.
class CountingDevice final : public Device {
 public:
  int index() const override { return 0; }
  std::string name() const override { return "host"; }
  bool is_host() const override { return true; }
  std::shared_ptr<Stream> make_stream() override { return make_host_stream(); }
  Event record(void*) override { return {}; }
  std::shared_ptr<void> register_host(void*, std::size_t nbytes) override {
    registered_nbytes += nbytes;
    return nullptr;
  }

  std::atomic<std::size_t> registered_nbytes{0};
};

}  // namespace

TEST(slots_bring_bytes_in_order_around_the_end_of_the_memory) {
  Pair pair(4 * 4096, slow_device());
  for (std::size_t i = 0; i < 50; ++i) {
    const std::string sent(1 + (i * 977) % 6000, static_cast<char>('a' + i % 26));
    CHECK(pair.writer->has_room(sent.size()));
    CHECK_EQ(pair.take(sent.size(), pair.put(sent)), sent);
  }
}

TEST(writer_has_room_only_for_what_the_readers_host_has_promised_to_take) {
  Pair pair(4 * 4096);
  const std::string half(2 * 4096, 'x');
  const std::uint64_t first = pair.put(half);
  pair.put(half);
  CHECK(!pair.writer->has_room(1));
  pair.take(half.size(), first);
  CHECK(pair.writer->has_room(half.size()));
  CHECK(!pair.writer->has_room(half.size() + 1));
}

TEST(writers_stream_waits_until_a_promised_slot_is_empty) {
  Pair pair(2 * 4096);
  const std::string old(2 * 4096, 'o'), fresh(2 * 4096, 'f');
  const std::uint64_t first = pair.put(old);
  std::atomic<bool> may_read{false};
  std::string got(old.size(), '?');
  pair.reader->take(old.size(), first, [&](Stream& stream, const std::byte* slot) {
    stream.enqueue([&may_read] { may_read.wait(false); });
    stream.copy_async(got.data(), slot, got.size());
  });
  CHECK(pair.writer->has_room(fresh.size()));
  const std::uint64_t second = pair.put(fresh);
  const Event written = pair.writer->record();
  std::this_thread::sleep_for(20ms);
  CHECK(!written.is_ready());
  may_read.store(true);
  may_read.notify_all();
  CHECK_EQ(pair.take(fresh.size(), second), fresh);
  CHECK_EQ(got, old);
}

TEST(slot_that_ends_elsewhere_and_promises_for_what_was_not_sent_are_refused) {
  Pair pair(2 * 4096);
  const std::uint64_t end = pair.put("abc");
  CHECK_ERROR(ErrorKind::transport, "a slot that ends at", pair.reader->take(3, end + 256, {}));
  CHECK_ERROR(ErrorKind::transport, "a slot that ends at", pair.reader->take(5000, end, {}));
  pair.counters.promised.store(end + 1);
  CHECK_ERROR(ErrorKind::transport, "promises", pair.writer->has_room(1));
}

TEST(ends_do_not_wait_for_a_peer_that_does_nothing_more) {
  Pair pair(2 * 4096);
  const std::string whole(2 * 4096, 'x');
  const std::uint64_t first = pair.put(whole);
  pair.reader->take(whole.size(), first, {});
  pair.reader->take(whole.size(), 2 * first, {});  // never written
  pair.reader.reset();
  Pair other(2 * 4096);
  other.put(whole);
  other.counters.promised.store(first);  // never taken
  other.put(whole);
  other.writer.reset();
}

TEST(message_in_slots_is_the_one_sent_at_every_size_and_codec) {
  auto in_slots = connect_all(2, on(slow_device()));
  auto on_host = connect_all(2);
  for (const std::size_t count : {std::size_t{1}, std::size_t{771}, std::size_t{1200000}, std::size_t{5000001}}) {
    Floats sent(count);
    for (std::size_t i = 0; i < count; ++i) sent[i] = static_cast<float>(i % 1013) / 97.0f - 5.0f;
    for (const char* codec : {"raw", "int8", "int4"}) {
      std::array<Floats, 2> got{Floats(count, -1), Floats(count, -2)};
      std::array<std::size_t, 2> wire{};
      for (std::size_t i = 0; i < 2; ++i) {
        const auto& ranks = i == 0 ? in_slots : on_host;
        auto receive = post_receive(ranks[1], 0, got[i]);
        auto send = ranks[0]->send(1, {}, {part(sent, codec)}, nullptr);
        receive->wait(10s);
        send->wait(10s);
        CHECK(receive->is_done() && send->is_done());
        CHECK_EQ(send->wire_nbytes(), receive->wire_nbytes());
        wire[i] = send->wire_nbytes();
      }
      CHECK(std::memcmp(got[0].data(), got[1].data(), 4 * count) == 0);
      CHECK(wire[0] <= wire[1]);
    }
  }
}

TEST(tensors_are_not_touched_before_their_streams_are_ready) {
  auto ranks = connect_all(2, on(make_host_device()));
  const auto compute = make_host_stream();
  std::atomic<bool> may_run{false};
  Floats sent(1000, 0), got(1000, -1);
  compute->enqueue([&] {
    may_run.wait(false);
    sent.assign(sent.size(), 7);
  });
  auto send = ranks[0]->send(1, {}, {part(sent)}, nullptr, compute->record());
  auto receive = ranks[1]->receive(0, {}, {view(got)}, nullptr);
  std::this_thread::sleep_for(20ms);
  CHECK(!send->is_done() && !receive->is_done());
  may_run.store(true);
  may_run.notify_all();
  receive->wait(10s);
  CHECK(got == Floats(1000, 7));

  may_run.store(false);
  Floats later(1000, -1);
  compute->enqueue([&] { may_run.wait(false); });
  auto second = ranks[1]->receive(0, {}, {view(later)}, nullptr, compute->record());
  post_send(ranks[0], 1, sent)->wait(10s);
  std::this_thread::sleep_for(20ms);
  CHECK(later == Floats(1000, -1));
  may_run.store(true);
  may_run.notify_all();
  second->wait(10s);
  CHECK(later == sent);
}

// As under CUDA_DEVICE_MAX_CONNECTIONS=1, only worse: both ranks' streams are one queue. Waits that stand in front of
// what they wait for would stop it.
TEST(one_queue_for_all_streams_is_enough_for_large_messages_both_ways) {
  const auto queue = make_host_stream();
  auto ranks = connect_all(2, on(make_host_device([queue] { return queue; })));
  Floats there = ramp(9000000), back = ramp(9000000, 5), got_there(there.size()), got_back(back.size());
  for (int round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<Transfer>> transfers{post_send(ranks[0], 1, there), post_send(ranks[1], 0, back),
                                                     post_receive(ranks[1], 0, got_there),
                                                     post_receive(ranks[0], 1, got_back)};
    for (const auto& transfer : transfers) transfer->wait(20s);
    CHECK(got_there == there && got_back == back);
    std::swap(there, back);
  }
}

TEST(keepalive_lives_until_the_device_has_read_the_tensors) {
  auto ranks = connect_all(2, on(make_host_device()));
  const auto compute = make_host_stream();
  std::atomic<bool> may_run{false};
  compute->enqueue([&] { may_run.wait(false); });
  Floats values(4, 3), got(4);
  auto owner = std::make_shared<int>(1);
  auto send = ranks[0]->send(1, {}, {part(values)}, owner, compute->record());
  auto receive = post_receive(ranks[1], 0, got);
  std::this_thread::sleep_for(20ms);
  CHECK(owner.use_count() > 1 && !send->has_left());
  may_run.store(true);
  may_run.notify_all();
  receive->wait(10s);
  for (int round = 0; round < 1000 && owner.use_count() > 1; ++round) std::this_thread::sleep_for(1ms);
  CHECK_EQ(owner.use_count(), 1L);
  CHECK(send->has_left());
}

TEST(caller_with_a_device_waits_for_the_event_and_not_in_wait) {
  CommunicatorOptions options = on(make_host_device());
  options.pool = make_host_pool(0);
  auto ranks = connect_all(2, options);
  for (const auto& rank : ranks) CHECK(rank->use_device(kOnHost)->is_host());
  const auto compute = make_host_stream();
  std::atomic<bool> may_run{false};
  compute->enqueue([&] { may_run.wait(false); });
  Floats sent = ramp(1000);
  auto send = ranks[0]->send(1, tagged(1), {part(sent)}, nullptr, compute->record());
  ranks[0]->send(1, tagged(2), {part(sent)}, nullptr);
  auto receive = ranks[1]->receive(0, tagged(1), {}, nullptr);
  auto dropped = ranks[1]->receive(0, tagged(2), {}, nullptr);
  for (const auto& transfer : {send, receive, dropped}) transfer->wait(10s);
  CHECK(!send->is_done() && !receive->is_done() && !dropped->is_done());
  const std::size_t both = 2 * sent.size() * sizeof(float);
  dropped.reset();
  CHECK_EQ(options.pool->stats().live_nbytes, both);
  may_run.store(true);
  may_run.notify_all();
  receive->event().block(nullptr);
  CHECK(std::memcmp(receive->parts()[0].block.data(), sent.data(), both / 2) == 0);
  for (int round = 0; round < 1000 && options.pool->stats().live_nbytes == both; ++round) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK_EQ(options.pool->stats().live_nbytes, both / 2);
}

TEST(what_comes_through_the_host_for_a_device_lies_in_pinned_memory) {
  const auto device = std::make_shared<CountingDevice>();
  auto ranks = connect_each({CommunicatorOptions{}, on(device)});
  Floats sent = ramp(500000);
  for (const bool is_used : {false, true}) {
    if (is_used) ranks[1]->use_device(kOnHost);
    auto receive = ranks[1]->receive(0, {}, {}, nullptr);
    ranks[0]->send(1, {}, {part(sent)}, nullptr)->wait(10s);
    receive->wait(10s);
    CHECK(std::memcmp(receive->parts()[0].block.data(), sent.data(), sent.size() * sizeof(float)) == 0);
    CHECK_EQ(device->registered_nbytes > sent.size(), is_used);
  }
  CHECK(connect_all(2)[0]->use_device(kOnHost) == nullptr || in_slots());
}

TEST(host_and_device_tensors_answer_each_other) {
  auto ranks = connect_each({CommunicatorOptions{}, on(slow_device())});
  for (const char* codec : {"raw", "int8"}) {
    Floats up(100000, 1.5f), down(100000, -2.5f), got_up(up.size()), got_down(down.size());
    auto to_device = post_receive(ranks[1], 0, got_up), to_host = post_receive(ranks[0], 1, got_down);
    ranks[0]->send(1, {}, {part(up, codec)}, nullptr);
    ranks[1]->send(0, {}, {part(down, codec)}, nullptr);
    to_device->wait(10s);
    to_host->wait(10s);
    for (std::size_t i = 0; i < up.size(); ++i) {
      CHECK(std::abs(got_up[i] - up[i]) < 0.02f && std::abs(got_down[i] - down[i]) < 0.02f);
    }
  }
}

TEST(rank_whose_first_receive_is_into_host_memory_gets_slots_with_its_first_tensor_of_a_device) {
  CommunicatorOptions options;
  options.open_device = [](int) { return slow_device(); };
  auto ranks = connect_each({options, options});
  Floats sent = ramp(300000), got(sent.size()), got_on_device(sent.size());
  SendPart outgoing = part(sent);
  outgoing.tensor.device = 0;
  auto to_host = post_receive(ranks[1], 0, got);
  ranks[0]->send(1, {}, {outgoing}, nullptr)->wait(10s);
  to_host->wait(10s);
  CHECK(got == sent);
  CHECK_EQ(ranks[0]->path(1), std::string("shared memory, from host through the host"));
  TensorView target = view(got_on_device);
  target.device = 0;
  const std::string slots = "shared memory, in slots of host";
  bool were_there = false;
  for (int round = 0; round < 200 && !were_there; ++round) {
    were_there = ranks[0]->path(1) == slots;
    auto receive = ranks[1]->receive(0, {}, {target}, nullptr);
    ranks[0]->send(1, {}, {outgoing}, nullptr);
    receive->wait(10s);
    receive->event().wait();
    CHECK(got_on_device == sent);
    got_on_device.assign(sent.size(), -1);
  }
  CHECK(were_there);
}

TEST(device_message_parked_for_a_later_receive_arrives_whole) {
  auto ranks = connect_all(2, on(slow_device()));
  Floats first = ramp(1500000), second = ramp(10), got(first.size()), got_second(second.size());
  auto later = post_receive(ranks[1], 0, got_second, tagged(2));
  post_send(ranks[0], 1, first, tagged(1));
  post_send(ranks[0], 1, second, tagged(2));
  later->wait(10s);
  post_receive(ranks[1], 0, got, tagged(1))->wait(10s);
  CHECK(got == first && got_second == second);
}

TEST(closing_at_once_loses_nothing_that_was_sent) {
  for (int round = 0; round < 5; ++round) {
    auto ranks = connect_all(2, on(slow_device()));
    Floats sent = ramp(1000000), got(sent.size());
    auto receive = post_receive(ranks[1], 0, got);
    post_send(ranks[0], 1, sent)->wait(10s);
    ranks[0]->close();
    receive->wait(10s);
    CHECK(got == sent);
  }
}

TEST(what_waits_for_its_turn_takes_no_pinned_memory) {
  const auto device = std::make_shared<CountingDevice>();
  auto ranks = connect_each({on(device), CommunicatorOptions{}});
  Floats values = ramp(500000), got(values.size()), small(4, 1), got_small(4);
  std::vector<std::shared_ptr<Transfer>> sends;
  for (int i = 0; i < 10; ++i) post_send(ranks[0], 1, small);
  for (int i = 0; i < 40; ++i) sends.push_back(post_send(ranks[0], 1, values));
  for (int i = 0; i < 10; ++i) post_receive(ranks[1], 0, got_small)->wait(10s);
  CHECK(got_small == small);
  for (const auto& send : sends) {
    post_receive(ranks[1], 0, got)->wait(10s);
    send->wait(10s);
    CHECK(got == values);
  }
  CHECK(device->registered_nbytes.load() >= 2 * 2000000);
  CHECK(device->registered_nbytes.load() < 20 * 2000000);
}

TEST(path_tells_how_the_tensors_of_a_device_go) {
  Floats values(4), got(4);
  auto both = connect_all(2, on(slow_device()));
  CHECK_EQ(both[0]->path(1), std::string("shared memory"));
  post_send(both[0], 1, values);
  post_receive(both[1], 0, got)->wait(10s);
  CHECK_EQ(both[0]->path(1), std::string("shared memory, in slots of host"));
  CHECK_EQ(both[1]->path(0), std::string("shared memory"));
  auto one = connect_each({on(slow_device()), CommunicatorOptions{}});
  post_send(one[0], 1, values);
  post_receive(one[1], 0, got)->wait(10s);
  CHECK_EQ(one[0]->path(1), std::string("shared memory, from host through the host"));
}

CHECK_MAIN()
