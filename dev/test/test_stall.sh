#!/usr/bin/env bash
# Tests ranks of train_fp8 that hang: stopped in one of the phases of a run, stopped and continued, in a slow read or
# fsync, in a read that never ends. Needs ./train_fp8, build/synth_stories and mpirun. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
. dev/test/lib/cpu_trainer.sh
ok() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); echo "FAILED: $*"; }
build/synth_stories --out "$tmp/s" --bytes 60000 --seed 3 >/dev/null || bad "synth_stories"
host=$(hostname)
data="--train-data $tmp/s_train.bin --sequence-length 16"
launcher="mpirun --allow-run-as-root --oversubscribe -np 3 -x LD_PRELOAD=$tmp/shim.so"
stall_run() { exec $launcher ./train_fp8 "$@" $data; }
. dev/test/lib/stall_cases.sh
lines() { grep '^step ' "$tmp/$1.log" | sed 's/ | [0-9.]* ms.*//'; }

# Exports the weights that a run loads below.
./train_fp8 tiny $data --num-steps 1 --export-hf "$tmp/model" >"$tmp/one.log" 2>&1 || bad "$(tail -n 3 "$tmp/one.log")"

# ---- SIGSTOP of a rank in the phases from start-up to export. Several runs go on at once, because each waits most of
# the time. Before the first step a rank reads each data file 18 or 19 times: the header, and parts of the file for its
# fingerprint. A rank reads a model's file 12 times or more.
endless="--num-steps 1000000 --stall-timeout 5"
# Waits until rank $2 of run $1 is stopped. Checks that the run then ends within 15 s, with an error that names that
# rank and the phase $3.
silent() {
    local speaker=$(($2 == 0))
    stall_await "$1" 60 || return
    stall_says "$1" 15 "rank $2 on $host has not responded for .*; rank $speaker waits in $3: "
}
stall_start start 1 stop pread 3 s_train.bin tiny $endless
stall_start training 2 stop pread 40 s_train.bin tiny $endless
stall_start training0 0 stop pread 40 s_train.bin tiny $endless
silent start 1 start-up
silent training 2 'step 2[0-9], training'
silent training0 0 'step 2[0-9], training'
stall_start loading 1 stop pread 12 model.safetensors "$tmp/model" $endless
stall_start validation 1 stop pread 20 s_val.bin tiny $endless --val-data "$tmp/s_val.bin" --val-every 1
stall_start sampling 2 stop MPI_Bcast 20 none tiny $endless --sample-every 1
silent loading 1 loading
silent validation 1 'step 1, validation'
silent sampling 2 'step [0-9], sampling'
stall_start saving 1 stop fsync 1 model.safetensors tiny $endless --checkpoint-dir "$tmp/ck" --checkpoint-every 1
stall_start saving0 0 stop fsync 2 model.safetensors tiny $endless --checkpoint-dir "$tmp/ck0" --checkpoint-every 1
stall_start export 1 stop fsync 1 model.safetensors tiny $endless --num-steps 1 --export-hf "$tmp/out"
silent saving 1 'step 1, saving a checkpoint'
silent saving0 0 'step 1, saving a checkpoint'
silent export 1 'step 1, export'

# ---- A rank that continues in time: stopped for 3 s, in a read of 8 s, or in an fsync of 9 s with --stall-timeout 5 (a
# save may take 4 times --stall-timeout).
stall_start undisturbed 1 stop none 0 none tiny --num-steps 40
stall_start continued 1 stop pread 30 s_train.bin tiny --num-steps 40 --stall-timeout 30
stall_start slow 1 8 pread 30 s_train.bin tiny --num-steps 40 --stall-timeout 30
stall_start disk 1 9 fsync 1 model.safetensors tiny --num-steps 40 --stall-timeout 5 --checkpoint-dir "$tmp/slow"
stall_start never 1 1000 pread 30 s_train.bin tiny $endless
stall_await continued 60 && sleep 3 && kill -CONT $(<"$tmp/continued.mark")
for name in undisturbed continued slow disk; do
    stall_end $name 60
    check "$name: the run ends with status 0 ($status): $(tail -n 12 "$tmp/$name.log")" [ "$status" = 0 ]
    check "$name: its step lines equal those of the undisturbed run" equal "$(lines $name)" "$(lines undisturbed)"
done
check "the undisturbed run prints 40 step lines" equal "$(lines undisturbed | wc -l)" 40
# ---- A read that never ends: the rank reports it itself.
place="in step 1[0-9], training: pread of .*s_train.bin"
stall_await never 60 && stall_says never 15 "rank 1 on $host: a call on a file has not returned for .* $place"
finish
