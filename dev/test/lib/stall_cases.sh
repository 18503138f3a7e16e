# Sourced by test_stall.sh (train_fp8) and gpu_faults.sh (train_fp8cu). Holds one rank of a run and checks how the run
# ends. Needs $tmp, ok, bad, and the function stall_run, which executes mpirun with the trainer, the given arguments,
# and $tmp/shim.so as LD_PRELOAD.
gcc -shared -fPIC -O1 -Wall -Werror -o "$tmp/shim.so" dev/test/lib/stall_shim.c -ldl || bad "stall_shim.c"

# Starts run $1 in the background. The arguments after $6 go to the trainer. Rank $2 is held at call number $5 of
# function $4 (pread, fsync or MPI_Bcast; with "none" no rank is held). Calls of pread and fsync count only on files
# whose path contains $6. $3 is the number of seconds that the rank sleeps there, or "stop": it stops itself (SIGSTOP).
# Sets launched[$1] to the process id of mpirun.
declare -A launched
stall_start() {
    local name=$1 rank=$2 how=$3 call=$4 count=$5 path=$6
    shift 6
    export STALL_RANK=$rank STALL_CALL=$call STALL_COUNT=$count STALL_PATH=$path STALL_MARK=$tmp/$name.mark
    if [ "$how" = stop ]; then unset STALL_SLEEP; else export STALL_SLEEP=$how; fi
    stall_run "$@" >"$tmp/$name.log" 2>&1 </dev/null &
    launched[$name]=$!
}
# Waits at most $2 seconds until the rank of run $1 is held. The rank then writes $tmp/$1.mark.
stall_await() {
    await "$2" eval "[ -s '$tmp/$1.mark' ] || ! kill -0 ${launched[$1]}"
    [ -s "$tmp/$1.mark" ] && return
    bad "$1: the rank did not reach the call that was to hold it, within $2 s or before the run ended:" \
        "$(tail -n 4 "$tmp/$1.log")"
    return 1
}
# Waits at most $2 seconds for the end of run $1, and kills the run if it has not ended. Sets `took` (seconds), and
# `status` ("running" if the run was killed).
stall_end() {
    local start=$SECONDS pid=${launched[$1]}
    while kill -0 $pid 2>/dev/null && [ $((SECONDS - start)) -lt "$2" ]; do sleep 0.1; done
    took=$((SECONDS - start)) status=running
    if kill -0 $pid 2>/dev/null; then kill -9 $(children $pid) $pid 2>/dev/null; else wait $pid; status=$?; fi
}
# Checks that run $1 ends by itself within $2 seconds, with status 6 (EXIT_LOST) and exactly one error line, which
# matches $3.
stall_says() {
    local said
    stall_end "$1" "$2"
    said=$(grep -o 'error: .*' "$tmp/$1.log")  # text of a sample may precede the error on its line
    if [[ $status = 6 && $(wc -l <<<"$said") = 1 && $said =~ ^"error: "$3 ]]; then
        ok "$1: status $status after $took s: $said"
    else
        bad "$1: status $status after $took s, not \"$3\": ${said:-$(tail -n 5 "$tmp/$1.log")}"
    fi
}
