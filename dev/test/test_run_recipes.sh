#!/usr/bin/env bash
# Tests scripts/run_recipes.sh on the CPU trainer: a run for each recipe, the table compared with the logs of the runs,
# a recipe that is emulated because the trainer refuses it, a recipe that fails, a second start in the same folder,
# which keeps finished runs, a stdout that nothing reads, and options that the script refuses. Needs ./train_fp8 (or
# TRAINER), build/synth_stories and python3. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
trainer=$(realpath "${TRAINER:-./train_fp8}")
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
. scripts/tally.sh

build/synth_stories --out "$tmp/synth" --bytes 100000 --seed 1 >/dev/null || exit 1

# A small model on which every recipe runs GEMMs in FP8: the sizes of its linear layers, but for lm_head, are multiples
# of 128.
mkdir "$tmp/mini"
cat >"$tmp/mini/config.json" <<'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 128,
 "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
 "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
END

# A stand-in for the GPU trainer. Like some GPUs it lacks the GEMMs of mxfp8, and it fails with another error for
# delayed. Its name tells scripts that it runs on the CPU.
mkdir "$tmp/bin"
cat >"$tmp/bin/train_fp8" <<END
#!/usr/bin/env bash
case " \$* " in
    *" --fp8-emulate "* | *" --list "*) ;;
    *" --fp8-recipe mxfp8 "*) echo "error: no GEMMs for recipe mxfp8; try --fp8-emulate" >&2; exit 4 ;;
    *" --fp8-recipe delayed "*) echo "error: something else" >&2; exit 1 ;;
esac
exec "$trainer" "\$@"
END
chmod +x "$tmp/bin/train_fp8"

# Checks the table in a folder against the logs. Prints a line for each recipe: its name, then "failed", or "nothing" if
# nothing ran in FP8, or the kinds of its audited GEMMs; "emulated" follows if it was.
cat >"$tmp/table.py" <<'END'
import glob, json, re, statistics, sys
folder = sys.argv[1]
rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in open(folder + "/recipes.md")
        if line.startswith("|")]
head, rows = rows[0], rows[2:]
assert all(len(row) == len(head) for row in rows), rows
text = [line for line in open(folder + "/recipes.txt") if re.match(r"[a-z0-9_]+( \(emulated\))?  ", line)]
text = [line.split("  ")[0] for line in text]
assert text[1:] == [row[0] for row in rows], (text, rows)  # after the head
bf16 = None
for row in rows:
    recipe, cell = row[0].split()[0], dict(zip(head, row))
    if not cell["loss"]:
        print(recipe, "failed")
        continue
    emulated = "emulated" in row[0]
    precision = "bf16" if recipe == "bf16" else "fp8-" + recipe + "-emulate" * emulated
    name, = glob.glob("%s/*_%s_1gpu/log.jsonl" % (folder, precision))
    lines = [json.loads(line) for line in open(name)]
    losses = [line["loss"] for line in lines if line["type"] == "step"][-20:]
    loss, speed = statistics.fmean(losses), lines[-1]["tokens_per_second_per_gpu"]
    bf16 = bf16 or (loss, speed)
    assert cell["loss"] == "%.4f" % loss and cell["tok/s/GPU"] == "%.0f" % speed, (cell, loss, speed)
    if recipe != "bf16": assert cell["loss diff"] == "%+.2f%%" % (100 * (loss / bf16[0] - 1)), cell
    audits = [line for line in lines if line["type"] == "fp8_audit"]
    in_bf16 = recipe != "bf16" and not audits
    assert cell["FP8/BF16"] == ("" if recipe == "bf16" or emulated or in_bf16 else "%.2fx" % (speed / bf16[1])), cell
    assert (cell["lowest SQNR at"] == "nothing ran in FP8") == in_bf16, cell
    words = ["nothing"] * in_bf16
    for gemm in ("fprop", "dgrad", "wgrad"):
        values = [line["sqnr_db"] for line in audits if line["gemm"] == gemm and line["sqnr_db"] is not None]
        assert cell[gemm + " SQNR"] == ("%.1f" % min(values) if values else "bf16" if audits else ""), (cell, gemm)
        if values:
            words.append(gemm)
            # 3 or 2 bits of mantissa give about 31 or 25 dB, if no value is flushed to zero.
            assert 10 < min(values) < 60, (gemm, min(values))
    print(recipe, *words, *["emulated"] * emulated)
END
# Runs table.py on folder $1. It must print the lines $2, which have ";" between them here.
table() {
    python3 "$tmp/table.py" "$1" >"$tmp/table.log" 2>&1 && equal "$(paste -sd';' "$tmp/table.log")" "$2" ||
        { cat "$tmp/table.log"; false; }
}

run() {
    scripts/run_recipes.sh --data "$tmp/synth_train.bin" --model "$tmp/mini" --num-steps 4 --sequence-length 64 \
        --audit-every 3 "$@" >"$tmp/run.log" 2>&1
}

run --trainer "$trainer" --out "$tmp/all" -- --batch-size 2
check "the script ends with status 0 if all recipes finish" equal "$?" 0
all="fprop dgrad wgrad"
rows=bf16
for recipe in $("$trainer" --list recipes); do
    table=$("$trainer" "$tmp/mini" --dry-run --train-data "$tmp/synth_train.bin" --precision fp8 --fp8-recipe "$recipe")
    grep -q 'down *wgrad .* bf16 ' <<<"$table" && rows+=";$recipe fprop dgrad" || rows+=";$recipe $all"
done
rows+=";fast $all"
check "the table has every recipe's loss, speed and SQNR from the logs" table "$tmp/all" "$rows"
check "no recipe is emulated on the CPU" lacks "$tmp/all/recipes.txt" "emulated"
check "the script prints one table" \
    equal "$(grep -c '^recipe ' "$tmp/run.log") $(grep -c '^model ' "$tmp/run.log")" "1 0"
check "the table names the settings of the runs" holds "$tmp/all/recipes.txt" ": mini, 4 steps of 1 x 1 x 2 x 64 tokens"
check "the runs audit only step 3" \
    equal "$(grep -h '"type": "fp8_audit"' "$tmp/all"/*/log.jsonl | grep -c -v '"step": 3,')" 0

run --trainer "$trainer" --out "$tmp/tiny" --model tiny --recipes "rowwise blockwise blockwise:emulate"
check "sizes that are no multiples of 128: the script ends with status 0" equal "$?" 0
check "sizes that are no multiples of 128: blockwise runs nothing in FP8" table "$tmp/tiny" \
    "bf16;rowwise $all;blockwise nothing;blockwise nothing emulated"
check "sizes that are no multiples of 128: the table says that nothing ran in FP8" \
    equal "$(grep -c '^blockwise .*nothing ran in FP8$' "$tmp/tiny/recipes.txt")" 2
run --trainer "$trainer" --out "$tmp/unaudited" --recipes fp8 -- --fp8-audit 0
check "without audits the table does not report FP8 runs as BF16" \
    equal "$? $(grep -c 'nothing ran' "$tmp/unaudited/recipes.txt") $(grep -c '^tensorwise .*x ' \
    "$tmp/unaudited/recipes.txt")" "0 0 1"

some=(--trainer "$tmp/bin/train_fp8" --out "$tmp/some" --recipes "rowwise,mxfp8 delayed" -- --batch-size 1)
run "${some[@]}"
check "the script ends with status 1 if one recipe fails" equal "$?" 1
check "a recipe without GEMMs on this GPU is emulated" \
    table "$tmp/some" "bf16;rowwise $all;delayed failed;mxfp8 $all emulated"
check "the table marks the emulated recipe" holds "$tmp/some/recipes.txt" "mxfp8 (emulated)"
check "the table explains \"emulated\"" \
    holds "$tmp/some/recipes.txt" "emulated: operands are quantized, then multiplied in BF16"
check "the table has the error of the recipe that failed" holds "$tmp/some/recipes.txt" "failed: something else"
run "${some[@]}"
check "a second start keeps the 3 finished runs" equal "$(grep -c ': done .*from before' "$tmp/run.log")" 3
run "${some[@]}" --beta1 0.8
check "other settings in the same folder are refused without a table of old runs" \
    equal "$? $(grep -c 'holds runs of other settings' "$tmp/run.log") $(grep -c '^recipe ' "$tmp/run.log")" "1 1 0"

{ sleep 0.2; scripts/run_recipes.sh --help; } 2>"$tmp/unread.log" | true
check "--help ends with status 0 if nothing reads stdout" equal "${PIPESTATUS[0]}$(cat "$tmp/unread.log")" 0
{
    sleep 0.2
    scripts/run_recipes.sh --data "$tmp/synth_train.bin" --model tiny --num-steps 2 --sequence-length 16 \
        --recipes tensorwise --trainer "$trainer" --out "$tmp/unread"
} 2>"$tmp/unread.log" | true
check "the script ends with status 0 if nothing reads stdout" equal "${PIPESTATUS[0]}$(cat "$tmp/unread.log")" 0
check "the table is whole if nothing reads stdout" table "$tmp/unread" "bf16;tensorwise fprop dgrad wgrad"

refused() {
    local expected=$1
    shift
    run "$@"
    check "the script refuses with \"$expected\"" equal "$? $(grep -c "^error: .*$expected" "$tmp/run.log")" "1 1"
}
refused "unknown option --models;" --models tiny
refused "\"0\" is not a whole number" --num-steps 0
refused "--recipes needs a value" --recipes " , "
refused "has no such recipe" --trainer "$trainer" --recipes row --out "$tmp/none"
refused "there is no program ./none" --trainer ./none
refused "holds mini_T64_bf16_1gpu, a run of another model" --trainer "$trainer" --out "$tmp/all" --sequence-length 32
refused "holds mini_T64_bf16_1gpu, a run of another model" --trainer "$trainer" --out "$tmp/all" --gpus 2
refused "no training shards" --trainer "$trainer" --data "$tmp/none.bin" --out "$tmp/none"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
