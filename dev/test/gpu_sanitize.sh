#!/usr/bin/env bash
# Trains the models tiny and small for two steps under compute-sanitizer, at most six programs at a time: ./train_fp8cu
# under memcheck, racecheck and initcheck, build/train_fp8cu_apart under memcheck. Each program has its own log in
# build/sanitize/ and is killed after SANITIZE_SECONDS (default 900). Also needs build/synth_stories. Ends with "N
# passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/gpu_lines.sh
at_once=6
limit=${SANITIZE_SECONDS:-900}
logs=build/sanitize
names=() pids=()

IFS=, read -ra gpus <<<"$(visible_gpus)"  # the programs are spread over them
[ ${#gpus[@]} -gt 0 ] || gpus=(0)
trap 'kill $(jobs -rp) 2>/dev/null' EXIT
trap 'exit 130' INT TERM

# Waits until fewer than $at_once programs run, then starts one. $1 tool, $2 what the trainer does (for the name of the
# check), $3 trainer, then the model and options.
start() {
    local tool=$1 trainer=$3 number=${#names[@]}
    names+=("compute-sanitizer $tool, $2")
    shift 3
    while [ "$(jobs -rp | wc -l)" -ge $at_once ]; do sleep 0.1; done
    set -- --tool "$tool" --print-limit 0 --error-exitcode 9 "$trainer" "$@" --train-data build/check_train.bin \
        --batch-size 2 --num-steps 2 --deterministic
    CUDA_VISIBLE_DEVICES=${gpus[number % ${#gpus[@]}]} timeout -k 10 "$limit" compute-sanitizer "$@" \
        >"$logs/$number.log" 2>&1 </dev/null &
    pids+=($!)
}

# True if racecheck's log $1 has hazards, and all accesses of all hazards are in kernels of cuBLASLt (nvjet...):
# racecheck takes these kernels' bulk copies to shared memory for races. Each hazard begins with "Race reported between"
# and an access. The other accesses begin with "and", on lines of their own or on the first line.
only_in_cublaslt() {
    awk '/Race reported between/ { races++ }
        /Race reported between|^=+ +and / { others += gsub(/ access at /, "&") - gsub(/ access at nvjet_/, "&") }
        /RACECHECK SUMMARY: [0-9]+ hazards? displayed/ { sub(/.*SUMMARY: /, ""); displayed = $1 }
        END { exit !(races > 0 && races == displayed && others == 0) }' "$1"
}

# Waits for program number $1. Prints its summary, or prints how it failed and returns 1.
result() {
    local name=${names[$1]} log=$logs/$1.log status note=""
    wait "${pids[$1]}"
    status=$?
    case $name in
    *racecheck*)
        if [ $status -eq 9 ] && only_in_cublaslt "$log"; then status=0 note=", all in cuBLASLt's kernels"; fi ;;
    esac
    if [ $status -ne 0 ]; then
        grep -a '^error' "$log"
        grep -a '^=========' "$log" | head -n 60
        tail -n 3 "$log"
        case $status in 124 | 137) echo "$name was killed after $limit s" ;; esac
        return 1
    fi
    echo "$name: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1)$note"
}

rm -rf "$logs"
mkdir -p "$logs"
build/synth_stories --out build/check --bytes 200000 --seed 1 >/dev/null
# The runs of "tiny" have recipe tensorwise. Hopper has no GEMMs for mxfp8.
mapfile -t recipes < <(./train_fp8cu --list recipes |
    sed '/^tensorwise$/d; s/^mxfp8$/& --fp8-emulate/; s/^tensorwise_bounded$/& --fast/')
for tool in memcheck racecheck initcheck; do
    for precision in bf16 fp8; do
        start $tool $precision ./train_fp8cu tiny --sequence-length 160 --precision $precision
    done
    # blockwise needs sizes that are multiples of 128. The model "small" has them.
    for recipe in "${recipes[@]}"; do
        start $tool "$recipe" ./train_fp8cu small --sequence-length 64 --precision fp8 --fp8-audit 2 \
            --fp8-recipe $recipe
    done
    start $tool "MS-AMP's states" ./train_fp8cu tiny --sequence-length 160 --precision fp8 --optimizer-state msamp \
        --master-weights fp16 --fp8-audit 2
    start $tool "FP8 gradients" ./train_fp8cu tiny --sequence-length 160 --precision fp8 --grad-accum-dtype fp8 \
        --grad-accumulation-steps 2
done
# In train_fp8cu_apart each buffer is an allocation of its own, so memcheck sees a write past a buffer's end. The 1,064
# tokens of a sequence do not fill their last tile.
for precision in bf16 fp8 "fp8 --fp8-recipe delayed" "fp8 --fp8-recipe rowwise" \
    "fp8 --fp8-recipe rowwise_with_gw_hp" "fp8 --recompute layer"; do
    start memcheck "buffers apart, $precision" build/train_fp8cu_apart small --sequence-length 1064 \
        --precision $precision --val-data build/check_val.bin --sample-every 1 --max-tokens 2
done
for number in "${!names[@]}"; do check "${names[number]}" result "$number"; done
finish
