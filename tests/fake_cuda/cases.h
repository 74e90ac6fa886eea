// What tests over the stand-in driver share: a child that must be ended, threads that must be stuck, tensors of a
// device.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "control.h"

using namespace std::chrono_literals;

// What a process prints to stderr that runs `body` as its first use of the driver; "" where it comes to an end well.
inline std::string dying_words(const std::function<void()>& body) {
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    fake_cuda::begin_anew();
    body();
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<std::size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFSIGNALED(status) && text.empty()) text = "signal " + std::to_string(WTERMSIG(status));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "" : text;
}

#define CHECK_FORBIDDEN(part, ...)                                                                  \
  do {                                                                                              \
    const std::string words = dying_words([&] { __VA_ARGS__; });                                    \
    if (words.find(part) == std::string::npos) {                                                    \
      check::fail(__FILE__, __LINE__, "expected an end that tells of \"" part "\"; got: " + words); \
    }                                                                                               \
  } while (false)

// A call on a thread of its own, which may never come back.
class Beside {
 public:
  explicit Beside(std::function<void()> body)
      : done_(std::make_shared<std::atomic<bool>>(false)), thread_([done = done_, body = std::move(body)] {
          body();
          done->store(true);
        }) {}
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;
  ~Beside() { done_->load() ? thread_.join() : thread_.detach(); }

  bool is_done_within(std::chrono::milliseconds time) const {
    for (const auto end = std::chrono::steady_clock::now() + time; std::chrono::steady_clock::now() < end;) {
      if (done_->load()) return true;
      std::this_thread::sleep_for(1ms);
    }
    return done_->load();
  }

 private:
  std::shared_ptr<std::atomic<bool>> done_;
  std::thread thread_;
};
