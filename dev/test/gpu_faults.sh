#!/usr/bin/env bash
# Tests faults of train_fp8cu on several GPUs of one host: ranks that are killed, interrupted or stuck. Uses 4 GPUs, or
# 2 if there are fewer; two ranks share a single GPU. Needs ./train_fp8cu, build/synth_stories, mpirun and gcc. Ends
# with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/gpu_lines.sh
. dev/test/lib/gpu_ranks_setup.sh

# ---- A rank that is killed or interrupted.
# Starts a run of 1,000,000 steps in the background that saves to $tmp/$1 every 20 steps. Waits at most 30 seconds for
# the first checkpoint. Sets `launched` to the process id of mpirun, and `ranks` to the process ids of the ranks.
start_endless() {
    $launcher -np $W ./train_fp8cu $common --precision bf16 --num-steps 1000000 $(split $W) --checkpoint-dir "$tmp/$1" \
        --checkpoint-every 20 >"$tmp/$1.log" 2>&1 </dev/null &
    launched=$!
    await 30 grep -q '^saved' "$tmp/$1.log"
    ranks=($(for pid in $(children $launched); do grep -q train_fp8cu /proc/$pid/cmdline && echo $pid; done))
    [ ${#ranks[@]} -eq $W ] || bad "$1: ${#ranks[@]} ranks are running: $(tail -n 3 "$tmp/$1.log")"
}
alive() { for pid in "${ranks[@]}"; do kill -0 $pid 2>/dev/null && echo $pid; done; }
# Waits at most 60 seconds until the run and all its ranks have ended (mpirun may return before the last rank has gone).
# Sets `took` to the seconds waited, and `status` to mpirun's exit status. If mpirun still runs, kills it and the ranks,
# and sets `status` to "running". If mpirun has ended, ranks that are left are not killed.
await_end() {
    local start=$SECONDS
    while { kill -0 $launched 2>/dev/null || [ -n "$(alive)" ]; } && [ $((SECONDS - start)) -lt 60 ]; do sleep 0.2; done
    took=$((SECONDS - start))
    if kill -0 $launched 2>/dev/null; then
        status=running
        kill -9 "${ranks[@]}" $launched
    else
        wait $launched
        status=$?
    fi
}

start_endless killed
kill -9 "${ranks[$((W - 1))]}"
await_end
if [ "$status" != running ] && [ "$status" -ne 0 ] && [ -z "$(alive)" ] && grep -q 'rank [0-9]' "$tmp/killed.log"; then
    ok "SIGKILL of a rank: status $status after $took s: $(grep -m1 'rank [0-9]' "$tmp/killed.log" | cut -c1-150)"
else
    bad "SIGKILL of a rank: status $status after $took s, alive: $(alive): $(tail -n 8 "$tmp/killed.log")"
fi
last=$(ls "$tmp/killed" | grep -v tmp | tail -n 1)
if run after_kill 1 $common --precision bf16 --num-steps $((10#${last#step-} + 1)) $(split 1) \
    --checkpoint-dir "$tmp/killed" --resume && ! grep -q 'resume: skipping' "$tmp/after_kill.log"; then
    ok "the last checkpoint before the kill is complete: $last"
else
    bad "after the kill: $(grep -E 'resume|error' "$tmp/after_kill.log")"
fi

start_endless stopped
before=$(ls "$tmp/stopped" | wc -l)
kill -TERM "${ranks[1]}"
await_end
saved=$(printf 'step-%08d' "$(sed -n 's/^stopped by signal 15 after step \([0-9]*\).*/\1/p' "$tmp/stopped.log")")
if [ "$status" = 0 ] && [ -z "$(alive)" ] && [ "$(grep -c '^stopped by signal' "$tmp/stopped.log")" -eq 1 ] &&
    [ -d "$tmp/stopped/$saved" ]; then
    ok "SIGTERM to rank 1: $(grep '^stopped' "$tmp/stopped.log"), status 0 after $took s"
else
    bad "SIGTERM to rank 1: status $status after $took s, $before checkpoints before, now $(ls "$tmp/stopped"):" \
        "$(tail -n 5 "$tmp/stopped.log")"
fi

# ---- A rank that hangs. Each run has 2 ranks, of which one is stopped in one phase of the run. With --stall-timeout 5
# all ranks end, and the error names the stopped rank.
host=$(hostname)
stall_run() { exec $launcher -np 2 -x LD_PRELOAD="$tmp/shim.so" ./train_fp8cu "$@"; }
. dev/test/lib/stall_cases.sh
data="--train-data $tmp/synth_train.bin --sequence-length 256 --deterministic --precision bf16 $share"
endless="$data --num-steps 1000000 --stall-timeout 5"
# Stops a rank and checks the error. $1 run, $2 rank, $3 phase, then the call on which the rank stops (as for
# stall_start) and the trainer's arguments. The run must end within 25 s: after the timeout of 5 s the other rank must
# notice it, and two GPU processes must end.
silent() {
    local name=$1 rank=$2 phase=$3 speaker=$(($2 == 0))
    shift 3
    stall_start "$name" "$rank" stop "$@"
    stall_await "$name" 60 || return
    stall_says "$name" 25 \
        "rank $rank on $host has not responded for .*; rank $speaker (waits|is) in $phase: "
}
small="small $endless"
ending="$small --num-steps 1 --export-hf $tmp/stall_model"
# Before the first step a rank calls pread 18 times on each data file (rank 0: 19 or 20 times), and 12 times or more on
# a model's file.
silent start 1 start-up pread 3 synth_train.bin $small
silent training 1 'step [0-9]*, training' pread 40 synth_train.bin $small
silent training0 0 'step [0-9]*, training' pread 40 synth_train.bin $small
silent validation 1 'step 1, validation' pread 20 synth_val.bin $small --val-data "$tmp/synth_val.bin" --val-every 1
silent sampling 1 'step [0-9]*, sampling' MPI_Bcast 30 none $small --sample-every 1
save='step 1, saving a checkpoint'
silent saving 1 "$save" fsync 1 model.safetensors $small --checkpoint-dir "$tmp/stall_ck" --checkpoint-every 1
silent saving0 0 "$save" fsync 2 model.safetensors $small --checkpoint-dir "$tmp/stall_ck0" --checkpoint-every 1
silent export 1 'step 1, export' fsync 1 model.safetensors $ending
run stall_model 2 $ending
silent loading 1 loading pread 12 model.safetensors "$tmp/stall_model" $endless
echo "($SECONDS s)"

# A rank that is held, but goes on before the timeout, changes no result. The rank is stopped for 20 s, or one of its
# reads takes 60 s.
goes_on() {  # $1 run
    stall_end "$1" 60
    if [ "$status" = 0 ]; then same "$1" undisturbed "$1"; else bad "$1: status $status: $(tail -n 4 "$tmp/$1.log")"; fi
}
run undisturbed 2 small $data --num-steps 30
stall_start continued 1 stop pread 30 synth_train.bin small $data --num-steps 30 --stall-timeout 150
stall_await continued 60 && sleep 20 && kill -CONT $(<"$tmp/continued.mark") && goes_on continued
stall_start slow 1 60 pread 30 synth_train.bin small $data --num-steps 30
stall_await slow 60 && sleep 60 && goes_on slow
# If a read does not return, the rank reports that itself and blames no other rank.
stall_start never 1 1000 pread 30 synth_train.bin small $endless
place="in step [0-9]*, training: pread of .*synth_train.bin"
stall_await never 60 && stall_says never 15 "rank 1 on $host: a call on a file has not returned for .* $place"
unset "${!STALL_@}"
echo "($SECONDS s)"
finish
