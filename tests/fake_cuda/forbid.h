// Ends the process of a test that calls CUDA as its documentation forbids.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace fake_cuda {

[[noreturn]] inline void forbid(const char* call, const char* rule) {
  std::fprintf(stderr, "fake CUDA: %s: %s\n", call, rule);
  std::abort();
}

inline void require(bool holds, const char* call, const char* rule) {
  if (!holds) forbid(call, rule);
}

}  // namespace fake_cuda
