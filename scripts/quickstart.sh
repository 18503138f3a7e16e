#!/usr/bin/env bash
# From a fresh machine (Debian 12, Ubuntu 24.04) to a trained model that tells a story: see --help. STEPS (steps to
# train) and OUT (folder of the log) are for the tests.
set -eu
cd "$(dirname "$0")/.."
. scripts/install.sh
take_none "usage: scripts/quickstart.sh
Installs the build tools that are missing, builds, makes story text, trains a small model for a few minutes and prints
a story that it tells. It trains on the GPU if there is one of compute capability 8.0 or above (with nvcc and NCCL), in
FP8 from 8.9 on, below that in BF16; else on the CPU in BF16.
The log goes to log/quickstart." "$@"
install_tools

output=$(mktemp)
trap 'rm -f "$output"' EXIT
hidden() { "$@" >"$output" 2>&1; }
# Runs a command without showing its output. If it fails, shows the output and ends the script.
quietly() { alive hidden "$@" || { cat "$output"; exit 1; }; }

say "build"
trainer=./train_fp8 steps=${STEPS:-1500}
if have_gpu && find_nccl; then
    # The first GPU's, without its dot, such as 90; no number if the driver does not tell.
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
    if [[ $capability =~ ^[0-9]+$ ]] && [ "$capability" -ge 80 ]; then
        trainer=./train_fp8cu steps=${STEPS:-1000} precision=fp8
        [ "$capability" -ge 89 ] || precision=bf16
        [ "$capability" -eq 90 ] || export CUDA_ARCH=${CUDA_ARCH:-$capability}
    else
        echo "the GPU cannot train: its compute capability is below 8.0, or the driver does not tell it"
    fi
fi
quietly make -s "${trainer#./}" build/synth_stories
echo "built $trainer"

say "stories to learn from"
build/synth_stories --out build/stories --bytes 2000000 --seed 1

out=${OUT:-log/quickstart}
run="--train-data build/stories_train.bin --val-data build/stories_val.bin --num-steps $steps --log-dir $out
    --lr-schedule cosine --log-every $(((steps + 29) / 30)) --sample-every $steps --max-tokens 240"
if [ "$trainer" = ./train_fp8cu ]; then
    say "training: small (4 layers), ${precision^^}, on the GPU"
    $trainer small $run --precision $precision --sequence-length 512 --batch-size 16 --learning-rate 1e-3 \
        --warmup-steps $((steps / 20))
else
    say "training: tiny (2 layers), BF16 as a GPU would round it, on the CPU"
    $trainer tiny $run --sequence-length 256 --batch-size 8 --learning-rate 3e-3 --warmup-steps $((steps / 30))
fi
echo
echo "Every step is in $out/log.jsonl. Next: docs/TRAINING.md."
