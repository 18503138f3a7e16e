#!/usr/bin/env bash
# Tests the shell scripts. All must parse, and each lower-case variable that a script reads must be set in it, in a file
# that it sources, or in a file that sources it. This test runs few of them: scripts/quickstart.sh trains 30 steps,
# scripts that take only --help must refuse other arguments before any work, and slurm.sbatch must refuse bad jobs. Also
# tests that make without nvcc leaves out train_fp8cu, and that a GPU target then fails and says why. Ends with "N
# passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. scripts/tally.sh

# reads: prints the variables that the files read. sets: prints the variables that they set.
reads() { cat "$@" | grep -v '^ *#' | grep -oE '\$\{?[#!]?[a-z_][a-z_0-9]*' | tr -d '${#!' | sort -u; }
sets() {
    local assigned='(^|[ ;(&|])([a-z_][a-z_0-9]*)(\[[^]]*\])?\+?='
    local declared='(^|[ ;])(for|local|read|declare|export|mapfile) +[-a-z_0-9 ]+|-v +[a-z]+|\(\([a-z_]+'
    cat "$@" | grep -oE "$assigned|$declared" | sed 's/\[.*//; s/+\{0,1\}=.*//' | grep -oE '[a-z_][a-z_0-9]*' | sort -u
}
unset_in() { comm -23 <(reads "$1") <(sets "$@"); }

for script in scripts/*.sh scripts/*.sbatch dev/*.sh dev/test/*.sh dev/test/lib/*.sh dev/reference/*.sh data/*.sh \
    .ci/run; do
    [ -e "$script" ] || continue
    check "$script parses" bash -n "$script"
    others=$(grep -lE "(^|[ ;])(\.|source) .*$(basename "$script")" scripts/*.sh dev/test/*.sh; for name in \
        $(grep -oE '(^|[ ;])(\.|source) [^ ]*\.sh' "$script" | sed 's/.*[ /]//'); do
            ls {scripts,dev/test,dev/test/lib}/"$name" 2>/dev/null; done)
    check "$script reads no variable that is never set" equal "$(unset_in "$script" $others)" ""
done

# The test finds a script that lost the line that sets a variable.
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
grep -v '^common=' dev/test/gpu_runs.sh >"$tmp/gpu_runs.sh"
check "the test finds a variable that is no longer set" \
    equal "$(unset_in "$tmp/gpu_runs.sh" dev/test/lib/gpu_lines.sh)" common

# A stand-in for make kills the script that calls it. These scripts must not call make if they get --help or an argument
# that they refuse.
printf '#!/bin/sh\nkill "$PPID"\n' >"$tmp/make"
chmod +x "$tmp/make"
for script in scripts/quickstart.sh scripts/test.sh scripts/check_gpu.sh scripts/check_cluster.sh; do
    PATH=$tmp:$PATH "$script" --help >"$tmp/log" 2>&1
    check "$script --help prints the usage" equal "$? $(grep -c "^usage: .*$script" "$tmp/log")" "0 1"
    PATH=$tmp:$PATH "$script" --fast >"$tmp/log" 2>&1
    check "$script refuses an argument before any work" equal "$? $(cat "$tmp/log")" \
        "2 error: unknown argument \"--fast\"; $script --help prints the usage"
done
# A failing apt-get ends a script that has no `set -e`, too.
printf '#!/bin/sh\n[ "$FAILING" != "$1" ]\n' >"$tmp/apt-get"
printf '#!/bin/sh\nexec "$@"\n' >"$tmp/sudo"
chmod +x "$tmp/apt-get" "$tmp/sudo"
install_gcc() { FAILING=$1 PATH=$tmp:$PATH bash -c '. scripts/install.sh; install_packages gcc; echo next' 2>&1; }
for word in update install; do
    printed=$(install_gcc $word)
    check "if apt-get $word fails, the script ends with status 1 and an error" equal "$? $(tail -n 1 <<<"$printed")" \
        "1 error: apt-get failed; install these packages by hand: gcc"
done
check "after apt-get has installed, the script goes on" equal "$(install_gcc none | tail -n 1)" next

# The workflow compiles for every capability that docs/GPUS.md lists.
listed() { grep -E '^\| .*\([0-9.]+\)' docs/GPUS.md | grep -oE '\([0-9]+\.[0-9]\)' | tr -d '().' | sort -n | xargs; }
compiled() {
    sed -n 's/.*cuda_arch: \[\(.*\)\]/\1/p' .github/workflows/test.yml | tr -d 'a" ' | tr , '\n' | sort -n | xargs
}
check "the workflow compiles for each GPU of docs/GPUS.md" equal "$(compiled)" "$(listed)"
check "docs/GPUS.md has the GPUs that the trainer may meet" equal "$(listed)" "80 86 87 89 90 100 103 120"
# check_gpu.sh writes one result: counts, failed checks, and timings.
eval "$(sed -n '/^result() {/,/^}/p' scripts/check_gpu.sh)"
printf 'x\nFAILED: a check\ntest_gpu: 5 passed, 1 failed\n' >"$tmp/tests.out"
printf 'swiglu\tforward\t8 x 8\t91\t0\t\n' >"$tmp/lines"
printf '#!/bin/sh\necho "GPU name, 8.9, 580.1, 24564 MiB"\n' >"$tmp/nvidia-smi"
printf '#!/bin/sh\necho "release 13.0"\n' >"$tmp/nvcc"
chmod +x "$tmp/nvidia-smi" "$tmp/nvcc"
(lines=$tmp/lines PATH=$tmp:$PATH passed=5 failed=1 skipped=0; result "$tmp/tests.out") >"$tmp/result"
for line in "GPU: GPU name, 8.9, 580.1, 24564 MiB" "result: 5 passed, 1 failed, 0 skipped" "FAILED: a check" \
    "test_gpu: 5 passed, 1 failed" "commit: " "date: 20" "swiglu"; do
    check "check_gpu.sh's result has: $line" holds "$tmp/result" "$line"
done

# check_cluster.sh compares losses. A step that ran twice with equal losses counts once; with different losses both
# count.
eval "$(grep '^lines() ' scripts/check_cluster.sh)"
printf 'step %s/3 | loss %s | %s ms | 1 tok/s\n' 1 5.1 9.1 2 5.2 9.2 10 5.3 9.3 2 5.2 8.2 >"$tmp/again.out"
check "check_cluster.sh counts a repeated step once" \
    equal "$(lines again | tr '\n' ' ')" "step 1/3 | loss 5.1 step 2/3 | loss 5.2 step 10/3 | loss 5.3 "
printf 'step 2/3 | loss 5.0 | 7.2 ms | 1 tok/s\n' >>"$tmp/again.out"
check "check_cluster.sh sees another loss of a repeated step" equal "$(lines again | grep -c '^step 2/')" 2

# The quickstart prints at most 80 lines, its story among them. On a machine with a GPU it trains on the GPU.
STEPS=30 OUT=$tmp/quickstart scripts/quickstart.sh >"$tmp/log" 2>&1
check "quickstart prints one story" equal "$? $(grep -c '^sample after step 30: ' "$tmp/log")" "0 1"
check "quickstart logs all steps" equal "$(grep -c '"type": "step"' "$tmp/quickstart/log.jsonl")" 30
check "quickstart prints 30 step lines" equal "$(grep -c '^step ' "$tmp/log")" 30
check "quickstart prints at most 80 lines" equal "$(($(wc -l <"$tmp/log") <= 80))" 1
slow=$(
    . scripts/install.sh
    slept() { command sleep 0.3; return 7; }
    sleep() { command sleep 0.1; }
    alive slept 2>&1
    echo $?
)
check "a command that is silent has lines that say it goes on, and its status counts: $slow" \
    equal "$(sed 's/([0-9] s)/tick/' <<<"$slow" | sort -u | xargs)" "7 tick"
# On a GPU of the compute capability $1, prints what the quickstart builds, and for which CUDA_ARCH. Stand-ins for
# nvidia-smi, nvcc and make; this make fails, which ends the quickstart.
mkdir "$tmp/gpu"
printf '#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: a GPU" || echo "$CAPABILITY"\n' >"$tmp/gpu/nvidia-smi"
printf '#!/bin/sh\n' >"$tmp/gpu/nvcc"
printf '#!/bin/sh\necho "builds $2 for ${CUDA_ARCH:-the default}"\nexit 1\n' >"$tmp/gpu/make"
chmod +x "$tmp/gpu/"*
builds() { env -u CUDA_ARCH CAPABILITY="$1" NCCL_HOME=/ PATH="$tmp/gpu:$PATH" scripts/quickstart.sh | grep '^builds'; }
check "quickstart on an H100" equal "$(builds 9.0)" "builds train_fp8cu for the default"
check "quickstart on a 4090" equal "$(builds 8.9)" "builds train_fp8cu for 89"
check "quickstart on an A100" equal "$(builds 8.0)" "builds train_fp8cu for 80"
check "quickstart on a B200" equal "$(builds 10.0)" "builds train_fp8cu for 100"
check "quickstart on a T4, which cannot train" equal "$(builds 7.5)" "builds train_fp8 for the default"
check "quickstart on a GPU of unknown capability" equal "$(builds '[N/A]')" "builds train_fp8 for the default"
# Checks that slurm.sbatch refuses a job with status 2 and one line. $1 the trainer, $2 text that the line contains,
# then the arguments of slurm.sbatch.
refuses() {
    local trainer=$1 text=$2
    shift 2
    SLURM_JOB_ID=1 TRAINER=$trainer bash scripts/slurm.sbatch "$@" >"$tmp/log" 2>&1
    equal "$? $(wc -l <"$tmp/log")" "2 1" && holds "$tmp/log" "$text"
}
SLURM_JOB_ID="" bash scripts/slurm.sbatch tiny >"$tmp/log" 2>&1
check "slurm.sbatch without Slurm says how to submit it" equal "$? $(grep -c '^error: .* sbatch ' "$tmp/log")" "2 1"
check "slurm.sbatch refuses a missing trainer" refuses ./none "there is no program ./none" tiny --checkpoint-dir ck
check "slurm.sbatch refuses a job without --checkpoint-dir" refuses /bin/sh "give --checkpoint-dir" tiny --num-steps 5
data/setup_venv.sh --help >"$tmp/log" 2>&1
check "data/setup_venv.sh --help prints the usage" equal "$? $(grep -c '^usage: data/setup_venv.sh' "$tmp/log")" "0 1"

# ---- The GPUs that CUDA_VISIBLE_DEVICES names, as CUDA counts them: the same number in launch.sh and in Python.

counts_gpus() {
    local in_python='from runs.trainer import visible_gpus; print(len(visible_gpus()))'
    equal "$(CUDA_VISIBLE_DEVICES=$1 bash -c '. scripts/launch.sh; count_gpus')" "$2" &&
        equal "$(CUDA_VISIBLE_DEVICES=$1 PYTHONPATH=scripts python3 -c "$in_python")" "$2"
}
while read -r visible count; do
    check "CUDA_VISIBLE_DEVICES=$visible names $count GPUs" counts_gpus "${visible//_/ }" "$count"
done <<'GPUS'
0,1 2
-1 0
0,-1,2 1
NoDevFiles 0
0,0 0
_1,_GPU-aa 2
GPUS

# ---- make without nvcc (-n: it only prints its commands): a GPU target fails and says why, "all" leaves out
# train_fp8cu.
for target in train_fp8cu build/test_gpu build/bench_gemm cuda-headers; do
    make -B -n NVCC= $target >"$tmp/log" 2>&1
    check "make $target without nvcc fails (status $?)" [ $? -ne 0 ]
    check "make $target without nvcc says why" holds "$tmp/log" "no nvcc: "
done
make -B -n NVCC= all >"$tmp/log" 2>&1
check "make without nvcc succeeds (status $?)" [ $? -eq 0 ]
check "make without nvcc does not build train_fp8cu" lacks "$tmp/log" "-o train_fp8cu"
check "make without nvcc says that it leaves train_fp8cu out" holds "$tmp/log" "train_fp8cu (GPU) is left out"
finish
