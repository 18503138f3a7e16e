# Sourced by tests of the CPU trainer, in the root of the tree. Builds it and build/synth_stories, and makes the folder
# $tmp, which ends with the test; $out is a name in it for the output of a run.
. scripts/tally.sh
make -s train_fp8 build/synth_stories || exit 1
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
out=$tmp/out

# True if the trainer's run with the options "$@" succeeds within 60 s.
trains() { timeout 60 ./train_fp8 "$@" >"$out" 2>&1 || { tail -n 3 "$out"; false; }; }
# True if a run ends before its first step with status $1 and one error, and its output contains the text $2. The rest:
# options.
refuses() {
    local status=$1 text=$2
    shift 2
    timeout 60 ./train_fp8 "$@" >"$out" 2>&1
    equal $? "$status" && holds "$out" "$text" && no_step "$out" && equal "$(grep -c '^error: ' "$out")" 1
}
# Runs $1 ranks without mpirun, which takes longer to start than most runs of tests take.
meet() {
    local n=$1 rank status=0 pids=()
    shift
    rm -f "$tmp/meeting"
    for ((rank = 0; rank < n; rank++)); do
        RANK=$rank WORLD_SIZE=$n ./train_fp8 "$@" --init-from "file:$tmp/meeting" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank" || status=$?; done
    return $status
}
