# Sourced by gpu_bits.sh, gpu_ranks.sh and gpu_faults.sh. Finds the GPUs, makes data, and sets options of most runs.
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
visible=$(visible_gpus)
gpus=$(tr , '\n' <<<"$visible" | grep -c .)
if [ "$gpus" -lt 1 ]; then
    echo "skipped: no GPU"
    echo "0 passed, 0 failed"
    exit 0
fi
W=$((gpus >= 4 ? 4 : 2))
# With --share-gpu NCCL connects the ranks by TCP, as on different hosts. Copy engines still copy between the ranks, as
# they do between GPUs.
share=$([ "$gpus" -gt 1 ] || echo --share-gpu)
[ -z "$share" ] || echo "one GPU: $W ranks share it, so speeds and links between GPUs are not tested"
# There may be more ranks than cores. mpirun must not bind all threads of a rank to one core.
launcher="mpirun --allow-run-as-root --oversubscribe --bind-to none"

# Runs the trainer. $1 name of the log, $2 ranks, then the trainer's arguments.
run() { if [ "$2" -eq 1 ]; then gpu "$1" "${@:3}"; else trains "$1" $launcher -np "$2" ./train_fp8cu "${@:3}"; fi; }

build/synth_stories --out "$tmp/synth" --bytes 400000 --seed 3 >/dev/null || bad "synth_stories"
steps=8
common="small --train-data $tmp/synth_train.bin --val-data $tmp/synth_val.bin --sequence-length 256 --batch-size 1"
common="$common --deterministic --learning-rate 1e-3 --grad-clip 1 $share"
# Prints the options for $1 ranks. In each step all ranks together train on 2 W sequences, and they validate on 16. The
# sequences are the same for any number of ranks.
split() { echo "--grad-accumulation-steps $((2 * W / $1)) --val-steps 16"; }
