# What a developer runs; `make` alone lists it. Everything happens in .venv and build/.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# What the compiled parts are made of; a change in Python needs no reinstall.
BUILD_SOURCES := $(shell find csrc cmake -type f) CMakeLists.txt setup.py pyproject.toml \
  pipecomm/torch_half/c10d_compile.py pipecomm/_version.py

export PIPECOMM_WERROR ?= 1
# Where no GPU will run them, one architecture is enough to see that the kernels compile: each takes
# as long as all of the host's sources.
ifeq ($(shell command -v nvidia-smi),)
$(VENV)/installed: export PIPECOMM_CUDA_ARCHS ?= 8.0
endif

# What tools/phase notes, of this run of make only.
PHASES := build/phases
$(shell rm -f $(PHASES))

.PHONY: help install demo test test-slow test-fake-cuda lint format cpp-test sanitize fuzz soak kills kills-fake-cuda \
  device-check device-check-rehearsal clean distclean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(VENV)/installed ## Set up .venv: torch, tools, and pipecomm built in place

demo: $(VENV)/installed ## Train a byte-level GPT over two stages, raw and 4-bit, and compare
	@tools/phase "Training" $(BIN)/pipecomm train --compare --link-mbps auto $(ARGS)
	@cat $(PHASES)

# One worker more than the smallest machine has processors: a test often waits.
PYTEST := $(BIN)/pytest -p no:cacheprovider -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed ## Run the Python tests (ARGS="-k codec" for some of them)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed ## Run those that take longer: more cases, longer benchmarks, more builds
	$(PYTEST) -m slow $(ARGS)

lint: $(VENV)/installed ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/installed ## Put all sources into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

cpp-test: $(VENV)/cuda-headers ## Build and run the C++ tests
	$(call run_cpp_tests,build/cpp,)

sanitize: $(VENV)/cuda-headers ## Run the C++ tests under address, undefined and thread sanitizers
	$(call run_cpp_tests,build/asan,address$(comma)undefined)
	$(call run_cpp_tests,build/tsan,thread)

fuzz: $(VENV)/cuda-headers ## Decode a million random and broken inputs under the address sanitizer
	$(BIN)/cmake -S . -B build/asan -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DPIPECOMM_CUDA=off \
	  -DPIPECOMM_BUILD_PYTHON=OFF -DPIPECOMM_BUILD_TESTS=ON -DPIPECOMM_SANITIZE=address,undefined
	$(BIN)/cmake --build build/asan --target fuzz_codec
	build/asan/tests/cpp/fuzz_codec 1000000

# Under Python: the library with the stand-in driver, which LD_LIBRARY_PATH puts in the place of the other.
OVER_FAKE_CUDA := LD_LIBRARY_PATH=$(abspath build/cpp/tests/cpp/fake_cuda) FAKE_CUDA_STAND_IN=1 \
  FAKE_CUDA=is_coherent=1,max_delay_us=300

test-fake-cuda: build/cpp/over-fake-cuda ## Run Python ranks through the CUDA half, over a stand-in driver
	$(OVER_FAKE_CUDA) $(BIN)/pytest -p no:cacheprovider tests/fake_cuda/check_python.py tests/links/test_stand_in.py $(ARGS)
	$(OVER_FAKE_CUDA) $(BIN)/pytest -p no:cacheprovider tests/engine/test_pipeline_stand_in.py \
	  -k "sender_may_write or received_memory or nobody_waits or tensors_are_kept or wait_leaves" $(ARGS)
	$(OVER_FAKE_CUDA) $(BIN)/python -m tests.kills --way slots --kills 6 --stops 1

kills-fake-cuda: build/cpp/over-fake-cuda ## The kills of `make kills`, of ranks that use that driver
	$(OVER_FAKE_CUDA) $(BIN)/python -m tests.kills --way slots --stops 0 $(ARGS)

.PHONY: build/cpp/over-fake-cuda
build/cpp/over-fake-cuda: $(VENV)/installed $(VENV)/cuda-headers
	$(call configure_cpp_tests,build/cpp,)
	$(BIN)/cmake --build build/cpp --target pipecomm_over_fake

soak: $(VENV)/installed ## Send 100,000 random messages between four ranks, check them and the memory
	$(BIN)/python -m tests.soak $(ARGS)

kills: $(VENV)/installed ## Kill a rank at 200 random moments, stop one at 20; the others must notice, or not
	$(BIN)/python -m tests.kills $(ARGS)

# The environment must have a CUDA torch, and pybind11, cmake, ninja, pytest, rich and numpy.
device-check: ## Build, test and time what needs a GPU, in the environment of PYTHON, within 8 minutes
	$(PYTHON) -m tests.device.check $(ARGS)

device-check-rehearsal: $(VENV)/installed ## The same without a GPU, with the host as the device
	$(BIN)/python -m tests.device.check --rehearse --limit 1500 --results build/rehearsal $(ARGS)

clean: ## Remove what was built
	rm -rf build dist out *.egg-info pipecomm/*.so $(VENV)/installed

distclean: clean ## Remove .venv too
	rm -rf $(VENV)

comma := ,
# $(1) build folder, $(2) sanitizers
define configure_cpp_tests
	$(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DPIPECOMM_CUDA=off \
	  -DPIPECOMM_BUILD_PYTHON=OFF -DPIPECOMM_BUILD_TESTS=ON -DPIPECOMM_SANITIZE=$(2)
endef
define run_cpp_tests
	$(call configure_cpp_tests,$(1),$(2))
	$(BIN)/cmake --build $(1)
	$(BIN)/ctest --test-dir $(1) --output-on-failure --timeout 120
endef

# The build tools and torch, which a build without isolation finds in place.
$(VENV)/tools: Makefile
	@tools/phase -l build/venv.log "Making $(VENV)" $(PYTHON) -m venv $(VENV)
	@tools/phase -l build/tools.log "Installing torch and the build tools" \
	  $(PIP) install $(TORCH) "setuptools>=77" "cmake>=3.24" ninja "pybind11>=2.13"
	@touch $@

# The stand-in driver of the tests is compiled against them; a toolkit has them too.
$(VENV)/cuda-headers: $(VENV)/tools
	@test -e "$${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime_api.h" || tools/phase -l build/headers.log \
	  "Installing CUDA's headers" $(PIP) install nvidia-cuda-runtime nvidia-cuda-crt
	@touch $@

$(VENV)/installed: $(VENV)/tools $(BUILD_SOURCES)
	@tools/phase -l build/install.log "Building pipecomm, installing what it needs" \
	  $(PIP) install -v --no-build-isolation -e ".[demo,test,lint]"
	@touch $@
