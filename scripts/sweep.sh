#!/usr/bin/env bash
# Trains every combination of model, sequence length, number of GPUs and precision for some steps. Each run has its own
# log folder. Ends with a table; see --help.
set -u
cd "$(dirname "$0")/.."
. scripts/launch.sh

usage() {
    cat <<'END'
usage: scripts/sweep.sh [options] [-- trainer options]

Runs the trainer for every combination of the lists and writes one table of all runs. List items are separated by
commas or blanks. Paths are relative to the repository's root. Defaults are in parentheses.

  --models LIST            presets, or folders with a config.json
                           (llama3.2-1b,llama3.2-3b,llama3.1-8b,qwen3-4b,qwen3-14b)
  --sequence-lengths LIST  tokens in a sequence (2048,4096,8192)
  --precisions LIST        bf16, fp8, fp8:RECIPE (fp8:rowwise, fp8:blockwise, ...), fp8:RECIPE:emulate; the CPU
                           trainer also has fp32 (bf16,fp8)
  --gpus LIST              numbers of GPUs, or of ranks of the CPU trainer (1,2,4)
  --num-steps N            optimizer steps in each run (100)
  --llama-data GLOB        training shards for models named llama* or Llama* (data/tinystories_llama3_train.bin)
  --qwen-data GLOB         training shards for models named qwen* or Qwen* (data/tinystories_qwen_train.bin)
  --data GLOB              training shards for all models; models with other names need it
  --trainer PROGRAM        ./train_fp8cu, or ./train_fp8 on the CPU (./train_fp8cu)
  --out FOLDER             folder of the tables and of all runs (log/sweep)
  --mpirun COMMAND         command that starts several ranks, for example "mpirun --hostfile hosts" (mpirun)
  --max-gpus N             number of GPUs available (those of this machine, as far as CUDA_VISIBLE_DEVICES names them;
                           4096 ranks of the CPU trainer); set it if you use several machines
  --retry WHICH            which unsuccessful runs to repeat when the sweep is started again: none, failed (not those
                           out of memory) or all (failed). Runs that were skipped are tried again in any case
  --no-table               write the table, do not print it
  --dry-run                print the command of each run and exit; without a GPU, the GPU trainer needs --max-gpus
  --                       all options after this one are passed to the trainer; those that begin with --fp8 are passed
                           to FP8 runs only; --msamp is refused, because it sets --precision

FOLDER gets table.txt, table.csv and table.md. Each run has a folder in it with its output (stdout.txt), its log.jsonl
and its result. If a run fails, its error message is recorded and the sweep continues. Out of memory is a normal result.

Start the sweep again to continue it: finished runs (log.jsonl ends with the summary of all steps) are kept. Once a run
has finished, the trainer, its options, the number of steps and the data cannot change. Ctrl-C or SIGTERM stops the
sweep and its current run, which starts from the beginning next time. The sweep continues if the reader of its output
goes away.

Exit status 0: every run finished, ran out of memory or was skipped because there are too few GPUs. 1: a run failed,
this GPU or trainer cannot do a run, the command is wrong, or FOLDER cannot be used. 128 plus the signal's number: a
signal stopped the sweep.
END
}

# ---------------------------------------------------------------------------------------------------------------------
# Options

models="llama3.2-1b llama3.2-3b llama3.1-8b qwen3-4b qwen3-14b"
lengths="2048 4096 8192" precisions="bf16 fp8" gpu_counts="1 2 4" num_steps=100
llama_data=data/tinystories_llama3_train.bin qwen_data=data/tinystories_qwen_train.bin data=""
trainer=./train_fp8cu out=log/sweep mpirun=mpirun max_gpus="" retry=failed dry_run="" no_table=""
while [ $# -gt 0 ]; do
    case $1 in
        --) shift; break ;;
        --dry-run) dry_run=1; shift; continue ;;
        --no-table) no_table=1; shift; continue ;;
        --help) usage 2>/dev/null; exit 0 ;;
        --models | --sequence-lengths | --precisions | --gpus | --num-steps | --llama-data | --qwen-data | --data | \
            --trainer | --out | --mpirun | --max-gpus | --retry)
            [[ ${2-} =~ [^,[:space:]] ]] || fail "$1 needs a value" ;;
        *) fail "unknown option $1; --help lists all options; put options of the trainer after --" ;;
    esac
    case $1 in
        --models) models=${2//,/ } ;;
        --sequence-lengths) lengths=${2//,/ } ;;
        --precisions) precisions=${2//,/ } ;;
        --gpus) gpu_counts=${2//,/ } ;;
        --num-steps) num_steps=$2 ;;
        --llama-data) llama_data=$2 ;;
        --qwen-data) qwen_data=$2 ;;
        --data) data=$2 ;;
        --trainer) trainer=$2 ;;
        --out) out=${2%/} ;;
        --mpirun) mpirun=$2 ;;
        --max-gpus) max_gpus=$2 ;;
        --retry) retry=$2 ;;
    esac
    shift 2
done
extra=("$@")

# Prints the training shards for model $1, whose tokenizer must be the model's. Prints nothing if none are known.
data_of() {
    if [ -n "$data" ]; then echo "$data"; return; fi
    case $(basename "$1") in
        llama* | Llama*) echo "$llama_data" ;;
        qwen* | Qwen*) echo "$qwen_data" ;;
    esac
}

# Prints the number of ranks above which runs are skipped.
count_ranks() {
    if [ -n "$max_gpus" ]; then echo "$max_gpus"
    elif is_cpu_trainer; then echo 4096
    else count_gpus
    fi
}

check_precisions() {
    local word recipe recipes=""
    for word in $precisions; do
        [[ $word =~ ^(bf16|fp32|fp8(:[a-z0-9_]+(:emulate)?)?)$ ]] ||
            fail "--precisions takes bf16, fp8, fp8:RECIPE, fp8:RECIPE:emulate and (CPU trainer) fp32, not \"$word\""
        [[ $word == *:* ]] || continue
        recipes=${recipes:-$(list_recipes)} recipe=${word#*:}
        [[ " $recipes " == *" ${recipe%:emulate} "* ]] ||
            fail "--precisions $word: $trainer has no such recipe; it has ${recipes:-none}"
    done
}

check_options() {
    local word shards known
    check_counts --sequence-lengths $lengths
    check_counts --gpus $gpu_counts
    check_counts --num-steps "$num_steps"
    check_counts --max-gpus "${max_gpus:-1}"
    [[ $retry =~ ^(none|failed|all)$ ]] || fail "--retry takes none, failed or all, not \"$retry\""
    check_trainer
    check_precisions
    [ "$available" -gt 0 ] || fail "no GPU found here (nvidia-smi -L lists none, or CUDA_VISIBLE_DEVICES is empty);" \
        "--trainer ./train_fp8 runs on the CPU"
    known=$(list_models)
    for word in $models; do
        [ -d "$word" ] || [[ " $known " == *" $word "* ]] ||
            fail "--models $word: neither a folder nor a model that $trainer knows by name: $known"
        shards=$(data_of "$word")
        [ -n "$shards" ] || fail "no data known for model \"$word\"; name its training shards with --data"
        compgen -G "$shards" >/dev/null ||
            fail "no training shards $shards for model $word; data/README.md shows how to make them;" \
                "--llama-data, --qwen-data and --data choose other files"
    done
    for word in ${extra[@]+"${extra[@]}"}; do
        case ${word%%=*} in
            --train-data | --sequence-length | --num-steps | --precision | --log-dir)
                fail "${word%%=*} is set by the sweep; see --help" ;;
            --fp8-recipe) fail "--fp8-recipe is set by the sweep: --precisions fp8:RECIPE" ;;
            --msamp) fail "--msamp sets --precision, also of BF16 runs; give the other options of its level instead" ;;
            --checkpoint-dir | --resume | --export-hf) fail "${word%%=*}: runs of a sweep keep no checkpoints" ;;
            --dry-run | --help | --json | --list | --world-size)
                fail "${word%%=*} trains nothing; --dry-run before the -- prints every run's command" ;;
        esac
    done
}

# ---------------------------------------------------------------------------------------------------------------------
# One run. Its variables: model, length, gpus, precision, and dir (its folder)

run_name() { local name=${model%/}; name=${name##*/}; echo "${name}_T${length}_${precision//:/-}_${gpus}gpu"; }

# Sets `words` to the trainer's options: those of the run's precision, then those after -- that apply to it.
make_words() {
    local word value="" parts
    IFS=: read -ra parts <<<"$precision"
    words=(--precision "${parts[0]}")
    [ -z "${parts[1]:-}" ] || words+=(--fp8-recipe "${parts[1]}")
    [ -z "${parts[2]:-}" ] || words+=(--fp8-emulate)
    for word in ${extra[@]+"${extra[@]}"}; do
        if [ "${parts[0]}" = fp8 ]; then words+=("$word")
        elif [ -n "$value" ]; then value=""  # skips the value of an FP8 option
        else
            case $word in
                --fp8-emulate | --fp8-*=*) ;;
                --fp8-*) value=next ;;
                *) words+=("$word") ;;
            esac
        fi
    done
}

make_command() {
    local words
    make_launch "$gpus"
    make_words
    command=(${launch[@]+"${launch[@]}"} "$trainer" "$model" --train-data "$(data_of "$model")" \
        --sequence-length "$length" --num-steps "$num_steps" --log-dir "$dir" "${words[@]}")
}

# True if the run's log ends with the summary of all its steps. The log's world_size differs from the number of ranks if
# mpirun is of another MPI than the trainer: such a run is not finished.
is_finished() {
    [ -f "$dir/log.jsonl" ] && head -n 1 "$dir/log.jsonl" | grep -q "\"world_size\": $gpus," &&
        tail -n 1 "$dir/log.jsonl" | grep -Eq "^\{\"type\": \"summary\", \"steps\": $num_steps, .*\}$"
}

# Prints why a run that ended with status $1 has no results: that the number of ranks is wrong, or else the trainer's
# error message, or else the status and the last line of the output.
reason() {
    local line
    if [ -f "$dir/log.jsonl" ] && ! head -n 1 "$dir/log.jsonl" | grep -q "\"world_size\": $gpus,"; then
        line="the trainer did not run on $gpus ranks: is $mpirun of the MPI that the trainer was built with?"
    elif ! line=$(grep -m1 -oE '(rank [0-9]+: )?error: .*' "$dir/stdout.txt"); then
        line=$(grep -v '^[-[:space:]]*$' "$dir/stdout.txt" | tail -n 1)
        line="status $1$([ "$1" -gt 128 ] && echo " (signal $(($1 - 128)))")${line:+, last line: $line}"
    fi
    printf '%s' "${line#error: }" | tr '\t' ' ' | cut -c1-400
}

# Writes the run's result atomically, and sets kind ($1: done, memory, unsupported, failed or skipped), seconds ($2) and
# message ($3).
record() {
    printf '%s\t%s\t%s\n' "$1" "$2" "$3" >"$dir/result.tmp" && mv "$dir/result.tmp" "$dir/result" ||
        fail "cannot write $dir/result"
    kind=$1 seconds=$2 message=$3
}

# Reads the run's result into kind, seconds and message. kind is empty if there is no result.
recall() {
    kind="" seconds=0 message=""
    if [ -f "$dir/result" ]; then IFS=$'\t' read -r kind seconds message <"$dir/result"; fi
}

# Runs the command and records how it ended. The command has its own process group: only stop() passes Ctrl-C to it.
run_one() {
    local begin=$SECONDS status
    rm -f "$dir/result" "$dir/log.jsonl"
    set -m
    "${command[@]}" >"$dir/stdout.txt" 2>&1 </dev/null &
    child=$!
    set +m
    wait "$child" 2>/dev/null
    status=$?
    child=""
    if is_finished; then
        message=$([ $status -eq 0 ] || echo "ended with status $status after its summary")
        [[ $precision == fp8* && $(head -n 1 "$dir/log.jsonl" | json_number fp8_gemms) == 0 ]] &&
            message="nothing ran in FP8${message:+; $message}"
        record done $((SECONDS - begin)) "$message"
    else
        case $status in $EXIT_MEMORY) kind=memory ;; $EXIT_UNSUPPORTED) kind=unsupported ;; *) kind=failed ;; esac
        record "$kind" $((SECONDS - begin)) "$(reason "$status")"
    fi
}

# Called on signal number $1. Ends the current run with SIGTERM, and with SIGKILL after 30 s. Then ends this script,
# with a message. The run gets no result, so it starts anew next time.
stop() {
    trap '' INT TERM HUP
    if [ -n "${child:-}" ]; then
        kill -TERM -- "-$child" 2>/dev/null
        for _ in $(seq 300); do kill -0 -- "-$child" 2>/dev/null || break; sleep 0.1; done
        kill -KILL -- "-$child" 2>/dev/null
    fi
    printf '\ninterrupted in run %d of %d; start the sweep again to continue; ' "$number" "$total"
    printf 'scripts/sweep_table.py %q prints the table\n' "$out"
    exit $((128 + $1))
}

# ---------------------------------------------------------------------------------------------------------------------
# All runs

# Prints a number in proportion to the run's expected time, for the estimate of the time left. It grows with the
# parameters (from the model's name, such as "8b"; else one billion) and with the sequence length.
weight() {
    local size=10
    if [[ $model =~ ([0-9]+)(\.([0-9]))?[bB] ]]; then size=$((10 * 10#${BASH_REMATCH[1]} + ${BASH_REMATCH[3]:-0})); fi
    echo $(((10 + size) * (2048 + length)))
}

time_left() {
    [ "$weight_timed" -gt 0 ] || return 0
    local left=$((seconds_timed * weight_left / weight_timed))
    if [ $left -lt 120 ]; then
        echo " | about $left s left"
    else
        echo " | about $((left / 3600)) h $((left / 60 % 60)) min left"
    fi
}

# Calls $1 for each run. Sets number, model, length, gpus, precision and dir before.
each_run() {
    number=0
    for model in $models; do for length in $lengths; do for gpus in $gpu_counts; do for precision in $precisions; do
        number=$((number + 1))
        dir=$out/$(run_name)
        "$1"
    done; done; done; done
}

print_command() { make_command; printf '%q ' "${command[@]}"; echo; }

# Counts the run and adds it to runs.txt, which gives the order of the table. Runs of earlier starts stay in it.
enlist() {
    local line="$(run_name) $length $gpus $precision $model"
    total=$number
    weight_left=$((weight_left + $(weight)))
    if ! grep -Fxqs -- "$line" "$out/runs.txt"; then
        cut -d' ' -f1 "$out/runs.txt" 2>/dev/null | grep -Fxq -- "$(run_name)" &&
            fail "two models would share the folder $dir; train one of them in a sweep with another --out"
        mkdir -p "$dir" && echo "$line" >>"$out/runs.txt" || fail "cannot write to $out"
    fi
}

# True if the run is not started again: it is finished, or it failed in a way that --retry does not repeat.
is_kept() {
    is_finished || case $kind in
        memory) [ "$retry" != all ] ;;
        failed | unsupported) [ "$retry" = none ] ;;
        *) false ;;
    esac
}

# Prints the main results of a finished run.
figures() {
    local summary
    summary=$(tail -n 1 "$dir/log.jsonl")
    printf 'loss %.4f, median step %.2f ms, %.0f tok/s/GPU' "$(json_number last_loss <<<"$summary")" \
        "$(json_number median_ms <<<"$summary")" "$(json_number tokens_per_second_per_gpu <<<"$summary")" 2>/dev/null
}

visit() {
    local again=""
    recall
    printf '[%d/%d] %s, T %s, %s, %s GPU%s%s\n' "$number" "$total" "$model" "$length" "$precision" "$gpus" \
        "$([ "$gpus" -eq 1 ] || echo s)" "$(time_left)"
    if is_kept; then
        [ "$kind" ] || record done 0 ""  # the run finished, but the sweep was killed before it wrote the result
        again=" earlier"
    elif [ "$gpus" -gt "$available" ]; then
        record skipped 0 "the run needs $gpus GPUs; $available available"
    else
        make_command
        run_one
    fi
    if [ "$seconds" -gt 0 ]; then
        seconds_timed=$((seconds_timed + seconds)) weight_timed=$((weight_timed + $(weight)))
    fi
    weight_left=$((weight_left - $(weight)))
    case $kind in failed | unsupported) any_failed=1 ;; esac
    if [ "$kind" = done ]; then echo "    done$again in $seconds s${message:+ ($message)}: $(figures)"
    else echo "    ${kind/memory/out of memory}$again: $message"
    fi
}

# Prints the settings that all runs in one folder share. One table must not compare runs with different settings.
settings() {
    printf '%s\n' "trainer $trainer" "steps $num_steps" "llama data $llama_data" "qwen data $qwen_data" "data $data" \
        "trainer options ${extra[*]-}"
}

# Writes the settings to settings.txt. If an earlier start had other settings, or lost that file: ends the script if one
# of its runs has finished; else removes the results of its runs.
note_settings() {
    local steps
    settings | cmp -s - "$out/settings.txt" && return
    if compgen -G "$out/*/log.jsonl" >/dev/null || [ -s "$out/settings.txt" ]; then
        touch "$out/settings.txt"
        steps=$(sed -n 's/^steps //p' "$out/settings.txt")
        settings | diff "$out/settings.txt" - >&2
        ! grep -qs "^{\"type\": \"summary\", \"steps\": ${steps:-[0-9]*}," "$out"/*/log.jsonl ||
            fail "$out holds runs of other settings (< there, > now; none there: settings.txt was lost);" \
                "give another --out"
        echo "no run in $out has finished, so its settings are replaced (< before, > now)"
        rm -f "$out"/*/result
    fi
    settings >"$out/settings.tmp" && sync "$out/settings.tmp" && mv "$out/settings.tmp" "$out/settings.txt" ||
        fail "cannot write $out/settings.txt"
}

total=0 weight_left=0 weight_timed=0 seconds_timed=0 any_failed="" child=""
available=$(count_ranks)
check_options
if [ -n "$dry_run" ]; then each_run print_command; exit 0; fi
mkdir -p "$out" || fail "cannot make the folder $out"
# Runs inherit the lock: if the sweep is killed, its last run goes on, and no other sweep may write here until it ends.
{ exec 9>"$out/lock"; } 2>/dev/null || fail "cannot write in $out"
flock -n 9 || fail "another sweep, or the last run of a killed sweep, still works in $out"
note_settings
each_run enlist
for signal in INT TERM HUP; do trap "stop $(kill -l $signal)" $signal; done
each_run visit
table=$(python3 scripts/sweep_table.py "$out") || fail "no table could be made"
[ -n "$no_table" ] || printf '\n%s\n\nfigures and intervals: scripts/report.py %q\n' "$table" "$out"
[ -z "$any_failed" ]
