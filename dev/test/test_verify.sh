#!/usr/bin/env bash
# Tests receipts, scripts/verify.py and --replay-every on the CPU trainer: receipts are equal on other numbers of ranks
# and through a restart; a replay says what differs first; a changed log is found; so is a rank that computes wrongly.
# Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
. dev/test/lib/cpu_trainer.sh
build/synth_stories --out "$tmp/s" --bytes 30000 --seed 3 >/dev/null
mkdir "$tmp/mini"
data="--train-data $tmp/s_train.bin"
train() {
    ./train_fp8 "${model:-tiny}" $data --sequence-length 32 --batch-size 1 --grad-accumulation-steps 4 \
        --learning-rate 1e-3 --fast --fp8-fast-accum fprop --fp8-lm-head off --fp8-recipe delayed \
        --optimizer-state coat-stochastic --deterministic --receipt 2 --log-dir "$tmp/log" \
        --checkpoint-dir "$tmp/ck" --checkpoint-every 4 --keep-checkpoints 9 "$@" >"$out" 2>&1
}
# verify STATUS WORDS ...: the words of the line that it prints, after $1, the exit status
verify() {
    local expected=$1 words=$2
    shift 2
    scripts/verify.py "$@" >"$tmp/verified" 2>&1
    equal $? "$expected" && holds "$tmp/verified" "$words"
}
check "a run with receipts" train --num-steps 6
check "it goes on to step 8" train --num-steps 8 --resume
check "the last stretch is verified" verify 0 "equal: 2 receipts, steps 6 to 8, 1" "$tmp/log"
check "the first stretch is verified from new weights, on 2 ranks" verify 0 "equal: 3 receipts, steps 0 to 4" \
    "$tmp/log" --step 4 --ranks 2
check "other roundings are found in the first step that has them" verify 1 "step 6 differs: gradients of " \
    "$tmp/log" --step 6 -- --rounding-seed 9
check "and the replay says up to where it was equal" holds "$tmp/verified" "equal up to step 4"
check "other weights are found at the start" verify 1 "step 0 differs: weights of model." \
    "$tmp/log" --step 2 -- --seed 9
check "a step without a receipt is refused" verify 1 "--step 3 has no receipt after a step" "$tmp/log" --step 3
check "ranks that do not divide the micro-batches are refused" verify 1 "give a number that divides them" \
    "$tmp/log" --ranks 3
build/synth_stories --out "$tmp/t" --bytes 9000 --seed 5 >/dev/null
data="--mix $tmp/t_*.bin=1,$tmp/s_train.bin=2" check "a run with --mix" train --num-steps 2 --log-dir "$tmp/mixed" \
    --checkpoint-dir "$tmp/mixed"
check "it is verified on 2 ranks" verify 0 "equal: 2 receipts, steps 0 to 2" "$tmp/mixed" --ranks 2
check "a run with FP8 gradients" train --num-steps 2 --reduce-dtype fp8 --log-dir "$tmp/fp8" --checkpoint-dir "$tmp/fp8"
check "other ranks are refused" verify 1 "this run has the same bits on 1 rank alone" "$tmp/fp8" --ranks 2
cp "$tmp/ck/step-00000004/config.json" "$tmp/mini/" && sed -i 's/192/128/' "$tmp/mini/config.json"
model=$tmp/mini check "a run whose MODEL is a folder" train --num-steps 6 --log-dir "$tmp/own" \
    --checkpoint-dir "$tmp/own"
check "it is verified from new weights" verify 0 "equal: 3 receipts, steps 0 to 4" "$tmp/own" --step 4
rm -r "$tmp/mini"
check "and from a checkpoint, without the folder" verify 0 "equal: 2 receipts, steps 4 to 6" "$tmp/own"
sed -i '/"receipt", "step": 2/s/"weights": "./"weights": "x/; s/"weights": "x/"weights": "0/' "$tmp/log/log.jsonl"
check "a changed log is found" verify 1 "step 2: the receipt does not follow" "$tmp/log"
./train_fp8 tiny --train-data "$tmp/s_train.bin" --receipt 2 >"$out" 2>&1
check "receipts need --deterministic" holds "$out" "--receipt needs --deterministic"

# ---- --replay-every: 3 ranks, of which one may flip a bit. Each step has two forward passes and two more that repeat.
make -s build/faulty_rank || exit 1
# replay: $1 the trainer, the rest: options
replay() {
    local rank program=$1 pids=()
    shift
    rm -f "$tmp/meeting"
    for rank in 0 1 2; do
        RANK=$rank WORLD_SIZE=3 $program tiny --train-data "$tmp/s_train.bin" --sequence-length 32 --batch-size 1 \
            --grad-accumulation-steps 2 --precision fp8 --fp8-recipe delayed --num-steps 4 --deterministic \
            --init-from "file:$tmp/meeting" "$@" >"$out.$rank" 2>&1 &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank"; done
    grep '^step' "$out.0" | sed 's/ | lr.*//' >"$out.lines"
}
replay ./train_fp8 && cp "$out.lines" "$out.plain"
replay ./train_fp8 --replay-every 2
check "a replay changes no line" cmp "$out.lines" "$out.plain"
check "there are four lines" equal "$(wc -l <"$out.lines")" 4
# blames: $1 the faulty rank, $2 its first wrong pass, $3 the step that finds it
blames() {
    FAULTY_RANK=$1 FAULTY_PASS=$2 replay build/faulty_rank --replay-every 2
    grep -q "^error: rank $1 on .*: step $3: rank $1 on .* computed wrongly: .*, first of model.embed_tokens.weight" \
        "$out.$1"
}
check "a wrong last micro-step is found" blames 1 4 2
check "a wrong repetition is found" blames 0 5 2
export FAULTY_ALWAYS=1
check "a rank that is always wrong is found in the next replay" blames 2 6 4
finish
