#!/usr/bin/env bash
# Llama 3.1 8B from random weights in FP8 at T 8192, on TinyStories: one H200, or more GPUs of 80 GB each. --help says what can be set.
set -u
cd "$(dirname "$0")/.."
. scripts/run_common.sh
model=llama3.1-8b tokenizer=llama3
options=(--precision fp8 --sequence-length 8192 --num-steps 1000
    --learning-rate 1e-4 --lr-schedule cosine --warmup-steps 100 --beta2 0.95 --weight-decay 0.1 --grad-clip 1
    --val-every 250 --sample-every 250 --sample-tokens 128 --checkpoint-every 250)
run_until_done "$@"
