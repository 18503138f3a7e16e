#!/usr/bin/env bash
# Tests gpu_sanitize.sh without a GPU, with stand-ins for compute-sanitizer, nvidia-smi and the trainer. All programs
# must run, at most six of them at a time, and must be spread over all GPUs. A program that fails or hangs must count as
# failed, but one whose only hazards are in cuBLASLt's kernels must pass. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/cpu_trainer.sh
mkdir -p "$tmp/dev/test/lib" "$tmp/scripts" "$tmp/build" "$tmp/bin" "$tmp/running"
cp dev/test/gpu_sanitize.sh "$tmp/dev/test"
cp dev/test/lib/gpu_lines.sh "$tmp/dev/test/lib"
cp scripts/tally.sh "$tmp/scripts"

printf '#!/bin/sh\n[ "$1" != --list ] || exec "%s/train_fp8" "$@"\n' "$PWD" >"$tmp/train_fp8cu"
cp "$tmp/train_fp8cu" "$tmp/build/train_fp8cu_apart"
cp "$tmp/train_fp8cu" "$tmp/build/synth_stories"
printf '#!/bin/sh\necho "GPU 0: a"\necho "GPU 1: b"\n' >"$tmp/bin/nvidia-smi"
# This stand-in writes its GPU and the number of running programs to `seen`, then ends as compute-sanitizer does. With
# FAULTS=yes some programs fail and one hangs.
cat >"$tmp/bin/compute-sanitizer" <<'END'
#!/usr/bin/env bash
cd "$(dirname "$0")/.."
touch "running/$$"
echo "$CUDA_VISIBLE_DEVICES $(ls running | wc -l)" >>seen
sleep 0.3
rm "running/$$"
"$7" || exit 1
race() {  # the kernel of the first access, then those of the others
    echo "========= Error: Race reported between Write access at $1+0x90"
    for name in "${@:2}"; do echo "=========     and Read access at $name+0xa0 [8 hazards]"; done
}
case "${FAULTS:-}$*" in
yes*memcheck*blockwise*)
    echo "========= Invalid __global__ write of size 4 bytes"
    echo "========= ERROR SUMMARY: 1 error"
    exit 9 ;;
yes*racecheck*"rowwise "*)
    race nvjet_a nvjet_a nvjet_a; race nvjet_b nvjet_b
    echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
    exit 9 ;;
yes*racecheck*delayed*)
    race nvjet_a nvjet_a; race attention attention
    echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
    exit 9 ;;
yes*racecheck*blockwise*)
    race nvjet_a nvjet_a attention
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    exit 9 ;;
yes*racecheck*mxfp8*)
    echo "========= Error: Race reported between Write access at attention and Read access at nvjet_a"
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    exit 9 ;;
yes*initcheck*"tiny "*bf16*) sleep 100 ;;
yes*initcheck*mxfp8*) echo "error: out of memory"; exit 3 ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
END
chmod +x "$tmp"/bin/* "$tmp/train_fp8cu" "$tmp"/build/*

# Runs gpu_sanitize.sh with the variables "$@".
sanitize() { rm -f "$tmp/seen"; env "$@" PATH="$tmp/bin:$PATH" "$tmp/dev/test/gpu_sanitize.sh" >"$out" 2>&1; }

# Three tools run bf16, each recipe, MS-AMP's states and FP8 gradients; six programs have buffers apart.
n=$((3 * ($(./train_fp8 --list recipes | wc -l) + 3) + 6))
check "status 0 if all programs pass" sanitize FAULTS=
check "$n programs pass" equal "$(tail -n 1 "$out")" "$n passed, 0 failed"
check "$n programs print their summary" equal "$(grep -c '^compute-sanitizer .*ERROR SUMMARY: 0 errors' "$out")" $n
check "the first program's summary is printed first" equal "$(head -n 1 "$out")" \
    "compute-sanitizer memcheck, bf16: ========= ERROR SUMMARY: 0 errors"
check "every program has a log" equal "$(ls "$tmp/build/sanitize" | wc -l)" $n
check "each of two GPUs gets half of the programs" equal "$(cut -d' ' -f1 "$tmp/seen" | sort | uniq -c | xargs)" \
    "$(((n + 1) / 2)) 0 $((n / 2)) 1"
most=$(cut -d' ' -f2 "$tmp/seen" | sort -n | tail -n 1)
check "at most 6 programs run at a time, and at times several ($most)" [ "$most" -gt 1 -a "$most" -le 6 ]
sanitize CUDA_VISIBLE_DEVICES=3,5,GPU-7
check "the programs take turns on the GPUs of CUDA_VISIBLE_DEVICES" \
    equal "$(cut -d' ' -f1 "$tmp/seen" | sort | uniq -c | xargs)" "$((n / 3)) 3 $((n / 3)) 5 $((n / 3)) GPU-7"

start=$SECONDS
sanitize FAULTS=yes SANITIZE_SECONDS=4
check "status 1 if programs fail" equal $? 1
check "all programs end within 60 s, although one would hang for 100 s" [ $((SECONDS - start)) -lt 60 ]
check "the last line counts 6 failed" equal "$(tail -n 1 "$out")" "$((n - 6)) passed, 6 failed"
check "the failed programs are named" equal "$(grep '^FAILED: ' "$out")" "FAILED: compute-sanitizer memcheck, blockwise
FAILED: compute-sanitizer racecheck, delayed
FAILED: compute-sanitizer racecheck, blockwise
FAILED: compute-sanitizer racecheck, mxfp8 --fp8-emulate
FAILED: compute-sanitizer initcheck, bf16
FAILED: compute-sanitizer initcheck, mxfp8 --fp8-emulate"
check "the lines that compute-sanitizer printed for a failed program are shown" \
    holds "$out" "========= Invalid __global__ write of size 4 bytes"
check "the error that the trainer printed in a failed program is shown" holds "$out" "error: out of memory"
check "a killed program is reported as killed" holds "$out" "compute-sanitizer initcheck, bf16 was killed after 4 s"
check "a program whose only hazards are in cuBLASLt's kernels passes" holds "$out" \
    "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings), all in cuBLASLt's kernels"
finish
