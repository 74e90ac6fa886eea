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
  CHECK(of_one <= 2 * 6);
  CHECK(of_six <= of_one + 5 * 2 * 3);
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
