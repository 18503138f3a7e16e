# Both trainers need Open MPI. Beside it train_fp8 (CPU) needs gcc, and train_fp8cu (GPU) the CUDA Toolkit and NCCL.
# `make help` lists the main targets.
CC ?= gcc
# Include and library folders of Open MPI: only those flags of mpicc that both gcc and nvcc understand.
MPICC ?= mpicc
MPI_CFLAGS := $(filter -I%,$(shell $(MPICC) --showme:compile))
MPI_LIBS := $(filter -L% -l%,$(shell $(MPICC) --showme:link))
ifeq ($(MPI_LIBS),)
$(error $(MPICC) is missing or is not Open MPI; install libopenmpi-dev and openmpi-bin (scripts/test.sh does))
endif
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
# The compiler in the commands of GPU targets: without nvcc they fail with this error.
CUDA_COMPILER = $(or $(NVCC),$(error no nvcc: $@ needs the CUDA Toolkit; make train_fp8 builds the CPU trainer))
WARNINGS = -Wall -Wextra -Werror
# With its default vector cost model and AVX-512, gcc 13 keeps the tile of matmul() in memory, not in registers: 1.7
# times slower. clang does not know the option.
COST_MODEL := $(shell $(CC) -fvect-cost-model=cheap -Werror -E -x c /dev/null >/dev/null 2>&1 && \
	echo -fvect-cost-model=cheap)
CFLAGS = -std=gnu11 -O3 -march=native $(COST_MODEL) -fopenmp -pthread -ffp-contract=off \
	$(WARNINGS) $(MPI_CFLAGS)
# -Og compiles in half the time of -O1. It also inlines less, and inlining hides pointers to stack frames that are gone.
SANITIZE = -std=gnu11 -Og -g1 -march=native -fopenmp -pthread -ffp-contract=off $(WARNINGS) \
	-fsanitize=address,undefined -fno-sanitize-recover=all $(MPI_CFLAGS)
LIBS = $(MPI_LIBS) -lm
# Code for Hopper. Other GPUs of compute capability 8.0 and above run the portable kernels, in a program that is built
# for them: make CUDA_ARCH=80 for compute capability 8.0
CUDA_ARCH ?= 90a
CUDA_TARGET = -gencode=arch=compute_$(CUDA_ARCH),code=sm_$(CUDA_ARCH) '-DCUDA_ARCH="$(CUDA_ARCH)"'
# -O1 is for code of the host, which mostly enqueues work. nvcc optimizes kernels as with -O3.
NVCCFLAGS = -std=c++17 -O1 $(CUDA_TARGET) -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings $(MPI_CFLAGS) \
	$(NCCL_CFLAGS)
# NCCL where it is in no system folder, for example PyTorch's: make NCCL_HOME=.../site-packages/nvidia/nccl
NCCL_HOME ?=
NCCL_CFLAGS = $(if $(NCCL_HOME),-I$(NCCL_HOME)/include)
NCCL_LIBS = $(if $(NCCL_HOME),-L$(NCCL_HOME)/lib -Xlinker -rpath=$(NCCL_HOME)/lib) -l:libnccl.so.2
CUDA_LIBS = -lcublasLt $(NCCL_LIBS) $(MPI_LIBS)
BENCH_LIBS = -lcublasLt

# A compile writes the names of the headers that it has read to build/deps/TARGET.d (TARGET without build/). So make
# knows what to rebuild after a header has changed. A target depends on its own .d: if that is missing, make compiles.
DEPENDENCIES = -MMD -MP -MT $@ -MF build/deps/$(@:build/%=%).d

HEADERS := $(wildcard llmc/*/*.h)
CUDA_HEADERS := $(wildcard llmc/*/*.cuh)
UNIT_TESTS := $(patsubst dev/test/%.c,build/%,$(wildcard dev/test/test_*.c))
SANITIZED := $(patsubst dev/test/%.c,build/asan/%,$(wildcard dev/test/test_*.c))
GPU_TESTS := $(patsubst dev/test/%.cu,build/%,$(wildcard dev/test/test_*.cu))
BENCHES := $(patsubst dev/cuda/%.cu,build/bench_%,$(wildcard dev/cuda/*.cu))
HEADER_CHECKS := $(HEADERS:llmc/%=build/headers/%.ok) build/headers/cxx.ok
CUDA_HEADER_CHECKS := $(CUDA_HEADERS:llmc/%=build/headers/%.ok)
# Programs that only a GPU can run. make check-gpu builds them all.
GPU_PROGRAMS := $(wildcard dev/cuda/*.cu dev/test/lib/*.cu) dev/test/test_gpu.cu gradient_bias.cu
GPU_SOURCES := $(HEADERS) $(CUDA_HEADERS) $(wildcard dev/cuda/*.cuh dev/test/lib/*.h dev/test/lib/*.cuh) train_fp8.cu \
	$(GPU_PROGRAMS)
# GPU tests that need no GPU: they run host code alone.
HOST_TESTS := build/test_fsdp_order build/test_placement
FUZZ_TARGETS := $(patsubst dev/fault/%.c,build/fault/%,$(wildcard dev/fault/fuzz_*.c))
COMPILED := train_fp8 train_fp8cu build/train_fp8cu_apart build/gradient_bias build/gradient_biascu \
	build/synth_stories build/compare_checkpoints build/faulty_rank build/faulty_rankcu build/sums_fp8 \
	build/sums_fp8cu $(UNIT_TESTS) $(SANITIZED) $(GPU_TESTS) $(BENCHES) $(HEADER_CHECKS) $(CUDA_HEADER_CHECKS) \
	build/headers/programs.ok build/fault/replay $(FUZZ_TARGETS)
DEPENDENCY_FILES := $(patsubst build/%,build/deps/%.d,$(filter build/%,$(COMPILED))) \
	build/deps/train_fp8.d build/deps/train_fp8cu.d
FOLDERS := $(sort $(patsubst %/,%,$(dir $(filter build/%,$(COMPILED)) $(DEPENDENCY_FILES))))

.PHONY: all help test unit-tests asan headers cuda-headers gpu benches bench-syntax check-gpu check-all check-faults \
	format check-format clean FORCE

all: train_fp8 build/synth_stories $(if $(NVCC),train_fp8cu)
	@$(if $(NVCC),:,echo "train_fp8cu (GPU) is left out: there is no nvcc. It needs the CUDA Toolkit and NCCL.")

help:
	@echo "make               train_fp8, build/synth_stories, and train_fp8cu if nvcc is installed"
	@echo "make test          every test that needs no GPU (scripts/test.sh)"
	@echo "make check-all     make test with all cases, then make check-faults: 100 minutes"
	@echo "make test-X        one test: dev/test/test_X.c, .cu, .sh or .py, for example make test-options"
	@echo "make check-gpu     every GPU test and bench (scripts/check_gpu.sh)"
	@echo "make build/gradient_bias, build/gradient_biascu  what scripts/gradient_bias.sh runs, on the CPU and on the GPU"
	@echo "make build/bench_X the check and bench dev/cuda/X.cu; build/bench_X runs it on a GPU"
	@echo "make check-faults  crashes, bad disks, damage, hostile input (dev/fault): 35 minutes; with QUICK=1 one minute"
	@echo "make asan          builds the unit tests with address and undefined-behaviour sanitizers: build/asan/test_X"
	@echo "make headers       every .h compiled alone, as C and as C++"
	@echo "make cuda-headers  every .cuh compiled alone, by nvcc"
	@echo "make format        clang-format over all C and CUDA code; make check-format changes nothing"
	@echo "dev/README.md says what each test needs and how long it takes."

# Names the sources of a trainer in its logs: equal sources have equal names on all machines. make compiles nothing
# because the name has changed: a program has the name of the sources as they were when it was compiled.
BUILD = $(shell cat $(sort $(HEADERS) $(CUDA_HEADERS) train_fp8.c train_fp8.cu) | sha256sum | cut -c1-12)
NAMED = '-DTRAINER_BUILD="$(BUILD)"'

# ---- C

train_fp8: train_fp8.c build/deps/train_fp8.d | $(FOLDERS)
	$(CC) $(CFLAGS) $(NAMED) $(DEPENDENCIES) -o $@ $< $(LIBS)

build/gradient_bias: gradient_bias.c build/deps/gradient_bias.d | $(FOLDERS)
	$(CC) $(CFLAGS) $(DEPENDENCIES) -o $@ $< $(LIBS)

build/synth_stories: data/synth_stories.c build/deps/synth_stories.d | $(FOLDERS)
	$(CC) $(CFLAGS) $(DEPENDENCIES) -o $@ $< $(LIBS)

build/compare_checkpoints: dev/test/lib/compare_checkpoints.c build/deps/compare_checkpoints.d | $(FOLDERS)
	$(CC) $(CFLAGS) $(DEPENDENCIES) -o $@ $< $(LIBS)

build/faulty_rank build/sums_fp8: build/%: dev/test/lib/%.c build/deps/%.d | $(FOLDERS)
	$(CC) $(CFLAGS) $(DEPENDENCIES) -o $@ $< $(LIBS)
# It trains a few steps of tiny. -Og compiles in a fifth of the time.
build/faulty_rank: CFLAGS := $(CFLAGS) -Og

build/test_%: dev/test/test_%.c build/deps/test_%.d | $(FOLDERS)
	$(CC) $(CFLAGS) $(DEPENDENCIES) -o $@ $< $(LIBS)

build/asan/test_%: dev/test/test_%.c build/deps/asan/test_%.d | $(FOLDERS)
	$(CC) $(SANITIZE) $(DEPENDENCIES) -o $@ $< $(LIBS)

# ---- CUDA

# Holds the CUDA_ARCH of the last compile. If CUDA_ARCH changes, all GPU programs are compiled again. Written while make
# reads this file: as a target that is always made it would put off those that need it, the slowest ones, to the end.
$(shell [ "$$(cat build/cuda_arch 2>/dev/null)" = "$(CUDA_ARCH)" ] || \
	{ mkdir -p build && echo "$(CUDA_ARCH)" >build/cuda_arch; })
build/cuda_arch: ;

train_fp8cu: train_fp8.cu build/cuda_arch build/deps/train_fp8cu.d | $(FOLDERS)
	$(CUDA_COMPILER) $(NVCCFLAGS) $(NAMED) $(DEPENDENCIES) -o $@ $< $(CUDA_LIBS)

build/gradient_biascu: gradient_bias.cu build/cuda_arch build/deps/gradient_biascu.d | $(FOLDERS)
	$(CUDA_COMPILER) $(NVCCFLAGS) $(DEPENDENCIES) -o $@ $< $(CUDA_LIBS)

build/faulty_rankcu build/sums_fp8cu: build/%cu: dev/test/lib/%.cu build/cuda_arch build/deps/%cu.d | $(FOLDERS)
	$(CUDA_COMPILER) $(NVCCFLAGS) $(DEPENDENCIES) -o $@ $< $(CUDA_LIBS)

# In this program each range of GPU memory is an allocation of its own, so that memcheck finds overruns (arena.h).
build/train_fp8cu_apart: train_fp8.cu build/cuda_arch build/deps/train_fp8cu_apart.d | $(FOLDERS)
	$(CUDA_COMPILER) $(NVCCFLAGS) $(NAMED) -DARENA_APART $(DEPENDENCIES) -o $@ $< $(CUDA_LIBS)

build/test_%: dev/test/test_%.cu build/cuda_arch build/deps/test_%.d | $(FOLDERS)
	$(CUDA_COMPILER) $(NVCCFLAGS) $(DEPENDENCIES) -o $@ $< $(STAND_INS:%=-Xlinker --wrap=%) $(CUDA_LIBS)

# Their kernels never run, so they are neither optimized nor assembled: a fifth of the time.
$(HOST_TESTS): CUDA_TARGET = -gencode=arch=compute_$(CUDA_ARCH),code=compute_$(CUDA_ARCH) '-DCUDA_ARCH="$(CUDA_ARCH)"' \
	-Xcicc -O0

# test_fsdp_order checks the order of all ranks' streams on the host: it replaces these functions by its own.
build/test_fsdp_order: STAND_INS := cudaStreamSynchronize cudaStreamQuery cudaStreamCreateWithFlags cudaStreamDestroy \
	cudaEventCreate cudaEventCreateWithFlags cudaEventDestroy cudaEventQuery cudaEventRecord cudaStreamWaitEvent \
	cudaMallocHost cudaFreeHost cudaMemsetAsync cudaMemset2DAsync cudaMemcpy2DAsync cudaMemcpyAsync cudaGetDevice \
	cudaDeviceGetAttribute cudaLaunchKernelExC \
	ncclGroupStart ncclGroupEnd ncclCommGetAsyncError ncclAllGather ncclReduceScatter ncclAllReduce \
	ncclSend ncclRecv \
	cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle cudaGetDriverEntryPointByVersion \
	MPI_Allgather MPI_Allreduce MPI_Barrier MPI_Type_contiguous MPI_Type_commit MPI_Type_free

build/bench_%: dev/cuda/%.cu build/cuda_arch build/deps/bench_%.d | $(FOLDERS)
	$(CUDA_COMPILER) $(NVCCFLAGS) $(DEPENDENCIES) -o $@ $< $(BENCH_LIBS)

# Only this bench needs NCCL: transport.cuh includes it.
build/bench_fsdp: BENCH_LIBS = $(CUDA_LIBS)

# ---- each header alone; build/headers/FILE.ok says that it compiled

build/headers/%.h.ok: llmc/%.h build/deps/headers/%.h.ok.d | $(FOLDERS)
	@$(CC) $(CFLAGS) -Wno-unused-function $(DEPENDENCIES) -x c -fsyntax-only $<
	@touch $@

# All headers in one: C shows what a header forgets to include, so here only the language is tested.
build/headers/cxx.ok: $(HEADERS) | $(FOLDERS)
	@printf '#include "%s"\n' $(HEADERS) | g++ -std=c++17 -march=native $(WARNINGS) $(MPI_CFLAGS) -I. -x c++ \
		-fsyntax-only -
	@touch $@

# nvcc parses kernels and host code and compiles neither: a twentieth of the time.
PARSE = $(CUDA_COMPILER) $(NVCCFLAGS) --fdevice-syntax-only --cuda $(DEPENDENCIES) -o /dev/null

# Warning 177 is about functions that nothing calls, of which a header alone has many.
build/headers/%.cuh.ok: llmc/%.cuh build/cuda_arch build/deps/headers/%.cuh.ok.d | $(FOLDERS)
	@$(PARSE) -Xcompiler -Wno-unused-function -diag-suppress 177 -x cu $<
	@touch $@

# All GPU_PROGRAMS in one translation unit: so the system's headers are parsed once. Each program is in a namespace of
# its own with a copy of the headers of llmc/ that it includes, and has no macro of the program before it. So an include
# that it lacks is found. The texts are copied, because nvcc reports no unused function of an included file; as deep in
# the tree as the deepest program, so that no ../ leads out of it.
build/headers/programs.ok: build/cuda_arch build/deps/headers/programs.ok.d $(GPU_PROGRAMS) | $(FOLDERS)
	@mkdir -p build/headers/programs
	@sed -n 's/^ *# *define *\(\w*\).*/#undef \1/p' $(GPU_SOURCES) | sort -u >build/headers/programs/undef.h
	@{ sed -n 's/^#include \(<.*>\).*/#if __has_include(\1)\n#include \1\n#endif/p' $(GPU_SOURCES); \
		for program in $(GPU_PROGRAMS); do \
		printf '#include "undef.h"\nnamespace %s_program {\n' $$(basename $$program .cu); cat $$program; echo '}'; \
		done; } >build/headers/programs/all.cu
	@$(PARSE) -DOMPI_SKIP_MPICXX=1 -I. -Idev/cuda -Idev/test -Idev/test/lib build/headers/programs/all.cu
	@touch $@

# ---- faults and hostile input

build/fault/inject.so: dev/fault/inject.c | $(FOLDERS)
	$(CC) -std=gnu11 -O1 $(WARNINGS) -shared -fPIC -o $@ $< -ldl -lpthread

# build/fault/replay runs all fuzz targets without libFuzzer. build/fault/fuzz_X is one target, with libFuzzer.
build/fault/replay: dev/fault/replay.c build/deps/fault/replay.d | $(FOLDERS)
	$(CC) $(SANITIZE) $(DEPENDENCIES) -o $@ $< $(LIBS)

FUZZ_CC ?= clang
FUZZ_CFLAGS = -std=gnu11 -O1 -g -Wall -Wextra -fsanitize=fuzzer,address,undefined \
	-fno-sanitize-recover=all $(MPI_CFLAGS)
build/fault/fuzz_%: dev/fault/fuzz_%.c build/deps/fault/fuzz_%.d | $(FOLDERS)
	$(FUZZ_CC) $(FUZZ_CFLAGS) $(DEPENDENCIES) -o $@ $< $(LIBS)

# ---- groups

unit-tests: $(UNIT_TESTS)
asan: $(SANITIZED)
gpu: train_fp8cu $(HOST_TESTS)
benches: $(BENCHES) build/test_gpu
bench-syntax: build/headers/programs.ok

headers: $(HEADER_CHECKS)
	@echo "$(words $(HEADERS)) headers compile alone"

cuda-headers: $(CUDA_HEADER_CHECKS)
	@echo "$(words $(CUDA_HEADERS)) CUDA headers compile alone"

test:
	scripts/test.sh

# One test. Before a script, make builds the programs that scripts run: the CPU trainer and two tools.
test-%: FORCE
	@export PATH="$$PWD/dev/test/lib/path:$$PATH" outputs=$$(mktemp -d); trap 'rm -rf "$$outputs"' EXIT; \
	if [ -e dev/test/test_$*.c ] || [ -e dev/test/test_$*.cu ]; then $(MAKE) -s build/test_$* && build/test_$*; \
	elif [ -e dev/test/test_$*.sh ] || [ -e dev/test/test_$*.py ]; then \
		$(MAKE) -s train_fp8 build/synth_stories build/compare_checkpoints || exit 1; \
		if [ -e dev/test/test_$*.sh ]; then bash dev/test/test_$*.sh; else python3 dev/test/test_$*.py; fi; \
	else echo "error: there is no dev/test/test_$*.c, .cu, .sh or .py" >&2; exit 1; fi

check-gpu:
	scripts/check_gpu.sh

# The cases that take minutes, too.
check-all:
	ALL=1 scripts/test.sh
	$(MAKE) check-faults

check-faults:
	python3 dev/fault/campaign.py $(if $(QUICK),--quick) $(if $(MINUTES),--minutes $(MINUTES))

format:
	dev/format.sh

check-format:
	dev/format.sh --check

FORCE:

$(FOLDERS):
	@mkdir -p $@

clean:
	rm -rf build train_fp8 train_fp8cu

$(DEPENDENCY_FILES): ;
-include $(wildcard $(DEPENDENCY_FILES))
