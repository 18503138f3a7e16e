#!/usr/bin/env bash
# Tests --deterministic on the CPU trainer: the same losses, norms, validation and checkpoints on 1, 2, 3 and 4 ranks,
# in a run that goes from 4 ranks to 2, to 1 and back to 4, and with --mix on 1 and 3 ranks, also resumed. With ALL=1:
# more precisions, recipes and states, and 200 steps. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1  # there are more ranks than cores, so threads would wait for each other
. dev/test/lib/cpu_trainer.sh
build/synth_stories --out "$tmp/s" --bytes 60000 --seed 3 >/dev/null
python3 dev/test/lib/mask_shard.py "$tmp/s_train.bin" "$tmp/m_train.bin"
steps=$([ -n "${ALL-}" ] && echo 200 || echo 4)
build/synth_stories --out "$tmp/t" --bytes 9000 --seed 5 >/dev/null
data="--train-data $tmp/s_train.bin"
common="tiny --val-data $tmp/s_val.bin --val-steps 5 --learning-rate 3e-3 --batch-size 1 \
--deterministic"

# run: $1 the run's name, $2 ranks, $3 micro-batches of a step, the rest: options.
run() {
    local name=$1 n=$2 micro=$3
    shift 3
    meet "$n" $common $data --grad-accumulation-steps $((micro / n)) --num-steps "$steps" \
        --checkpoint-dir "$tmp/$name" --log-dir "$tmp/$name" "$@" >"$out" 2>&1 || { tail -n 3 "$out"; false; }
}
# Losses and norms of run $1, and its validation losses.
lines() {
    sed -n 's/{"type": "step", \(.*\), "ms".*/\1/p; s/\({"type": "validation".*\), "seconds.*/\1/p' "$tmp/$1/log.jsonl"
}
# True if runs $1 and $2 have equal, finite lines and equal bytes in their last checkpoints.
same() {
    local at file
    at=$(printf 'step-%08d' "$steps")
    equal "$(lines "$1")" "$(lines "$2")" && equal "$(lines "$1" | grep -c 'loss": [0-9]')" $((steps + 1)) || return
    for file in "$tmp/$1/$at"/*.safetensors; do cmp "$file" "$tmp/$2/$at/${file##*/}" || return; done
}
# bits: $1 the runs' name, $2 micro-batches of a step, $3 numbers of ranks, the rest: options. The first run has one
# rank.
bits() {
    local name=$1 micro=$2 n
    local counts=$3
    shift 3
    check "$name on 1 rank" run "$name-1" 1 "$micro" "$@"
    for n in $counts; do
        check "$name on $n ranks" run "$name-$n" "$n" "$micro" "$@"
        check "$name: $n ranks have the bits of 1" same "$name-$n" "$name-1"
    done
}
# True if the last run said $1 of its bits, in both places.
says() { holds "$out" "bits      the same $1" && holds "$tmp/$2/log.jsonl" "\"same_bits\": \"$1\""; }

short="--sequence-length 32"
bits bf16 12 "2 3 4" $short --grad-clip 0.5
check "a run says that it has the same bits on any number of ranks" says "on any number of ranks" bf16-4
bits fp32 4 "4" $short --precision fp32 --sharding grad_op
bits mask 6 "2 3" $short --train-data "$tmp/m_train.bin" --val-data "$tmp/m_train.bin" --precision fp8
check "a run says that it has a mask" holds "$out" "tokens marked as context do not count in the loss"
bits masters 6 "3" $short --master-weights fp32 --grad-clip 0.5
bits skips 6 "2 3" $short --precision fp8 --fp8-recipe delayed --on-nonfinite skip
bits bounded 6 "2 3" $short --precision fp8 --fp8-recipe tensorwise_bounded
bits finer 4 "4" $short --precision fp8 --fp8-recipe rowwise --optimizer-state coat-stochastic --sharding grad_op
bits msamp 4 "2" $short --precision fp8 --optimizer-state msamp --master-weights fp16-stochastic
if [ -n "${ALL-}" ]; then
    for recipe in $(./train_fp8 --list recipes); do
        bits "$recipe" 12 "2 3 4" --sequence-length 128 --precision fp8 --fp8-recipe "$recipe"
    done
    for sharding in full grad_op; do
        bits "bf16-$sharding" 4 "2 4" $short --sharding $sharding
        bits "fp32-$sharding" 12 "2 3 4" $short --precision fp32 --sharding $sharding --grad-clip 0.5
        bits "masters-$sharding" 12 "2 3 4" $short --master-weights fp32 --sharding $sharding
        bits "sums-$sharding" 12 "2 3 4" $short --grad-accum-dtype fp32 --sharding $sharding
        bits "coat-$sharding" 12 "2 3 4" $short --precision fp8 --optimizer-state coat --sharding $sharding
        bits "stochastic-$sharding" 12 "2 3 4" $short --precision fp8 --optimizer-state coat-stochastic \
            --sharding $sharding --grad-clip 0.5
    done
    steps=3 bits many 256 "2 4" $short  # --grad-accum-dtype auto counts the micro-steps of all ranks
fi

# ---- 4 ranks, then 2, 1 and 4 again have the bits of one rank.
quarter=$((steps / 4))
last=$(printf 'step-%08d' "$steps")
moves() {
    local at=0 n
    for n in 4 2 1 4; do
        at=$((at + quarter))
        run "moved-$1" $n 4 $fp8 --num-steps $((n == 4 && at > quarter ? steps : at)) --lr-schedule constant \
            --resume || return
    done
}
for recipe in tensorwise tensorwise_bounded; do
    fp8="$short --precision fp8 --fp8-recipe $recipe --grad-clip 0.5"
    check "$recipe: a run on 4, 2, 1 and 4 ranks" moves $recipe
    check "$recipe: the run on 1 rank" run still-$recipe 1 4 $fp8
    check "$recipe: both have the same losses and norms" equal "$(lines moved-$recipe | grep -v validation)" \
        "$(lines still-$recipe | grep -v validation)"
    for file in "$tmp/still-$recipe/$last"/*.safetensors; do
        check "$recipe: both have the same last ${file##*/}" cmp "$file" "$tmp/moved-$recipe/$last/${file##*/}"
    done
done

# ---- --mix: an unbroken run has the bits of one that is resumed in its middle, on 1 and on 3 ranks.
mixed="--mix $tmp/s_t*.bin=0.7,$tmp/t_train.bin=0.3"
data=$mixed
bits mixed 6 "3" $short --document-mask on
losses() { lines "$1" | grep -v validation; }
# goes_on: $1 ranks of the first half, $2 ranks of the second
goes_on() {
    run "half-$1" "$1" 6 $short --document-mask on --num-steps $((steps / 2)) &&
        run "half-$1" "$2" 6 $short --document-mask on --resume && lacks "$out" "--mix is" &&
        equal "$(losses "half-$1")" "$(losses mixed-1)" && equal "$(losses mixed-1 | wc -l)" "$steps"
}
check "--mix: 3 ranks go on where 1 has stopped" goes_on 1 3
check "--mix: 1 rank goes on where 3 have stopped" goes_on 3 1
check "each source has a line at the start" holds "$out" "source    $tmp/t_train.bin: share 30.0%, "
data=${mixed/0.7/0.5}
more() { run "half-3" 1 6 $short --document-mask on --num-steps $((steps + 1)) --resume; }
check "a resume with other shares trains" more
check "it tells of them" holds "$out" "resume: --mix is ${mixed#--mix } in the checkpoint, ${data#--mix } now"
data=${mixed/t_train/t_val}
check "a resume with other sources is refused" eval "! more >/dev/null"
check "and the error says so" holds "$out" "--mix has "
data="--mix $tmp/t_train.bin=1,$tmp/s_t*.bin=1"
check "sources in another order are refused too" eval "! more >/dev/null"
check "and the error says so" holds "$out" "--mix has as many tokens as in the checkpoint, but its shards differ or"
data="--train-data $tmp/s_train.bin"

# ---- What has the same bits on one number of ranks alone says so.
check "FP8 gradients train" run o1 2 2 $short --msamp O1
check "they say that the number of ranks counts" \
    says "on 2 ranks alone: sums of FP8 gradients have scales that depend on the number of ranks" o1
check "replicas train" run replicas 2 2 $short --sharding none
check "they say that the number of ranks counts" \
    says "on 2 ranks alone: each replica sums its own micro-steps first" replicas

finish
