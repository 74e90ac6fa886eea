// What may have to wait for a device, on a thread of its own: nobody holds the lock of the transfers meanwhile.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "transport/progress/progress.h"

namespace pipecomm {

// One at a time. Its end waits for the work. Progress lock only; the end, without it.
template <typename Result>
class Errand {
 public:
  Errand() = default;
  Errand(const Errand&) = delete;
  Errand& operator=(const Errand&) = delete;
  ~Errand() {
    if (thread_.joinable()) thread_.join();
  }

  void begin(std::function<Result()> work) {
    std::packaged_task<Result()> task(std::move(work));
    future_ = task.get_future();
    thread_ = std::thread([task = std::move(task)]() mutable {
      task();
      Progress::instance().kick();
    });
  }
  bool is_under_way() const { return future_.valid(); }
  bool is_done() const {
    return is_under_way() && future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  // Of one that is done: what the work gave. Throws what it threw.
  Result take() {
    thread_.join();
    return future_.get();
  }

 private:
  std::future<Result> future_;
  std::thread thread_;
};

}  // namespace pipecomm
