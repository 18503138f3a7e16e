#!/usr/bin/env bash
# Tests ranks of train_fp8 that mpirun did not start (--init-from): losses, how the ranks meet, hybrid sharding on
# several host names, wrong options, ranks that are missing, connections of other programs, ranks that die or hang.
# Needs python3, and mpirun for comparison. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
. dev/test/lib/cpu_trainer.sh
trap 'kill -KILL $(jobs -p) 2>/dev/null
    rm -rf "$tmp"' EXIT
build/synth_stories --out "$tmp/s" --bytes 60000 --seed 3 >/dev/null
data="tiny --train-data $tmp/s_train.bin --sequence-length 32"
endless="--num-steps 1000000 --stall-timeout 10"
host=$(hostname)
port=$((20000 + $$ % 10000))
free_port() { port=$((port + 1)); }

# Starts one rank in the background. $1 name of the run, $2 rank, $3 number of ranks, $4 --init-from, then other
# arguments.
rank() {
    local log="$tmp/$1.$2" r=$2 n=$3 from=$4
    shift 4
    RANK=$r WORLD_SIZE=$n timeout 120 ./train_fp8 $data --init-from "$from" "$@" >"$log.out" 2>"$log.err" &
    pids[r]=$!
}
# Starts all ranks of a run. $1 its name, $2 number of ranks, $3 --init-from, then other arguments.
ranks() {
    local name=$1 n=$2 from=$3 r
    shift 3
    pids=()
    for ((r = 0; r < n; r++)); do rank "$name" "$r" "$n" "$from" "$@"; done
}
# Waits for all ranks of run $1, and leaves their exit statuses in `statuses` and their errors in $tmp/$1.errors.
ends() {
    local r
    statuses=""
    for r in "${!pids[@]}"; do
        wait "${pids[r]}" 2>/dev/null
        statuses+="$? "
    done
    cat "$tmp/$1".*.err >"$tmp/$1.errors"
}
steps() { grep '^step ' "$1" | sed 's/ | [0-9.]* ms.*//'; }
# Waits for a run, and checks its statuses and its one line of error. $1 name, $2 statuses, $3 pattern of the error.
fails() {
    ends "$1"
    check "$1: statuses $2" equal "$statuses" "$2 "
    check "$1: one error line" equal "$(grep -c '^error: ' "$tmp/$1.errors")" 1
    check "$1: the error says $3: $(cat "$tmp/$1.errors")" grep -qE "^error: $3" "$tmp/$1.errors"
}

# ---- losses: equal to those of ranks that mpirun started, with sharding full, hybrid and none

compare() {
    local n=$1 name=$2
    shift 2
    mpirun --allow-run-as-root --oversubscribe -np "$n" ./train_fp8 $data --num-steps 4 "$@" >"$tmp/$name.mpi" 2>&1
    ranks "$name" "$n" "file:$tmp/$name.meet" --num-steps 4 "$@"
    ends "$name"
    check "$name: all ranks end with status 0" equal "${statuses// /}" "$(printf '0%.0s' $(seq "$n"))"
    check "$name: the step lines equal those of ranks that mpirun started" \
        equal "$(steps "$tmp/$name.0.out")" "$(steps "$tmp/$name.mpi")"
    check "$name: rank 0 prints 4 steps" equal "$(steps "$tmp/$name.0.out" | wc -l)" 4
    check "$name: no rank prints an error" equal "$(cat "$tmp/$name.errors")" ""
    check "$name: the file where the ranks met is removed" equal "$(ls "$tmp/$name.meet" 2>/dev/null)" ""
}
compare 2 two --val-data "$tmp/s_val.bin" --val-every 2
compare 4 four --precision fp8 --fp8-recipe delayed --grad-clip 0.5 --sample-every 2
compare 4 hybrid --sharding hybrid --shard-size 2 --precision fp8 --reduce-dtype fp32
compare 3 replicas --sharding none --grad-accumulation-steps 2

# ---- ways without mpirun in which a process learns its rank and where the ranks meet

free_port
ranks tcp 3 "tcp:localhost:$port" --num-steps 2
ends tcp
check "tcp:HOST:PORT trains" equal "$statuses$(steps "$tmp/tcp.0.out" | wc -l)" "0 0 0 2"
free_port
ranks six 2 "tcp:[::1]:$port" --num-steps 2
ends six
if [ -e /proc/net/if_inet6 ] && grep -q ' lo$' /proc/net/if_inet6; then
    check "an IPv6 address in brackets trains" equal "$statuses$(steps "$tmp/six.0.out" | wc -l)" "0 0 2"
fi
# Runs ranks that learn their rank from environment variables, and waits for them. $1 name, $2 number of ranks, then
# VARIABLE=value with @ for the rank, up to --, then arguments.
by_variables() {
    local name=$1 n=$2 r variables=()
    shift 2
    while [ "$1" != -- ]; do variables+=("$1"); shift; done
    shift
    pids=()
    for ((r = 0; r < n; r++)); do
        env "${variables[@]//@/$r}" timeout 60 ./train_fp8 $data --num-steps 2 "$@" \
            >"$tmp/$name.$r.out" 2>"$tmp/$name.$r.err" &
        pids[r]=$!
    done
    ends "$name"
}
free_port
by_variables torch 2 RANK=@ WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port --
check "PyTorch's four variables are enough" equal "$statuses$(steps "$tmp/torch.0.out" | wc -l)" "0 0 2"
slurm=(SLURM_PROCID=@ SLURM_STEP_NUM_TASKS=2 "SLURM_STEP_NODELIST=localhost,other" SLURM_JOB_ID=$$ SLURM_STEP_ID=0)
by_variables slurm 2 "${slurm[@]}" --
check "Slurm's variables are enough" equal "$statuses$(steps "$tmp/slurm.0.out" | wc -l)" "0 0 2"
by_variables slurm-file 2 "${slurm[@]}" -- --init-from "file:$tmp/slurm.meet"
check "Slurm's variables and a file are enough" equal "$statuses$(steps "$tmp/slurm-file.0.out" | wc -l)" "0 0 2"
by_variables batch 1 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7 --
check "a Slurm batch script, outside srun, is a single rank" equal "$statuses$(steps "$tmp/batch.0.out" | wc -l)" "0 2"
by_variables single 1 RANK=0 WORLD_SIZE=1 -- --init-from tcp:nowhere:1
check "a single rank does not need the address of --init-from" \
    equal "$statuses$(steps "$tmp/single.0.out" | wc -l)" "0 2"

# ---- without --shard-size, hybrid sharding takes the ranks of one host as a shard group. Ranks with different host
# names count as ranks of different hosts.

# Runs 4 ranks with --sharding hybrid, and waits for them. $1 name, $2 the host names of ranks 0 to 3.
on_hosts() {
    local name=$1 r=0 of_rank
    pids=()
    for of_rank in $2; do
        RANK=$r WORLD_SIZE=4 timeout 60 unshare --uts sh -c "hostname $of_rank; exec ./train_fp8 $data --num-steps 2 \
            --sharding hybrid --init-from file:$tmp/$name.meet" >"$tmp/$name.$r.out" 2>"$tmp/$name.$r.err" &
        pids[r]=$!
        r=$((r + 1))
    done
    ends "$name"
}
if unshare --uts hostname other 2>/dev/null; then
    on_hosts hosts "a a b b"
    check "hybrid on two hosts trains" equal "$statuses" "0 0 0 0 "
    check "hybrid on two hosts has two replicas" holds "$tmp/hosts.0.out" "ranks     4: 2 replicas of 2 ranks"
    check "hybrid on two hosts prints the derived --shard-size" holds "$tmp/hosts.0.out" "--shard-size 2"
    on_hosts uneven "a a a b"
    check "hosts with 3 and 1 ranks are refused" equal "$statuses$(grep -c \
        '^error: rank 0 on a: --sharding hybrid: the hosts have different numbers of ranks, from 1 to 3;' \
        "$tmp/uneven.errors")" "2 2 2 2 1"
    on_hosts mixed "a b a b"
    check "ranks that alternate between hosts are refused" equal "$statuses$(grep -c \
        '^error: rank 0 on a: --sharding hybrid: the ranks of a host do not follow each other' \
        "$tmp/mixed.errors")" "2 2 2 2 1"
else
    echo "skipped: hybrid on several hosts: this user may not set a host name for a process (unshare --uts)"
fi

# ---- wrong options or variables: $1 name, $2 pattern of the error, then variables, --, arguments

wrong() {
    local name=$1 pattern=$2
    shift 2
    by_variables "$name" 1 "$@"
    check "$name: status 2" equal "$statuses" "2 "
    check "$name: $pattern" grep -qE "^error: $pattern" "$tmp/$name.errors" || cat "$tmp/$name.errors"
}
wrong kind 'argument --init-from|--init-from smoke: must be auto, mpi, slurm, file:PATH or tcp:HOST:PORT' \
    A=1 -- --init-from smoke
wrong no-port '--init-from tcp:node1: must be tcp:HOST:PORT' RANK=0 WORLD_SIZE=2 -- --init-from tcp:node1
wrong big-port '--init-from tcp:node1:65536: must be tcp:HOST:PORT, with a port from 1 to 65535' \
    RANK=0 WORLD_SIZE=2 -- --init-from tcp:node1:65536
wrong no-rank '--init-from file:/x: this process does not know its rank; set RANK and WORLD_SIZE' A=1 -- \
    --init-from file:/x
wrong high-rank 'RANK is "2" and WORLD_SIZE is "2": the rank must be' RANK=2 WORLD_SIZE=2 -- --init-from file:/x
wrong odd-rank 'RANK is "one" and WORLD_SIZE is "2": the rank must be' RANK=one WORLD_SIZE=2 -- --init-from file:/x
wrong no-slurm '--init-from slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST are not all set' \
    A=1 -- --init-from slurm
wrong timeout '--init-timeout soon: must be a whole number of seconds' RANK=0 WORLD_SIZE=2 -- \
    --init-from file:/x --init-timeout soon

# ---- rank 2 of 3 meets the others, connects to them, and then says nothing (the run ends while other tests run)

cat >"$tmp/silent.py" <<'PY'
import socket, struct, sys, time
CARD = "<24s5i64s64s40s64s33s3x"
def connect(port, kind, token=b""):
    s = socket.create_connection(("127.0.0.1", port))
    s.sendall(struct.pack(CARD, b"train_fp8 rank 1", kind, 3, 2, 1, 1, b"", b"far", b"none", b"", token))
    return s
for _ in range(100):
    try:
        first = connect(int(sys.argv[1]), 0)
        break
    except OSError:
        time.sleep(0.1)
size = struct.calcsize(CARD)
table = first.makefile("rb").read(1032 + 3 * size)[1032:]  # behind an Answer
cards = [struct.unpack_from(CARD, table, r * size) for r in range(2)]
kept = [connect(card[5], kind, cards[0][-1].split(b"\0")[0]) for card in cards for kind in (1, 2)]
print("connected", flush=True)
time.sleep(60)
PY
free_port
pids=()
for r in 0 1; do rank silent $r 3 "tcp:127.0.0.1:$port" --stall-timeout 5; done
python3 "$tmp/silent.py" "$port" >"$tmp/silent.log" &
pids_silent=("${pids[@]}" $!)

# ---- starts that must fail, a file that an earlier run left, two runs at one place

pids=()
for r in 0 1 3; do rank missing $r 4 "file:$tmp/missing.meet" --init-timeout 3; done
fails missing "6 6 6" "rank 0 on $host: rank 2 of 4 did not come to $tmp/missing.meet within 3 s \(--init-timeout\)$"
check "missing: the file where the ranks met is removed" equal "$(ls "$tmp"/missing.meet* 2>/dev/null)" ""
pids=()
rank nobody 1 2 "file:$tmp/nobody.meet" --init-timeout 2
fails nobody 6 "rank 1 on $host: rank 0 could not be reached within 2 s .*: $tmp/nobody.meet is missing or cannot"
pids=()
rank refused 1 2 "tcp:localhost:1" --init-timeout 2
fails refused 6 "rank 1 on $host: rank 0 could not be reached within 2 s .*localhost:1: Connection refused"
pids=()
rank count 0 3 "file:$tmp/count.meet" --init-timeout 20
rank count 1 2 "file:$tmp/count.meet" --init-timeout 20
ends count
check "count: both ranks end with status 2" equal "$statuses" "2 2 "
check "count: the error names both counts" grep -qE "^error: rank 0 on $host: rank 1 on $host \(process [0-9]+\) was \
started as one of 2 ranks, and rank 0 as one of 3" "$tmp/count.errors"
echo "something else" >"$tmp/other"
pids=()
rank other 0 2 "file:$tmp/other" --init-timeout 5
fails other 1 \
    "rank 0 on $host: --init-from file:$tmp/other: the file exists and cannot be read as one that rank 0 of a run wrote"
check "other: the file is as it was" equal "$(cat "$tmp/other")" "something else"
pids=()
rank folder 0 2 "file:$tmp/none/meet" --init-timeout 5
fails folder 1 "rank 0 on $host: --init-from file:$tmp/none/meet: cannot write .*No such file or directory"

# A stale file, which names a port where nobody listens, is replaced, with a warning.
pids=()
rank stale 0 2 "file:$tmp/stale.meet"
await 30 grep -q '^address' "$tmp/stale.meet"
kill -KILL $(children "${pids[0]}")
wait "${pids[0]}" 2>/dev/null
check "a killed rank 0 leaves its file" [ -s "$tmp/stale.meet" ]
ranks stale 2 "file:$tmp/stale.meet" --num-steps 2
ends stale
check "stale: the run trains" equal "$statuses$(steps "$tmp/stale.0.out" | wc -l)" "0 0 2"
check "stale: a warning says that the file is replaced" \
    grep -q "^warning: .*a run on $host that does not answer left the file; it is replaced" "$tmp/stale.errors"

# A silent program listens at the port that a stale file names: the rank that waits for its answer goes on when rank 0
# has written the file again.
python3 -c 'import socket, time
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1], flush=True)
time.sleep(60)' >"$tmp/mute.port" &
mute=$!
await 30 test -s "$tmp/mute.port"
printf '%s\n' "train_fp8 rank 1" "token 0123" "job none" "host $host" "boot $(cat /proc/sys/kernel/random/boot_id)" \
    "process 1" "port $(<"$tmp/mute.port")" "address 127.0.0.1" >"$tmp/mute.meet"
pids=()
rank mute 1 2 "file:$tmp/mute.meet" --num-steps 2
sleep 1
rm "$tmp/mute.meet"
rank mute 0 2 "file:$tmp/mute.meet" --num-steps 2
start=$SECONDS
ends mute
kill $mute
check "a silent program at a stale file's port does not delay the run" \
    equal "$statuses$(steps "$tmp/mute.0.out" | wc -l) $((SECONDS - start < 20))" "0 0 2 1"

pids=("${pids_silent[@]:0:2}")
fails silent "6 6" "rank 0 on $host has waited for .* in start-up: all-gather: another rank is stuck or too slow$"
check "silent: rank 2 had connected to both" equal "$(<"$tmp/silent.log")" connected
kill "${pids_silent[2]}"

# Prints the addresses where a program listens at port $1, in hex. True if there are any.
listeners() { awk -v p="$(printf ':%04X' "$1")" '$4 == "0A" && index($2, p) { print $2 }' /proc/net/tcp{,6} | grep .; }

# A second rank 0 at the place of another run is refused: first the place is a file, then a port.
free_port
free_port
for places in "file:$tmp/both.meet file:$tmp/other.meet" "tcp:localhost:$((port - 1)) tcp:localhost:$port"; do
    read -r place other <<<"$places"
    pids=()
    rank first 0 2 "$place" --init-timeout 20
    case $place in file:*) await 10 test -e "${place#file:}" ;; *) await 10 listeners $((port - 1)) ;; esac
    rank second 1 2 "$other" --init-timeout 3  # it waits at another place, and must not disturb
    pids=("${pids[0]}")
    RANK=0 WORLD_SIZE=2 timeout 20 ./train_fp8 $data --init-from "$place" >/dev/null 2>"$tmp/second.err"
    check "${place%%:*}: a second rank 0 ends with status 1" equal $? 1
    check "${place%%:*}: its error names rank 0 of the other run, or the port" \
        grep -qE "its rank 0 on $host|cannot listen on port" "$tmp/second.err" || cat "$tmp/second.err"
    kill "${pids[0]}"
    wait "${pids[0]}" 2>/dev/null
done
# Rank 1 of a run is started twice. Then rank 0 of one Slurm job and rank 1 of another come to one file.
pids=()
rank twice 0 3 "file:$tmp/twice.meet" --init-timeout 20
rank twice 1 3 "file:$tmp/twice.meet" --init-timeout 20
sleep 1
rank twice-again 1 3 "file:$tmp/twice.meet" --init-timeout 20
wait "${pids[1]}"
check "twice: the second rank 1 ends with the status of a lost rank, which scripts start again" equal $? 6
wait "${pids[0]}"
check "twice: rank 0 ends with status 6" equal $? 6
check "twice: the error names both processes" \
    grep -qE "rank 1 came twice, from $host \(process [0-9]+\) and $host \(process" "$tmp/twice.0.err"
for r in 0 1; do
    env SLURM_JOB_ID=$r SLURM_STEP_ID=0 RANK=$r WORLD_SIZE=2 timeout 20 ./train_fp8 $data \
        --init-timeout $((6 - 4 * r)) --init-from "file:$tmp/jobs.meet" >/dev/null 2>"$tmp/jobs.$r.err" &
done
wait
check "rank 1 of another Slurm job prints that the file is of another job" \
    grep -q "jobs.meet is of another job: slurm 0.0.0" "$tmp/jobs.1.err"

# ---- What rank 0 leaves open while it waits: a file that only its user reads, which a signal removes; and with a
# loopback address no other address.

pids=()
rank guarded 0 2 "file:$tmp/guarded.meet" --init-timeout 20
await 10 test -e "$tmp/guarded.meet"
check "the file with the token is its user's alone" equal "$(stat -c %a "$tmp/guarded.meet")" 600
kill "${pids[0]}"  # timeout passes the signal on
wait "${pids[0]}"
check "a signal removes the file" test ! -e "$tmp/guarded.meet"
free_port
pids=()
rank loopback 0 2 "tcp:127.0.0.1:$port" --init-timeout 3
await 3 listeners "$port"
check "tcp:127.0.0.1 listens there alone" equal "$(listeners "$port")" "$(printf '0100007F:%04X' "$port")"
wait

# Rank 1 waits on a host with few free ports, one of them rank 0's: it neither connects to itself nor listens there.
cat >"$tmp/few_ports.sh" <<'SH'
ip link set lo up && echo 29001 29008 >/proc/sys/net/ipv4/ip_local_port_range || exit
WORLD_SIZE=2 RANK=1 timeout 30 ./train_fp8 "$@" &
sleep 3
WORLD_SIZE=2 RANK=0 timeout 30 ./train_fp8 "$@"
echo "status $?"; wait $!; echo "status $?"
SH
if unshare --net true 2>/dev/null; then
    unshare --net bash "$tmp/few_ports.sh" $data --num-steps 1 --init-from tcp:127.0.0.1:29001 --init-timeout 15 \
        >"$tmp/few.out" 2>&1
    check "few free ports: both ranks train" equal "$(grep -c '^status 0' "$tmp/few.out")" 2 || cat "$tmp/few.out"
else
    echo "skipped: ranks on a host with few free ports: this user may not make a network (unshare --net)"
fi

# ---- connections of other programs ("strangers"): random bytes, an HTTP request, half of a rank's greeting, silence.
# The run trains all the same.

free_port
cat >"$tmp/strangers.py" <<'PY'
import os, socket, sys, time
port, seconds = int(sys.argv[1]), float(sys.argv[2])
end = time.time() + seconds
kept = []
while time.time() < end:
    try:
        for kind in range(40):
            s = socket.create_connection(("localhost", port), timeout=1)
            if kind % 4 == 0:
                s.sendall(os.urandom(4096))
            elif kind % 4 == 1:
                s.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif kind % 4 == 2:
                s.sendall(b"train_fp8 rank 1\0")
            kept.append(s)
    except OSError:
        pass
    time.sleep(0.05)
print(len(kept))
PY
pids=()
rank strangers 0 3 "tcp:localhost:$port" --num-steps 2 --init-timeout 60
python3 "$tmp/strangers.py" "$port" 5 >"$tmp/strangers.count" &
crowd=$!
sleep 2
rank strangers 1 3 "tcp:localhost:$port" --num-steps 2 --init-timeout 60
sleep 1
rank strangers 2 3 "tcp:localhost:$port" --num-steps 2 --init-timeout 60
ends strangers
wait $crowd
check "strangers: other programs have made 100 connections or more" [ "$(<"$tmp/strangers.count")" -ge 100 ]
check "strangers: the run trains" equal "$statuses$(steps "$tmp/strangers.0.out" | wc -l)" "0 0 0 2"
check "strangers: no rank prints an error" equal "$(cat "$tmp/strangers.errors")" ""

# ---- ranks that fail, die, hang, stop

ranks option 3 "file:$tmp/option.meet" --no-such-option
fails option "2 2 2" "rank 0 on $host: unknown option --no-such-option"
# Starts an endless run and waits up to 30 s for its step 5. $1 name, $2 number of ranks, then arguments.
begin() {
    local name=$1 n=$2
    shift 2
    ranks "$name" "$n" "file:$tmp/$name.meet" $endless "$@"
    await 30 grep -q '^step  *5/' "$tmp/$name.0.out" || cat "$tmp/$name".*.err
}
# Prints the process id of the trainer of rank $1, which is a child of timeout.
process() { children "${pids[$1]}"; }
for victim in 0 1; do
    begin killed$victim 3
    start=$SECONDS
    kill -KILL "$(process $victim)"
    [ $victim = 0 ] && expected="137 6 6" || expected="6 137 6"
    fails killed$victim "$expected" \
        "rank [$((victim == 0))2] on $host: rank $victim on $host was killed or has crashed; this rank waits for it in "
    check "killed$victim: all ranks end within 12 s" [ $((SECONDS - start)) -le 12 ]
done
begin stopped 3
kill -STOP "$(process 2)"
sleep 14
kill -CONT "$(process 2)"
ends stopped
check "stopped: ranks 0 and 1 end with status 6" equal "${statuses:0:4}" "6 6 "
check "stopped: one error line names the rank" \
    equal "$(grep -c "^error: rank 2 on $host has not responded for" "$tmp/stopped.errors")" 1
begin stop 3 --checkpoint-dir "$tmp/stop" --checkpoint-every 1000000
kill -TERM $(for r in 0 1 2; do process $r; done)
ends stop
check "stop: SIGTERM to all ranks saves and ends with status 0" equal "$statuses$(ls "$tmp/stop" | wc -l)" "0 0 0 1"
ranks nonfinite 2 "file:$tmp/nonfinite.meet" --num-steps 50 --learning-rate 1000
ends nonfinite
check "nonfinite: both ranks end with status 7" equal "$statuses" "7 7 "
finish
