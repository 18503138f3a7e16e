# Sourced by gpu_runs.sh and gpu_ranks.sh: counts checks, and compares what runs printed, whose logs are $tmp/NAME.log.
passed=0 failed=0
ok() { passed=$((passed + 1)); echo "ok: $*"; }
bad() { failed=$((failed + 1)); echo "FAILED: $*"; }
# The part of the step lines that may not depend on timing; field $2 (loss, norm) of line $3 of log $1; the validation loss.
lines() { grep -E '^(step|validation) ' "$tmp/$1.log" | sed 's/ | [0-9.]* ms.*//'; }
field() { grep '^step ' "$tmp/$1.log" | sed -n "$3p" | sed "s/.*$2 \([^ ]*\) .*/\1/"; }
validation() { grep '^validation ' "$tmp/$1.log" | tail -n 1 | sed 's/.*loss //'; }
# $1 what, $2 and $3 the numbers, $4 largest relative difference
near() {
    if awk -v a="$2" -v b="$3" -v t="$4" 'BEGIN { if (a == "" || b == "") exit 1; d = a / b - 1; if (d < 0) d = -d; exit !(d <= t) }'; then ok "$1: $2 and $3"; else bad "$1: $2 and $3 differ by more than $4"; fi
}
# $1 what, $2 and $3 the logs, which print the same lines; $4: or $3 the last so many of $2's
same() {
    local want got
    want=$(lines "$2" | tail -n "${4:-+1}") got=$(lines "$3")
    if [ -n "$got" ] && [ "$want" = "$got" ]; then ok "$1: the same lines"; else bad "$1: $(diff <(echo "$want") <(echo "$got") | head -n 4) $(grep -m1 -i error "$tmp/$3.log")"; fi
}
