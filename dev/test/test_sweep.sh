#!/usr/bin/env bash
# Tests scripts/sweep.sh, scripts/sweep_table.py and the loop of the run scripts, on the CPU trainer with a tiny model,
# 1 and 2 ranks. Needs ./train_fp8 (or TRAINER), build/synth_stories, mpirun and python3. If TRAINER prints other words
# than train_fp8 (test_prose.sh), the filter REWORD must turn train_fp8's words into those of TRAINER. Ends with
# "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
trainer=${TRAINER:-./train_fp8}
tmp=$(mktemp -d)
running=""
stopped=""
trap 'kill -TERM $running 2>/dev/null; kill -KILL $stopped 2>/dev/null; rm -rf "$tmp"' EXIT
. scripts/tally.sh
kind_of() { cut -f1 "$1/result" 2>/dev/null || echo none; }

build/synth_stories --out "$tmp/synth" --bytes 200000 --seed 1 >/dev/null || exit 1
sweep=(scripts/sweep.sh --trainer "$trainer" --data "$tmp/synth_train.bin")
sweep() { "${sweep[@]}" "$@"; }

# ---------------------------------------------------------------------------------------------------------------------
# Checks the tables: computes their speeds, losses and memory again from log.jsonl.

cat >"$tmp/tables.py" <<'END'
import csv, json, re, statistics, sys
out = sys.argv[1]
close = lambda a, b: abs(a - b) <= 1e-9 * abs(b)  # the CSV has all digits; sums may be in another order
rows = list(csv.DictReader(open(out + "/table.csv")))
runs = [line.split(maxsplit=4) for line in open(out + "/runs.txt")]
assert len(rows) == len(runs), (len(rows), len(runs))
truth = {}
for row, (name, T, gpus, precision, model) in zip(rows, runs):
    key = model.strip().split("/")[-1], T, precision, gpus
    assert (row["model"], row["sequence_length"], row["precision"], row["gpus"]) == (key[0], T, precision, gpus), row
    if row["result"] != "done":
        assert not any(row[c] for c in ("steps", "tokens_per_second", "last_loss", "memory_bytes")), row
        continue
    lines = [json.loads(line) for line in open(f"{out}/{name}/log.jsonl")]
    settings, steps = lines[0], [line for line in lines if line["type"] == "step"]
    options, words = settings["settings"], precision.split(":")
    assert settings["world_size"] == int(gpus) and options["sequence-length"] == int(T)
    assert options["precision"] == words[0] and options["fp8-recipe"] == (words + ["tensorwise"])[1]
    assert options["fp8-emulate"] == ("on" if "emulate" in words else "off")
    assert len(steps) == settings["settings"]["num-steps"] == int(row["steps"])
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    ms = statistics.median(s["ms"] for s in steps[10:])
    rate = int(T) / ms * 1e3
    expected = {"median_ms": ms, "steps_per_second": 1e3 / ms, "tokens_per_second_per_gpu": rate,
                "tokens_per_second": rate * int(gpus),
                "tflops_per_gpu": rate * settings["model_flops_per_token"] * 1e-12,
                "last_loss": statistics.fmean(s["loss"] for s in steps[-20:]),
                "first_loss": steps[0]["loss"], "memory_bytes": max(s["memory_bytes"] for s in steps)}
    for column, value in expected.items():
        assert close(float(row[column]), value), (name, column, row[column], value)
    truth[key] = expected
for row in rows:
    key = row["model"], row["sequence_length"], row["precision"], row["gpus"]
    one, bf16 = truth.get(key[:3] + ("1",)), truth.get(key[:2] + ("bf16", key[3]))
    def against(column, other, name):
        if key in truth and other: assert close(float(row[column]), truth[key][name] / other[name]), (key, column)
        else: assert row[column] == "", (key, column, row[column])
    against("scaling_efficiency", one, "tokens_per_second_per_gpu")
    against("fp8_over_bf16_speed", bf16 if key[2].startswith("fp8") else None, "tokens_per_second_per_gpu")
    against("fp8_over_bf16_loss", bf16 if key[2].startswith("fp8") else None, "last_loss")
# The text and Markdown tables show these numbers, rounded.
text = [line.rstrip("\n") for line in open(out + "/table.txt")]
text = text[next(i for i, line in enumerate(text) if line.startswith("model")) + 1:]
marked = [line for line in open(out + "/table.md") if line.startswith("|")]
marked = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in marked]
assert len(set(map(len, marked))) == 1 and len(marked) == len(rows) + 2, [len(m) for m in marked]
for row, line, cells in zip(rows, text, marked[2:]):
    key = [row["model"], row["sequence_length"], row["gpus"], row["precision"]]
    assert cells[:4] == key == line.split()[:4], (cells, line)
    if row["result"] == "done":
        want = ["%.0f" % float(row["tokens_per_second_per_gpu"]), "%.0f" % float(row["tokens_per_second"]),
                "%.3f" % float(row["steps_per_second"]), "%.4f" % float(row["tflops_per_gpu"]), "n/a",
                "%.3f" % (int(row["memory_bytes"]) / 2**30), "%.4f" % float(row["last_loss"])]
        if row["precision"].startswith("fp8") and row["fp8_over_bf16_speed"]:
            want += ["%.2fx" % float(row["fp8_over_bf16_speed"])]
            want += ["%+.2f%%" % (100 * float(row["fp8_over_bf16_loss"]) - 100)]
        elif row["precision"].startswith("fp8"): want += ["n/a", "n/a"]
        want += ["%.1f%%" % (100 * float(row["scaling_efficiency"])) if row["scaling_efficiency"] else "n/a"]
        assert [c for c in cells[4:] if c] == want == line.split()[4:], (cells, want, line)
    else:
        message = row["message"][:100]
        assert {"memory": "out of memory"}.get(row["result"], row["result"]) in line, line
        assert message in line and message in cells[-1], line
print(f"{len(truth)} of {len(rows)} runs with numbers")
END
tables() {
    python3 "$tmp/tables.py" "$1" >"$tmp/tables.log" 2>&1 && equal "$(cat "$tmp/tables.log")" "$2" ||
        { cat "$tmp/tables.log"; false; }
}

# ---------------------------------------------------------------------------------------------------------------------
# Some runs of a sweep fail: FP8 needs T to be a multiple of 16, and T 40 is not. Two more sweeps follow in the same
# folder: of a model folder without config.json, and of a model that needs more memory than this machine has.

out=$tmp/sweep
mkdir "$tmp/mine"
start() {
    sweep --sequence-lengths 40,64 --gpus "1 2" --num-steps 22 --out "$out" "$@" -- --learning-rate 1e-3 \
        >"$tmp/sweep.log" 2>&1
}
main=(--models tiny)
mine=(--models "$tmp/mine" --sequence-lengths 64 --precisions fp8 --gpus 2)
large=(--models llama3.1-405b --sequence-lengths 64 --precisions bf16 --gpus 1)
start "${main[@]}" --dry-run
check "--dry-run prints 8 commands and starts none" \
    equal "$(grep -c -- '--num-steps 22' "$tmp/sweep.log") $(ls -d "$out" 2>/dev/null)" "8 "
start "${main[@]}"
check "the sweep ends with status 1 if runs failed" equal $? 1
check "the sweep numbers its runs" holds "$tmp/sweep.log" "[8/8] tiny, T 64, fp8, 2 GPUs"
start "${mine[@]}"
start "${large[@]}"
check "a run out of memory is recorded as \"memory\", and the sweep ends with status 0" \
    equal "$? $(kind_of "$out/llama3.1-405b_T64_bf16_1gpu")" "0 memory"
for run in T40_bf16_1gpu:done T40_fp8_1gpu:failed T40_bf16_2gpu:done T40_fp8_2gpu:failed T64_bf16_1gpu:done \
    T64_fp8_1gpu:done T64_bf16_2gpu:done T64_fp8_2gpu:done; do
    check "tiny_${run%:*} is recorded as \"${run#*:}\"" equal "$(kind_of "$out/tiny_${run%:*}")" "${run#*:}"
done
check "table.txt has the error of the failed run" holds "$out/table.txt" "$(${REWORD:-cat} <<<"multiples of 16")"
check "table.txt has the error of the model without config.json" holds "$out/table.txt" "$tmp/mine/config.json"
check "table.txt has the error of the run out of memory" holds "$out/table.txt" "out of memory: "
check "the tables equal the logs after the first start" tables "$out" "6 of 10 runs with numbers"
first_step() { grep -o '"step": 1, "loss": [^,]*' "$out/tiny_T64_bf16_$1gpu/log.jsonl"; }
check "two ranks have another first loss than one, since a step has two sequences" \
    test "$(first_step 1)" != "$(first_step 2)"

# Second start: finished runs and runs out of memory are kept. Failed runs are repeated. The model folder is complete
# now, so its run succeeds.
cat >"$tmp/mine/config.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 32,
 "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
 "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
END
for dir in "$out"/*/; do echo "of the first start" >>"$dir/stdout.txt"; done
logs() { cat "$out"/tiny_*_bf16_*/log.jsonl "$out"/tiny_T64_*/log.jsonl | cksum; }
before=$(logs)
start "${main[@]}"
check "a second start leaves finished runs alone" equal "$(logs)" "$before"
check "a second start prints \"from before\" for 6 finished runs" \
    equal "$(grep -c ': done .*from before$' "$tmp/sweep.log")" 6
check "a second start tries a failed run again" lacks "$out/tiny_T40_fp8_1gpu/stdout.txt" "of the first start"
start "${mine[@]}"
check "a model folder that is complete now trains, with status 0" \
    equal "$? $(kind_of "$out/mine_T64_fp8_2gpu")" "0 done"
start "${large[@]}"
check "a second start does not try a run out of memory again" \
    holds "$out/llama3.1-405b_T64_bf16_1gpu/stdout.txt" "of the first start"
check "the tables equal the logs after the second start" tables "$out" "7 of 10 runs with numbers"

start "${large[@]}" --retry all
check "--retry all tries a run out of memory again" \
    lacks "$out/llama3.1-405b_T64_bf16_1gpu/stdout.txt" "of the first start"
echo "of the third start" >>"$out/tiny_T40_fp8_1gpu/stdout.txt"
start "${main[@]}" --retry none
check "--retry none does not try failed runs again" holds "$out/tiny_T40_fp8_1gpu/stdout.txt" "of the third start"

# ---------------------------------------------------------------------------------------------------------------------
# FP8 recipes as precisions: each has its own folder, row and ratios. Only FP8 runs get the FP8 options after --; the
# BF16 run would fail with them.

out=$tmp/recipes
arguments=(--models tiny --sequence-lengths 64 --precisions "bf16 fp8 fp8:rowwise_with_gw_hp fp8:mxfp8:emulate" \
    --gpus 1 --num-steps 22 --out "$out")
sweep "${arguments[@]}" -- --fp8-filter first --beta1 0.8 --fp8-all-gather=off >"$tmp/recipes.log" 2>&1
check "recipes: all runs finish" equal "$? $(grep -c ': done in' "$tmp/recipes.log")" "0 4"
check "recipes: mxfp8:emulate and rowwise_with_gw_hp have folders of their own" \
    test -f "$out/tiny_T64_fp8-mxfp8-emulate_1gpu/result" -a -f "$out/tiny_T64_fp8-rowwise_with_gw_hp_1gpu/result"
check "recipes: FP8 runs get FP8 options" holds "$out/tiny_T64_fp8_1gpu/log.jsonl" '"fp8-filter": "first"'
check "recipes: BF16 runs get no FP8 options" holds "$out/tiny_T64_bf16_1gpu/log.jsonl" '"fp8-filter": ""'
check "recipes: all runs get the options that are not for FP8" \
    equal "$(grep -l '"beta1": 0.8,' "$out"/*/log.jsonl | grep -c .)" 4
check "recipes: the tables equal the logs" tables "$out" "4 of 4 runs with numbers"

# ---------------------------------------------------------------------------------------------------------------------
# Interrupts. SIGTERM and SIGINT come in a sweep's second run, which is too long to end before the signal.

steps_in() { grep -c '"type": "step"' "$1/log.jsonl" 2>/dev/null; }
is_training() { [ "$(steps_in "$1")" -ge 3 ] 2>/dev/null; }
# Starts the sweep "${arguments[@]}" in the background with SIGINT not ignored, and waits until run $1 trains.
start_until() {
    set -m
    # this test may have been started with SIGINT ignored
    env --default-signal "${sweep[@]}" "${arguments[@]}" >"$tmp/background.log" 2>&1 &
    running=$!
    set +m
    await 60 is_training "$1"
}
wait_for_sweep() {
    wait "$running" 2>/dev/null
    status=$?
    running=""
}
# Prints the ids of the processes whose command line begins with $1 and contains $2.
processes() { grep -saPl -- "^\Q${1// /\\E\\0\\Q}\E.*\Q${2// /\\E\\0\\Q}" /proc/[0-9]*/cmdline | cut -d/ -f3; }
trainers_in() { processes "" "--log-dir $1" | grep -c .; }

interrupted() {
    local signal=$1 gpus=$2 steps=$3 expected=$4 run
    out=$tmp/interrupted_$signal
    arguments=(--models tiny --sequence-lengths 16,128 --precisions bf16 --gpus "$gpus" --num-steps "$steps" \
        --out "$out")
    run=$out/tiny_T128_bf16_${gpus}gpu
    start_until "$run" || { check "SIG$signal: the second run trains before the signal" false; return; }
    kill "-$signal" "$running"
    wait_for_sweep
    check "SIG$signal: the sweep ends with status $expected" equal "$status" "$expected"
    check "SIG$signal: no trainer is left" equal "$(trainers_in "$out/")" 0
    check "SIG$signal: the run in progress has no result" \
        equal "$(kind_of "$out/tiny_T16_bf16_${gpus}gpu") $(kind_of "$run")" "done none"
    scripts/sweep_table.py "$out" >/dev/null
    check "SIG$signal: the tables have no numbers of the run in progress" tables "$out" "1 of 2 runs with numbers"
    sweep "${arguments[@]}" >"$tmp/again.log" 2>&1
    check "SIG$signal: another start repeats the run from step 1" \
        equal "$? $(grep -c 'from before' "$tmp/again.log") $(steps_in "$run")" "0 1 $steps"
    check "SIG$signal: the tables equal the logs after another start" tables "$out" "2 of 2 runs with numbers"
}
interrupted TERM 1 240 143
interrupted INT 2 240 130

# A sweep cannot catch SIGKILL, so its current run goes on. No other sweep may start in its folder until that run ends.
# Then the run counts as finished.
out=$tmp/killed
arguments=(--models tiny --sequence-lengths 128 --precisions bf16 --gpus 1 --num-steps 300 --out "$out")
start_until "$out/tiny_T128_bf16_1gpu"
stopped=$(processes "" "--log-dir $out/")
check "SIGKILL: the trainer can be stopped" kill -STOP $stopped  # else it may end before the second sweep begins
kill -KILL "$running"
wait_for_sweep
sweep "${arguments[@]}" >"$tmp/beside.log" 2>&1
check "SIGKILL: a second sweep is refused while the last run goes on" \
    equal "$? $(grep -c 'still works in' "$tmp/beside.log")" "1 1"
kill -CONT $stopped
stopped=""
is_gone() { [ "$(trainers_in "$out/")" -eq 0 ]; }
check "SIGKILL: the last run ends" await 60 is_gone
sweep "${arguments[@]}" >"$tmp/again.log" 2>&1
check "SIGKILL: the last run counts as finished" \
    equal "$? $(grep -c 'from before' "$tmp/again.log") $(steps_in "$out/tiny_T128_bf16_1gpu")" "0 1 300"

# ---------------------------------------------------------------------------------------------------------------------
# Settings may change until a run has finished, and all results before the change are removed. Later changes are
# refused.

out="$tmp/a blank"
corrected() {
    sweep --models "$1" --sequence-lengths 64 --precisions bf16 --gpus 1 --out "$out" "${@:2}" >"$tmp/corrected.log" \
        2>&1
}
corrected tiny -- --learning-rate abc
check "a typing error in an option makes the run fail" equal "$? $(kind_of "$out/tiny_T64_bf16_1gpu")" "1 failed"
# Writes a log like that of an interrupted run.
mkdir -p "$out/tiny_T64_bf16_1gpu" && echo '{"type": "summary", "steps": 7, "skipped": 0}' \
    >"$out/tiny_T64_bf16_1gpu/log.jsonl"
corrected llama3.1-405b -- --learning-rate 1
check "settings may change while no run has finished" \
    equal "$? $(kind_of "$out/llama3.1-405b_T64_bf16_1gpu") $(kind_of "$out/tiny_T64_bf16_1gpu")" "0 memory none"
corrected tiny --num-steps 22 --retry none -- --learning-rate 1e-4
check "corrected settings: the run finishes" equal "$? $(kind_of "$out/tiny_T64_bf16_1gpu")" "0 done"
check "the folder is quoted in the command that makes a report" \
    equal "$(tail -n 1 "$tmp/corrected.log")" "figures and intervals: scripts/report.py '$tmp/a blank'"
check "corrected settings: the earlier result \"memory\" is removed" \
    equal "$(kind_of "$out/llama3.1-405b_T64_bf16_1gpu")" none
check "corrected settings: settings.txt has them" \
    equal "$(grep -E '^(steps|trainer options) ' "$out/settings.txt" | paste -sd';')" \
    "steps 22;trainer options --learning-rate 1e-4"
check "corrected settings: the tables equal the logs" tables "$out" "1 of 2 runs with numbers"
rm "$out/tiny_T64_bf16_1gpu/result"  # as if the sweep was killed before it wrote the result
corrected tiny --num-steps 22 -- --learning-rate 1e-3
check "other settings are refused after a run has finished" \
    equal "$? $(grep -c '^error: .* holds runs of other settings' "$tmp/corrected.log")" "1 1"
check "refused settings do not change settings.txt" \
    equal "$(tail -n 1 "$out/settings.txt")" "trainer options --learning-rate 1e-4"
: >"$out/settings.txt"  # as after a lost write
corrected tiny --num-steps 22 -- --learning-rate 1e-3
check "lost settings of a finished run are not replaced" \
    equal "$? $(grep -c '^error: .*settings.txt was lost' "$tmp/corrected.log")" "1 1"

# ---------------------------------------------------------------------------------------------------------------------
# Numbers of GPUs, a wrong mpirun, a stdout that nothing reads, refused options.

out=$tmp/counts
arguments=(--models tiny --sequence-lengths 64 --precisions bf16 --gpus 1,2 --num-steps 22 --out "$out")
sweep "${arguments[@]}" --max-gpus 1 >"$tmp/counts.log" 2>&1
check "a run on more GPUs than are available is skipped" equal "$? $(kind_of "$out/tiny_T64_bf16_2gpu")" "0 skipped"
check "table.txt has the reason of a skipped run" holds "$out/table.txt" "skipped: the run needs 2 GPUs; 1 available"
printf '#!/bin/sh\nwhile [ "$1" != --oversubscribe ]; do shift; done\nshift\nexec "$@"\n' >"$tmp/other_mpirun"
chmod +x "$tmp/other_mpirun"
sweep "${arguments[@]}" --mpirun "$tmp/other_mpirun" >"$tmp/other.log" 2>&1
check "an mpirun that starts single ranks is detected" holds "$tmp/other.log" \
    "failed: the trainer did not run on 2 ranks"
sweep "${arguments[@]}" >"$tmp/counts.log" 2>&1
check "a skipped run trains when the GPUs are available" equal "$? $(kind_of "$out/tiny_T64_bf16_2gpu")" "0 done"

# Prints the status and stderr of a command whose stdout nothing reads.
unread() {
    { sleep 0.2; "$@"; } 2>"$tmp/unread.log" | true
    echo "${PIPESTATUS[0]}$(cat "$tmp/unread.log")"
}
arguments=(--models tiny --sequence-lengths 64 --precisions bf16 --gpus 1 --num-steps 22 --out "$tmp/unread")
check "--help ends with status 0 if nothing reads stdout" equal "$(unread "${sweep[@]}" --help)" 0
check "--dry-run ends with status 0 if nothing reads stdout" \
    equal "$(unread "${sweep[@]}" "${arguments[@]}" --dry-run)" 0
check "the sweep ends with status 0 if nothing reads stdout" equal "$(unread "${sweep[@]}" "${arguments[@]}")" 0
check "the tables equal the logs if nothing reads stdout" tables "$tmp/unread" "1 of 1 runs with numbers"

# refused: $1 regular expression that the error must match, then options. One Python refuses them all.
coproc { PYTHONPATH=dev/test/lib:scripts exec python3 -c 'import counted, shlex, sweep, sys
for line in sys.stdin:
    status, _, error = counted.call(lambda: sweep.main(shlex.split(line)))
    print(status, error.replace("\n", " "), flush=True)'; }
arguments=(--models tiny --sequence-lengths 64 --precisions bf16 --gpus 1,2 --num-steps 22 --out "$out")
refused() {
    local expected=$1 output status
    shift
    echo "$(printf '%q ' "${sweep[@]:1}" "$@")" >&"${COPROC[1]}"
    read -r status output <&"${COPROC[0]}"
    check "the sweep refuses with \"$expected\"" equal "$status $(grep -c "^error: .*$expected" <<<"$output")" "1 1"
}
refused "holds runs of other settings" "${arguments[@]}" -- --learning-rate 1
refused "unknown option --model;" --model tiny
refused "\"0\" is not a whole number" --gpus 0
refused "\"3 4\" is not a whole number" --num-steps "3 4"
refused "--gpus needs a value" --gpus
for option in --models --sequence-lengths --precisions --gpus --num-steps --max-gpus; do
    refused "$option needs a value" $option " , "
done
refused "not \"fp4\"" --precisions fp4
refused "not \"fp8:\"" --precisions fp8:
refused "not \"bf16:rowwise\"" --precisions bf16:rowwise
refused "has no such recipe; it has tensorwise delayed " --precisions fp8:row
refused "--models tinny: neither a folder nor a model that .* knows by name: tiny small " --models tiny,tinny
refused "fp8-recipe is set by the sweep" -- --fp8-recipe rowwise
refused "--precision is set by the sweep" -- --precision fp8
refused "--fast sets --precision, also of BF16 runs; give fp8:fast" -- --fast
refused "--list trains nothing" -- --list=models
refused "--json trains nothing" -- --json
refused "no training shards $tmp/none.bin" --data "$tmp/none.bin" --models tiny
refused "would share a folder" --models "$tmp/mine,$tmp/./mine" --out "$tmp/shared"
refused "there is no program ./none" --trainer ./none

# ---------------------------------------------------------------------------------------------------------------------
# The run scripts: they start a killed trainer again from its newest checkpoint. A script that is stopped saves a
# checkpoint. In the end the loss equals that of a run without interruptions.

cat >"$tmp/run.sh" <<'END'
set -u
. scripts/run_common.sh
model=tiny tokenizer=llama3
options=(--sequence-length 64 --num-steps "$STEPS" --learning-rate 1e-3 --checkpoint-every 10)
run_until_done "$@"
END
export TRAINER=$trainer DATA=$tmp/synth
sleep() { command sleep 0.1; }  # a run script waits before it starts a trainer again
export -f sleep
newest() { ls "$1/steps" 2>/dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }
has_saved() { [[ $(newest "$1") > $2 ]]; }
last_loss() { tail -n 1 <(grep '"type": "step"' "$1/log.jsonl") | grep -o '"step": [0-9]*, "loss": [^,]*'; }
# Starts the run in $1 on $GPUS ranks in the background. Waits until it has saved a checkpoint later than $2 (a folder
# name; "": any checkpoint).
start_run() {
    set -m
    OUT=$1 bash "$tmp/run.sh" >>"$tmp/run.log" 2>&1 &
    running=$!
    set +m
    await 60 has_saved "$1" "$2"
}
for GPUS in 1 2; do
    export GPUS STEPS=$((160 / GPUS))  # a run takes seconds: a kill and a stop come before its end
    last=$(printf 'step-%08d' "$STEPS")
    rm -f "$tmp/run.log"
    OUT=$tmp/unbroken_$GPUS bash "$tmp/run.sh" >"$tmp/unbroken.log" 2>&1
    check "$GPUS ranks: an unbroken run ends with status 0 after $last" \
        equal "$? $(newest "$tmp/unbroken_$GPUS")" "0 $last"
    check "$GPUS ranks: the run script prints the cost" \
        holds "$tmp/unbroken.log" "cost: $STEPS steps of $((64 * GPUS)) tokens = "
    start_run "$tmp/broken_$GPUS" ""
    kill -KILL "$(processes "$trainer tiny " "--log-dir $tmp/broken_$GPUS " | tail -n 1)"
    check "$GPUS ranks: the run script starts a killed trainer again" \
        await 60 grep -q "starting again from step-" "$tmp/run.log"
    await 60 has_saved "$tmp/broken_$GPUS" "$(newest "$tmp/broken_$GPUS")"
    kill -TERM "$running"
    wait_for_sweep
    check "$GPUS ranks: SIGTERM ends the run script with status 0 and no trainer is left" \
        equal "$status $(trainers_in "$tmp/broken_$GPUS ")" "0 0"
    check "$GPUS ranks: a stopped run script prints its last checkpoint" holds "$tmp/run.log" \
        "stopped after $(newest "$tmp/broken_$GPUS"); run the same command to continue"
    check "$GPUS ranks: the run script was stopped before the last step" lacks <(newest "$tmp/broken_$GPUS") "$last"
    OUT=$tmp/broken_$GPUS bash "$tmp/run.sh" >>"$tmp/run.log" 2>&1
    check "$GPUS ranks: a second start trains to the last step" equal "$? $(newest "$tmp/broken_$GPUS")" "0 $last"
    check "$GPUS ranks: the broken run ends with the loss of the unbroken run" \
        equal "$(last_loss "$tmp/broken_$GPUS")" "$(last_loss "$tmp/unbroken_$GPUS")"
done
# True if the .safetensors files in $1 take as many bytes as --dry-run plans, plus at most 20,000 for their headers.
takes_planned_bytes() {
    local planned taken
    planned=$("$trainer" tiny --train-data "$tmp/synth_train.bin" --dry-run --json |
        (. scripts/launch.sh && json_number checkpoint_bytes))
    taken=$(cat "$1"/*.safetensors | wc -c)
    echo "planned $planned, taken $taken"
    [ "$taken" -ge "$planned" ] && [ "$taken" -le $((planned + 20000)) ]
}
check "a checkpoint takes the bytes that --dry-run plans" \
    takes_planned_bytes "$tmp/unbroken_1/steps/$(newest "$tmp/unbroken_1")"
GPUS=1 OUT=$tmp/hopeless bash "$tmp/run.sh" --learning-rate 1000 >"$tmp/hopeless.log" 2>&1
check "the run script gives up on a run that fails three times before its first checkpoint" \
    equal "$? $(grep -c 'three starts in a row failed' "$tmp/hopeless.log")" "1 1"
(
    kill() { command sleep 0.5; builtin kill "$@"; }
    export -f kill
    GPUS=1 OUT=$tmp/hopeless bash "$tmp/run.sh" --learning-rate 1000 >"$tmp/hopeless.log" 2>&1
)
check "the run script gives up, too, if each trainer has ended before the script looks at it" \
    equal "$? $(grep -c 'three starts in a row failed' "$tmp/hopeless.log")" "1 1"

GPUS=1 OUT=$tmp/unbroken_1 bash "$tmp/run.sh" --num-steps 7 >"$tmp/fewer.log" 2>&1
check "--num-steps below the steps that are done: the run script prints \"done\"" \
    equal "$? $(grep -c '^done: step-00000160 ' "$tmp/fewer.log")" "0 1"
# 1 MB is free. That is too little for the checkpoints of a new run, but enough for a run that has checkpoints already.
mkdir "$tmp/bin"
printf '#!/bin/sh\necho Filesystem\necho x 0 0 1000 0 /\n' >"$tmp/bin/df" && chmod +x "$tmp/bin/df"
PATH=$tmp/bin:$PATH GPUS=1 STEPS=160 OUT=$tmp/cramped bash "$tmp/run.sh" >"$tmp/cramped.log" 2>&1
check "a new run on a disk that is too small is refused" \
    equal "$? $(grep -c '^error: not enough disk space' "$tmp/cramped.log") $(newest "$tmp/cramped")" "1 1 "
PATH=$tmp/bin:$PATH GPUS=1 STEPS=160 OUT=$tmp/unbroken_1 bash "$tmp/run.sh" >"$tmp/cramped.log" 2>&1
check "the disk space of the run's own checkpoints counts as free" \
    equal "$? $(grep -c '^done: ' "$tmp/cramped.log")" "0 1"

# A stand-in for a trainer that saves no checkpoint: the run script is stopped before the first one.
mkdir "$tmp/slow"
printf '#!/bin/sh\ncase "$*" in *--dry-run*) exec "%s" "$@" ;; esac\ntouch "%s"\nexec sleep 60\n' \
    "$(realpath "$trainer")" "$tmp/slow/begun" >"$tmp/slow/train_fp8"
chmod +x "$tmp/slow/train_fp8"
set -m
GPUS=1 TRAINER=$tmp/slow/train_fp8 OUT=$tmp/early bash "$tmp/run.sh" >"$tmp/early.log" 2>&1 &
running=$!
set +m
await 60 test -e "$tmp/slow/begun"
kill -TERM "$running"
wait_for_sweep
check "a run script that is stopped before the first checkpoint says so" \
    equal "$(tail -n 1 "$tmp/early.log")" "stopped before the first checkpoint; run the same command to continue"

# Stand-ins for the GPU trainer and for nvidia-smi, which lists a GPU of 80 GiB and one of 1 MiB. 1 MiB is too small.
printf '#!/bin/sh\nexec "%s" "$@"\n' "$(realpath "$trainer")" >"$tmp/bin/gpu_trainer"
printf '#!/bin/sh\necho "0, GPU-aa11, 81920"\necho "1, GPU-bb22, 1"\n' >"$tmp/bin/nvidia-smi"
chmod +x "$tmp/bin/gpu_trainer" "$tmp/bin/nvidia-smi"
rm "$tmp/bin/df"
# Trains 20 steps on one GPU with $1, an argument of env. Prints the status and the number of lines about memory.
on_gpu() {
    rm -rf "$tmp/gpu"
    env "$1" PATH="$tmp/bin:$PATH" TRAINER="$tmp/bin/gpu_trainer" GPUS=1 STEPS=20 OUT="$tmp/gpu" bash "$tmp/run.sh" \
        >"$tmp/gpu.log" 2>&1
    echo "$? $(grep -cE '^(memory: 0 of 80 GiB on each GPU|error: .*the smallest GPU here has 0 GiB)' "$tmp/gpu.log")"
}
for visible in 0 GPU-aa; do
    check "the run script counts only the memory of GPU $visible if CUDA_VISIBLE_DEVICES names it" \
        equal "$(on_gpu CUDA_VISIBLE_DEVICES=$visible)" "0 1"
done
for visible in CUDA_VISIBLE_DEVICES={1,"0,1",GPU-bb22,MIG-cc33} -uCUDA_VISIBLE_DEVICES; do
    check "the run script refuses a GPU that is too small ($visible)" equal "$(on_gpu "$visible")" "1 1"
done

GPUS=1 OUT=$tmp/planned bash "$tmp/run.sh" --dry-run >"$tmp/planned.log" 2>&1
check "a run script's --dry-run prints plan, cost and command and starts nothing" \
    equal "$? $(grep -cE "^($(${REWORD:-cat} <<<"memory plan")|cost: |.* --resume )" "$tmp/planned.log") $(ls -d \
    "$tmp/planned" 2>/dev/null)" "0 3 "
unread_run() { unread env GPUS=1 STEPS=20 OUT="$tmp/unread_run" bash "$tmp/run.sh" "$@"; }
check "a run script's --help ends with status 0 if nothing reads stdout" equal "$(unread_run --help)" 0
check "a run script's --dry-run ends with SIGPIPE if nothing reads stdout" equal "$(unread_run --dry-run)" 141
check "a run script trains if nothing reads stdout" equal "$(unread_run) $(newest "$tmp/unread_run")" "0 step-00000020"
check "stdout.txt has all step lines if nothing reads stdout" \
    equal "$(grep -c '^[a-z]* *[0-9]*/20 ' "$tmp/unread_run/stdout.txt")" 20
for option in --checkpoint-dir "--checkpoint-dir=$tmp/other" --log-dir; do
    OUT=$tmp/other bash "$tmp/run.sh" "$option" "$tmp/other" >"$tmp/other.log" 2>&1
    check "a run script refuses $option" \
        equal "$? $(grep -c "^error: ${option%%=*} is set by this script; OUT=FOLDER" "$tmp/other.log") $(ls \
        -d "$tmp/other" 2>/dev/null)" "1 1 "
done
for script in scripts/run_*-*.sh; do
    TRAINER=./none DATA=$tmp/none "$script" --num-steps 7 --help >"$tmp/help.log" 2>&1
    check "$script --help prints the usage" equal "$? $(grep -c "^usage: $script " "$tmp/help.log")" "0 1"
    for name in $(grep -oE '\$\{[A-Z]+' scripts/run_common.sh | tr -d '${' | sort -u); do
        check "$script --help lists $name" grep -q "^  $name  " "$tmp/help.log"
    done
done
finish
