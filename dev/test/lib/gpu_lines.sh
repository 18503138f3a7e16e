# Sourced by all gpu_*.sh. Runs trainers, counts checks and compares output, which is in $tmp/NAME.log.
. scripts/tally.sh
export XDG_CACHE_HOME=/dev/null  # tests neither read nor write a user's GEMM algorithms (gemm_cache.h)
ok() { passed=$((passed + 1)); echo "ok: $*"; }
bad() { failed=$((failed + 1)); echo "FAILED: $*"; }
# Prints the GPUs that this process may use, with commas between them.
visible_gpus() {
    local all
    all=$(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p' | paste -sd,)
    [ -z "$all" ] || echo "${CUDA_VISIBLE_DEVICES-$all}"
}
# Runs a command that must succeed within 120 s. If it does not, counts a failed check and prints its status and errors.
# $1 name of the log, then the command.
trains() {
    local log="$tmp/$1.log" start=$SECONDS status
    shift
    timeout 120 "$@" >"$log" 2>&1 </dev/null
    status=$?
    [ $status -ne 0 ] || return 0
    bad "$(basename "$log"): status $status after $((SECONDS - start)) s:" \
        "$(grep -m3 -i 'error' "$log"; tail -n 3 "$log")"
    return 1
}
# Sets the first 64 elements of a bf16 tensor to 3.4e38. $1 folder of weights, $2 name of the tensor.
spoil() {
    local file="$1/model.safetensors" bytes offset
    bytes=$(od -An -tu8 -N8 "$file" | tr -d ' ')
    offset=$(head -c $((8 + bytes)) "$file" | tail -c "$bytes" | grep -o "\"$2\":{[^}]*}" |
        sed 's/.*"data_offsets":\[\([0-9]*\),.*/\1/')
    head -c 128 /dev/zero | tr '\0' '\177' | dd of="$file" bs=1 seek=$((8 + bytes + offset)) conv=notrunc 2>/dev/null
}
# Checks that at least 8 skipped steps follow a saved step, and that none of them changed fp8_state. $1 name of the
# check, $2 log of a run with delayed scaling that saved every step in folder $3.
skips_leave_no_trace() {
    local skipped=0 moved=0 traces=0 before="" folder step now
    for folder in "$3"/step-????????; do
        step=$((10#${folder##*-}))
        now=same
        [ -n "$before" ] && ! cmp -s "$before/fp8_state.safetensors" "$folder/fp8_state.safetensors" && now=other
        if [ -n "$before" ] && grep -q "^warning: step $step skipped" "$2"; then
            skipped=$((skipped + 1))
            [ $now = same ] || traces=$((traces + 1))
        fi
        [ $now = same ] || moved=$((moved + 1))
        before=$folder
    done
    if [ $skipped -ge 8 ] && [ $traces -eq 0 ]; then
        ok "$1: $skipped skipped steps left fp8_state unchanged, $moved others changed it"
    else
        bad "$1: $skipped skipped steps, $traces of them changed fp8_state: $(tail -n 2 "$2")"
    fi
}
# Counts the values that are not finite in the optimizer state of checkpoint $1, which must be bf16.
infinities() { cat "$1"/optimizer*.safetensors | od -An -v -tx2 -w2 | grep -cE '^ *[7f]f[89a-f]'; }
# Run one trainer, on the CPU or on one GPU. $1 name of the log, then the trainer's arguments.
cpu() { trains "$1" ./train_fp8 "${@:2}"; }
gpu() { trains "$1" ./train_fp8cu "${@:2}"; }
# lines: the step and validation lines of log $1, without the times and what follows them. field: value $2 (loss, norm)
# of step line number $3 of log $1, whose first step line is number 1. validation: the last validation loss in log $1.
lines() { grep -E '^(step|validation) ' "$tmp/$1.log" | sed 's/ | [0-9.]* ms.*//'; }
field() { grep '^step ' "$tmp/$1.log" | sed -n "$3p" | sed "s/.*$2 \([^ ]*\) .*/\1/"; }
validation() { grep '^validation ' "$tmp/$1.log" | tail -n 1 | sed 's/.*loss //'; }
# Checks that two numbers are close. $1 name of the check, $2 and $3 the numbers, $4 largest relative difference.
near() {
    if awk -v a="$2" -v b="$3" -v t="$4" \
        'BEGIN { if (a == "" || b == "") exit 1; d = a / b - 1; if (d < 0) d = -d; exit !(d <= t) }'; then
        ok "$1: $2 and $3 differ by $4 of their value at most"
    else
        bad "$1: $2 and $3 differ by more than $4 of their value"
    fi
}
# Checks that two runs printed equal step and validation lines. $1 name of the check, $2 and $3 the logs. With $4, these
# lines of log $3 must equal the last $4 of these lines of log $2.
same() {
    local want got
    want=$(lines "$2" | tail -n "${4:-+1}") got=$(lines "$3")
    if [ -n "$got" ] && [ "$want" = "$got" ]; then
        ok "$1: equal step and validation lines"
    else
        bad "$1: the step or validation lines differ: $(diff <(echo "$want") <(echo "$got") | head -n 4)" \
            "$(grep -m1 -i error "$tmp/$3.log")"
    fi
}
