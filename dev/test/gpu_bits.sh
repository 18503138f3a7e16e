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
    rm -rf "$tmp/ck_$1"
    run "$1" "$2" ${common/#small/${BITS_MODEL:-small}} --num-steps $bits_steps $(split "$2") \
        --checkpoint-dir "$tmp/ck_$1" "${@:3}"
}
cases=("2 --copy-engines on" "2 --copy-engines off" "2 --share-gpu")
[ $W -eq 2 ] || cases+=("$W --copy-engines on" "$W --copy-engines off")
# bits: $1 name, the rest: options. Compares lines and all bytes of the last checkpoints with those of one GPU.
bits() {
    local case ranks option seen
    bits_run bits_one 1 "${@:2}" || return
    for case in "${cases[@]}"; do
        ranks=${case%% *} option=${case#* } seen=$visible
        [ "$option" != --share-gpu ] || seen=${visible%%,*}
        CUDA_VISIBLE_DEVICES=$seen bits_run bits_now "$ranks" "${@:2}" $option || continue
        same "$1: lines of $case and of one GPU" bits_one bits_now
        for file in model optimizer; do
            check "$1: $file of $case has the bytes of one GPU" \
                cmp "$tmp"/ck_bits_{one,now}/step-"$(printf %08d $bits_steps)/$file.safetensors"
        done
    done
}
bits bf16 --precision bf16
bits "bf16, unclipped, grad_op" --precision bf16 --grad-clip 0 --sharding grad_op
bits "bf16, fp32 masters" --precision bf16 --master-weights fp32
bits "--fast" --fast
for recipe in $(./train_fp8cu --list recipes | grep -v -E 'mxfp8|bounded'); do  # Hopper has no GEMMs for mxfp8
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
