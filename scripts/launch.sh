# Sourced by sweep.sh, run_recipes.sh and run_common.sh: how a trainer is started. They set `trainer` and, if it is not plain mpirun, `mpirun`.

export LC_ALL=C  # with a decimal comma, awk, printf and sort -n would read and write other numbers
trap '' PIPE     # a reader of the output that goes away (| head, a closed ssh) ends neither the script nor what it starts; a run's lines are in its files

fail() { echo "error: $*" >&2; exit 1; }

# $1 an option, the rest its values.
check_counts() {
    local option=$1 word
    shift
    for word in "$@"; do [[ $word =~ ^[1-9][0-9]{0,8}$ ]] || fail "$option: \"$word\" is not a positive whole number"; done
}

check_trainer() { [ -x "$trainer" ] || fail "there is no program $trainer; build it with: make $(basename "$trainer")"; }

# The CPU trainer's ranks share the cores, in any number; the GPU trainer's have a GPU each.
is_cpu_trainer() { [ "$(basename "$trainer")" = train_fp8 ]; }

# GPUs that this process may use.
count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
    else nvidia-smi -L 2>/dev/null | grep -c '^GPU'
    fi
}

# Sets `launch` to the words that start $1 ranks; none for one rank.
make_launch() {
    launch=()
    [ "$1" -gt 1 ] || return 0
    launch=(${mpirun:-mpirun} -np "$1" --bind-to none)  # without it, mpirun ties a rank with all its threads to one core
    [ "$(id -u)" -ne 0 ] || launch+=(--allow-run-as-root)
    is_cpu_trainer || return 0
    launch+=(--oversubscribe)
    if [ -z "${OMP_NUM_THREADS:-}" ]; then launch+=(-x "OMP_NUM_THREADS=$((($(nproc) + $1 - 1) / $1))"); fi
}

# The models that the trainer knows by name, and its FP8 recipes, with a blank after each.
list_models() { "$trainer" --list models 2>/dev/null | tr '\n' ' '; }
list_recipes() { "$trainer" --list recipes 2>/dev/null | tr '\n' ' '; }

# The number with the key $1 in a JSON object of the trainer on stdin, which has one such key: --dry-run --json, or a line of log.jsonl.
json_number() {
    awk -v key="\"$1\": " '{ at = index($0, key); if (at) { text = substr($0, at + length(key)); sub(/[],}].*/, "", text); print text; exit } }'
}

# The trainer's exit statuses on which scripts act; its --help lists all.
EXIT_MEMORY=3 EXIT_UNSUPPORTED=4
