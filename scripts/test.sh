#!/usr/bin/env bash
# Runs the tests in dev/test that need no GPU, four at a time. Installs missing build tools, and the libraries of the
# reports if PyPI can be reached. If nvcc and NCCL are there, also compiles the GPU trainer and its tests, checks the
# syntax of the benches, and runs two of these tests. Ends with "N passed, N failed", and with a non-zero status if a
# test failed. Skipped tests print why.
set -u
cd "$(dirname "$0")/.."
. scripts/install.sh
. scripts/tally.sh
usage="usage: scripts/test.sh [--quick]
Installs missing build tools and libraries, then builds and runs every test in dev/test that needs no GPU. --quick: only
the tests of seconds, without sanitizers, GPU code and libraries. Exit status 0: no test failed."
quick=
case "$*" in
--quick) quick=yes ;;
*) take_none "$usage" "$@" ;;
esac
install_tools
QUIET=1

# Runs the tests $@, four at a time with one thread each, in this order, and tallies each with its seconds when it and
# those before it have ended. Two cores stay busy: one or two of four tests mostly wait. Says each minute what runs.
tally_side_by_side() {
    local program name out runner said=$SECONDS
    outputs=$(mktemp -d)
    export outputs
    # bash has what it starts in the background ignore SIGINT, so that Ctrl-C would not end the tests
    printf '%s\n' "$@" | env --default-signal=INT xargs -P 4 -I {} bash -c 'run_one {}' &
    runner=$!
    for program; do
        name=${program#dev/test/} name=${name#build/} program=${program//\//.} out=$outputs/$program
        while [ ! -e "$out.seconds" ] && kill -0 $runner 2>/dev/null; do
            sleep 0.2
            [ $((SECONDS - said)) -ge 60 ] || continue
            said=$SECONDS
            echo "running: $(ls "$outputs" | sed -n 's/.*\(test_.*\)\.running/\1/p' | xargs)"
        done
        tally "$name, $(cat "$out.seconds") s" replay "$program"
    done
    wait $runner
    rm -rf "$outputs"
}
# Writes the output of test $1, its status and its seconds.
run_one() {
    local command=("$1") out=$outputs/${1//\//.} begin=$SECONDS
    : >"$out.running"
    case $1 in
    *.py) command=(python3 "$1") ;;
    *.sh) command=(bash "$1") ;;
    */test_openmp) ;;  # tests how idle threads wait
    *) command=(env GOMP_SPINCOUNT=300 "$1") ;;  # idle threads must not take the time of the test beside
    esac
    "${command[@]}" >"$out" 2>&1
    echo $? >"$out.status"
    echo $((SECONDS - begin)) >"$out.running"
    mv "$out.running" "$out.seconds"  # it appears with its content
}
replay() { cat "$outputs/$1" && return "$(cat "$outputs/$1.status")"; }
export -f run_one
export PATH=$PWD/dev/test/lib/path:$PATH  # an mpirun for tests
# mpirun would bind the ranks of all tests to the same cores.
export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 OMPI_MCA_hwloc_base_binding_policy=none \
    PRTE_MCA_hwloc_default_binding_policy=none

if [ -n "$quick" ]; then
    # tests of at most some 10 seconds; the others are named
    slow=" test_train_fp8.c test_ranks.sh test_hosts.sh test_stall.sh test_rendezvous.sh test_sweep.sh test_faults.sh \
test_setup.sh test_cli.sh test_prose.sh test_same_options.sh test_streams.sh test_run_recipes.sh test_folders.sh \
test_verdict.py test_report.py test_export_logs.py test_data.py test_mpijob.py test_runner.py test_scripts.sh \
test_bias_run.py "
    programs=()
    for source in dev/test/test_*.c dev/test/test_*.py dev/test/test_*.sh; do
        name=${source##*/}
        [[ $slow = *" $name "* ]] && continue
        case $name in *.c) programs+=("build/${name%.c}") ;; *) programs+=("$source") ;; esac
    done
    say "build"
    check "make" make -s -j2 train_fp8 build/synth_stories $(printf '%s\n' "${programs[@]}" | grep '^build/')
    say "tests of seconds"
    tally_side_by_side "${programs[@]}"
    finish
    exit
fi

say "build"
# tests of arithmetic, which is compiled to other instructions without sanitizers
optimized=(build/test_{train_fp8,reference,fp8,coat,msamp,adamw,gradient_sum,gradient_fp8})
targets=(train_fp8 build/gradient_bias build/synth_stories build/compare_checkpoints headers asan "${optimized[@]}")
gpu_tests=()
if find_nvcc && find_nccl; then
    gpu_tests=(build/test_fsdp_order build/test_placement)
    targets=(train_fp8cu bench-syntax "${gpu_tests[@]}" "${targets[@]}" ${ALL:+cuda-headers})  # the slowest first
else
    echo "skipped: no nvcc or no NCCL here, so the GPU trainer is not compiled"
    skipped=$((skipped + 1))
fi
install_report &
report=$!
check "make ${targets[*]}" make -s -j2 "${targets[@]}"
wait $report

say "tests, those in C also under address and undefined-behaviour sanitizers"
# The long ones first, so that none runs alone at the end; those that mostly wait lie between those that compute.
programs=(dev/test/test_hosts.sh dev/test/test_rendezvous.sh dev/test/test_ranks.sh dev/test/test_prose.sh
    dev/test/test_stall.sh build/asan/test_train_fp8 dev/test/test_faults.sh dev/test/test_setup.sh
    build/test_train_fp8 dev/test/test_cli.sh "${gpu_tests[@]}" dev/test/test_report.py dev/test/test_streams.sh
    dev/test/test_same_options.sh dev/test/test_verify.sh dev/test/test_verdict.py dev/test/test_bias_run.py)
for program in dev/test/test_*.c "${optimized[@]}" dev/test/test_*.py dev/test/test_*.sh; do
    case $program in
    *.c) program=build/asan/$(basename "$program" .c) ;;
    */test_sweep.sh | */test_run_recipes.sh) continue ;;  # test_prose.sh runs them
    esac
    [[ " ${programs[*]} " = *" $program "* ]] || programs+=("$program")
done
tally_side_by_side "${programs[@]}"
finish
