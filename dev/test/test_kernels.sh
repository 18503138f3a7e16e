#!/usr/bin/env bash
# Tests the rule that CUDA_LAUNCH needs (llmc/gpu/cuda_utils.cuh), by reading llmc/*/*.cuh and train_fp8.cu:
# grid_dependency_wait() is the first statement of each kernel, and only CUDA_LAUNCH launches kernels. Ends with "N
# passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. scripts/tally.sh

# Prints one line for each kernel in files $@: "waits" if it begins with grid_dependency_wait(), else "early"; then its
# place.
kernels() {
    awk '/__global__/ { inside = 1; place = FILENAME ":" FNR }
         body { print ($1 == "grid_dependency_wait();" ? "waits" : "early"), place; body = inside = 0 }
         inside && /\{$/ { body = 1 }' "$@"
}

all=$(kernels llmc/*/*.cuh train_fp8.cu)
while read -r rule place; do
    check "the kernel at $place begins with grid_dependency_wait()" equal "$rule" waits
done <<<"$all"
check "the list has one kernel for each __global__" equal "$(wc -l <<<"$all")" \
    "$(cat llmc/*/*.cuh train_fp8.cu | grep -c __global__)"
check "no kernel is launched without CUDA_LAUNCH" \
    equal "$(grep -l '<<<.*>>>(' llmc/*/*.cuh train_fp8.cu | grep -v cuda_utils.cuh)" ""

# The test finds a kernel that breaks the rule.
tmp=$(mktemp)
trap 'rm -f "$tmp"' EXIT
sed '0,/grid_dependency_wait();/s//const int before = 0;/' llmc/kernels/embedding.cuh >"$tmp"
check "the test finds a kernel that does not wait" equal "$(kernels "$tmp" | grep -c '^early')" 1
finish
