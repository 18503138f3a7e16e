#!/usr/bin/env bash
# Trains Llama 3.2 1B on TinyStories from random weights in FP8, with sequences of 4096 tokens. Needs one GPU with FP8
# and 25 GiB of memory. See --help.
set -u
cd "$(dirname "$0")/.."
. scripts/run_common.sh
model=llama3.2-1b tokenizer=llama3
options=(--precision fp8 --sequence-length 4096 --batch-size 4 --num-steps 2000
    --learning-rate 3e-4 --lr-schedule cosine --warmup-steps 200 --beta2 0.95 --weight-decay 0.1 --grad-clip 1
    --val-every 500 --sample-every 500 --max-tokens 128 --checkpoint-every 500)
run_until_done "$@"
