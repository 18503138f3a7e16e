# Sourced by gpu_runs.sh and gpu_ranks.sh: runs trainers, counts checks, and compares what runs printed, whose logs are $tmp/NAME.log.
. scripts/tally.sh
ok() { passed=$((passed + 1)); echo "ok: $*"; }
bad() { failed=$((failed + 1)); echo "FAILED: $*"; }
# $1 name of the log, then a command that must end well. Says how it ended if not.
trains() {
    local log="$tmp/$1.log" start=$SECONDS status
    shift
    timeout 120 "$@" >"$log" 2>&1 </dev/null
    status=$?
    [ $status -eq 0 ] || { bad "$(basename "$log"): status $status after $((SECONDS - start)) s: $(grep -m3 -i 'error' "$log"; tail -n 3 "$log")"; return 1; }
}
# The same of one trainer on the CPU, or on one GPU. $1 name of the log, then the arguments.
cpu() { trains "$1" ./train_fp8 "${@:2}"; }
gpu() { trains "$1" ./train_fp8cu "${@:2}"; }
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
