#!/usr/bin/env bash
# Qwen3 14B from random weights in FP8 at T 8192, on TinyStories: four H200. --help says what can be set.
set -u
cd "$(dirname "$0")/.."
. scripts/run_common.sh
model=qwen3-14b tokenizer=qwen
options=(--precision fp8 --sequence-length 8192 --num-steps 1000
    --learning-rate 1e-4 --lr-schedule cosine --warmup-steps 100 --beta2 0.95 --weight-decay 0.1 --grad-clip 1
    --val-every 250 --sample-every 250 --sample-tokens 128 --checkpoint-every 250)
run_until_done "$@"
