#!/usr/bin/env bash
# The rule that CUDA_LAUNCH rests on (llmc/cuda/cuda_utils.cuh), read from the source: each kernel's first statement is grid_dependency_wait(), and CUDA_LAUNCH
# alone launches kernels. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. scripts/tally.sh

# Of the files: one line for each kernel, "waits" or "early", and where it is.
kernels() {
    awk '/__global__/ { inside = 1; place = FILENAME ":" FNR }
         body { print ($1 == "grid_dependency_wait();" ? "waits" : "early"), place; body = inside = 0 }
         inside && /\{$/ { body = 1 }' "$@"
}

all=$(kernels llmc/*/*.cuh train_fp8.cu)
while read -r rule place; do check "the kernel at $place begins with grid_dependency_wait()" equal "$rule" waits; done <<<"$all"
check "as many kernels as the word __global__" equal "$(wc -l <<<"$all")" "$(cat llmc/*/*.cuh train_fp8.cu | grep -c __global__)"
check "no kernel is launched past CUDA_LAUNCH" equal "$(grep -l '<<<.*>>>(' llmc/*/*.cuh train_fp8.cu | grep -v cuda_utils.cuh)" ""

# The rule finds a kernel that breaks it.
tmp=$(mktemp)
trap 'rm -f "$tmp"' EXIT
sed '0,/grid_dependency_wait();/s//const int before = 0;/' llmc/cuda/embedding.cuh >"$tmp"
check "a kernel that starts early is found" equal "$(kernels "$tmp" | grep -c '^early')" 1
finish
