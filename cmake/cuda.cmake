# Decides whether the CUDA kernels are built: by nvcc alone, never by whether a GPU is visible.
# Sets PIPECOMM_HAVE_CUDA, PIPECOMM_NVCC_VERSION and PIPECOMM_CUDA_ARCHS_BUILT (a comma-separated text).
set(PIPECOMM_HAVE_CUDA OFF)
set(PIPECOMM_CUDA_REASON "PIPECOMM_CUDA=${PIPECOMM_CUDA}")

if(NOT PIPECOMM_CUDA STREQUAL "off")
  include(CheckLanguage)
  if(NOT DEFINED ENV{CUDACXX})
    find_program(PIPECOMM_NVCC nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda/bin)
    if(PIPECOMM_NVCC)
      set(ENV{CUDACXX} "${PIPECOMM_NVCC}")
    endif()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # an earlier search that found none
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(PIPECOMM_HAVE_CUDA ON)
  elseif(DEFINED ENV{CUDACXX})
    set(HOST_COMPILER g++)
    if(DEFINED ENV{CUDAHOSTCXX})
      set(HOST_COMPILER $ENV{CUDAHOSTCXX})
    endif()
    execute_process(COMMAND $ENV{CUDACXX} --version OUTPUT_VARIABLE NVCC_TEXT ERROR_QUIET)
    string(REGEX MATCH "V[0-9.]+" NVCC_TEXT "${NVCC_TEXT}")
    execute_process(COMMAND ${HOST_COMPILER} -dumpfullversion -dumpversion
      OUTPUT_VARIABLE HOST_VERSION OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    string(APPEND PIPECOMM_CUDA_REASON ", but $ENV{CUDACXX} ${NVCC_TEXT} does not work with its host compiler "
      "${HOST_COMPILER} ${HOST_VERSION}; set CUDAHOSTCXX to one that this nvcc supports")
  else()
    string(APPEND PIPECOMM_CUDA_REASON ", and no nvcc in CUDACXX, CUDA_HOME or on PATH")
  endif()
  if(PIPECOMM_CUDA STREQUAL "on" AND NOT PIPECOMM_HAVE_CUDA)
    message(FATAL_ERROR "the CUDA kernels cannot be built: ${PIPECOMM_CUDA_REASON}. "
      "Install the CUDA toolkit, or use PIPECOMM_CUDA=auto to build without CUDA.")
  endif()
endif()

if(PIPECOMM_HAVE_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES ${PIPECOMM_CUDA_ARCHS})
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set_target_properties(pipecomm PROPERTIES
    CUDA_ARCHITECTURES "${PIPECOMM_CUDA_ARCHS}" CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON)
  file(GLOB PIPECOMM_CUDA_SOURCES CONFIGURE_DEPENDS csrc/device/*.cu csrc/memory/*.cu csrc/codec/*.cu)
  target_sources(pipecomm PRIVATE ${PIPECOMM_CUDA_SOURCES})
  target_compile_definitions(pipecomm PUBLIC PIPECOMM_HAVE_CUDA=1)
  # Static cudart: the library imports on a machine without a GPU or a toolkit.
  target_link_libraries(pipecomm PRIVATE CUDA::cudart_static)
  target_compile_options(pipecomm PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false -Xptxas=-v -Xcompiler=-Wall,-Wextra>)
  # No later option undoes all that it does.
  string(REGEX REPLACE "--?use_fast_math" "" CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS}")
  if(PIPECOMM_WERROR)
    target_compile_options(pipecomm PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
  endif()
  set(PIPECOMM_NVCC_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
  list(JOIN PIPECOMM_CUDA_ARCHS "," PIPECOMM_CUDA_ARCHS_BUILT)
  string(APPEND PIPECOMM_CUDA_REASON ", nvcc ${PIPECOMM_NVCC_VERSION}, architectures ${PIPECOMM_CUDA_ARCHS_BUILT}")
endif()
message(STATUS "pipecomm: CUDA kernels ${PIPECOMM_HAVE_CUDA} (${PIPECOMM_CUDA_REASON})")
