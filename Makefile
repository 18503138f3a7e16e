# Both trainers need Open MPI; train_fp8 (CPU) else gcc alone, train_fp8cu (GPU) the CUDA Toolkit and NCCL. `make help` lists the targets.
CC ?= gcc
# Where mpi.h and libmpi are: only what both gcc and nvcc understand of what mpicc would pass.
MPICC ?= mpicc
MPI_CFLAGS := $(filter -I%,$(shell $(MPICC) --showme:compile))
MPI_LIBS := $(filter -L% -l%,$(shell $(MPICC) --showme:link))
ifeq ($(MPI_LIBS),)
$(error $(MPICC) is missing or is not Open MPI; install libopenmpi-dev and openmpi-bin, or run scripts/test.sh, which does)
endif
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
# gcc 13 counting costs leaves the tile of matmul() in memory where there is AVX-512: 1.7 times slower.
CFLAGS = -std=gnu11 -O3 -march=native -fvect-cost-model=cheap -fopenmp -pthread -ffp-contract=off -Wall -Wextra -Werror $(MPI_CFLAGS)
SANITIZE = -std=gnu11 -O1 -g -march=native -fopenmp -pthread -ffp-contract=off -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all $(MPI_CFLAGS)
# Code for Hopper; other GPUs of compute capability 8.0 and above run the portable kernels: make CUDA_ARCH=80
CUDA_ARCH ?= 90a
CUDA_TARGET = -gencode=arch=compute_$(CUDA_ARCH),code=sm_$(CUDA_ARCH) '-DCUDA_ARCH="$(CUDA_ARCH)"'
NVCCFLAGS = -std=c++17 -O3 $(CUDA_TARGET) -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings $(MPI_CFLAGS)
CUDALIBS = -lcublasLt
# Where NCCL is if not in the system's or CUDA's folders, for example PyTorch's: make NCCL_HOME=.../site-packages/nvidia/nccl
NCCL_HOME ?=
NCCL_CFLAGS = $(if $(NCCL_HOME),-I$(NCCL_HOME)/include)
NCCL_LIBS = $(if $(NCCL_HOME),-L$(NCCL_HOME)/lib -Xlinker -rpath=$(NCCL_HOME)/lib) -l:libnccl.so.2 $(MPI_LIBS)

HEADERS := $(wildcard llmc/*/*.h)
# What every GPU program is made of beside its own file.
GPU_PARTS := $(HEADERS) $(wildcard llmc/*/*.cuh) build/cuda_arch
UNIT_TESTS := $(patsubst dev/test/%.c,build/%,$(wildcard dev/test/test_*.c))
SANITIZED := $(patsubst dev/test/%.c,build/asan/%,$(wildcard dev/test/test_*.c))
BENCHES := $(patsubst dev/cuda/%.cu,build/bench_%,$(wildcard dev/cuda/*.cu))

.PHONY: all help test unit-tests asan headers gpu benches check-gpu check-faults clean FORCE

all: train_fp8 build/synth_stories $(if $(NVCC),train_fp8cu)

help:
	@echo "make             train_fp8, and train_fp8cu where nvcc is"
	@echo "make test        every test that needs no GPU (scripts/test.sh)"
	@echo "make check-gpu   every GPU test and bench (scripts/check_gpu.sh)"
	@echo "make check-faults crashes, bad disks, damage, hostile input (dev/fault): 35 minutes; QUICK=1 takes 1"
	@echo "make asan        the unit tests under address and undefined-behaviour sanitizers"
	@echo "make headers     every header compiled alone"

train_fp8: train_fp8.c $(HEADERS)
	$(CC) $(CFLAGS) -o $@ $< $(MPI_LIBS) -lm

# Holds what GPU programs were compiled for last: another CUDA_ARCH compiles them anew.
build/cuda_arch: FORCE | build
	@[ "$$(cat $@ 2>/dev/null)" = "$(CUDA_ARCH)" ] || echo "$(CUDA_ARCH)" >$@

train_fp8cu: train_fp8.cu $(GPU_PARTS)
	$(NVCC) $(NVCCFLAGS) $(NCCL_CFLAGS) -o $@ $< $(CUDALIBS) $(NCCL_LIBS)

# Every range of GPU memory an allocation of its own, for memcheck (arena.h).
build/train_fp8cu_apart: train_fp8.cu $(GPU_PARTS) | build
	$(NVCC) $(NVCCFLAGS) -DARENA_APART $(NCCL_CFLAGS) -o $@ $< $(CUDALIBS) $(NCCL_LIBS)

build/synth_stories: data/synth_stories.c $(HEADERS) | build
	$(CC) $(CFLAGS) -o $@ $< $(MPI_LIBS) -lm

build/test_gpu: dev/test/test_gpu.cu train_fp8.cu dev/test/check.h dev/test/golden.h dev/test/scratch.h $(GPU_PARTS) | build
	$(NVCC) $(NVCCFLAGS) $(NCCL_CFLAGS) -o $@ $< $(CUDALIBS) $(NCCL_LIBS)

# Where everything lies in GPU memory, on the host alone.
build/test_placement: dev/test/test_placement.cu train_fp8.cu dev/test/check.h $(GPU_PARTS) | build
	$(NVCC) $(NVCCFLAGS) $(NCCL_CFLAGS) -o $@ $< $(CUDALIBS) $(NCCL_LIBS)

# The order of all ranks' streams, on the host alone: the test's own functions stand in for these.
STAND_INS := cudaStreamSynchronize cudaStreamQuery cudaStreamCreateWithFlags cudaStreamDestroy \
	cudaEventCreateWithFlags cudaEventDestroy cudaEventQuery cudaEventRecord cudaStreamWaitEvent cudaMemsetAsync cudaMemcpyAsync cudaGetDevice cudaDeviceGetAttribute cudaLaunchKernelExC \
	ncclGroupStart ncclGroupEnd ncclCommGetAsyncError ncclAllGather ncclReduceScatter ncclAllReduce \
	cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle cudaGetDriverEntryPointByVersion \
	MPI_Allgather MPI_Allreduce MPI_Type_contiguous MPI_Type_commit MPI_Type_free
build/test_fsdp_order: dev/test/test_fsdp_order.cu dev/test/check.h dev/test/order_model.h $(GPU_PARTS) | build
	$(NVCC) $(NVCCFLAGS) $(NCCL_CFLAGS) -o $@ $< $(addprefix -Xlinker --wrap=,$(STAND_INS)) $(CUDALIBS) $(NCCL_LIBS)

build/compare_checkpoints: dev/test/compare_checkpoints.c dev/test/check.h $(HEADERS) | build
	$(CC) $(CFLAGS) -o $@ $< $(MPI_LIBS) -lm

build/bench_%: dev/cuda/%.cu $(GPU_PARTS) $(wildcard dev/cuda/*.cuh) | build
	$(NVCC) $(NVCCFLAGS) -o $@ $< $(CUDALIBS)

# fsdp.cuh knows NCCL.
build/bench_fsdp: NVCCFLAGS += $(NCCL_CFLAGS)
build/bench_fsdp: CUDALIBS += $(NCCL_LIBS)

build/test_%: dev/test/test_%.c train_fp8.c $(wildcard dev/test/*.h) $(HEADERS) | build
	$(CC) $(CFLAGS) -o $@ $< $(MPI_LIBS) -lm

build/asan/test_%: dev/test/test_%.c train_fp8.c $(wildcard dev/test/*.h) $(HEADERS) | build
	$(CC) $(SANITIZE) -o $@ $< $(MPI_LIBS) -lm

build/fault/inject.so: dev/fault/inject.c | build/fault
	$(CC) -std=gnu11 -O1 -Wall -Wextra -Werror -shared -fPIC -o $@ $< -ldl -lpthread

# The fuzz targets in one program without libFuzzer, and each with it.
build/fault/replay: dev/fault/replay.c $(wildcard dev/fault/fuzz*) $(HEADERS) | build/fault
	$(CC) $(SANITIZE) -o $@ $< $(MPI_LIBS) -lm

FUZZ_CC ?= clang
FUZZ_CFLAGS = -std=gnu11 -O1 -g -Wall -Wextra -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(MPI_CFLAGS)
build/fault/fuzz_%: dev/fault/fuzz_%.c dev/fault/fuzz.h $(HEADERS) | build/fault
	$(FUZZ_CC) $(FUZZ_CFLAGS) -o $@ $< $(MPI_LIBS) -lm

unit-tests: $(UNIT_TESTS)
asan: $(SANITIZED)
gpu: train_fp8cu build/test_gpu build/test_fsdp_order build/test_placement build/compare_checkpoints
benches: $(BENCHES)

headers: | build
	@for h in $(HEADERS); do $(CC) $(CFLAGS) -x c -c -o build/header.o $$h && g++ -std=c++17 -march=native -Wall -Wextra -Werror $(MPI_CFLAGS) -x c++ -c -o build/header.o $$h || exit 1; done
	@echo "$(words $(HEADERS)) headers compile alone"

test:
	scripts/test.sh

check-gpu:
	scripts/check_gpu.sh

check-faults:
	python3 dev/fault/campaign.py $(if $(QUICK),--quick) $(if $(MINUTES),--minutes $(MINUTES))

FORCE:

build:
	@mkdir -p build/asan

build/fault:
	@mkdir -p $@

clean:
	rm -rf build train_fp8 train_fp8cu
