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
# $1 a folder of weights, $2 one of its bf16 tensors: its first 64 elements become 3.4e38.
spoil() {
    local file="$1/model.safetensors" bytes offset
    bytes=$(od -An -tu8 -N8 "$file" | tr -d ' ')
    offset=$(head -c $((8 + bytes)) "$file" | tail -c "$bytes" | grep -o "\"$2\":{[^}]*}" | sed 's/.*"data_offsets":\[\([0-9]*\),.*/\1/')
    head -c 128 /dev/zero | tr '\0' '\177' | dd of="$file" bs=1 seek=$((8 + bytes + offset)) conv=notrunc 2>/dev/null
}
# $1 what, $2 the log of a run with delayed scaling that saved every step in folder $3: each skipped step left fp8_state as it was.
skips_leave_no_trace() {
    local skipped=0 moved=0 traces=0 before="" folder step now
    for folder in "$3"/step-????????; do
        step=$((10#${folder##*-}))
        now=same
        [ -n "$before" ] && ! cmp -s "$before/fp8_state.safetensors" "$folder/fp8_state.safetensors" && now=other
        if [ -n "$before" ] && grep -q "^warning: step $step skipped" "$2"; then skipped=$((skipped + 1)); [ $now = same ] || traces=$((traces + 1)); fi
        [ $now = same ] || moved=$((moved + 1))
        before=$folder
    done
    if [ $skipped -ge 8 ] && [ $traces -eq 0 ]; then ok "$1: $skipped skipped steps left fp8_state as it was, $moved others moved it"; else bad "$1: $skipped skipped steps, $traces with traces: $(tail -n 2 "$2")"; fi
}
# Words of the optimizer's bf16 state in a checkpoint that are not finite.
infinities() { cat "$1"/optimizer*.safetensors | od -An -v -tx2 -w2 | grep -cE '^ *[7f]f[89a-f]'; }
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
