# Sourced by test.sh, check_gpu.sh and tests that are scripts: counts checks, over programs that count their own.
export LC_ALL=C  # with a decimal comma, awk and printf would read and write other numbers
passed=0 failed=0

# Runs one command that counts as one check.
check() {
    local name=$1
    shift
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $name"; fi
}

# Commands for check: two texts are equal; file $1 holds, or lacks, the text $2.
equal() { [ "$1" = "$2" ] || { echo "\"$1\" is not \"$2\""; false; }; }
holds() { grep -Fq -- "$2" "$1" || { echo "$1 does not hold \"$2\":"; tail -n 12 "$1"; false; }; }
lacks() { ! grep -Fq -- "$2" "$1"; }

# Runs a program that ends with "N passed, N failed" and adds its counts. Shows all it printed if QUIET is empty or it failed, else what it skipped.
tally() {
    local name=$1 status log line
    shift
    log=$(mktemp)
    "$@" >"$log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    if [ -z "${QUIET:-}" ] || [ "$status" -ne 0 ] || [ -z "$line" ]; then cat "$log"; else grep -i 'skipped:' "$log"; fi
    rm -f "$log"
    if [ -z "$line" ]; then
        failed=$((failed + 1))
        echo "FAILED: $name ended with status $status and without a count"
        return
    fi
    local its_passed=${line%% *} its_failed
    its_failed=$(echo "$line" | cut -d' ' -f3)
    passed=$((passed + its_passed))
    failed=$((failed + its_failed))
    if [ "$status" -ne 0 ] && [ "$its_failed" -eq 0 ]; then
        failed=$((failed + 1))
        echo "FAILED: $name ended with status $status"
    fi
    echo "$name: $line"
}

# The closing line, and the status of the script.
finish() {
    echo
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}
