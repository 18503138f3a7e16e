#!/usr/bin/env bash
# Trains one model in BF16 and in FP8 recipes (all, or those of --recipes), with FP8 audits. Ends with a table of losses
# and speeds. See --help.
set -u
cd "$(dirname "$0")/.."
. scripts/launch.sh

usage() {
    cat <<'END'
usage: scripts/run_recipes.sh [options] [-- trainer options]

Trains a model in BF16 and in FP8 recipes with equal data and steps. Prints a table: the loss (mean of the last 20
steps) and its change from BF16 in percent, tokens per second, memory, and the lowest SQNR (signal to quantization noise
ratio) that --fp8-audit found for each kind of GEMM. If this GPU lacks the GEMMs of a recipe, the recipe is emulated
and marked in the table. Paths are relative to the repository's root. Defaults are in parentheses.

  --model MODEL            preset, or folder with a config.json (llama3.2-1b)
  --data GLOB              training shards of the model's tokenizer (data/tinystories_llama3_train.bin)
  --num-steps N            optimizer steps in each run (300)
  --sequence-length N      tokens in a sequence (2048)
  --recipes LIST           names of recipes, such as rowwise,mxfp8 (all recipes of the trainer)
  --audit-every N          steps between audits (a tenth of the steps, rounded up)
  --gpus N                 GPUs, or ranks of the CPU trainer (1)
  --trainer PROGRAM        ./train_fp8cu, or ./train_fp8 on the CPU (./train_fp8cu)
  --out FOLDER             folder of the table and of all runs (log/recipes_MODEL)
  --                       all options after this one are passed to the trainer (those that begin with --fp8 in FP8 runs
                           only), after these defaults: --batch-size 4 --learning-rate 3e-4 --beta2 0.95
                           --weight-decay 0.1 --grad-clip 1, and warm-up for a tenth of the steps, rounded up

scripts/sweep.sh does the runs. FOLDER gets recipes.txt and recipes.md beside the files of the sweep. Start the script
again to continue: finished runs are kept. Another model, sequence length or number of GPUs needs another FOLDER. Exit
status 0: every row of the table has results, or the reader of the output has gone. 128 plus the signal's number: a
signal stopped it. 1: anything else.
END
}

model=llama3.2-1b data=data/tinystories_llama3_train.bin num_steps=300 length=2048 recipes="" every="" gpus=1 \
    trainer=./train_fp8cu out=""
while [ $# -gt 0 ]; do
    case $1 in
        --) shift; break ;;
        --help) usage 2>/dev/null; exit 0 ;;
        --model | --data | --num-steps | --sequence-length | --recipes | --audit-every | --gpus | --trainer | --out)
            [[ ${2-} =~ [^,[:space:]] ]] || fail "$1 needs a value" ;;
        *) fail "unknown option $1; --help lists all options; put options of the trainer after --" ;;
    esac
    case $1 in
        --model) model=$2 ;;
        --data) data=$2 ;;
        --num-steps) num_steps=$2 ;;
        --sequence-length) length=$2 ;;
        --recipes) recipes=${2//,/ } ;;
        --audit-every) every=$2 ;;
        --gpus) gpus=$2 ;;
        --trainer) trainer=$2 ;;
        --out) out=${2%/} ;;
    esac
    shift 2
done
check_counts --num-steps "$num_steps"
check_counts --sequence-length "$length"
check_counts --gpus "$gpus"
check_counts --audit-every ${every:+"$every"}
check_trainer
recipes=${recipes:-$(list_recipes)}
[ -n "$recipes" ] || fail "$trainer --list recipes names none"
model=${model%/}
out=${out:-log/recipes_${model##*/}}
tenth=$(((num_steps + 9) / 10))

# Ends the script if the folder holds runs that the table must not compare with those of this start.
check_folder() {
    local name words
    [ -f "$out/runs.txt" ] || return 0
    while read -r name words; do
        [[ $words == "$length $gpus "*" $model" ]] ||
            fail "$out holds $name, a run of another model, sequence length or number of GPUs; give another --out"
    done <"$out/runs.txt"
}

# Trains with each of the precisions $1. If a run fails, its row of the table says so and the script goes on. If the
# sweep itself fails, the script ends.
sweep() {
    local status
    rm -f "$out/table.txt"
    scripts/sweep.sh --no-table --models "$model" --data "$data" --num-steps "$num_steps" --sequence-lengths "$length" \
        --gpus "$gpus" --trainer "$trainer" --out "$out" --precisions "$1" -- --batch-size 4 --learning-rate 3e-4 \
        --warmup-steps "$tenth" --beta2 0.95 --weight-decay 0.1 --grad-clip 1 \
        --fp8-audit "${every:-$tenth}" "${extra[@]+"${extra[@]}"}"
    status=$?
    [ "$status" -le 1 ] && [ -f "$out/table.txt" ] || exit "$status"
}

# Prints the precisions to emulate: FP8 recipes whose run ended with status 4, as it does on a GPU without their GEMMs.
refused() {
    local name length gpus precision model
    while read -r name length gpus precision model; do
        if [[ $precision == fp8:* && $precision != *:emulate ]] && grep -qs '^unsupported' "$out/$name/result"; then
            echo "$precision:emulate"
        fi
    done <"$out/runs.txt"
}

extra=("$@")
check_folder
sweep "bf16 $(printf 'fp8:%s ' $recipes)"
emulated=$(refused | tr '\n' ' ')
[ -z "$emulated" ] || sweep "$emulated"
echo
python3 scripts/recipes_table.py "$out"
