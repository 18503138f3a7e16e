# Sourced by scripts/run_MODEL.sh, which set `model`, `tokenizer` (llama3 or qwen) and `options`, and call run_until_done "$@".
# usage() says what can be set from outside.

. scripts/launch.sh

usage() {
    cat <<END
usage: $0 [trainer options]

Trains $model from random weights on all GPUs of this machine until all steps are done: makes the data if there is none, checks GPU memory and disk
space, prints what the run will cost, and starts the trainer again from its newest checkpoint if it fails. Ctrl-C, SIGTERM or a closed terminal (without
nohup) saves and stops; the same command goes on. By environment:

  GPUS     how many GPUs, or ranks of the CPU trainer (all there are; 1 rank)
  TRAINER  the program (./train_fp8cu)
  DATA     shards, without their _train.bin and _val.bin (data/tinystories_$tokenizer, made if missing: a download of 2 GB)
  OUT      folder of the log, and of the checkpoints in steps/ (checkpoints/$model)
  PRICE    of a GPU hour, for the estimate of the cost

Options are passed to the trainer, whose --help lists them, after those of this script, where the last of two equal ones holds:

  ${options[*]}
END
}

# Before any work: --help, and options that would part the run from the folder where this script looks.
check_arguments() {
    local word
    if [[ " $* " == *" --help "* ]]; then usage; exit 0; fi
    for word in "$@"; do
        case ${word%%=*} in --checkpoint-dir | --log-dir) fail "${word%%=*} is set by this script; OUT=FOLDER puts log and checkpoints elsewhere" ;; esac
    done
}

# A number of the trainer's plan, by its key.
planned() { json_number "$1" <<<"$plan"; }

pick_data() {
    [ -f "${data}_train.bin" ] && [ -f "${data}_val.bin" ] && return
    [ "$data" = "data/tinystories_$tokenizer" ] || fail "${data}_train.bin or ${data}_val.bin is missing; data/README.md shows how to make shards"
    echo "no ${data}_train.bin here: making it from TinyStories (a download of 2 GB)"
    data/setup_venv.sh && data/.venv/bin/python data/tinystories.py --tokenizer "$tokenizer" || fail "could not make it; see data/README.md"
}

# Whether each GPU has the memory that the trainer's plan asks for.
check_memory() {
    local needed smallest
    is_cpu_trainer && return
    command -v nvidia-smi >/dev/null || fail "$trainer needs a GPU and its driver, and there is no nvidia-smi here; --dry-run shows the plan without one"
    needed=$(($(planned total_bytes) / 1048576))
    smallest=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n | head -n 1)
    [ "$needed" -le "$smallest" ] || fail "$model on $gpus GPUs needs $((needed / 1024)) GiB on each, and the smallest here has $((smallest / 1024)); more GPUs, --recompute layer or a smaller --sequence-length would help"
    echo "memory: $((needed / 1024)) of $((smallest / 1024)) GiB a GPU"
}

# What the run will take, and whether the disk has it. Half the peak is a guess on the low side for large models in FP8; the trainer's lines tell.
print_cost() {
    local free held text  # what awk prints goes through it: awk fails on a closed pipe, and its status says whether there is room
    text=$(awk -v per_token="$(planned model_flops_per_token)" -v T="$(planned sequence-length)" -v B="$(planned batch-size)" -v A="$(planned grad-accumulation-steps)" -v steps="$(planned num-steps)" -v W="$gpus" \
        -v price="${PRICE:-}" 'BEGIN {
            tokens = W * B * A * T * steps; flops = per_token * tokens; hours = flops / (0.5 * 989.5e12) / 3600
            printf "cost: %d steps of %d tokens are %.1f million tokens, about %.2g FLOPs, %.2f GPU hours at half the BF16 peak of an H200 (%.2f hours on %d)", steps, W * B * A * T, tokens / 1e6, flops, hours, hours / W, W
            if (price != "") printf ", %.2f at %s a GPU hour", hours * price, price
            print "" }')
    echo "$text"
    held=$(du -sk "$checkpoints" 2>/dev/null | cut -f1)
    free=$(df -Pk "$(existing_parent "$out")" | awk 'NR == 2 { print $4 }')
    text=$(awk -v bytes="$(planned checkpoint_bytes)" -v keep="$(planned keep-checkpoints)" -v held="${held:-0}" -v free="$free" -v out="$out" -v dry="$dry_run" 'BEGIN {
        needed = bytes * (keep + 1) / 2^30; held /= 2^20; free /= 2^20
        printf "disk: checkpoints take up to %.1f GiB in %s, of which %.1f are there; %.1f are free\n", needed, out, held, free
        exit !dry && needed > held + free }')
    local short=$?
    echo "$text"
    [ "$short" -eq 0 ] || fail "not enough room for the checkpoints; OUT=FOLDER puts them elsewhere"
}

# The folder $1, or the nearest one above it that is there.
existing_parent() {
    local folder=$1
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    echo "$folder"
}

newest_checkpoint() { ls "$checkpoints" 2>/dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }

# A run of more steps than are asked for now is done too.
is_done() {
    local newest
    newest=$(newest_checkpoint)
    [ -n "$newest" ] && [ "${newest#step-}" -ge "$(planned num-steps)" ]
}

# A stop goes to the ranks as SIGUSR1, the one signal that mpirun hands on without ending them: they finish the step, save, and end with status 0.
forward_stop() {
    stopping=1
    if [ -n "$child" ]; then kill -USR1 "$child" 2>/dev/null; fi
}

# One start of the trainer, from the newest checkpoint, in a process group of its own so that Ctrl-C comes by way of forward_stop alone.
start_trainer() {
    set -m
    "${command[@]}" > >(trap '' INT TERM USR1 HUP; exec tee -a "$out/stdout.txt") 2>&1 </dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do wait "$child" 2>/dev/null; done
    wait "$child" 2>/dev/null  # its status is kept: one above may have been that of a signal, and a child that was gone at once had none
    status=$?
    child=""
}

# Trains to the last step. A start that fails (a crash, a GPU or a host lost) is followed by another from the newest checkpoint; three in a row that
# come no further than the best before them end it.
run_until_done() {
    local best newest fruitless=0
    check_arguments "$@"
    trainer=${TRAINER:-./train_fp8cu} out=${OUT:-checkpoints/$model} data=${DATA:-data/tinystories_$tokenizer}
    checkpoints=$out/steps stopping="" child="" dry_run=""
    check_trainer
    gpus=${GPUS:-$(is_cpu_trainer && echo 1 || count_gpus)}
    [ -n "${GPUS:-}" ] || [ "$gpus" -gt 0 ] || fail "no GPU found here (nvidia-smi -L lists none); with --dry-run, GPUS=N shows the plan without one"
    check_counts GPUS "$gpus"
    [[ ${PRICE:-0} =~ ^[0-9]*[.]?[0-9]+$ ]] || fail "PRICE=$PRICE is not a number, of a GPU hour"
    [[ " $* " == *" --dry-run "* ]] && dry_run=1
    [ -n "$dry_run" ] || { pick_data; mkdir -p "$out" || fail "cannot make the folder $out"; }
    local arguments=("$model" "${options[@]}" --train-data "${data}_train.bin" --val-data "${data}_val.bin" --log-dir "$out" --checkpoint-dir "$checkpoints" "$@")
    plan=$("$trainer" "${arguments[@]}" --world-size "$gpus" --dry-run --json) || exit 1
    [ -n "$dry_run" ] || check_memory
    print_cost

    make_launch "$gpus"
    command=(${launch[@]+"${launch[@]}"} "$trainer" "${arguments[@]}" --resume)
    printf '%q ' "${command[@]}"
    echo
    if [ -n "$dry_run" ]; then "$trainer" "${arguments[@]}" --world-size "$gpus" --dry-run; exit; fi
    trap forward_stop INT TERM USR1 HUP
    best=$(newest_checkpoint)
    while true; do  # also of a run that is done: an --export-hf may be new, or an option wrong
        start_trainer
        [ "$status" -eq 0 ] && is_done && break
        if [ -n "$stopping" ] || [ "$status" -eq 0 ]; then
            echo "stopped after $(newest_checkpoint); start again to go on"
            exit "$status"
        fi
        newest=$(newest_checkpoint)
        if [[ $newest > $best ]]; then best=$newest fruitless=0; else fruitless=$((fruitless + 1)); fi
        [ "$fruitless" -lt 3 ] || fail "three starts in a row failed without a new checkpoint; $out/stdout.txt says why"
        echo "the run failed with status $status; starting again from ${newest:-the beginning}"
        sleep 2
        [ -z "$stopping" ] || exit 0
    done
    echo "done: $(newest_checkpoint) in $checkpoints; the lines of all steps are in $out/log.jsonl"
    return 0  # whether or not that could be printed
}
