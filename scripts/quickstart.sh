#!/usr/bin/env bash
# From a fresh machine (Debian 12, Ubuntu 24.04) to a trained model that tells a story: installs the build tools that
# are missing, builds, makes story text, trains, and prints a sample. Uses a GPU if there is one (with nvcc and NCCL),
# else the CPU. The GPU must be a Hopper, or one that has FP8 and whose architecture CUDA_ARCH names (Makefile). Takes a
# few minutes. STEPS (steps to train) and OUT (folder of the log) are for the tests.
set -eu
cd "$(dirname "$0")/.."
. scripts/install.sh
take_none "usage: scripts/quickstart.sh
Installs the build tools that are missing, builds, makes story text, trains a small model for a few minutes and prints
a story that it tells: on the GPU if there is one (with nvcc and NCCL), else on the CPU. A GPU that is not a Hopper
needs its architecture in CUDA_ARCH, and FP8 (compute capability 8.9 or above): CUDA_ARCH=89 scripts/quickstart.sh.
The log goes to log/quickstart." "$@"
install_tools

output=$(mktemp)
trap 'rm -f "$output"' EXIT
# Runs a command without showing its output. If it fails, shows the output and ends the script.
quietly() { "$@" >"$output" 2>&1 || { cat "$output"; exit 1; }; }

say "build"
if have_gpu && find_nccl; then
    trainer=./train_fp8cu steps=${STEPS:-1000}
else
    trainer=./train_fp8 steps=${STEPS:-1500}
fi
quietly make -s "${trainer#./}" build/synth_stories
echo "built $trainer"

say "stories to learn from"
build/synth_stories --out build/stories --bytes 2000000 --seed 1

out=${OUT:-log/quickstart}
run="--train-data build/stories_train.bin --val-data build/stories_val.bin --num-steps $steps --log-dir $out
    --lr-schedule cosine --log-every $((steps / 10)) --sample-every $steps --sample-tokens 240"
if [ "$trainer" = ./train_fp8cu ]; then
    say "training: small (4 layers), FP8, on the GPU"
    $trainer small $run --precision fp8 --sequence-length 512 --batch-size 16 --learning-rate 1e-3 \
        --warmup-steps $((steps / 20))
else
    say "training: tiny (2 layers), BF16 as a GPU would round it, on the CPU"
    $trainer tiny $run --sequence-length 256 --batch-size 8 --learning-rate 3e-3 --warmup-steps $((steps / 30))
fi
echo
echo "Every step is in $out/log.jsonl. Next: docs/TRAINING.md."
