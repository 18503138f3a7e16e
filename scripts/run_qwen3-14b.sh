#!/usr/bin/env bash
# Trains Qwen3 14B on TinyStories from random weights in FP8, with sequences of 8192 tokens. Needs one H200 or more, or
# for example 8 H100 with 80 GB. See --help.
set -u
cd "$(dirname "$0")/.."
. scripts/run_common.sh
model=qwen3-14b tokenizer=qwen
options=(--precision fp8 --sequence-length 8192 --num-steps 1000
    --learning-rate 1e-4 --lr-schedule cosine --warmup-steps 100 --beta2 0.95 --weight-decay 0.1 --grad-clip 1
    --val-every 250 --sample-every 250 --max-tokens 128 --checkpoint-every 250)
run_until_done "$@"
