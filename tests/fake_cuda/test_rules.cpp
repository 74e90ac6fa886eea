// Positive controls: whoever breaks a rule of the stand-in driver is caught.
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "cases.h"
#include "launch.h"

namespace {

using fake_cuda::machine;

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  return stream;
}

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  CHECK_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  return event;
}

// Shared memory of the host, as a memfd's is.
std::uint64_t* make_page() {
  return static_cast<std::uint64_t*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
}

template <typename Function>
Function driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  CHECK_EQ(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status), cudaSuccess);
  return reinterpret_cast<Function>(found);
}

CUresult wait_value(cudaStream_t stream, const void* at, std::uint64_t value) {
  const auto function = driver<decltype(&cuStreamWaitValue64)>("cuStreamWaitValue64");
  return function(stream, reinterpret_cast<CUdeviceptr>(at), value, CU_STREAM_WAIT_VALUE_GEQ);
}

CUresult write_value(cudaStream_t stream, const void* at, std::uint64_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  operation.writeValue.address = reinterpret_cast<CUdeviceptr>(at);
  operation.writeValue.value64 = value;
  return driver<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp")(stream, 1, &operation, 0);
}

// A stream that stands still until the word is 1, as one does that waits for a peer.
struct Waiting {
  Waiting() {
    CHECK_EQ(cudaHostRegister(word, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable), cudaSuccess);
    CHECK_EQ(wait_value(stream, word, 1), CUDA_SUCCESS);
  }
  ~Waiting() { go_on(); }
  void go_on() { std::atomic_ref(*word).store(1); }

  std::uint64_t* word = make_page();
  cudaStream_t stream = make_stream();
};

__global__ void add_one(int* value) {
  if (threadIdx.x == 0) *value += 1;
}

cudaError_t run_add_one(int* value, cudaStream_t stream) {
  void* pointers[] = {&value};
  return cudaLaunchKernel(add_one, dim3(1), dim3(32), pointers, 0, stream);
}

struct Restored {
  fake_cuda::Machine before = machine();
  ~Restored() { machine() = before; }
};

}  // namespace

TEST(runtime_call_of_a_thread_without_a_device_makes_the_context_of_device_0) {
  const std::string words = dying_words([] {
    std::thread([] {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);
    }).join();
    std::fprintf(stderr, "contexts %d %d", fake_cuda::num_contexts(0), fake_cuda::num_contexts(1));
    std::abort();
  });
  CHECK_EQ(words, std::string("contexts 1 0"));
}

TEST(each_thread_has_a_device_of_its_own_and_setting_it_makes_the_context) {
  const std::string words = dying_words([] {
    cudaSetDevice(1);
    int mine = -1, others = -1;
    cudaGetDevice(&mine);
    std::thread([&] { cudaGetDevice(&others); }).join();
    std::fprintf(stderr, "%d %d, contexts %d %d", mine, others, fake_cuda::num_contexts(0), fake_cuda::num_contexts(1));
    std::abort();
  });
  CHECK_EQ(words, std::string("1 0, contexts 0 1"));
}

TEST(driver_call_without_a_context_is_refused) {
  std::thread([] {
    std::size_t nbytes = 0;
    CUdeviceptr begin = 0;
    const auto function = driver<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange");
    CHECK_EQ(function(&begin, &nbytes, 1), CUDA_ERROR_INVALID_CONTEXT);
  }).join();
}

TEST(draining_call_waits_for_all_streams_and_calls_of_other_threads_wait_for_it) {
  Waiting waiting;
  cudaEvent_t event = make_event();
  Beside draining([] {
    void* data = nullptr;
    cudaMalloc(&data, 512);
    cudaFree(data);
  });
  CHECK(!draining.is_done_within(50ms));
  Beside other([event] { cudaEventQuery(event); });
  CHECK(!other.is_done_within(50ms));
  waiting.go_on();
  CHECK(draining.is_done_within(5s));
  CHECK(other.is_done_within(5s));
}

TEST(first_launch_of_a_kernel_drains_and_the_second_does_not) {
  int* value = nullptr;
  CHECK_EQ(cudaMalloc(reinterpret_cast<void**>(&value), 512), cudaSuccess);
  cudaStream_t stream = make_stream();
  Waiting waiting;
  Beside first([=] { run_add_one(value, stream); });
  CHECK(!first.is_done_within(50ms));
  waiting.go_on();
  CHECK(first.is_done_within(5s));
  Waiting again;
  Beside second([=] { run_add_one(value, stream); });
  CHECK(second.is_done_within(5s));
  again.go_on();
  CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST(registration_and_freeing_drain) {
  void* data = nullptr;
  CHECK_EQ(cudaMalloc(&data, 512), cudaSuccess);
  const std::uint64_t* page = make_page();
  Waiting waiting;
  Beside registering([page] { cudaHostRegister(const_cast<std::uint64_t*>(page), 4096, cudaHostRegisterMapped); });
  CHECK(!registering.is_done_within(50ms));
  waiting.go_on();
  CHECK(registering.is_done_within(5s));
  Waiting again;
  Beside freeing([data] { cudaFree(data); });
  CHECK(!freeing.is_done_within(50ms));
  again.go_on();
  CHECK(freeing.is_done_within(5s));
}

TEST(call_that_enqueues_more_than_1024_operations_waits_for_room) {
  Waiting waiting;
  std::atomic<int> num_done{0};
  Beside filling([&, stream = waiting.stream] {
    cudaSetDevice(0);
    for (int i = 0; i < 1100; ++i) {
      write_value(stream, waiting.word + 1, 1);
      ++num_done;
    }
  });
  CHECK(!filling.is_done_within(100ms));
  CHECK_EQ(num_done.load(), 1024);
  waiting.go_on();
  CHECK(filling.is_done_within(5s));
}

TEST(error_of_a_device_is_the_answer_of_every_later_call_and_nothing_is_done_any_more) {
  const std::string words = dying_words([] {
    cudaStream_t stream = make_stream();
    cudaEvent_t event = make_event();
    run_add_one(reinterpret_cast<int*>(4096), stream);
    const int first = cudaStreamSynchronize(stream);
    cudaGetLastError();
    const int recorded = cudaEventRecord(event, stream), queried = cudaEventQuery(event);
    void* data = nullptr;
    std::fprintf(stderr, "%d %d %d %d", first, recorded, queried, cudaMalloc(&data, 512));
    std::abort();
  });
  CHECK_EQ(words, std::string("700 700 700 700"));
}

TEST(host_that_touches_a_devices_memory_is_ended_and_a_kernel_that_leaves_it_too) {
  CHECK_FORBIDDEN("signal", {
    int* value = nullptr;
    cudaMalloc(reinterpret_cast<void**>(&value), 512);
    *value = 1;
  });
  CHECK_FORBIDDEN("signal", {
    int* value = nullptr;
    cudaMalloc(reinterpret_cast<void**>(&value), 4096);
    cudaStream_t stream = make_stream();
    run_add_one(value + 1023, stream);
    cudaStreamSynchronize(stream);
    fake_cuda::launch(nullptr, stream, [=](int device) {
      reinterpret_cast<volatile int*>(fake_cuda::find_argument(device, value))[1024] = 1;
      return true;
    });
    cudaStreamSynchronize(stream);
  });
}

TEST(stream_that_waits_at_the_hosts_address_fails_where_devices_have_another) {
  const std::string words = dying_words([] {
    machine().uses_host_addresses = false;
    std::uint64_t* page = make_page();
    void* seen = nullptr;
    cudaHostRegister(page, 4096, cudaHostRegisterMapped);
    cudaHostGetDevicePointer(&seen, page, 0);
    cudaStream_t stream = make_stream();
    write_value(stream, seen, 7);
    const int good = cudaStreamSynchronize(stream);
    const auto value = page[0];
    write_value(stream, page, 8);
    std::fprintf(stderr, "%d, %d, %d, %d", seen != page, good, static_cast<int>(value), cudaStreamSynchronize(stream));
    std::abort();
  });
  CHECK_EQ(words, std::string("1, 0, 7, 700"));
}

TEST(unsafe_call_during_capture_is_refused_and_ends_it_but_not_in_relaxed_mode) {
  cudaStream_t stream = make_stream();
  cudaEvent_t event = make_event();
  fake_cuda::begin_capture(stream, cudaStreamCaptureModeGlobal);
  std::thread([&] { CHECK_EQ(cudaEventQuery(event), cudaErrorStreamCaptureUnsupported); }).join();
  CHECK(!fake_cuda::end_capture(stream));
  fake_cuda::begin_capture(stream, cudaStreamCaptureModeGlobal);
  std::thread([&] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    CHECK_EQ(cudaEventQuery(event), cudaSuccess);
  }).join();
  CHECK(fake_cuda::end_capture(stream));
  fake_cuda::begin_capture(stream, cudaStreamCaptureModeThreadLocal);
  std::thread([&] { CHECK_EQ(cudaEventQuery(event), cudaSuccess); }).join();
  CHECK_EQ(cudaEventQuery(event), cudaErrorStreamCaptureUnsupported);
  CHECK(!fake_cuda::end_capture(stream));
}

TEST(what_a_machine_cannot_do_is_refused) {
  const Restored restored;
  CHECK_EQ(cudaSetDevice(0), cudaSuccess);
  machine().waits_for_64_bit_values = machine().exports_memory = machine().has_ipc = false;
  int value = 1;
  driver<decltype(&cuDeviceGetAttribute)>("cuDeviceGetAttribute")(&value,
                                                                  CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0);
  CHECK_EQ(value, 0);
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  CHECK_EQ(driver<decltype(&cuMemCreate)>("cuMemCreate")(&handle, std::size_t{2} << 20, &prop, 0),
           CUDA_ERROR_NOT_SUPPORTED);
  void* data = nullptr;
  cudaIpcMemHandle_t text;
  CHECK_EQ(cudaMalloc(&data, 512), cudaSuccess);
  CHECK_EQ(cudaIpcGetMemHandle(&text, data), cudaErrorNotSupported);
  CHECK_EQ(cudaFree(data), cudaSuccess);
  CHECK_FORBIDDEN("64-bit stream memory operations", {
    machine().waits_for_64_bit_values = false;
    cudaSetDevice(0);
    write_value(nullptr, make_page(), 1);
  });
}

TEST(memory_ends_at_the_size_that_is_set) {
  const Restored restored;
  machine().memory_nbytes = fake_cuda::allocated_nbytes(0) + 4096;
  void* data = nullptr;
  CHECK_EQ(cudaMalloc(&data, 8192), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
  CHECK_EQ(cudaMalloc(&data, 4096), cudaSuccess);
  CHECK_EQ(cudaFree(data), cudaSuccess);
}

TEST(call_is_refused_on_demand_and_then_works) {
  fake_cuda::refuse("cudaMalloc", cudaErrorLaunchFailure, 1, 1);
  void *first = nullptr, *second = nullptr;
  CHECK_EQ(cudaMalloc(&first, 512), cudaSuccess);
  CHECK_EQ(cudaMalloc(&second, 512), cudaErrorLaunchFailure);
  CHECK_EQ(cudaMalloc(&second, 512), cudaSuccess);
  cudaFree(first), cudaFree(second);
}

TEST(some_calls_and_operations_are_delayed_and_none_without_a_limit) {
  const Restored restored;
  const cudaStream_t stream = make_stream();
  const cudaEvent_t event = make_event();
  const auto num_of = [&](std::size_t max_delay_us) {
    machine().max_delay_us = max_delay_us;
    const std::uint64_t before = fake_cuda::num_delays();
    for (int i = 0; i < 200; ++i) CHECK_EQ(cudaEventRecord(event, stream), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return fake_cuda::num_delays() - before;
  };
  CHECK_EQ(num_of(0), std::uint64_t{0});
  const std::uint64_t num_delayed = num_of(1);
  CHECK(num_delayed > 10 && num_delayed < 390);
}

TEST(peer_out_of_reach_is_refused_and_what_reaches_for_its_memory_breaks_the_device) {
  const std::string words = dying_words([] {
    const auto map_for = [](int device) {
      cudaSetDevice(0);
      CUmemAllocationProp prop{};
      prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
      prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
      constexpr std::size_t kNbytes = std::size_t{2} << 20;
      CUmemGenericAllocationHandle handle = 0;
      CUdeviceptr address = 0;
      driver<decltype(&cuMemCreate)>("cuMemCreate")(&handle, kNbytes, &prop, 0);
      driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve")(&address, kNbytes, 0, 0, 0);
      driver<decltype(&cuMemMap)>("cuMemMap")(address, kNbytes, 0, handle, 0);
      CUmemAccessDesc access{};
      access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access.location.id = device;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      return driver<decltype(&cuMemSetAccess)>("cuMemSetAccess")(address, kNbytes, &access, 1);
    };
    const CUresult reached = map_for(1);
    machine().reaches_peers = false;
    const CUresult own = map_for(0), out_of_reach = map_for(1);
    void* data = nullptr;
    cudaSetDevice(1);
    cudaMalloc(&data, 512);
    cudaSetDevice(0);
    const cudaStream_t stream = make_stream();
    run_add_one(static_cast<int*>(data), stream);
    std::fprintf(stderr, "%d %d %d, %d", reached, own, out_of_reach, cudaStreamSynchronize(stream));
    std::abort();
  });
  CHECK_EQ(words, "0 0 " + std::to_string(CUDA_ERROR_INVALID_DEVICE) + ", 700");
}

TEST(calls_are_counted_by_name) {
  cudaStream_t stream = make_stream();
  fake_cuda::forget_calls();
  write_value(stream, make_page(), 1);
  cudaGetLastError();
  CHECK_EQ(fake_cuda::calls_text(),
           std::string("cuStreamBatchMemOp 1, cudaGetDriverEntryPointByVersion 1, cudaGetLastError 1"));
  CHECK_EQ(fake_cuda::num_calls(), std::uint64_t{3});
}

CHECK_MAIN()
