// Arguments that CUDA's documentation forbids end the test, and another device's memory is out of reach.
#include <cstring>

#include "cases.h"
#include "launch.h"

namespace {

using fake_cuda::machine;

void enqueue(cudaHostFn_t function) {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
  cudaLaunchHostFunc(stream, function, nullptr);
  cudaStreamSynchronize(stream);
}

void* allocate(std::size_t nbytes) {
  void* data = nullptr;
  cudaMalloc(&data, nbytes);
  return data;
}

void copy(void* dst, const void* src, std::size_t nbytes) {
  cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, nullptr);
  cudaStreamSynchronize(nullptr);
}

}  // namespace

TEST(forbidden_arguments_end_the_test) {
  CHECK_FORBIDDEN("must not make CUDA calls", enqueue([](void*) { cudaGetLastError(); }));
  CHECK_FORBIDDEN("cudaMalloc gave", void* data = allocate(512); cudaFree(data); cudaFree(data));
  CHECK_FORBIDDEN("do not overlap", char* data = static_cast<char*>(allocate(512)); copy(data + 1, data, 256));
  CHECK_FORBIDDEN("was registered", char page[1]; cudaHostUnregister(page));
  CHECK_FORBIDDEN("not destroyed", cudaStream_t stream = nullptr;
                  cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0); cudaStreamDestroy(stream);
                  cudaStreamSynchronize(stream));
  CHECK_FORBIDDEN("not destroyed", cudaEvent_t event = nullptr;
                  cudaEventCreateWithFlags(&event, cudaEventDisableTiming); cudaEventDestroy(event);
                  cudaEventQuery(event));
  CHECK_FORBIDDEN("bytes to allocate", allocate(0));
}

TEST(what_is_allowed_ends_well) {
  CHECK_EQ(dying_words([] { enqueue([](void*) {}); }), std::string());
  CHECK_EQ(dying_words([] { cudaFree(allocate(512)); }), std::string());
}

TEST(setting_that_does_not_exist_ends_the_test) {
  CHECK_FORBIDDEN("lists name=number", ::setenv("FAKE_CUDA", "num_gpus=2", 1);
                  ::execl("/proc/self/exe", "test", "event_is_recorded", nullptr));
}

TEST(copy_reaches_the_own_devices_memory_and_the_hosts_and_no_other_devices) {
  const std::string words = dying_words([] {
    auto* data = static_cast<char*>(allocate(512));
    char sent[512], got[512] = {};
    std::memset(sent, 7, sizeof(sent));
    copy(data, sent, sizeof(sent));
    copy(got, data, sizeof(got));
    const bool is_equal = std::memcmp(sent, got, sizeof(got)) == 0;
    cudaSetDevice(1);
    cudaMemcpyAsync(got, data, sizeof(got), cudaMemcpyDefault, nullptr);
    std::fprintf(stderr, "%d %d", is_equal, cudaStreamSynchronize(nullptr));
    std::abort();
  });
  CHECK_EQ(words, std::string("1 700"));
}

TEST(event_is_recorded_on_a_stream_of_its_device_alone) {
  const std::string words = dying_words([] {
    cudaEvent_t event = nullptr;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaSetDevice(1);
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
    std::fprintf(stderr, "%d", cudaEventRecord(event, stream));
    std::abort();
  });
  CHECK_EQ(words, std::string("400"));
}

CHECK_MAIN()
