# The Python binding _core, and what an installed package consists of:
# component "runtime" is the libraries, "sources" what a first-use build of the torch half needs.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND "${Python_EXECUTABLE}" -c "import pybind11; print(pybind11.get_cmake_dir())"
  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE PYBIND11_MISSING)
if(PYBIND11_MISSING)
  message(FATAL_ERROR "pybind11 was not found by ${Python_EXECUTABLE}: pip install pybind11")
endif()
find_package(pybind11 CONFIG REQUIRED)

file(STRINGS pipecomm/_version.py PIPECOMM_VERSION REGEX "^__version__ = ")
string(REGEX REPLACE ".*\"(.*)\".*" "\\1" PIPECOMM_VERSION "${PIPECOMM_VERSION}")

file(GLOB PIPECOMM_BINDINGS CONFIGURE_DEPENDS csrc/bindings/*.cpp)
pybind11_add_module(_core NO_EXTRAS ${PIPECOMM_BINDINGS})
target_link_libraries(_core PRIVATE pipecomm pipecomm_flags)
# Together they compile in half the time: most of it goes into pybind11's headers.
set_target_properties(_core PROPERTIES UNITY_BUILD ON)
target_compile_definitions(_core PRIVATE
  "PIPECOMM_VERSION=\"${PIPECOMM_VERSION}\"" "PIPECOMM_BUILD_TYPE=\"${CMAKE_BUILD_TYPE}\""
  "PIPECOMM_CUDA_ARCHS=\"${PIPECOMM_CUDA_ARCHS_BUILT}\"" "PIPECOMM_NVCC=\"${PIPECOMM_NVCC_VERSION}\"")

install(TARGETS pipecomm _core LIBRARY DESTINATION . COMPONENT runtime)
install(DIRECTORY csrc/ DESTINATION _src/csrc COMPONENT sources
  FILES_MATCHING PATTERN "*.h" PATTERN "_c10d.cpp")
