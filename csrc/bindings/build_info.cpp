// What this build is: version, compiler, CUDA. The values come from cmake/python.cmake.
#include "bindings/bindings.h"

namespace pipecomm {
namespace {

constexpr const char* kCompiler =
#if defined(__clang__)
    "clang " __clang_version__;
#else
    "gcc " __VERSION__;
#endif

pybind11::dict build_info() {
  pybind11::dict info;
  info["version"] = PIPECOMM_VERSION;
  info["compiler"] = kCompiler;
  info["build_type"] = PIPECOMM_BUILD_TYPE;
#if defined(PIPECOMM_HAVE_CUDA)
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["cuda_archs"] = PIPECOMM_CUDA_ARCHS;
  info["nvcc"] = PIPECOMM_NVCC;
  return info;
}

}  // namespace

void register_build_info(pybind11::module_& module) {
  module.def("build_info", &build_info,
             "What was built: version, compiler, build_type, cuda (bool), cuda_archs and nvcc ('' without CUDA).");
}

}  // namespace pipecomm
