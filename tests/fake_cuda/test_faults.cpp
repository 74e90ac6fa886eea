// What a reading of CUDA's documentation found wrong with the CUDA half, each seen over the stand-in driver.
#include <cmath>

#include "codec/codec.h"
#include "device/device.h"
#include "memory/device_memory.h"
#include "memory/segment.h"
#include "tensors.h"

namespace {

using fake_cuda::machine;

struct Restored {
  fake_cuda::Machine before = machine();
  ~Restored() { machine() = before; }
};

// One message from rank 0 to rank 1; both ends.
struct Message {
  std::shared_ptr<Transfer> send, receive;
};

Message pass(const std::vector<std::shared_ptr<Communicator>>& ranks, const CudaTensor& sent, const CudaTensor& got,
             const char* codec = "raw", std::int32_t tag = 0) {
  auto receive = ranks[1]->receive(0, tagged(tag), {got.view()}, nullptr);
  return {ranks[0]->send(1, tagged(tag), {sent.part(codec)}, nullptr), receive};
}

void finish(const Message& message) {
  CHECK(comes_true([&] { return message.send->is_done() && message.receive->is_done(); }));
  message.send->wait(5s);
  message.receive->wait(5s);
}

// Calls that enqueue something or change the context: polling is counted in time, not by message.
std::uint64_t num_calls_but_polling() {
  return fake_cuda::num_calls() - fake_cuda::num_calls("cudaEventQuery") - fake_cuda::num_calls("cudaGetLastError");
}

}  // namespace

TEST(thread_without_a_device_makes_no_context_on_device_0) {
  const std::string words = dying_words([] {
    const auto device = make_cuda_device(1);
    const auto stream = device->make_stream(), other = device->make_stream();
    Event event = stream->record();
    std::thread([&] {
      static_cast<void>(event.is_ready());
      event.wait();
      other->wait(event);
      stream->record().wait();
      event = {};
    }).join();
    int current = -1;
    cudaGetDevice(&current);
    std::fprintf(stderr, "device %d, contexts %d %d", current, fake_cuda::num_contexts(0), fake_cuda::num_contexts(1));
    std::abort();
  });
  CHECK_EQ(words, std::string("device 0, contexts 0 1"));
}

TEST(callers_device_is_left_alone) {
  CHECK_EQ(cudaSetDevice(0), cudaSuccess);
  const auto device = make_cuda_device(1);
  device->make_stream()->synchronize();
  int current = -1;
  CHECK_EQ(cudaGetDevice(&current), cudaSuccess);
  CHECK_EQ(current, 0);
}

// What the host's codec makes of the values.
Floats coded(const Floats& values, const char* codec) {
  const CodecSpec spec = parse_codec(codec);
  if (spec.id == CodecId::raw) return values;
  const Grid grid{1, static_cast<std::int64_t>(values.size())};
  std::vector<std::byte> wire(2 * 4 * values.size());
  Floats decoded(values.size());
  encode(spec, DType::float32, values.data(), grid, 0, num_groups(spec, grid), wire.data());
  decode(spec, DType::float32, wire.data(), grid, 0, num_groups(spec, grid), decoded.data());
  return decoded;
}

TEST(tensors_of_two_devices_cross_in_slots_with_every_codec) {
  auto ranks = connect_two();
  const CudaTensor sent(0, 3000, 1.5f), got(1, 3000);
  for (const char* codec : {"raw", "int8", "int4", "int4:hadamard=64", "nf4", "int8:spikes=2"}) {
    finish(pass(ranks, sent, got, codec));
    CHECK(got.values() == coded(Floats(3000, 1.5f), codec));
  }
  CHECK(ranks[0]->path(1).find("in slots of cuda:0") != std::string::npos);
}

TEST(ways_that_a_machine_does_not_have_are_gone_around) {
  const Restored restored;
  const CudaTensor sent(0, 300000, 2.5f), got(1, 300000);
  for (const char* what : {"exports_memory", "reaches_peers", "waits_for_64_bit_values"}) {
    machine() = restored.before;
    if (std::string(what) == "exports_memory") machine().exports_memory = false;
    if (std::string(what) == "reaches_peers") machine().reaches_peers = false;
    if (std::string(what) == "waits_for_64_bit_values") machine().waits_for_64_bit_values = false;
    auto ranks = connect_two();
    finish(pass(ranks, sent, got));
    CHECK(got.values() == Floats(300000, 2.5f));
    CHECK(ranks[0]->path(1).find("through the host") != std::string::npos);
  }
}

TEST(memory_that_devices_see_at_another_address_than_the_host_is_used) {
  const Restored restored;
  machine().uses_host_addresses = false;
  auto ranks = connect_two();
  const CudaTensor sent(0, 300000, 3.5f), got(1, 300000);
  finish(pass(ranks, sent, got));
  CHECK(got.values() == Floats(300000, 3.5f));
  CHECK(ranks[0]->path(1).find("in slots of") != std::string::npos);
}

TEST(first_message_of_a_codec_does_not_wait_for_what_a_device_does) {
  auto ranks = connect_two();
  const CudaTensor sent(0, 3000, 1), got(1, 3000);
  finish(pass(ranks, sent, got));
  HeldStream held(0);
  Message message = pass(ranks, sent, got, "fp8", 1);
  Beside beside([&] { message.send->wait(30s); });
  CHECK(beside.is_done_within(3s));
  held.go_on();
  finish(message);
}

TEST(only_out_of_memory_is_called_so) {
  const auto device = make_cuda_device(0);
  const auto pool = make_device_pool(device);
  fake_cuda::refuse("cudaMalloc", cudaErrorLaunchFailure);
  CHECK_ERROR(ErrorKind::cuda, "cudaMalloc", allocate_block(pool, 100));
  fake_cuda::refuse("cudaMalloc", cudaErrorMemoryAllocation, 100);
  CHECK_ERROR(ErrorKind::pool_exhausted, "out of memory", allocate_block(pool, 100));
  fake_cuda::refuse("cudaMalloc", 0, 1);
}

// torch's cache may keep what is missing.
TEST(others_are_asked_once_for_memory_that_a_device_does_not_have) {
  const auto device = make_cuda_device(0);
  const auto pool = make_device_pool(device);
  int num_asked = 0;
  set_memory_ask([&] { return ++num_asked > 0; });
  const auto allocate = [&] {
    Block block;
    CHECK(comes_true([&] { return block || (block = try_allocate_block(pool, 3 << 20, Growth::later)); }));
  };
  fake_cuda::refuse("cudaMalloc", cudaErrorMemoryAllocation);
  allocate();
  CHECK_EQ(num_asked, 1);
  fake_cuda::refuse("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(share_memory(*device, Sharing::descriptor, 1000).data != nullptr);
  CHECK_EQ(num_asked, 2);
  fake_cuda::refuse("cudaMalloc", cudaErrorMemoryAllocation, 100);
  CHECK_ERROR(
      ErrorKind::pool_exhausted, "out of memory",
      (void(comes_true([&] { return static_cast<bool>(try_allocate_block(pool, 100 << 20, Growth::later)); }))));
  CHECK(num_asked >= 3);
  set_memory_ask({});
  fake_cuda::refuse("cudaMalloc", 0, 1);
}

// Both ranks are of one thread, whose device is theirs, as torch makes it.
TEST(message_takes_few_calls) {
  auto ranks = connect_two();
  const std::size_t one = std::size_t{1} << 20, six = 6 * one;  // floats: one slot, and six
  const CudaTensor sent(0, six, 1), got(0, six), short_sent(0, one, 1), short_got(0, one);
  for (int i = 0; i < 3; ++i) finish(pass(ranks, sent, got));
  for (int i = 0; i < 3; ++i) finish(pass(ranks, short_sent, short_got));
  std::this_thread::sleep_for(50ms);  // waiting threads have left it to the comm thread
  fake_cuda::forget_calls();
  Message message = pass(ranks, short_sent, short_got);
  CHECK(comes_true([&] { return message.send->has_left() && message.receive->has_left(); }));
  const std::uint64_t of_one = num_calls_but_polling();
  const std::string text = fake_cuda::calls_text();
  std::printf("one slot, both ends: %s\n", text.c_str());
  fake_cuda::forget_calls();
  message = pass(ranks, sent, got);
  CHECK(comes_true([&] { return message.send->has_left() && message.receive->has_left(); }));
  std::printf("six slots, both ends: %s\n", fake_cuda::calls_text().c_str());
  const std::uint64_t of_six = num_calls_but_polling();
  CHECK(of_one <= 6);
  CHECK(of_six <= of_one + 5 * (2 + 3));
}

// A stream that waits for one message does not wait for the next one, which is late.
TEST(callers_stream_waits_for_its_message_alone) {
  auto ranks = connect_two();
  const CudaTensor sent(0, 3000, 1), got(1, 3000), later(1, 3000);
  finish(pass(ranks, sent, got));
  HeldStream own(1), late(0);
  auto first = ranks[1]->receive(0, tagged(1), {got.view()}, nullptr, ranks[1]->record(1, own.native()));
  auto second = ranks[1]->receive(0, tagged(2), {later.view()}, nullptr);
  ranks[0]->send(1, tagged(1), {sent.part()}, nullptr);
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 2; }));
  ranks[0]->send(1, tagged(2), {sent.part()}, nullptr, ranks[0]->record(0, late.native()));
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 3; }));
  const cudaStream_t stream = make_native_stream(1);
  first->event().block(stream);
  second->event().block(make_native_stream(1));
  CHECK(!first->is_done());
  own.go_on();
  CHECK(comes_true([&] { return first->is_done() && fake_cuda::num_queued(stream) == 0; }));
  CHECK(!second->is_done());
  late.go_on();
  finish({first, second});
}

// A later call of somebody else, torch's for one, would take it for its own.
TEST(error_that_nobody_is_told_of_is_not_left_for_others) {
  const auto device = make_cuda_device(0);
  auto memory = share_memory(*device, Sharing::handle, 1000);
  auto stream = device->make_stream();
  std::vector<std::byte> page(4096);
  auto registration = device->register_host(page.data(), page.size());
  for (const char* call : {"cudaFree", "cudaStreamSynchronize", "cudaHostUnregister"}) {
    fake_cuda::refuse(call, cudaErrorLaunchFailure);
  }
  memory.owner.reset();
  stream.reset();
  registration.reset();
  CHECK_EQ(cudaSetDevice(0), cudaSuccess);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
  CHECK_EQ(fake_cuda::num_calls("cudaStreamDestroy") > 0, true);
}

TEST(slots_that_the_peer_cannot_map_are_given_back) {
  const Restored restored;
  machine().exports_memory = false;  // the handle of this process's own memory is not one that it can open
  const CudaTensor sent(0, 300000, 2.5f), got(1, 300000);
  const std::size_t before = fake_cuda::allocated_nbytes(1);
  auto ranks = connect_two();
  finish(pass(ranks, sent, got));
  CHECK(ranks[0]->path(1).find("through the host") != std::string::npos);
  CHECK_EQ(fake_cuda::allocated_nbytes(1), before);
}

// A stream's queue has 1,024 entries; who enqueues one more waits, and whoever asks for the lock waits for that one.
TEST(many_messages_behind_a_late_stream_hold_nobody_up) {
  auto ranks = connect_two();
  const CudaTensor sent(0, 100, 1), got(1, 100);
  finish(pass(ranks, sent, got));
  HeldStream late(1);
  std::vector<std::shared_ptr<Transfer>> receives, sends;
  const Event ready = ranks[1]->record(1, late.native());
  for (int i = 0; i < 600; ++i) {
    receives.push_back(ranks[1]->receive(0, tagged(1), {got.view()}, nullptr, ready));
  }
  Beside posting([&] {
    for (int i = 0; i < 600; ++i) ranks[0]->send(1, tagged(1), {sent.part()}, nullptr);
  });
  std::this_thread::sleep_for(500ms);
  Beside asking([&] { static_cast<void>(ranks[1]->counters(0)); });
  CHECK(asking.is_done_within(3s));
  CHECK(posting.is_done_within(3s));
  late.go_on();
  CHECK(comes_true([&] { return receives.back()->is_done(); }));
  for (const auto& receive : receives) receive->wait(5s);
}

// What a link or a pool needs at its first message may have to wait for all that a device does.
TEST(memory_that_waits_for_a_device_holds_nobody_up) {
  auto ranks = connect_two();
  const CudaTensor sent(0, 3000, 1), got(1, 3000);
  ranks[1]->use_device(1);
  HeldStream busy(1);
  auto receive = ranks[1]->receive(0, tagged(0), {}, nullptr);
  auto send = ranks[0]->send(1, tagged(0), {sent.part()}, nullptr);
  std::this_thread::sleep_for(200ms);
  Beside asking([&] { static_cast<void>(ranks[1]->counters(0)); });
  CHECK(asking.is_done_within(3s));
  CHECK(!receive->is_done());
  busy.go_on();
  finish({send, receive});
}

// The last one: its devices do not come back.
TEST(error_of_a_device_ends_transfers_with_it_and_the_peer_hears_of_it) {
  auto ranks = connect_two();
  const CudaTensor sent(0, 3000, 1), got(1, 3000);
  finish(pass(ranks, sent, got));
  HeldStream held(1);
  auto waiting = ranks[0]->receive(1, tagged(7), {sent.view()}, nullptr);
  auto receive = ranks[1]->receive(0, tagged(1), {got.view()}, nullptr, ranks[1]->record(1, held.native()));
  auto send = ranks[0]->send(1, tagged(1), {sent.part()}, nullptr);
  CHECK(comes_true([&] { return ranks[1]->counters(0).messages_received == 2; }));
  CHECK(!receive->is_done());
  fake_cuda::break_device(1, cudaErrorIllegalAddress);
  CHECK(comes_true([&] { return receive->is_done(); }));
  CHECK(receive->error().has_value());
  CHECK_ERROR(ErrorKind::cuda, "cudaEventQuery", throw Error(*receive->error()));
  CHECK_ERROR(ErrorKind::peer_lost, "illegal memory access", waiting->wait(5s));
}

CHECK_MAIN()
