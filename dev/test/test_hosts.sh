#!/usr/bin/env bash
# Tests train_fp8 on 1 to 3 hosts that mpirun reaches by ssh (if it cannot, by nsenter), and without mpirun
# (--init-from): losses, disks of the hosts, a slow and lossy network, bytes and times of steps against the plan,
# --check-links, a killed rank, a lost host, and runs that go on with fewer hosts. The hosts are network namespaces of
# this machine (lib/hosts.sh). If they cannot be made here, the test is skipped. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1  # there are more ranks than cores, so threads would wait for each other
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
. scripts/tally.sh
. dev/test/lib/hosts.sh
if [ -z "${ROOM:-}" ]; then
    make -s train_fp8 build/synth_stories || exit 1
    enter_room
fi

make_hosts a b c
if ! start_sshd a b c; then
    echo "skipped: ssh between the hosts: $reason; mpirun enters their namespaces with nsenter"
    skipped=$((skipped + 1))
    make_agent
fi
build/synth_stories --out "$ROOM/s" --bytes 60000 --seed 3 >/dev/null
common="tiny --train-data $ROOM/s_train.bin --sequence-length 32 --deterministic --stall-timeout 10 --num-steps 6"
common="$common --learning-rate 1e-5"

# Starts mpirun on host a. It runs a command on the hosts $1: "a,b,c" means one rank on each, "a:3" means 3 ranks on
# host a. Ranks yield their core while they wait.
launch() {
    local hosts=$1
    shift
    on a mpirun --host "$hosts" --mca plm_rsh_agent "$agent" --mca orte_tmpdir_base "$ROOM" \
        --mca mpi_yield_when_idle 1 "$@"
}

# Starts run $1 in the background on the hosts $2 (a b c) without mpirun, one rank on each. The rest: options. Errors of
# rank R go to $ROOM/$1.R.err.
begin_meeting() {
    local name=$1 hosts=$2 rank=0 number=0 host
    shift 2
    pids=()
    for host in $hosts; do number=$((number + 1)); done
    for host in $hosts; do
        on "$host" env RANK=$rank WORLD_SIZE=$number ./train_fp8 $common --init-from tcp:a:29500 "$@" \
            >"$ROOM/$name.$rank.out" 2>"$ROOM/$name.$rank.err" &
        pids+=($!)
        rank=$((rank + 1))
    done
}
# Waits for the ranks of run $1, and leaves their exit statuses in `statuses` and all their errors in $ROOM/$1.err.
end_meeting() {
    local pid
    statuses=""
    for pid in "${pids[@]}"; do wait "$pid"; statuses+="$? "; done
    cat "$ROOM/$1".*.err >"$ROOM/$1.err"
}
# Starts a run with a log, as begin_meeting does, and waits for it. True if all ranks end with status 0.
meet() {
    begin_meeting "$@" --log-dir "$ROOM/$1"
    end_meeting "$1"
    [ -z "${statuses//0 /}" ] || { tail -n 5 "$ROOM/$1.err"; false; }
}

# Prints "step loss norm" for every step of run $1, with all digits of its log.
steps() {
    sed -n 's/.*"type": "step", "step": \([0-9]*\), "loss": \([^,]*\), "norm": \([^,]*\),.*/\1 \2 \3/p' \
        "$ROOM/$1/log.jsonl"
}

# Trains on the hosts $2 (a,b,c) as run $1, with mpirun. The rest: options.
train() {
    local name=$1 hosts=$2
    shift 2
    launch "$hosts" ./train_fp8 $common "$@" --log-dir "$ROOM/$name" >"$ROOM/$name.out" 2>&1 ||
        { tail -n 5 "$ROOM/$name.out"; false; }
}

# Checks that all steps of run $1 equal the steps of run $2 from step $3 on (1: all steps).
same_steps() {
    check "$1: the steps from $3 on have the losses and norms of $2" \
        equal "$(steps "$1")" "$(steps "$2" | tail -n +"$3")"
    check "$1: log.jsonl has steps" [ -n "$(steps "$1")" ]
}

# ---- Ranks on several hosts compute the bits of as many ranks on one host.

check "mpirun starts one rank on each host" equal "$(launch a,b,c hostname | sort | tr '\n' ' ')" "a b c "
check "2 ranks on one host train" train one2 a:2 --batch-size 3
check "2 hosts train" train hosts2 a,b --batch-size 3
same_steps hosts2 one2 1
check "3 ranks on one host train" train one3 a:3 --batch-size 2
check "3 hosts train" train hosts3 a,b,c --batch-size 2
same_steps hosts3 one3 1
check "2 hosts train without mpirun" meet meet2 "a b" --batch-size 3
same_steps meet2 one2 1
check "3 hosts train without mpirun" meet meet3 "a b c" --batch-size 2
same_steps meet3 one3 1
check "the number of ranks changes the bits, so equal bits mean something" eval '[ "$(steps one2)" != "$(steps one3)" ]'

# ---- Every host may have its own copy of the data. Checkpoints and exports need a disk that all hosts share.

# Trains on the hosts a and b as run $1, without mpirun. Each host has a disk of its own at $ROOM/own, with a copy of
# the data. The rest: options. Leaves `statuses` and the errors as end_meeting does.
meet_own() {
    local name=$1 rank=0 host
    shift
    mkdir -p "$ROOM/own"
    pids=()
    for host in a b; do
        on $host unshare --mount sh -c 'room=$1; shift; mount -t tmpfs tmpfs "$room/own" && cp "$room"/s_train.bin \
            "$room/own" && exec "$@"' sh "$ROOM" env RANK=$rank WORLD_SIZE=2 ./train_fp8 $common --batch-size 3 \
            --init-from tcp:a:29500 "$@" >"$ROOM/$name.$rank.out" 2>"$ROOM/$name.$rank.err" &
        pids+=($!)
        rank=$((rank + 1))
    done
    end_meeting "$name"
}

meet_own own-data --train-data "$ROOM/own/s_train.bin" --log-dir "$ROOM/own-data"
check "own data: 2 hosts with copies of the data train" equal "$statuses" "0 0 "
same_steps own-data one2 1
for option in --checkpoint-dir --export-hf; do
    meet_own own-disk $option "$ROOM/own/folder"
    check "$option on disks of the hosts ends both ranks with status 2" equal "$statuses" "2 2 "
    check "$option on disks of the hosts: one line says why: $(cat "$ROOM/own-disk.err")" \
        equal "$(grep '^error: ' "$ROOM/own-disk.err" | cut -d';' -f1)" \
        "error: rank 0 on a: $option $ROOM/own/folder: rank 1 on b: it does not see what rank 0 writes there"
done

# ---- A slow and lossy network changes no bit.

# Prints how many TCP segments the hosts sent again.
resent() {
    for host in a b c; do on $host cat /proc/self/net/snmp; done |
        awk '/^Tcp: [0-9]/ { sum += $13 } END { print sum }'
}

for link in "1 0" "10 0" "1 1"; do
    read -r delay loss <<<"$link"
    name=slow-$delay-$loss
    slow_network "$delay" "$loss" a b c
    began=$(date +%s%N)
    on a bash -c '</dev/tcp/b/1' 2>/dev/null  # refused, after a frame to b and a frame back
    took=$((($(date +%s%N) - began) / 1000000))
    check "$name: $shaper delays an answer by at least $((2 * delay)) ms ($took)" [ $took -ge $((2 * delay)) ]
    before=$(resent)
    check "$name: 3 hosts train" train "$name" a,b,c --batch-size 2
    check "$name: if frames are lost, TCP sends segments again ($before before, $(resent) after)" \
        [ $loss -eq 0 -o "$(resent)" -gt "$before" ]
    check "$name: 3 hosts train without mpirun" meet "meet-$name" "a b c" --batch-size 2
    fast_network a b c
    same_steps "$name" one3 1
    same_steps "meet-$name" one3 1
done

# ---- --dry-run says how many bytes cross the network, and how long a step takes over a link of 100 Mbit/s.

# Prints number $1 of the JSON plan for $2 hosts with one rank each: "step_ms", or "host_receives_bytes", summed over
# the collectives of a step. The rest: options.
plan() {
    local key=$1 hosts=$2
    shift 2
    ./train_fp8 $common --dry-run --json --world-size "$hosts" --ranks-per-host 1 "$@" |
        grep -o "\"$key\": [0-9.e+]*" | awk '{ sum += $2 } END { print sum }'
}
# received: prints the bytes that host $1 has received in its lifetime. step_time: prints the mean time of the steps of
# run $1 in milliseconds, without the first two steps.
received() { on "$1" awk '/eth0:/ { print $2 }' /proc/net/dev; }
step_time() {
    sed -n 's/.*"type": "step", "step": [0-9]*,.*"ms": \([0-9.]*\),.*/\1/p' "$ROOM/$1/log.jsonl" | tail -n +3 |
        awk '{ sum += $1 } END { print sum / NR }'
}
# links_said: prints what --check-links printed in $1.out. bus_bandwidth: prints the bus bandwidth of collective $2, in
# GB/s, that rank 0 of run $1 printed.
links_said() { sed -n '/^links between/,/^$/p' "$ROOM/$1.out"; }
bus_bandwidth() { sed -n "s/^  $2 of a layer.*bus bandwidth \([0-9.]*\) GB.*/\1/p" "$ROOM/$1.0.out"; }
# True if $1 is within $3 percent of $2.
within() { awk -v a="$1" -v b="$2" -v p="$3" 'BEGIN { exit !(b > 0 && a / b > 1 - p / 100 && a / b < 1 + p / 100) }'; }

while read -r hosts options <&3; do
    names=$(echo a b c | cut -d' ' -f"1-$hosts")
    for steps in 5 25; do
        before=$(received b)
        check "bytes-$steps, $hosts hosts, $options: trains" \
            meet "bytes-$steps" "$names" --num-steps $steps --batch-size 2 $options
        bytes[steps]=$(($(received b) - before))
    done
    measured=$(((bytes[25] - bytes[5]) / 20))
    planned=$(plan host_receives_bytes "$hosts" --batch-size 2 $options)
    check "$hosts hosts, $options: $planned bytes a step are planned for a host, $measured arrive at host b" \
        within "$planned" "$measured" 5
done 3<<'CASES'
2 --precision bf16
2 --precision fp8 --sharding grad_op
2 --precision fp8 --grad-accumulation-steps 3
3 --precision fp8 --fp8-recipe rowwise
3 --precision bf16 --sharding none
CASES

for i in 1 2 3; do
    check "one rank trains" meet "alone$i" a --num-steps 8 --batch-size 2
done
alone=$(for i in 1 2 3; do step_time "alone$i"; done | sort -g | head -1)  # other programs lengthen steps at times
if limit_network a b c; then
    for case in "2 --precision bf16" "3 --precision bf16" "2 --precision fp8 --fp8-recipe rowwise"; do
        read -r hosts options <<<"$case"
        names=$(echo a b c | cut -d' ' -f"1-$hosts")
        planned=$(plan step_ms "$hosts" --batch-size 2 $options --network-gbps 0.1 --step-ms "$alone")
        measured=
        for i in 1 2 3; do  # again only if something lengthened the steps
            check "$hosts hosts over 100 Mbit/s train" meet "limited$i" "$names" --num-steps 8 --batch-size 2 $options
            measured=$(printf '%s\n' $measured "$(step_time "limited$i")" | sort -g | head -1)
            within "$planned" "$measured" 20 && break
        done
        check "$hosts hosts, $options, 100 Mbit/s: a step is estimated at $planned ms and takes $measured" \
            within "$planned" "$measured" 20
        rm -rf "$ROOM"/limited[123]
    done
    # --check-links: equal links, then a slow one to host c.
    check "links: 3 hosts over 100 Mbit/s train" meet links "a b c" --batch-size 2 --check-links
    same_steps links one3 1
    check "links: none is slow: $(links_said links.0)" holds "$ROOM/links.0.out" "no rank and no link was found slow"
    for collective in all-gather reduce-scatter; do
        measured=$(bus_bandwidth links $collective)
        check "links: the bus bandwidth of $collective is that of 100 Mbit/s ($measured GB/s)" \
            within "$measured" 0.0125 20
    done
    tc qdisc change dev v-c root tbf rate 10mbit burst 32kb latency 10s
    check "links: 3 hosts train, one of them over 10 Mbit/s" meet slow-links "a b c" --batch-size 2 --check-links
    check "links: 3 hosts train with mpirun" train slow-links-mpi a,b,c --batch-size 2 --check-links
    for name in slow-links.0 slow-links-mpi; do
        check "$name: the slow rank and its host are named: $(links_said $name)" \
            equal "$(grep -o 'slow: rank . on . reaches other ranks over network' "$ROOM/$name.out")" \
            "slow: rank 2 on c reaches other ranks over network"
        check "$name: nothing else is slow" equal "$(grep -c 'slow: \|is slow' "$ROOM/$name.out")" 1
    done
    check "links: log.jsonl names the slow rank, too" \
        grep -q '"type": "links", .*"slow": \["rank 2 on c reaches' "$ROOM/slow-links/log.jsonl"
else
    echo "skipped: times of steps and --check-links over 100 Mbit/s: this kernel cannot limit a link (tbf)"
    skipped=$((skipped + 1))
fi
for host in a b c; do tc qdisc del dev "v-$host" root 2>/dev/null; done

# ---- A rank is killed, or a host is lost, in a run that saves every 2 steps. The run goes on.

# Starts run $1 with mpirun on the hosts a, b and c, and waits up to 20 s until it has saved the checkpoint of step 2.
# The run would go on for a million steps.
begin() {
    launch a,b,c ./train_fp8 $common --num-steps 1000000 --batch-size 2 --checkpoint-dir "$ROOM/$1-ck" \
        --checkpoint-every 2 --keep-checkpoints 1000000 >"$ROOM/$1.out" 2>&1 &
    running=$!
    check "$1: the run saves a checkpoint" await 20 test -d "$ROOM/$1-ck/step-00000002"
}

# True if no rank is left on the hosts $*.
all_ended() { [ -z "$(for host in "$@"; do processes "$host" train_fp8; done)" ]; }

# Sets `last` to the folder name of the newest checkpoint of run $1 (step-00000123). Leaves only the checkpoint of step
# 2 in $ROOM/$1-ck, and copies it to $ROOM/$1-copy, so that two runs can go on from there. $ROOM/$1-all gets all
# checkpoints.
keep_second() {
    last=$(ls "$ROOM/$1-ck" | grep -E '^step-[0-9]{8}$' | tail -n 1)
    cp -r "$ROOM/$1-ck" "$ROOM/$1-all"
    find "$ROOM/$1-ck" -mindepth 1 -maxdepth 1 ! -name step-00000002 -exec rm -r {} +
    cp -r "$ROOM/$1-ck" "$ROOM/$1-copy"
}

begin killed
began=$SECONDS
kill -KILL $(processes c train_fp8)
check "killed: all ranks end within 60 s" await 60 all_ended a b c
await 60 eval '! kill -0 $running 2>/dev/null'
wait $running
status=$?
check "killed: mpirun ends with status 137 ($status) after $((SECONDS - began)) s" [ $status -eq 137 ]
check "killed: one line names the rank and the host: $(tail -n 4 "$ROOM/killed.out")" \
    equal "$(grep -c 'rank 2 .*node c exited on signal 9' "$ROOM/killed.out")" 1
keep_second killed
check "killed: the run goes on on 3 hosts" \
    train resumed a,b,c --batch-size 2 --checkpoint-dir "$ROOM/killed-ck" --resume
same_steps resumed one3 3

begin lost
began=$SECONDS
ip link set v-b down
check "lost: the ranks on all other hosts end within 60 s" await 60 all_ended a c
await 60 eval '! kill -0 $running 2>/dev/null'
wait $running
status=$?
check "lost: mpirun ends with status 6 ($status)" [ $status -eq 6 ]
check "lost: mpirun ends within 60 s ($((SECONDS - began)))" [ $((SECONDS - began)) -le 60 ]
check "lost: the rank on the lost host ends" await 30 all_ended b
check "lost: there is one error: $(grep 'error: ' "$ROOM/lost.out")" equal "$(grep -c 'error: ' "$ROOM/lost.out")" 1
check "lost: the error names the host and the rank" \
    grep -q '^error: rank 1 on b has not responded for 1[0-9] s (limit 10 s, from --stall-timeout 10)' "$ROOM/lost.out"
keep_second lost
check "lost: a run with all checkpoints of the lost run trains on the 2 hosts that are left" \
    launch a,c ./train_fp8 $common --num-steps $((10#${last#step-} + 1)) --batch-size 3 \
    --checkpoint-dir "$ROOM/lost-all" --resume >"$ROOM/newest.out" 2>&1
check "lost: this run continues from the last checkpoint" \
    holds "$ROOM/newest.out" "continuing from $ROOM/lost-all/$last"
fewer="--batch-size 3 --checkpoint-dir"
check "lost: the run goes on from step 2 on the 2 hosts that are left" train fewer a,c $fewer "$ROOM/lost-ck" --resume
check "lost: the run goes on from step 2 on 2 ranks of one host" train fewer-one a:2 $fewer "$ROOM/lost-copy" --resume
same_steps fewer fewer-one 1
check "lost: the run on the 2 hosts that are left goes on after step 2" \
    equal "$(steps fewer | head -n 1 | cut -d' ' -f1)" 3

# ---- A killed rank and a lost host, without mpirun.

meeting="--num-steps 1000000 --batch-size 2 --checkpoint-every 2 --keep-checkpoints 1000000 --checkpoint-dir"
ip link set v-b up
begin_meeting met "a b c" $meeting "$ROOM/met-ck"
check "met: the run saves a checkpoint" await 20 test -d "$ROOM/met-ck/step-00000002"
began=$SECONDS
kill -KILL $(processes c train_fp8)
end_meeting met
check "met: a killed rank ends the others with status 6 within 10 s ($((SECONDS - began)))" \
    equal "$statuses$((SECONDS - began <= 10))" "6 6 137 1"
said=$(grep '^error: ' "$ROOM/met.err")
check "met: there is one error, with the killed rank and its host: $said" \
    equal "$(cut -d';' -f1 <<<"$said")" "error: rank 0 on a: rank 2 on c was killed or has crashed"
begin_meeting gone "a b c" $meeting "$ROOM/gone-ck"
check "gone: the run saves a checkpoint" await 20 test -d "$ROOM/gone-ck/step-00000002"
began=$SECONDS
ip link set v-b down
end_meeting gone
check "gone: a lost host ends all ranks with status 6 within 60 s ($((SECONDS - began)))" \
    equal "$statuses$((SECONDS - began <= 60))" "6 6 6 1"
check "gone: rank 0 prints one error with the lost rank and host, rank 2 none: $(cat "$ROOM/gone.0.err")" \
    equal "$(grep -c '^error: rank 1 on b has not responded' "$ROOM/gone.0.err")$(cat "$ROOM/gone.2.err")" 1
check "gone: the 2 hosts that are left train from step 2 of the run \"killed\"" meet gone-fewer "a c" --batch-size 3 \
    --num-steps 6 --checkpoint-dir "$ROOM/killed-copy" --resume
check "gone: these 2 hosts have the losses and norms of the run \"fewer\", which mpirun started" \
    equal "$(steps gone-fewer)" "$(steps fewer)"
finish
