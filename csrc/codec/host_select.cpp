// Chooses the host loops by what the processor and the operating system support.
#include <cstdlib>
#include <string>

#include "codec/host.h"

namespace pipecomm {
namespace {

const HostLoops& choose() {
  const std::vector<const HostLoops*> usable = usable_host_loops();
  const char* forced = std::getenv("PIPECOMM_ISA");
  if (forced == nullptr || *forced == '\0') return *usable.back();
  std::string names;
  for (const HostLoops* loops : usable) {
    if (std::string(loops->name) == forced) return *loops;
    names += (names.empty() ? "" : ", ") + std::string(loops->name);
  }
  throw Error(ErrorKind::config, "expected PIPECOMM_ISA to be one of " + names + " on this processor; got \"" + forced +
                                     "\"; unset it to use the fastest");
}

}  // namespace

std::vector<const HostLoops*> usable_host_loops() {
  std::vector<const HostLoops*> usable = {&kPortableLoops};
#if defined(__x86_64__)
  // These also ask XGETBV whether the operating system saves the wide registers.
  __builtin_cpu_init();
  // Every processor with AVX2 has F16C, which clang cannot ask for.
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) usable.push_back(&kAvx2Loops);
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    usable.push_back(&kAvx512Loops);
  }
#endif
  return usable;
}

const HostLoops& host_loops() {
  static const HostLoops& chosen = choose();
  return chosen;
}

}  // namespace pipecomm
