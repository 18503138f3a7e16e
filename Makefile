# train_fp8 (CPU) needs gcc alone; train_fp8cu (GPU) needs the CUDA Toolkit. `make help` lists the targets.
CC ?= gcc
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CFLAGS = -std=gnu11 -O3 -march=native -fopenmp -ffp-contract=off -Wall -Wextra -Werror
SANITIZE = -std=gnu11 -O1 -g -march=native -fopenmp -ffp-contract=off -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all
# Code for Hopper; other GPUs of compute capability 8.0 and above run the portable kernels: make CUDA_ARCH=80
CUDA_ARCH ?= 90a
NVCCFLAGS = -std=c++17 -O3 -gencode=arch=compute_$(CUDA_ARCH),code=sm_$(CUDA_ARCH) -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings
CUDALIBS = -lcublasLt

HEADERS := $(wildcard llmc/*.h)
KERNELS := $(wildcard llmc/*.cuh)
UNIT_TESTS := $(patsubst dev/test/%.c,build/%,$(wildcard dev/test/test_*.c))
SANITIZED := $(patsubst dev/test/%.c,build/asan/%,$(wildcard dev/test/test_*.c))
BENCHES := $(patsubst dev/cuda/%.cu,build/bench_%,$(wildcard dev/cuda/*.cu))

.PHONY: all help test unit-tests asan headers gpu benches check-gpu clean

all: train_fp8 build/synth_stories $(if $(NVCC),train_fp8cu)

help:
	@echo "make             train_fp8, and train_fp8cu where nvcc is"
	@echo "make test        every test that needs no GPU (scripts/test.sh)"
	@echo "make check-gpu   every GPU test and bench (scripts/check_gpu.sh)"
	@echo "make asan        the unit tests under address and undefined-behaviour sanitizers"
	@echo "make headers     every header compiled alone"

train_fp8: train_fp8.c $(HEADERS)
	$(CC) $(CFLAGS) -o $@ $< -lm

train_fp8cu: train_fp8.cu $(HEADERS) $(KERNELS)
	$(NVCC) $(NVCCFLAGS) -o $@ $< $(CUDALIBS)

build/synth_stories: data/synth_stories.c $(HEADERS) | build
	$(CC) $(CFLAGS) -o $@ $< -lm

build/test_gpu: dev/test/test_gpu.cu train_fp8.cu dev/test/check.h dev/test/golden.h $(HEADERS) $(KERNELS) | build
	$(NVCC) $(NVCCFLAGS) -o $@ $< $(CUDALIBS)

build/compare_checkpoints: dev/test/compare_checkpoints.c dev/test/check.h $(HEADERS) | build
	$(CC) $(CFLAGS) -o $@ $< -lm

build/bench_%: dev/cuda/%.cu $(HEADERS) $(KERNELS) $(wildcard dev/cuda/*.cuh) | build
	$(NVCC) $(NVCCFLAGS) -o $@ $< $(CUDALIBS)

build/test_%: dev/test/test_%.c train_fp8.c $(wildcard dev/test/*.h) $(HEADERS) | build
	$(CC) $(CFLAGS) -o $@ $< -lm

build/asan/test_%: dev/test/test_%.c train_fp8.c $(wildcard dev/test/*.h) $(HEADERS) | build
	$(CC) $(SANITIZE) -o $@ $< -lm

unit-tests: $(UNIT_TESTS)
asan: $(SANITIZED)
gpu: train_fp8cu build/test_gpu build/compare_checkpoints
benches: $(BENCHES)

headers: | build
	@for h in $(HEADERS); do $(CC) $(CFLAGS) -x c -c -o build/header.o $$h && g++ -std=c++17 -march=native -Wall -Wextra -Werror -x c++ -c -o build/header.o $$h || exit 1; done
	@echo "$(words $(HEADERS)) headers compile alone"

test:
	scripts/test.sh

check-gpu:
	scripts/check_gpu.sh

build:
	@mkdir -p build/asan

clean:
	rm -rf build train_fp8 train_fp8cu
