# Functions that start a trainer, sourced by run_common.sh and tests. The sourcing script sets the variable `trainer`.
# Sweeps and verdicts start it by runs/trainer.py.

export LC_ALL=C  # with a decimal comma, awk, printf and sort -n would read and write other numbers

# If the reader of the output goes away (| head, a closed ssh), scripts and trainers continue, and echo and printf print
# no errors about it. The output of runs is in their files.
trap '' PIPE
echo() { builtin echo "$@" 2>/dev/null; }
printf() { builtin printf "$@" 2>/dev/null; }

fail() { echo "error: $*" >&2; exit 1; }

# True if `trainer` is the CPU trainer: its ranks share the cores, so there may be more ranks than cores. Each rank of
# the GPU trainer needs a GPU of its own, unless --share-gpu is given.
is_cpu_trainer() { [ "$(basename "$trainer")" = train_fp8 ]; }

# Prints the number of GPUs that CUDA_VISIBLE_DEVICES names, or if it is not set, that nvidia-smi lists. As CUDA does,
# counts up to the first word that names none, such as -1 or NoDevFiles, and counts none if one is named twice.
count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        awk -v RS='[,\n]' '{ gsub(/ /, "") } !/^([0-9]+|(GPU|MIG)-.+)$/ { exit } seen[$0]++ { n = 0; exit } { n++ }
            END { print n + 0 }' <<<"$CUDA_VISIBLE_DEVICES"
    else nvidia-smi -L 2>/dev/null | grep -c '^GPU'
    fi
}

# Sets `launch` to the command that starts $1 ranks. It is empty for one rank.
make_launch() {
    launch=()
    [ "$1" -gt 1 ] || return 0
    # by default, Open MPI binds all threads of a rank to one core (2 ranks) or to one socket (more ranks)
    launch=(mpirun -np "$1" --bind-to none)
    [ "$(id -u)" -ne 0 ] || launch+=(--allow-run-as-root)
    is_cpu_trainer || return 0
    launch+=(--oversubscribe)
    if [ -z "${OMP_NUM_THREADS:-}" ]; then launch+=(-x "OMP_NUM_THREADS=$((($(nproc) + $1 - 1) / $1))"); fi
}

# Prints the first number with the key $1 in a JSON object on stdin: output of --dry-run --json, or a line of log.jsonl.
# Prints nothing if there is no such key.
json_number() {
    awk -v key="\"$1\": " '
        { at = index($0, key) }
        at { text = substr($0, at + length(key)); sub(/[],}].*/, "", text); print text; exit }'
}
