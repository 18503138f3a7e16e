#!/usr/bin/env bash
# Every test that needs no GPU. Installs the build tools if they are missing; where nvcc is, the GPU trainer and its tests must compile too.
# Ends with "N passed, N failed" and a non-zero status if anything failed. A test that is left out says why.
set -u
cd "$(dirname "$0")/.."
. scripts/install.sh
install_tools
passed=0 failed=0

# Runs one check that counts as one.
check() {
    local name=$1
    shift
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $name"; fi
}

# Runs a program that counts its own checks and adds its last "N passed, N failed".
tally() {
    local name=$1 status log line
    shift
    log=$(mktemp)
    "$@" >"$log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    if [ -z "$line" ]; then
        failed=$((failed + 1))
        cat "$log"
        echo "FAILED: $name ended with status $status and without a count"
    else
        passed=$((passed + $(echo "$line" | cut -d' ' -f1)))
        failed=$((failed + $(echo "$line" | cut -d' ' -f3)))
        if [ "$status" -ne 0 ] && [ "$(echo "$line" | cut -d' ' -f3)" -eq 0 ]; then failed=$((failed + 1)); fi
        if [ "$status" -ne 0 ]; then cat "$log"; fi
        grep -i 'skip' "$log"
        echo "$name: $line"
    fi
    rm -f "$log"
}

say "build"
check "make" make -s train_fp8 build/synth_stories
check "make headers" make -s headers
check "make unit-tests" make -s -j2 unit-tests
check "make asan" make -s -j2 asan

say "unit tests"
for program in build/test_*; do
    case $program in *test_gpu) continue ;; esac
    [ -x "$program" ] && tally "${program#build/}" "$program"
done
say "unit tests under address and undefined-behaviour sanitizers"
for program in build/asan/test_*; do [ -x "$program" ] && tally "${program#build/}" env ASAN_OPTIONS=detect_leaks=0 "$program"; done
say "data preparation"
tally test_data.py python3 dev/test/test_data.py

say "GPU code"
if find_nvcc; then
    check "make train_fp8cu and the GPU tests" make -s -j2 gpu benches
else
    echo "skipped: no nvcc here, so the GPU trainer is not compiled"
fi

echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
