// Tensors and streams of a CUDA device, as torch has them; and ranks of one process on devices of their own.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <vector>

#include "cases.h"
#include "transport/api/listener.h"

using namespace pipecomm;

using Floats = std::vector<float>;

inline void copy(void* dst, const void* src, std::size_t nbytes) {
  CHECK_EQ(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, nullptr), cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
}

class CudaTensor {
 public:
  CudaTensor(int device, std::size_t count, float value = 0) : device_(device), count_(count) {
    CHECK_EQ(cudaSetDevice(device), cudaSuccess);
    CHECK_EQ(cudaMalloc(&data_, count * sizeof(float)), cudaSuccess);
    const Floats values(count, value);
    copy(data_, values.data(), count * sizeof(float));
  }
  CudaTensor(const CudaTensor&) = delete;
  CudaTensor& operator=(const CudaTensor&) = delete;

  TensorView view() const { return {data_, DType::float32, {static_cast<std::int64_t>(count_)}, device_}; }
  SendPart part(const char* codec = "raw") const { return {view(), parse_codec(codec), false, false}; }
  Floats values() const {
    Floats values(count_);
    CHECK_EQ(cudaSetDevice(device_), cudaSuccess);
    copy(values.data(), data_, count_ * sizeof(float));
    return values;
  }

 private:
  const int device_;
  const std::size_t count_;
  void* data_ = nullptr;  // ends with the process
};

inline cudaStream_t make_native_stream(int device) {
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaSetDevice(device), cudaSuccess);
  CHECK_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  return stream;
}

// A stream that stands still until it is told to go on, as one whose kernel waits for another rank does.
class HeldStream {
 public:
  explicit HeldStream(int device) : stream_(make_native_stream(device)) {
    auto* held = new std::shared_ptr<std::atomic<bool>>(may_run_);
    const auto wait = [](void* argument) {
      const std::unique_ptr<std::shared_ptr<std::atomic<bool>>> owned(
          static_cast<std::shared_ptr<std::atomic<bool>>*>(argument));
      (*owned)->wait(false);
    };
    CHECK_EQ(cudaLaunchHostFunc(stream_, wait, held), cudaSuccess);
  }
  ~HeldStream() { go_on(); }
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

  cudaStream_t native() const { return stream_; }
  void go_on() {
    may_run_->store(true);
    may_run_->notify_all();
  }

 private:
  const std::shared_ptr<std::atomic<bool>> may_run_ = std::make_shared<std::atomic<bool>>(false);
  const cudaStream_t stream_;
};

inline MessageKey tagged(std::int32_t tag) { return {tag, Direction::none, kNoMicrobatch, 0}; }

inline std::vector<std::shared_ptr<Communicator>> connect_two() {
  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < 2; ++rank) {
    listeners.push_back(make_listener());
    addresses.push_back(listeners.back()->address());
  }
  std::vector<std::shared_ptr<Communicator>> made(2);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back(
        [&, rank] { made[rank] = listeners[rank]->connect(static_cast<int>(rank), addresses, {}, 10s); });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

template <typename Done>
bool comes_true(const Done& done) {
  for (int i = 0; i < 5000 && !done(); ++i) std::this_thread::sleep_for(1ms);
  return done();
}
