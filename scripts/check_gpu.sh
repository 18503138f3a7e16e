#!/usr/bin/env bash
# Every GPU test and bench in one command, on a machine with a GPU; then what kernels stay below 85% of their ceiling, and why. Ends with
# "N passed, N failed". QUICK=1 leaves out the compute-sanitizer runs.
set -u
cd "$(dirname "$0")/.."
. scripts/install.sh
. scripts/tally.sh
take_none "usage: [QUICK=1] scripts/check_gpu.sh
Builds and runs every GPU test and bench, on a machine with a GPU. QUICK=1 leaves out the compute-sanitizer runs. Status 0: all passed." "$@"
install_tools
have_gpu || { echo "error: this needs a GPU with its driver, and nvcc; scripts/test.sh runs what needs neither" >&2; exit 1; }
find_nccl || exit 1

# A bench, whose lines (bench_record in dev/cuda/bench.cuh) are kept for the table at the end, behind its name.
lines=build/kernel_lines.txt
bench() {
    local own=$lines.one status
    rm -f "$own"
    BENCH_LINES=$own "$1"
    status=$?
    [ ! -e "$own" ] || sed "s/^/${1#build/bench_}\t/" "$own" >>"$lines"
    return $status
}

# The lines below 85% with their reasons, and how many there are of each kind. The copy is the ceiling itself.
ceilings() {
    awk -F '\t' '$2 != "copy" {
            lines++
            if (!$5) next
            if ($6 == "") without++
            under++
            printf "%-14s %-46s %-22s %5s%%  %s\n", $1, $2, $3, $4, $6 == "" ? "NO REASON STATED" : $6
        }
        END { printf "%d kernel timings: %d at their ceiling or within 15%% of it, %d below for the reasons above, %d below without a reason\n",
                  lines, lines - under, under - without, without
              exit !lines }' "$lines"
}

say "build"
check "make" make -s -j"$(nproc)" gpu benches train_fp8 build/synth_stories
: >"$lines"
for program in build/bench_*; do
    say "${program#build/bench_}"
    tally "${program#build/}" bench "$program"
done
say "whole model"
tally test_gpu build/test_gpu
tally test_fsdp_order build/test_fsdp_order
tally test_placement build/test_placement
tally gpu_runs dev/test/gpu_runs.sh
tally gpu_ranks dev/test/gpu_ranks.sh

# Whether every hazard in racecheck's output $1 is in a kernel of cuBLASLt (nvjet...), whose bulk copies to shared memory it takes for races.
only_in_cublaslt() {
    local all own
    all=$(sed -n 's/.*RACECHECK SUMMARY: \([0-9]*\) hazards\{0,1\} displayed.*/\1/p' "$1" | tail -n 1)
    own=$(grep -c 'Race reported between .* at nvjet_' "$1")
    [ "$own" -gt 0 ] && [ "$own" = "$all" ]
}

# Two steps of a small model under one tool of compute-sanitizer: $1 = tool, $2 = trainer; the rest is its model and options.
sanitize() {
    local tool=$1 trainer=$2 status note=""
    shift 2
    compute-sanitizer --tool "$tool" --print-limit 0 --error-exitcode 9 "$trainer" "$@" --train-data build/check_train.bin --batch-size 2 \
        --num-steps 2 --deterministic >build/sanitize.log 2>&1
    status=$?
    if [ $status -eq 9 ] && [ "$tool" = racecheck ] && only_in_cublaslt build/sanitize.log; then status=0 note=", all in cuBLASLt's kernels"; fi
    [ $status -eq 0 ] || { grep '^=========' build/sanitize.log | head -n 60; tail -n 3 build/sanitize.log; return 1; }
    echo "compute-sanitizer $tool, $trainer $*: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' build/sanitize.log | tail -n 1)$note"
}
say "compute-sanitizer"
if [ -n "${QUICK:-}" ]; then
    echo "skipped: QUICK is set"
elif ! command -v compute-sanitizer >/dev/null; then
    echo "skipped: compute-sanitizer is not installed"
else
    build/synth_stories --out build/check --bytes 200000 --seed 1 >/dev/null
    for tool in memcheck racecheck initcheck; do
        for precision in bf16 fp8; do check "compute-sanitizer $tool, $precision" sanitize "$tool" ./train_fp8cu tiny --sequence-length 160 --precision $precision; done
        for recipe in delayed rowwise rowwise_with_gw_hp blockwise "mxfp8 --fp8-emulate"; do  # blockwise needs sizes of 128: small has them
            check "compute-sanitizer $tool, $recipe" sanitize "$tool" ./train_fp8cu small --sequence-length 64 --precision fp8 --fp8-audit 2 --fp8-recipe $recipe
        done
    done
    # Bounds inside the one allocation of a run, with rows that end inside a tile.
    check "make train_fp8cu_apart" make -s build/train_fp8cu_apart
    for precision in bf16 fp8 "fp8 --fp8-recipe delayed" "fp8 --fp8-recipe rowwise" "fp8 --fp8-recipe rowwise_with_gw_hp" "fp8 --recompute layer"; do
        check "compute-sanitizer memcheck, ranges apart, $precision" sanitize memcheck build/train_fp8cu_apart small --sequence-length 1064 --precision $precision --val-data build/check_val.bin --sample-every 1 --sample-tokens 2
    done
fi
say "kernels below 85% of their ceiling"
check "lines of the benches" ceilings
finish
