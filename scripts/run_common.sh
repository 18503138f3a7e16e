# Sourced by the scripts run_MODEL.sh. They set `model`, `tokenizer` (llama3 or qwen) and `options`, and call
# run_until_done "$@". usage() describes the environment variables.

. scripts/launch.sh

usage() {
    cat <<END
usage: $0 [trainer options]

Trains $model from random weights on GPUs of this machine until all steps are done. Makes the data if it is missing,
checks GPU memory and disk space, and estimates the cost. If the trainer fails, restarts it from its newest checkpoint,
and gives up after three starts in a row without a new one. Ctrl-C, SIGTERM or a closed terminal (without nohup) saves a
checkpoint and stops. The same command continues the run. If the reader of the output goes away, the run continues.

Environment variables, with their defaults in parentheses:

  GPUS     number of GPUs, or of ranks of the CPU trainer (all GPUs; 1 rank)
  TRAINER  the program (./train_fp8cu)
  DATA     start of the shards' names, before _train and _val
           (data/tinystories_$tokenizer; if these are missing, they are made from a download of 2 GB)
  OUT      folder of log.jsonl and stdout.txt; checkpoints are in its subfolder steps (checkpoints/$model)
  PRICE    price of a GPU hour, for the cost estimate

Trainer options are appended to the options of this script. If an option is given twice, the last one counts. The
options of this script:

  ${options[*]}
END
}

# Prints the usage and exits if --help is given. Refuses --checkpoint-dir and --log-dir: this script sets them.
check_arguments() {
    local word
    if [[ " $* " == *" --help "* ]]; then usage 2>/dev/null; exit 0; fi
    for word in "$@"; do
        case ${word%%=*} in
            --checkpoint-dir | --log-dir)
                fail "${word%%=*} is set by this script; OUT=FOLDER puts log and checkpoints elsewhere" ;;
        esac
    done
}

# Prints the number with the key $1 in the trainer's plan.
planned() { json_number "$1" <<<"$plan"; }

pick_data() {
    [ -f "${data}_train.bin" ] && [ -f "${data}_val.bin" ] && return
    [ "$data" = "data/tinystories_$tokenizer" ] ||
        fail "${data}_train.bin or ${data}_val.bin is missing; data/README.md shows how to make shards"
    echo "making ${data}_train.bin from TinyStories (a download of 2 GB)"
    data/setup_venv.sh && data/.venv/bin/python data/prepare.py tinystories --tokenizer "$tokenizer" ||
        fail "cannot make ${data}_train.bin; see data/README.md"
}

# Prints the MiB of the smallest GPU that the run may use: of those that CUDA_VISIBLE_DEVICES names by index or by the
# start of a UUID, or of all if it is not set or names none of them (MIG devices have other names).
smallest_memory() {
    nvidia-smi --query-gpu=index,uuid,memory.total --format=csv,noheader,nounits |
        awk -F ', *' '
            BEGIN { names = split(ENVIRON["CUDA_VISIBLE_DEVICES"], name, /, */) }
            !all || $3 < all { all = $3 }
            { named = 0
              for (i = 1; i <= names; i++) named += $1 == name[i] || name[i] ~ /^GPU-/ && index($2, name[i]) == 1
              if (named && (!some || $3 < some)) some = $3 }
            END { print some ? some : all }'
}

# Ends the script if there is no NVIDIA driver, or if a GPU that the run may use has less memory than the trainer's plan
# needs. Does nothing for the CPU trainer.
check_memory() {
    local needed smallest
    is_cpu_trainer && return
    command -v nvidia-smi >/dev/null ||
        fail "$trainer needs a GPU and its driver; nvidia-smi is missing here; --dry-run shows the plan without a GPU"
    needed=$(($(planned total_bytes) / 1048576))
    smallest=$(smallest_memory)
    [ "$needed" -le "$smallest" ] ||
        fail "$model on $gpus GPUs needs $((needed / 1024)) GiB on each; the smallest GPU here has" \
            "$((smallest / 1024)) GiB; use more GPUs, --recompute layer or a smaller --sequence-length"
    echo "memory: $((needed / 1024)) of $((smallest / 1024)) GiB on each GPU"
}

# Prints an estimate of the run's GPU hours, and of their price if PRICE is set, then the disk space that checkpoints
# need. Without --dry-run, ends the script if they need more than the free space plus that of the checkpoints there.
# The hours are those of an H200 at an MFU of 50%; large models in FP8 are faster.
print_cost() {
    # awk's output goes into $text because awk fails on a closed pipe, and its status means "too little space".
    local free held text folder=$out
    text=$(awk -v per_token="$(planned model_flops_per_token)" -v T="$(planned sequence-length)" \
        -v B="$(planned batch-size)" -v A="$(planned grad-accumulation-steps)" -v steps="$(planned num-steps)" \
        -v W="$gpus" -v price="${PRICE:-}" 'BEGIN {
            tokens = W * B * A * T * steps; flops = per_token * tokens; hours = flops / (0.5 * 989.5e12) / 3600
            printf "cost: %d steps of %d tokens = %.1f million tokens", steps, W * B * A * T, tokens / 1e6
            printf ", %.2g FLOPs, %.2f GPU hours at 50%% MFU of an H200", flops, hours
            printf " (%.2f hours on %d GPU%s)", hours / W, W, W == 1 ? "" : "s"
            if (price != "") printf ", cost %.2f at %s per GPU hour", hours * price, price
            print "" }')
    echo "$text"
    held=$(du -sk "$checkpoints" 2>/dev/null | cut -f1)
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done  # the nearest parent that exists
    free=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')
    text=$(awk -v bytes="$(planned checkpoint_bytes)" -v keep="$(planned keep-checkpoints)" -v held="${held:-0}" \
        -v free="$free" -v out="$out" -v dry="$dry_run" 'BEGIN {
        needed = bytes * (keep + 1) / 2^30; held /= 2^20; free /= 2^20
        printf "disk: checkpoints take up to %.1f GiB in %s; %.1f GiB are there already, %.1f GiB are free\n",
            needed, out, held, free
        exit !dry && needed > held + free }')
    local short=$?
    echo "$text"
    [ "$short" -eq 0 ] || fail "not enough disk space for the checkpoints; OUT=FOLDER puts them elsewhere"
}

newest_checkpoint() { ls "$checkpoints" 2>/dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }

# True if the newest checkpoint has all steps. It may have more, if --num-steps was larger before.
is_done() {
    local newest
    newest=$(newest_checkpoint)
    [ -n "$newest" ] && [ "${newest#step-}" -ge "$(planned num-steps)" ]
}

# Passes a stop to the ranks as SIGUSR1, which mpirun forwards. On SIGINT or SIGTERM mpirun would end the ranks itself.
# On SIGUSR1 they finish the step, save, and exit with status 0.
forward_stop() {
    stopping=1
    if [ -n "$child" ]; then kill -USR1 "$child" 2>/dev/null; fi
}

# Starts the trainer from the newest checkpoint and waits for it. Sets status. The trainer has its own process group, so
# that only forward_stop passes Ctrl-C to it. tee -p keeps writing the file if the reader of the output goes away.
start_trainer() {
    set -m
    "${command[@]}" > >(trap '' INT TERM USR1 HUP; exec tee -p -a "$out/stdout.txt") 2>&1 </dev/null &
    child=$!
    set +m
    while kill -0 "$child" 2>/dev/null; do wait "$child" 2>/dev/null; done
    # The loop's wait may have returned a signal's status, or the child may have ended before it. bash keeps the status.
    wait "$child" 2>/dev/null
    status=$?
    child=""
}

# Trains to the last step. If the trainer fails (a crash, a lost GPU), starts it again from the newest checkpoint, or
# from the beginning if there is none. Gives up after three starts in a row that fail without a newer checkpoint. Exits
# when a signal has stopped the run. With --dry-run prints the command and the trainer's plan.
run_until_done() {
    local best newest fruitless=0
    check_arguments "$@"
    trainer=${TRAINER:-./train_fp8cu} out=${OUT:-checkpoints/$model} data=${DATA:-data/tinystories_$tokenizer}
    checkpoints=$out/steps stopping="" child="" dry_run=""
    [ -x "$trainer" ] || fail "there is no program $trainer; build it with: make $(basename "$trainer")"
    gpus=${GPUS:-$(is_cpu_trainer && echo 1 || count_gpus)}
    [ -n "${GPUS:-}" ] || [ "$gpus" -gt 0 ] ||
        fail "no GPU found here (nvidia-smi -L lists none, or CUDA_VISIBLE_DEVICES is empty);" \
            "GPUS=N with --dry-run shows the plan without a GPU"
    [[ $gpus =~ ^[1-9][0-9]{0,8}$ ]] || fail "GPUS: \"$gpus\" is not a positive whole number below 1000000000"
    [[ ${PRICE:-0} =~ ^[0-9]*[.]?[0-9]+$ ]] || fail "PRICE=$PRICE is not a number; it is the price of a GPU hour"
    [[ " $* " == *" --dry-run "* ]] && dry_run=1
    [ -n "$dry_run" ] || { pick_data; mkdir -p "$out" || fail "cannot make the folder $out"; }
    local arguments=("$model" "${options[@]}" --train-data "${data}_train*.bin" --val-data "${data}_val*.bin"
        --log-dir "$out" --checkpoint-dir "$checkpoints" "$@")
    plan=$("$trainer" "${arguments[@]}" --world-size "$gpus" --dry-run --json) || exit 1
    [ -n "$dry_run" ] || check_memory
    print_cost

    make_launch "$gpus"
    command=(${launch[@]+"${launch[@]}"} "$trainer" "${arguments[@]}" --resume)
    printf '%q ' "${command[@]}"
    echo
    if [ -n "$dry_run" ]; then
        trap - PIPE  # a plan ends quietly when its reader goes away
        exec "$trainer" "${arguments[@]}" --world-size "$gpus" --dry-run
    fi
    trap forward_stop INT TERM USR1 HUP
    best=$(newest_checkpoint)
    while true; do  # starts a finished run too: --export-hf may be new, or an option wrong
        start_trainer
        [ "$status" -eq 0 ] && is_done && break
        newest=$(newest_checkpoint)
        if [ -n "$stopping" ] || [ "$status" -eq 0 ]; then
            echo "stopped ${newest:+after }${newest:-before the first checkpoint}; run the same command to continue"
            exit "$status"
        fi
        if [[ $newest > $best ]]; then best=$newest fruitless=0; else fruitless=$((fruitless + 1)); fi
        [ "$fruitless" -lt 3 ] ||
            fail "three starts in a row failed without a new checkpoint; $out/stdout.txt has the errors"
        echo "the run failed with status $status; starting again from ${newest:-the beginning}"
        sleep 2
        [ -z "$stopping" ] || exit 0
    done
    echo "done: $(newest_checkpoint) in $checkpoints; all steps are logged in $out/log.jsonl"
    return 0  # even if the line could not be printed
}
