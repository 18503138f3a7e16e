#!/usr/bin/env bash
# Measures the error of gradient accumulation: the gradient norm of one set of sequences as one large batch and in 16 to
# 1024 micro-steps, for each --precision and --grad-accum-dtype, with tokens per second and memory. Each run has one
# step, and nothing is saved.
#
#     dev/accumulation.sh TRAINER MODEL SEQUENCE_LENGTH [--option value ...]
#     dev/accumulation.sh ./train_fp8 tiny 32
#     dev/accumulation.sh ./train_fp8cu llama3.2-1b 128 --recompute layer
#     RANKS=2 DTYPES=auto dev/accumulation.sh ./train_fp8 tiny 32 --reduce-dtype fp32
#
# Environment variables and their defaults: DATA (shards; default: synthetic stories), SEQUENCES (1024), RANKS (1),
# MICRO_STEPS ("1 16 64 256 1024", in rising order), PRECISIONS ("bf16 fp8", with train_fp8 also fp32), DTYPES ("bf16
# fp32"; auto passes no option). Column "off" compares the norm with the first successful run of its precision. Failed
# runs, for example out of memory, have a "-" and their error. Numbers of micro-steps that do not divide SEQUENCES /
# RANKS are left out.
set -u
[ $# -ge 3 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 1; }
trainer=$(realpath "$1") model=$2 length=$3
shift 3
cd "$(dirname "$0")/.." || exit 1
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
sequences=${SEQUENCES:-1024} ranks=${RANKS:-1}
default_precisions="bf16 fp8"
[ "$(basename "$trainer")" = train_fp8cu ] || default_precisions="fp32 bf16 fp8"
if [ -z "${DATA:-}" ]; then
    make -s build/synth_stories && build/synth_stories --out "$tmp/s" --bytes $((2 * sequences * length + 300000)) \
        --seed 3 >/dev/null || exit 1
    DATA="$tmp/s_train.bin"
fi

# Prints field $1 of the first step in the log.
field() { sed -n "s/.*\"type\": \"step\".*\"$1\": \([-+.0-9e]*\).*/\1/p" "$tmp/log/log.jsonl" | head -n 1; }

run() {  # $1 precision, $2 dtype of the sum, $3 micro-steps, the rest: options
    local batch=$((sequences / $3 / ranks)) launcher=() dtype=()
    [ "$ranks" -gt 1 ] && launcher=(mpirun --allow-run-as-root --oversubscribe -np "$ranks")
    [ "$2" != auto ] && [ "$1" != fp32 ] && dtype=(--grad-accum-dtype "$2")
    rm -rf "$tmp/log"
    "${launcher[@]}" "$trainer" "$model" --train-data "$DATA" --sequence-length "$length" --shuffle off --num-steps 1 \
        --batch-size "$batch" --precision "$1" --grad-accumulation-steps "$3" "${dtype[@]}" --log-dir "$tmp/log" \
        "${@:4}" >"$tmp/out" 2>&1
}

printf '%-10s %-17s %12s %10s %12s %10s %12s %10s\n' \
    precision grad-accum-dtype micro-steps batch norm "off, %" tok/s GiB
for precision in ${PRECISIONS:-$default_precisions}; do
    one=""
    for dtype in ${DTYPES:-bf16 fp32}; do
        [ "$precision" = fp32 ] && [ "$dtype" = bf16 ] && continue  # fp32 runs have no bf16 sums
        for micro in ${MICRO_STEPS:-1 16 64 256 1024}; do
            [ $((sequences % (micro * ranks))) -eq 0 ] || continue
            if run "$precision" "$dtype" "$micro" "$@"; then
                norm=$(field norm) one=${one:-$norm}
                printf '%-10s %-17s %12d %10d %12.5f %10s %12.0f %10.2f\n' "$precision" "$dtype" "$micro" \
                    $((sequences / micro / ranks)) "$norm" \
                    "$(awk -v a="$norm" -v b="$one" 'BEGIN { printf "%.3f", 100 * (a / b - 1) }')" \
                    "$(field tokens_per_second)" \
                    "$(awk -v b="$(field memory_bytes)" 'BEGIN { print b / 1073741824 }')"
            else
                printf '%-10s %-17s %12d %10d %12s   %s\n' "$precision" "$dtype" "$micro" \
                    $((sequences / micro / ranks)) - "$(grep -m1 '^error' "$tmp/out" | cut -c1-120)"
            fi
        done
    done
done
