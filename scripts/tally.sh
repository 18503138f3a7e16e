# Counts checks. Sourced by test.sh, check_gpu.sh, check_cluster.sh and shell tests.
export LC_ALL=C  # with a decimal comma, awk and printf would read and write other numbers
passed=0 failed=0 skipped=0

# Runs a command as one check: it passes if the command does. $1 the check's name, then the command.
check() {
    local name=$1
    shift
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $name"; fi
}

# Repeats a command until it succeeds. After $1 seconds prints that it did not, and fails.
await() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { echo "waited in vain for: $*"; return 1; }
        sleep 0.05
    done
}

# Prints the process ids of the children of process $1. A bare Debian has no pgrep.
children() { grep -lsx "PPid:[[:space:]]*$1" /proc/[0-9]*/status | cut -d/ -f3; }

# Commands for check. equal: two texts are equal. holds, lacks: file $1 contains the text $2, or does not.
equal() { [ "$1" = "$2" ] || { echo "\"$1\" is not \"$2\""; false; }; }
holds() { grep -Fq -- "$2" "$1" || { echo "$1 does not hold \"$2\":"; tail -n 12 "$1"; false; }; }
lacks() { ! grep -Fq -- "$2" "$1"; }
# True if the output $1 of a trainer has no step line.
no_step() { ! grep -q "^step " "$1"; }

# Runs a program that ends with "N passed, N failed", adds its counts and prints them behind its name. Before them it
# prints the program's whole output if QUIET is empty, or if the status is not 0 or the counts are missing; otherwise
# only lines that begin with "skipped:". Missing counts, or a status other than 0 with "0 failed", count as one failed
# check. $1 the program's name, then the command.
tally() {
    local name=$1 status log line
    shift
    log=$(mktemp)
    "$@" >"$log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    if [ -z "${QUIET:-}" ] || [ "$status" -ne 0 ] || [ -z "$line" ]; then cat "$log"; else grep '^ *skipped:' "$log"; fi
    skipped=$((skipped + $(grep -c '^ *skipped:' "$log")))
    rm -f "$log"
    if [ -z "$line" ]; then
        failed=$((failed + 1))
        echo "FAILED: $name ended with status $status and did not print \"N passed, N failed\""
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

# Prints the counts of all checks. Status 0: no check failed.
finish() {
    echo
    [ "$skipped" -eq 0 ] || echo "$skipped skipped: lines above that begin with \"skipped:\" say why"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}
