#!/usr/bin/env bash
# Tests on several GPUs of one host that train_fp8cu has the same bits on any number of ranks, and that --replay-every
# finds a rank that computes wrongly. Uses 4 GPUs, or 2 if there are fewer; two ranks share a single GPU. Needs
# ./train_fp8cu, build/faulty_rankcu, build/synth_stories and mpirun. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/gpu_lines.sh
. dev/test/lib/gpu_ranks_setup.sh

# ---- The same bits on one GPU, on 2 and W ranks by copy engines and by NCCL, and on two ranks that share a GPU.
# BITS_MODEL and BITS_STEPS give another model and number of steps.
bits_steps=${BITS_STEPS:-$steps}
bits_run() {
    local name=$1 ranks=$2
    shift 2
    local all=${common/#small/${BITS_MODEL:-small}}
    rm -rf "$tmp/ck_$name"
    run "$name" "$ranks" ${all/--deterministic/${deterministic---deterministic}} --num-steps $bits_steps \
        $(split "$ranks") --checkpoint-dir "$tmp/ck_$name" "$@"
}
# Milliseconds of the steps of log $1 after the second: their median.
step_ms() { grep '^step ' "$tmp/$1.log" | tail -n +3 | sed 's/.*| \([0-9.]*\) ms.*/\1/' | sort -n | awk '{ a[NR] = $1 }
    END { print a[int((NR + 1) / 2)] }'; }
# bits: $1 name, the rest: options. Compares lines and all bytes of the last checkpoints with those of one GPU.
bits() {
    local name=$1 case ranks options n times=
    shift
    bits_run bits_one 1 "$@" || return
    for case in "2 --copy-engines on" "2 --copy-engines off" "$W --copy-engines auto" "$W --copy-engines off" \
        "2 --share-gpu"; do
        ranks=${case%% *} options=${case#* }
        [ "$options" = --share-gpu ] && export CUDA_VISIBLE_DEVICES=0
        bits_run bits_now "$ranks" "$@" $options
        n=$?
        [ "$options" = --share-gpu ] && unset CUDA_VISIBLE_DEVICES
        [ $n -eq 0 ] || continue
        same "$name: lines of $ranks ranks ($options) and of one GPU" bits_one bits_now
        for file in model optimizer; do
            check "$name, $ranks ranks ($options): $file has the bytes of one GPU" \
                cmp "$tmp"/ck_bits_{one,now}/step-"$(printf %08d $bits_steps)/$file.safetensors"
        done
        times="$times; $ranks $options $(step_ms bits_now)"
        # without --deterministic, for the price
        [ "$options" = --share-gpu ] || { deterministic= bits_run bits_free "$ranks" "$@" $options &&
            times="$times (without it $(step_ms bits_free))"; }
    done
    deterministic= bits_run bits_free 1 "$@"
    echo "$name: ms of a step: 1 rank $(step_ms bits_one) (without --deterministic $(step_ms bits_free))$times"
}
bits bf16 --precision bf16
bits "bf16, unclipped, grad_op" --precision bf16 --grad-clip 0 --sharding grad_op
bits "bf16, fp32 masters" --precision bf16 --master-weights fp32
for recipe in $(./train_fp8cu --list recipes | grep -v mxfp8); do  # Hopper has no GEMMs for mxfp8
    bits $recipe --precision fp8 --fp8-recipe $recipe
done
bits "coat-stochastic" --precision fp8 --optimizer-state coat-stochastic
python3 dev/test/lib/mask_shard.py "$tmp/synth_train.bin" "$tmp/masked.bin"
bits "tensorwise, loss mask" --precision fp8 --train-data "$tmp/masked.bin" --val-data "$tmp/masked.bin"
bits "msamp" --precision fp8 --optimizer-state msamp --master-weights fp16-stochastic
# ---- A replay changes no line; a rank that computes wrongly is found (dev/test/lib/faulty_rank.h).
for recipe in tensorwise delayed; do
    options="$common --num-steps $steps $(split 2) --precision fp8 --fp8-recipe $recipe"
    run plain 2 $options && run replayed 2 $options --replay-every 2 &&
        same "$recipe: --replay-every changes no line" plain replayed
done
# Both ranks take 2 W passes in steps 1 and 2, and then one that repeats the last one of the other rank.
export FAULTY_RANK=1 FAULTY_PASS=$((2 * W))
timeout 120 $launcher -np 2 build/faulty_rankcu $options --replay-every 2 >"$tmp/refused.log" 2>&1 </dev/null
unset FAULTY_RANK FAULTY_PASS
check "a rank with a flipped bit is found in step 2, and named" grep -q \
    "^error: rank 1 on .*: step 2: rank 1 on .* (GPU-.*) computed wrongly" "$tmp/refused.log"
finish
