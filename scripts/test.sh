#!/usr/bin/env bash
# Runs every test in dev/test that needs no GPU. Installs missing build tools, and the libraries of the reports if PyPI
# can be reached. If nvcc and NCCL are there, also compiles the GPU trainer, its tests and benches, and runs two of
# these tests. Ends with "N passed, N failed", and with a non-zero status if a test failed. Skipped tests print why.
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

say "unit tests"
for program in build/test_*; do
    case $program in *test_gpu | *test_fsdp_order | *test_placement) continue ;; esac  # GPU code: below
    [ -x "$program" ] && tally "${program#build/}" "$program"
done
say "unit tests under address and undefined-behaviour sanitizers (test_train_fp8 takes minutes)"
for program in build/asan/test_*; do
    [ -x "$program" ] && tally "${program#build/}" env ASAN_OPTIONS=detect_leaks=0 "$program"
done
say "Python tests"
install_report
outputs=$(mktemp -d)
export outputs
# Writes the output of Python test $1, and its status.
run_python() {
    python3 "$1" >"$outputs/${1##*/}" 2>&1
    echo $? >"$outputs/${1##*/}.status"
}
export -f run_python
printf '%s\n' dev/test/test_*.py | xargs -P 2 -I {} bash -c 'run_python {}'
replay() { cat "$outputs/$1" && return "$(cat "$outputs/$1.status")"; }
for script in dev/test/test_*.py; do tally "${script##*/}" replay "${script##*/}"; done
rm -rf "$outputs"
say "whole programs"
for script in dev/test/test_*.sh; do [ -e "$script" ] && tally "${script#dev/test/}" bash "$script"; done

say "GPU code"
if find_nvcc && find_nccl; then
    check "make train_fp8cu and the GPU tests" make -s -j2 gpu benches
    tally test_fsdp_order build/test_fsdp_order
    tally test_placement build/test_placement
else
    echo "skipped: no nvcc or no NCCL here, so the GPU trainer is not compiled"
    skipped=$((skipped + 1))
fi
finish
