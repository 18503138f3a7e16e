#!/usr/bin/env bash
# Every test that needs no GPU. Installs the build tools if they are missing; where nvcc is, the GPU trainer and its tests must compile too.
# Ends with "N passed, N failed" and a non-zero status if anything failed. A test that is left out says why.
set -u
cd "$(dirname "$0")/.."
. scripts/install.sh
. scripts/tally.sh
take_none "usage: scripts/test.sh
Installs the build tools that are missing, and builds and runs every test that needs no GPU. Status 0: all passed." "$@"
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
say "unit tests under address and undefined-behaviour sanitizers"
for program in build/asan/test_*; do [ -x "$program" ] && tally "${program#build/}" env ASAN_OPTIONS=detect_leaks=0 "$program"; done
say "data preparation"
tally test_data.py python3 dev/test/test_data.py
tally test_tables.py python3 dev/test/test_tables.py
tally test_sizes.py python3 dev/test/test_sizes.py
tally test_twins.py python3 dev/test/test_twins.py
tally test_peers.py python3 dev/test/test_peers.py
say "whole programs"
for script in dev/test/test_*.sh; do [ -e "$script" ] && tally "${script#dev/test/}" bash "$script"; done

say "GPU code"
if find_nvcc && find_nccl; then
    check "make train_fp8cu and the GPU tests" make -s -j2 gpu benches
    tally test_fsdp_order build/test_fsdp_order
    tally test_placement build/test_placement
else
    echo "skipped: no nvcc or no NCCL here, so the GPU trainer is not compiled"
fi
finish
