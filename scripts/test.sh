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
check "make headers" make -s headers
check "make unit-tests" make -s -j2 unit-tests
check "make asan" make -s -j2 asan

# Runs the programs of dev/test, two at a time with one thread each, and tallies them in the order given. $1: words
# before each program, such as "python3" or "env NAME=VALUE"; the rest: the programs.
tally_two_at_a_time() {
    local program first=$1
    shift
    outputs=$(mktemp -d)
    export outputs first
    printf '%s\n' "$@" | xargs -P 2 -I {} bash -c 'OMP_NUM_THREADS=1 $first {} >"$outputs/$(basename {})" 2>&1
        echo $? >"$outputs/$(basename {}).status"'
    for program; do tally "${program##*/}" replay "${program##*/}"; done
    rm -rf "$outputs"
}
replay() { cat "$outputs/$1" && return "$(cat "$outputs/$1.status")"; }

programs=()
for source in dev/test/test_*.c; do programs+=("build/$(basename "$source" .c)"); done
say "unit tests"
tally_two_at_a_time "" "${programs[@]}"
say "unit tests under address and undefined-behaviour sanitizers (test_train_fp8 takes minutes)"
tally_two_at_a_time "env ASAN_OPTIONS=detect_leaks=0" "${programs[@]/#build/build/asan}"
say "Python tests"
install_report
tally_two_at_a_time python3 dev/test/test_*.py
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
