#!/usr/bin/env bash
# From a fresh machine (Debian 12, Ubuntu 24.04) to a trained model that tells a story: installs the build tools that are missing, builds, makes
# story text, trains and prints samples. On a GPU where there is one (with nvcc), else on the CPU. Takes a few minutes.
set -eu
cd "$(dirname "$0")/.."
. scripts/install.sh
take_none "usage: scripts/quickstart.sh
Installs the build tools that are missing, builds, makes story text, trains a small model for a few minutes and prints what it tells: on the GPU where
there is one (with nvcc and NCCL), else on the CPU. The log goes to log/quickstart." "$@"
install_tools

say "build"
if have_gpu && find_nccl; then trainer=./train_fp8cu; else trainer=./train_fp8; fi
make -s "${trainer#./}" build/synth_stories
echo "built $trainer"

say "stories to learn from"
build/synth_stories --out build/stories --bytes 2000000 --seed 1

data="--train-data build/stories_train.bin --val-data build/stories_val.bin --log-dir log/quickstart"
if [ "$trainer" = ./train_fp8cu ]; then
    say "training: small (4 layers), FP8, on the GPU"
    $trainer small $data --precision fp8 --sequence-length 512 --batch-size 16 --num-steps 1000 --learning-rate 1e-3 --lr-schedule cosine --warmup-steps 50 \
        --sample-every 500 --sample-tokens 240
else
    say "training: tiny (2 layers), BF16 as a GPU would round it, on the CPU"
    $trainer tiny $data --sequence-length 256 --batch-size 8 --num-steps 1500 --learning-rate 3e-3 --lr-schedule cosine --warmup-steps 50 \
        --sample-every 500 --sample-tokens 240
fi
echo
echo "Every step is in log/quickstart/log.jsonl. Next: README.md, 'Train on TinyStories'."
