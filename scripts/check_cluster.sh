#!/usr/bin/env bash
# Runs scripts/slurm.sbatch on a Slurm cluster of two nodes, both on this machine. Installs Slurm and munge (Debian,
# Ubuntu). Jobs of the CPU trainer are preempted, lose a node, or have their ranks killed; Slurm must start them again,
# and their losses must be those of an uninterrupted run. Jobs that are cancelled, lose their ranks before the first
# checkpoint or have a wrong option must not be started again. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/.."
. scripts/install.sh
. scripts/tally.sh
take_none "usage: scripts/check_cluster.sh
Installs Slurm and munge, starts them on this machine as a cluster of two nodes, and tests scripts/slurm.sbatch there
with the CPU trainer. Needs root. Takes 3 to 6 minutes. Exit status 0: no test failed." "$@"
[ "$(id -u)" -eq 0 ] || { echo "error: check_cluster.sh starts Slurm's daemons, so it needs root" >&2; exit 1; }
install_tools
missing=()
for program in slurmctld slurmd munged; do command -v $program >/dev/null || missing+=("${program/munged/munge}"); done
command -v sbatch >/dev/null || missing+=(slurm-client)
[ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
make -s train_fp8 build/synth_stories || exit 1

tmp=$(mktemp -d)
daemons=()
leave() {
    if [ ${#daemons[@]} -gt 0 ]; then  # SLURM_CONF is set, so scancel reaches this cluster and no other
        scancel --full --signal=KILL --user=root 2>/dev/null
        scancel --user=root 2>/dev/null
        sleep 1
        kill "${daemons[@]}" 2>/dev/null
        wait "${daemons[@]}" 2>/dev/null
    fi
    if [ -e "$tmp/hosts" ]; then cat "$tmp/hosts" >/etc/hosts; fi
    rm -rf "$tmp"
}
trap leave EXIT
trap 'exit 130' INT TERM HUP

# ---- The cluster: its own key, sockets, ports and folders. No accounting, and no cgroups, which a container may lack.
# A job that is put back into the queue waits for cred_expire seconds, so these are 5 here instead of 120.

export SLURM_CONF=$tmp/slurm.conf OMP_NUM_THREADS=1
port=$((17000 + 3 * ($$ % 5000)))
dd if=/dev/urandom of="$tmp/munge.key" bs=128 count=1 2>/dev/null
mkdir "$tmp"/{state,tmp-n1,tmp-n2,spool-n1,spool-n2}
chmod 400 "$tmp/munge.key"
chmod 755 "$tmp"
echo "CgroupPlugin=cgroup/v1" >"$tmp/cgroup.conf"  # cgroup/v2 needs systemd when slurmd starts
echo "Name=gpu File=/dev/null" >"$tmp/gres.conf"  # Slurm counts one GPU on each node; no rank uses it
cat >"$SLURM_CONF" <<END
ClusterName=check
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthInfo=socket=$tmp/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$tmp/state
SlurmdSpoolDir=$tmp/spool-%n
TmpFS=$tmp/tmp-%n
SlurmctldPidFile=$tmp/slurmctld.pid
SlurmdPidFile=$tmp/slurmd-%n.pid
SlurmctldLogFile=$tmp/slurmctld.log
SlurmdLogFile=$tmp/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_min_interval=100000
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
OverTimeLimit=0
GresTypes=gpu
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=2 Gres=gpu:1
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=2 Gres=gpu:1
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
END

# Adds the nodes' names to /etc/hosts: ranks without PMIx look up the name of the first node. leave() restores the file.
name_nodes() {
    cp /etc/hosts "$tmp/hosts.tmp" && mv "$tmp/hosts.tmp" "$tmp/hosts" && echo "127.0.0.1 n1 n2" >>/etc/hosts
}

start_cluster() {
    name_nodes || return
    munged --foreground --key-file="$tmp/munge.key" --socket="$tmp/munge.socket" --pid-file="$tmp/munge.pid" \
        --log-file="$tmp/munge.log" --seed-file="$tmp/munge.seed" --num-threads=2 2>/dev/null &
    daemons+=($!)
    await 10 munge --socket="$tmp/munge.socket" -n || { cat "$tmp/munge.log"; return 1; }
    slurmctld -D >/dev/null 2>&1 &
    daemons+=($!)
    for node in n1 n2; do
        slurmd -D -N $node >/dev/null 2>&1 &
        daemons+=($!)
    done
    await 30 idle || { tail -n 5 "$tmp"/slurm*.log; return 1; }
}
idle() { [ "$(sinfo -h -N -p low -o %T | sort -u)" = idle ]; }

say "a cluster of two nodes: $(slurmctld -V)"
check "the cluster starts" start_cluster
[ "$failed" -eq 0 ] || { finish; exit 1; }
srun --mpi=list 2>&1 | tr '\n' ' '
echo

# ---- One job: sbatch scripts/slurm.sbatch. All starts of the job NAME write to $tmp/NAME.out.

build/synth_stories --out "$tmp/s" --bytes 200000 --seed 3 >/dev/null
steps=120 every=20
common=(tiny --train-data "$tmp/s_train.bin" --sequence-length 128 --batch-size 4 --deterministic --num-steps $steps)

# Submits job $1, which saves every $every steps. Sets `job` to its job id.
submit() {
    job=$(TRAINER=./train_fp8 sbatch --parsable --nodes 2 --ntasks-per-node 1 --gpus-per-node 1 --time 10 \
        --output "$tmp/$1.out" scripts/slurm.sbatch "${common[@]}" --checkpoint-dir "$tmp/$1" \
        --checkpoint-every $every)
}
state() { scontrol show job "$job" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
restarts() { scontrol show job "$job" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p'; }
pending() { [ "$(state)" = PENDING ]; }
ended() { [[ $(state) =~ COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL ]]; }
reached() { grep -q "^step *$2/" "$tmp/$1.out"; }

# Prints the step lines of run $1 in the order of steps, without times. Of equal lines it prints one: a step that ran
# twice has two lines only if its loss, norm or learning rate differs.
lines() { grep '^step ' "$tmp/$1.out" | sed 's/ | [0-9.]* ms.*//' | sort -k2n | uniq; }
starts() { grep -c '^slurm.sbatch: start ' "$tmp/$1.out"; }

# Checks that job $1 ended well, has been put back into the queue $2 times, and has the losses of an uninterrupted run.
check_job() {
    local before=$failed
    await 120 ended
    check "$1: the job ends as COMPLETED" equal "$(state)" COMPLETED
    check "$1: Slurm started it again $2 times" equal "$(restarts)" "$2"
    check "$1: it was started $(($2 + 1)) times" equal "$(starts "$1")" $(($2 + 1))
    check "$1: each step has the loss and norm of an uninterrupted run" diff <(lines "$1") <(lines whole)
    [ "$failed" -eq "$before" ] || tail -n 30 "$tmp/$1.out"
}

say "uninterrupted"
check "2 ranks train without Slurm" eval 'OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    mpirun --oversubscribe -np 2 ./train_fp8 "${common[@]}" >"$tmp/whole.out" 2>&1'
check "2 ranks without Slurm print all steps" equal "$(lines whole | wc -l)" $steps
check "job plain is submitted" submit plain
check_job plain 0

say "preempted by a job of a partition with a higher priority"
check "job preempted is submitted" submit preempted
await 60 reached preempted 30
check "a job of the other partition is submitted" \
    sbatch -p high -N2 --exclusive --output "$tmp/high.out" --wrap "sleep 2"
check_job preempted 1
stop=$(sed -n 's/^stopped by signal 10 after step \([0-9]*\).*/\1/p' "$tmp/preempted.out")
check "preempted: the signal stopped it after a step" [ "${stop:-0}" -gt 0 ]
check "preempted: it saved that step" holds "$tmp/preempted.out" "saved checkpoint after step $stop "
check "preempted: it went on from that step" \
    holds "$tmp/preempted.out" "continuing from $tmp/preempted/step-$(printf %08d "$stop")"

say "a node is lost"
check "job lost is submitted" submit lost
await 60 reached lost 50
scontrol update nodename=n2 state=down reason=test
await 30 pending
check "lost: the job is back in the queue" pending
newest=$(ls "$tmp/lost" | grep -E '^step-[0-9]{8}$' | tail -n 1)
scontrol update nodename=n2 state=resume
check_job lost 1
check "lost: it went on from the last whole checkpoint" holds "$tmp/lost.out" "continuing from $tmp/lost/$newest"
check "lost: that checkpoint is of step 40 or later ($newest)" [ "$((10#${newest#step-}))" -ge 40 ]

say "the ranks are killed"
check "job killed is submitted" submit killed
await 60 reached killed 30
scancel --signal=KILL "$job.0"
check_job killed 1

say "the ranks are killed, in a Slurm without PMIx"
mkdir "$tmp/bin"
printf '%s\n' '#!/bin/sh' '[ "$*" != --mpi=list ] || { echo "none pmi2"; exit; }' \
    "exec $(command -v srun) \"\$@\"" >"$tmp/bin/srun"
chmod +x "$tmp/bin/srun"
check "job variables is submitted" eval 'PATH=$tmp/bin:$PATH submit variables'
await 60 reached variables 30
scancel --signal=KILL "$job.0"
check_job variables 1
check "variables: the ranks started without PMIx" holds "$tmp/variables.out" "with srun --mpi=none"

say "jobs that end for good"
check "job cancelled is submitted" submit cancelled
await 60 reached cancelled 30
scancel "$job"
await 30 ended
check "cancelled: the job ends as CANCELLED" equal "$(state)" CANCELLED
check "cancelled: it was started once" equal "$(starts cancelled)" 1
every=1000
check "job early is submitted" submit early
await 60 reached early 5
scancel --signal=KILL "$job.0"
await 30 ended
check "killed before the first checkpoint: the job fails" equal "$(state)" FAILED
check "killed before the first checkpoint: it was started once" equal "$(starts early)" 1
common+=(--bogus 1)
check "a job with a wrong option is submitted" submit bogus
await 60 ended
check "a wrong option: the job fails" equal "$(state)" FAILED
check "a wrong option: the job ends with the trainer's status" \
    equal "$(scontrol show job "$job" | sed -n 's/.*ExitCode=\([0-9:]*\).*/\1/p')" 2:0
check "a wrong option: it was started once" equal "$(starts bogus)" 1
finish
