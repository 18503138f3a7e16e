#!/usr/bin/env bash
# Runs every test in dev/test that needs no GPU. Installs missing build tools, and the libraries of the reports if PyPI
# can be reached. If nvcc and NCCL are there, also compiles the GPU trainer and its tests, checks the syntax of the
# benches, and runs two of these tests. Ends with "N passed, N failed", and with a non-zero status if a test failed.
# Skipped tests print why.
set -u
cd "$(dirname "$0")/.."
. scripts/install.sh
. scripts/tally.sh
take_none "usage: scripts/test.sh
Installs missing build tools and libraries, then builds and runs every test in dev/test that needs no GPU. Exit status
0: no test failed." "$@"
install_tools
QUIET=1

say "build"
check "make" make -s train_fp8 build/synth_stories
check "make headers" make -s -j2 headers
check "make unit-tests" make -s -j2 unit-tests
check "make asan" make -s -j2 asan

# Runs the tests $@, two at a time with one thread each, in this order, and tallies them.
tally_two_at_a_time() {
    local program
    outputs=$(mktemp -d)
    export outputs
    printf '%s\n' "$@" | xargs -P 2 -I {} bash -c 'run_one {}'
    for program; do tally "${program#build/}" replay "${program//\//.}"; done
    rm -rf "$outputs"
}
# Writes the output of test $1, and its status.
run_one() {
    local command=("$1")
    case $1 in *.py) command=(python3 "$1") ;; esac
    OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 "${command[@]}" >"$outputs/${1//\//.}" 2>&1
    echo $? >"$outputs/${1//\//.}.status"
}
replay() { cat "$outputs/$1" && return "$(cat "$outputs/$1.status")"; }
export -f run_one

install_report
# the long ones first, so that none of them runs alone at the end
programs=(build/asan/test_train_fp8 dev/test/test_verdict.py build/test_train_fp8 dev/test/test_report.py)
for program in build/asan/test_* build/test_* dev/test/test_*.py; do
    case $program in *.d | *test_gpu | *test_fsdp_order | *test_placement) continue ;; esac  # GPU code: below
    [[ " ${programs[*]} " = *" $program "* ]] || programs+=("$program")
done
say "unit tests, alone and under address and undefined-behaviour sanitizers, and Python tests"
tally_two_at_a_time "${programs[@]}"
say "whole programs"
for script in dev/test/test_*.sh; do [ -e "$script" ] && tally "${script#dev/test/}" bash "$script"; done

say "GPU code"
if find_nvcc && find_nccl; then
    check "make train_fp8cu, the GPU tests, and the syntax of the benches" make -s -j2 gpu bench-syntax
    tally test_fsdp_order build/test_fsdp_order
    tally test_placement build/test_placement
else
    echo "skipped: no nvcc or no NCCL here, so the GPU trainer is not compiled"
    skipped=$((skipped + 1))
fi
finish
