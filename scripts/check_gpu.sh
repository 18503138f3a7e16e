#!/usr/bin/env bash
# Runs every GPU test and bench: see --help. Then lists the timings of kernels below 85% of their ceiling, with their
# reasons, if stated. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/.."
. scripts/install.sh
. scripts/tally.sh
take_none "usage: [QUICK=1] scripts/check_gpu.sh
Builds and runs every GPU test and bench, on a machine with a GPU. QUICK=1 skips the compute-sanitizer runs.
Writes build/gpu_result.txt (GPU, driver, commit, date, counts, failures, bench figures), which you can send us.
Exit status 0: no test failed." "$@"
install_tools
if ! have_gpu; then
    echo "error: check_gpu.sh needs a GPU with its driver, and nvcc; scripts/test.sh runs the tests without a GPU" >&2
    exit 1
fi
find_nccl || exit 1

# Runs the bench $1. Puts the bench's name in front of each line that bench_record (dev/cuda/bench.cuh) writes, and
# appends these lines to $lines, for the list at the end.
lines=build/kernel_lines.txt
bench() {
    local own=$lines.one status
    rm -f "$own"
    BENCH_LINES=$own "$1"
    status=$?
    [ ! -e "$own" ] || sed "s/^/${1#build/bench_}\t/" "$own" >>"$lines"
    return $status
}

# Prints the result file. $1 the whole output of the tests.
result() {
    echo "date: $(date -u +%Y-%m-%dT%H:%MZ)"
    echo "commit: $(git rev-parse HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null ||
        echo " changed")"
    nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader | sed 's/^/GPU: /'
    nvcc --version | grep release
    echo "result: $passed passed, $failed failed, $skipped skipped"
    grep -aE '^FAILED|^ *skipped:|^[a-z_0-9/]+: [0-9]+ passed, [0-9]+ failed' "$1"
    echo "bench, case, shape, percent of the ceiling, below 85%, reason:"
    cat "$lines"
}

# Prints the timings below 85% of their ceiling with their reasons, and counts all timings. Leaves out lines named
# "copy", which measure the ceiling itself. Fails if there are no timings.
ceilings() {
    awk -F '\t' '$2 != "copy" {
            lines++
            if (!$5) next
            if ($6 == "") without++
            under++
            printf "%-14s %-46s %-22s %5s%%  %s\n", $1, $2, $3, $4, $6 == "" ? "NO REASON STATED" : $6
        }
        END { printf "%d kernel timings: %d reach 85%% of their ceiling, ", lines, lines - under
              printf "%d are below for the reasons above, %d are below without a reason\n", under - without, without
              exit !lines }' "$lines"
}

mkdir -p build
output=build/check_gpu.txt
exec 3>&1 > >(exec tee "$output") 2>&1
say "build"
check "make" make -s -j"$(nproc)" gpu benches build/gradient_biascu cuda-headers train_fp8 \
    build/synth_stories build/compare_checkpoints
: >"$lines"
for program in build/bench_*; do
    say "${program#build/bench_}"
    tally "${program#build/}" bench "$program"
done
say "GPU tests"
for name in test_gpu test_fsdp_order test_placement; do tally $name build/$name; done
check "make programs of tests" make -s -j3 build/sums_fp8 build/sums_fp8cu build/faulty_rankcu
for name in gpu_runs gpu_bits gpu_ranks gpu_faults; do tally $name dev/test/$name.sh; done

say "compute-sanitizer"
if [ -n "${QUICK:-}" ]; then
    echo "skipped: QUICK is set"
elif ! command -v compute-sanitizer >/dev/null; then
    echo "skipped: compute-sanitizer is not installed"
else
    check "make train_fp8cu_apart" make -s build/train_fp8cu_apart
    tally gpu_sanitize dev/test/gpu_sanitize.sh
fi
say "kernels below 85% of their ceiling"
check "the benches have written timings" ceilings
exec >&3 2>&1
wait
result "$output" >build/gpu_result.txt
echo "build/gpu_result.txt has the result in one file"
finish
