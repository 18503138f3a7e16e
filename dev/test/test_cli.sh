#!/usr/bin/env bash
# Tests the interface for programs (exit statuses, --list, --dry-run --json, log.jsonl), that an error is one line, what
# a run prints before its first step, and --log-every. Needs mpirun and python3. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
. dev/test/lib/cpu_trainer.sh
trainer=./train_fp8
. scripts/launch.sh
build/synth_stories --out "$tmp/s" --bytes 30000 --seed 3 >/dev/null
data="--train-data $tmp/s_train.bin --sequence-length 32 --num-steps 2"

# ---- Exit statuses, on one rank and on two.

# $1 expected status, then arguments of the trainer. True if one rank and two ranks both end with that status.
ends() {
    local expected=$1 one two
    shift
    timeout 60 $trainer "$@" >"$tmp/one" 2>&1
    one=$?
    make_launch 2
    timeout 60 "${launch[@]}" $trainer "$@" >"$tmp/two" 2>&1
    two=$?
    equal "$one $two" "$expected $expected"
}
check "a run that succeeds ends with status 0" ends 0 tiny $data
check "--help ends with status 0" ends 0 --help
check "--help all ends with status 0" ends 0 --help all
check "--list ends with status 0" ends 0 --list models
check "a call without arguments ends with status 2" ends 2
check "an unknown option ends with status 2" ends 2 tiny $data --bogus
check "--json without --dry-run ends with status 2" ends 2 tiny $data --json
check "a missing shard ends with status 1" ends 1 tiny $data --train-data "$tmp/none.bin"
check "a plan larger than the memory ends with status 3" ends 3 llama3.1-405b $data
# Prints the number of threads of a run with the settings $@.
threads() {
    rm "$tmp/one"  # else await could find the steps of an earlier run
    env -u GOMP_SPINCOUNT "$@" $trainer tiny $data --num-steps 1000000 >"$tmp/one" 2>&1 &
    await 10 grep -q "^step  *2/" "$tmp/one"
    ls /proc/$!/task | wc -l
    kill $! && wait $! 2>/dev/null
}
check "a thread looks whether others take the cores (test_openmp.c), unless the user has chosen" \
    [ "$(threads)" -gt "$(threads GOMP_SPINCOUNT=7)" ]
limited="small $data --batch-size 64 --dry-run --memory-limit"
check "a plan larger than --memory-limit ends with status 3" ends 3 $limited 0.1
check "the message names options with which the run fits" \
    grep -q "with --batch-size 1 --grad-accumulation-steps 64 it needs 0.1 GiB" "$tmp/one"
check "a dry run within --memory-limit ends with status 0" ends 0 $limited 1
check "a plan past 2^63 bytes ends with status 3" \
    ends 3 llama3.1-405b $data --dry-run --batch-size 65535 --sequence-length 1048576
# $1 variables of a launcher that this MPI does not know, $2 error lines. True if the run ends with status 2, these
# lines and no step.
refuses_launcher() {
    env $1 timeout 60 $trainer tiny $data >"$tmp/out" 2>"$tmp/err"
    equal "$? $(wc -l <"$tmp/err")" "2 $2" && no_step "$tmp/out"
}
for variables in "PMI_SIZE=2 PMI_RANK=0" "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0" "PMIX_RANK=0" \
    "MPI_LOCALNRANKS=2 MPI_LOCALRANKID=0" "PMI_SIZE=2 PMI_RANK=x" "WORLD_SIZE=2 RANK=0"; do
    check "$variables without ranks that meet: status 2 and one line" refuses_launcher "$variables" 1
done
check "the launcher's second rank says nothing" refuses_launcher "PMI_SIZE=2 PMI_RANK=1" 0
check "--profile, which the CPU trainer lacks, ends with status 4" ends 4 tiny $data --profile
check "a gradient norm that counts as not finite ends with status 7" \
    ends 7 tiny $data --learning-rate 1000 --num-steps 50
for number in $(sed -n '/^exit status$/,$ s/^  \([0-9]\)  .*/\1/p' <($trainer --help all)); do
    check "docs/TRAINING.md lists exit status $number" grep -q "^| $number | " docs/TRAINING.md
done
known=$(sed -n 's/^ *X(EXIT_\(MEMORY\|UNSUPPORTED\), \([0-9]\).*/\2/p' llmc/base/utils.h | paste -sd' ')
statuses() { PYTHONPATH=scripts python3 -c "from runs.runner import STATUSES; print(*STATUSES)"; }
check "the statuses that sweeps tell apart equal EXIT_MEMORY and EXIT_UNSUPPORTED" equal "$(statuses)" "$known"

# ---- A resumed run says which settings differ from the checkpoint's, and what that does to the learning rate.
ck="--lr-schedule cosine --learning-rate 1e-3 --warmup-steps 2 --checkpoint-dir $tmp/ck"
$trainer tiny $data $ck --num-steps 10 >/dev/null
$trainer tiny $data $ck --num-steps 10 --resume >"$tmp/same"
$trainer tiny $data $ck --num-steps 20 --beta1 0.8 --resume >"$tmp/other"
check "a resumed run with the same settings says nothing of them" equal "$(grep -c "in the checkpoint" "$tmp/same")" 0
check "a resumed run says which settings differ" equal "$(grep "in the checkpoint" "$tmp/other")" \
    "resume: --num-steps is 10 in the checkpoint, 20 now
resume: --beta1 is 0.9 in the checkpoint, 0.8 now"
check "and what that does to the rate" holds "$tmp/other" "resume: the learning rate of step 11 is 5.868e-04"

# ---- Without --learning-rate the run chooses rate, schedule and optimizer; a resumed run takes the checkpoint's.
$trainer tiny $data --num-steps 30 --checkpoint-dir "$tmp/own" >"$tmp/own.out"
check "a run shows the rate, the schedule and the optimizer that it chooses, and its epochs" grep -Eq \
    "^learning  rate 0.0035 \(by size\), warm-up 2 of 30 steps, cosine to 10%; d.*, clip 1; .* epo" "$tmp/own.out"
check "a dry run shows them too, and how long the run takes" eval '$trainer tiny $data --step-ms 7200 --num-steps 50 \
    --dry-run | grep -cE "^learning  rate 0.0035 |^estimate of the run: 0.1 hours for 50 steps" | grep -qx 2'
$trainer "$tmp/own/step-00000030" $data >"$tmp/trained.out"
check "a run from weights continues with 1e-5" \
    holds "$tmp/trained.out" "learning  rate 1e-05 (for trained weights), warm-up 1 "
$trainer tiny $data --learning-rate 1e-5 --checkpoint-dir "$tmp/old" >/dev/null
$trainer tiny $data --checkpoint-dir "$tmp/old" --num-steps 4 --resume --step-ms 1 --dry-run >"$tmp/plan.out"
check "a dry run with --resume shows the checkpoint's rate" \
    holds "$tmp/plan.out" "learning  rate 1e-05 (the checkpoint's), "
$trainer tiny $data --checkpoint-dir "$tmp/old" --num-steps 4 --resume >"$tmp/old.out"
check "a resumed run without a rate keeps the checkpoint's rate, schedule and optimizer" holds "$tmp/old.out" \
    "learning  rate 1e-05 (the checkpoint's), warm-up 0 of 4 steps, constant; decay 0.01, betas 0.9 and 0.999, clip 0; "
check "of its settings only those that are given differ" equal "$(grep "in the checkpoint" "$tmp/old.out")" \
    "resume: --num-steps is 2 in the checkpoint, 4 now"

# ---- An error is one line on stderr: without mpirun, and with mpirun on one rank and on two. Open MPI 4 must add no
# paragraph about MPI_ABORT. With Open MPI 5, mpirun itself prints a paragraph ("prterun has exited ..."), which the
# trainer cannot prevent. The test leaves that paragraph out.

one_line() { [ "$(wc -l <"$1")" -eq 1 ] && grep -q '^error: ' "$1" || { cat "$1"; false; }; }
says_one_line() {
    local ranks="mpirun --allow-run-as-root --oversubscribe -np" prefix
    for prefix in "" "$ranks 1" "$ranks 2"; do
        timeout 60 $prefix $trainer "$@" >"$tmp/stdout" 2>"$tmp/stderr"
        [ $? -ne 0 ] || return 1
        if [[ $prefix && $(mpirun --version) != *"Open MPI) 4."* ]]; then
            awk '/^-*$/ { exit } 1' "$tmp/stderr" >"$tmp/own" && mv "$tmp/own" "$tmp/stderr"
        fi
        one_line "$tmp/stderr" || return 1
    done
}
saved="$data --batch-size 2 --checkpoint-dir $tmp/damaged"
$trainer tiny $saved >/dev/null 2>&1
printf 'x' | dd of="$tmp/damaged/step-00000002/model.safetensors" bs=1 seek=5000 conv=notrunc 2>/dev/null
check "a bad option prints one line on stderr" says_one_line tiny $data --bogus
check "a missing shard prints one line on stderr" says_one_line tiny $data --train-data "$tmp/none.bin"
check "a damaged checkpoint prints one line on stderr" says_one_line tiny $saved --resume
check "a damaged model prints one line on stderr" says_one_line "$tmp/damaged/step-00000002" $data
check "a gradient norm that counts as not finite prints one line on stderr" \
    says_one_line tiny $data --learning-rate 1000 --num-steps 50

# ---- --list prints the names that --help all has.

$trainer --help all >"$tmp/help"
check "--list models prints the models that --help all has" \
    equal "$($trainer --list models | paste -sd' ')" "$(sed -n 's/^MODEL: \(.*\),$/\1/p' "$tmp/help" | tr -d ',')"
recipes=$(sed -n 's/^ *--fp8-recipe \([a-z0-9_|]*\).*/\1/p' "$tmp/help" | tr '|' ' ')
check "--list recipes prints the recipes that --help all has" \
    equal "$($trainer --list recipes | paste -sd' ')" "$recipes"
check "--list options prints the options that --help all has" \
    equal "$($trainer --list options)" "$(sed -n 's/^  --\([a-z0-9-]*\)\( .*\|$\)/\1/p' "$tmp/help")"

# ---- Models, shards and losses: an export keeps the config.json of its MODEL, short shards are left out, and a run
# that diverged says so.

keeps_config() {
    $trainer tiny $data --export-hf "$tmp/model" >/dev/null 2>&1 || return 1
    rm "$tmp/model/train_fp8.json"  # the hashes of the files that the export wrote
    python3 - "$tmp/model/config.json" "$tmp/source.json" <<'EOF'
import json, sys
config = json.load(open(sys.argv[1]))
config = {"_name_or_path": "a/b", **config, "torch_dtype": "float32", "x": {"y": [1.5, None]}, "eos_token_id": [3, 4]}
for path in sys.argv[1:]:
    json.dump(config, open(path, "w"), indent=1)
EOF
    make_launch 2
    "${launch[@]}" $trainer "$tmp/model" $data --checkpoint-dir "$tmp/kept" --export-hf "$tmp/export" \
        >/dev/null 2>&1 || return 1
    for config in kept/step-00000002 export; do
        diff "$tmp/source.json" "$tmp/$config/config.json" | grep '^[<>]' >"$tmp/diff"
        equal "$(tr -d ' \n' <"$tmp/diff")" '<"torch_dtype":"float32",>"torch_dtype":"bfloat16",' || return 1
    done
}
check "a checkpoint and an export of 2 ranks keep MODEL's config.json but for the dtype" keeps_config
build/synth_stories --out "$tmp/short" --bytes 1 >/dev/null
leaves_out() {
    make_launch "$1"
    timeout 60 "${launch[@]}" $trainer tiny $data --train-data "$tmp/s_train.bin,$tmp/short_val.bin" \
        --sequence-length 1024 >"$tmp/stdout" 2>"$tmp/stderr" || return 1
    equal "$(grep -c "^warning: --train-data: 1 of 2 shards are left out: .*/short_val.bin" "$tmp/stderr")" 1
}
check "a short shard of a list is left out with a warning" leaves_out 1
check "a short shard is left out with one warning of 2 ranks" leaves_out 2
diverges() {
    local log=$tmp/$1/log.jsonl
    $trainer tiny $data --precision fp32 --num-steps 30 --log-dir "$tmp/$1" --learning-rate "$1" >"$tmp/stdout" &&
        equal "$(grep -c '^DIVERGED: the last loss' "$tmp/stdout") $(grep -c '"diverged": true' "$log")" "$2 $2"
}
check "a run that diverged says so" diverges 50 1
check "a run that did not diverge says nothing" diverges 1e-3 0

# ---- --generate and --evaluate load weights, train nothing, and need no training data.

used="$tmp/used --sequence-length 32"
$trainer tiny $data --val-data "$tmp/s_train.bin" --val-steps 1000 --checkpoint-dir "$tmp/ck2" --export-hf "$tmp/used" \
    >"$tmp/trained"
loss=$(sed -n 's/^validation after step 2 | loss //p' "$tmp/trained")
# $1 ranks, the rest: arguments. True if the loss of --evaluate is that of the validation, in documents.
evaluates() {
    make_launch "$1"
    shift
    "${launch[@]}" $trainer "$@" --evaluate "$tmp/s_train.bin" >"$tmp/evaluated" 2>&1
    grep -q "^evaluation of $tmp/s_train.bin: [0-9]* tokens in [1-9][0-9]* documents" "$tmp/evaluated" &&
        no_step "$tmp/evaluated" && equal "$(sed -n 's/^loss \([0-9.]*\) nats.*/\1/p' "$tmp/evaluated")" "$loss"
}
check "--evaluate of an export gives its validation loss" evaluates 1 $used --log-dir "$tmp/evaluation"
check "--evaluate prints and logs perplexity, bits per byte and an interval" eval "python3 - <'$tmp/evaluated' <<'EOF'
import json, math, re
text = open('$tmp/evaluated').read()
found = re.search(r'loss (\S+) nats per token . perplexity (\S+) . (\S+) bits', text)
loss, perplexity, bits = map(float, found.groups())
tokens = int(re.search(r': (\d+) tokens', text).group(1))
low, high = map(float, re.search(r'95% interval over documents: loss (\S+) to (\S+),', text).groups())
assert low < loss < high < low + 0.2 and abs(math.exp(loss) / perplexity - 1) < 1e-4, text
assert 1 < bits * math.log(2) / loss < 1.01, text  # a byte is a token here, but separators have none
record = json.loads(open('$tmp/evaluation/log.jsonl').readlines()[-1])
logged = [record[key] for key in ('loss', 'perplexity', 'bits_per_byte', 'loss_low', 'loss_high')]
assert record['type'] == 'evaluation' and (record['tokens'], record['unit']) == (tokens, 'documents'), record
assert all(abs(a - b) < 1e-4 for a, b in zip(logged, (loss, perplexity, bits, low, high))), record
EOF"
check "--evaluate of the newest checkpoint, on 2 ranks and in batches, gives the same loss" \
    evaluates 2 tiny --sequence-length 32 --batch-size 3 --checkpoint-dir "$tmp/ck2" --resume
python3 dev/test/lib/mask_shard.py "$tmp/s_train.bin" "$tmp/m_train.bin"
# True if --evaluate counts the tokens of a loss mask alone, 3 of 7, and gives the loss of their validation.
evaluates_mask() {
    local loss tokens
    loss=$($trainer tiny $data --val-data "$tmp/m_train.bin" --val-steps 1000 | sed -n 's/^validation .* loss //p')
    $trainer $used --evaluate "$tmp/m_train.bin" >"$tmp/evaluated" 2>&1
    tokens=$(sed -n 's/^evaluation of .*: \([0-9]*\) tokens.*/\1/p' "$tmp/evaluated")
    holds "$tmp/evaluated" "loss $loss nats" && [ $((tokens * 28 / $(stat -c %s "$tmp/m_train.bin"))) -eq 2 ]
}
check "--evaluate with a loss mask" evaluates_mask
# In step 2 targets 17 to 26 count, in step 3 none of 33 to 48.
all_context() {
    $trainer tiny --train-data "$tmp/m_train.bin" --shuffle off --sequence-length 16 --num-steps 3 --precision fp8 \
        >"$tmp/context" 2>&1 && holds "$tmp/context" "step 3: all targets of its 1 sequences are context" &&
        holds "$tmp/context" "step 3/3 | loss 0.000000 | norm 0.0000" && lacks "$tmp/context" "step 2: all"
}
check "a batch without a token that counts: loss and gradient 0, and a warning" all_context
check "--evaluate takes no memory for the optimizer" lacks "$tmp/evaluated" "optimizer state"
check "--evaluate of a part of the sequences counts sequences" \
    eval '$trainer $used --evaluate "$tmp/s_train.bin" --val-steps 3 | grep -q ": 96 tokens in 3 sequences$"'
# True if a signal ends --evaluate early, and the run prints and logs which, and how much was evaluated.
evaluates_part() {
    build/synth_stories --out "$tmp/long" --bytes 4000000 --seed 3 >/dev/null
    timeout -s TERM 1 $trainer $used --evaluate "$tmp/long_train.bin" --log-dir "$tmp/part" >"$tmp/evaluated" 2>&1
    local done all
    read -r done all < <(sed -n 's/.*"sequences": \([0-9]*\), "all_sequences": \([0-9]*\).*/\1 \2/p' \
        "$tmp/part/log.jsonl")
    [ "${done:-0}" -gt 0 ] && [ "$done" -lt "$all" ] &&
        holds "$tmp/evaluated" "stopped by signal 15 after $done of $all sequences; the result is theirs"
}
check "--evaluate stopped by a signal" evaluates_part
generated() { "${launch[@]}" $trainer "$@" --max-tokens 20 2>&1 | awk '/^Once upon/ { on = 1 } on'; }
launch=()
once=$(generated "$tmp/used" --generate "Once upon")
make_launch 2
check "--generate prints the text and a continuation, on 2 ranks the same" \
    eval '[ "${#once}" -gt 12 ] &&
        equal "$(generated tiny --checkpoint-dir "$tmp/ck2" --resume --generate "Once upon")" "$once"'
check "--generate: another seed, another text" \
    eval '[ "$(generated "$tmp/used" --seed 7 --generate "Once upon")" != "$once" ]'
# $1 a part of the message, $2 the status, the rest: arguments.
refuses() {
    local part=$1 status=$2
    shift 2
    timeout 60 $trainer "$@" >"$tmp/out" 2>"$tmp/err"
    equal "$? $(wc -l <"$tmp/err")" "$status 1" && holds "$tmp/err" "$part"
}
check "--generate needs weights" refuses "MODEL tiny has no weights" 2 tiny --generate x
check "--generate without a text" refuses "given without a text" 2 "$tmp/used" --generate ""
check "--evaluate with --mix" refuses "leave --mix out" 2 "$tmp/used" --evaluate y --mix a=1,b=1
check "--generate with --evaluate" refuses "leave --evaluate out" 2 "$tmp/used" --generate x --evaluate y
check "--generate past the model's positions" refuses "but model used has 8192 positions" 2 "$tmp/used" --generate x \
    --max-tokens 8191
check "--generate without a checkpoint" refuses "no checkpoint in $tmp to use" 1 tiny --checkpoint-dir "$tmp" --resume \
    --generate x
cp -r "$tmp/used" "$tmp/mistral"
rm "$tmp/mistral/train_fp8.json"  # the hashes of the files
sed -i 's/LlamaForCausalLM/MistralForCausalLM/; s/"llama"/"mistral"/; s/^{/{"sliding_window": 32,/' \
    "$tmp/mistral/config.json"
check "a folder of a Mistral model is evaluated as the Llama model of its weights" \
    evaluates 1 "$tmp/mistral" --sequence-length 32
check "and is refused past its sliding window" refuses "a window of 32 tokens (sliding_window)" 4 "$tmp/mistral" \
    --sequence-length 33 --evaluate "$tmp/s_train.bin"
check "MODEL with the shards' table" eval '$trainer $used $data >"$tmp/out" 2>&1 && lacks "$tmp/out" another'
printf x | dd of="$tmp/used/tokens.tokenizer" bs=1 seek=20 conv=notrunc status=none  # the text of token 0
check "MODEL with another table than the shards': a warning" eval '$trainer $used $data --no-verify >"$tmp/out" 2>&1 &&
    holds "$tmp/out" "another tokenizer table than MODEL, $tmp/used/tokens.tokenizer"'
rm "$tmp/used/tokens.tokenizer"
check "--generate without a tokenizer table says where it looks for one" refuses \
    "there is no $tmp/used/tokens.tokenizer" 1 "$tmp/used" --no-verify --generate x --train-data "$tmp/none.bin"
check "--generate takes the table beside --train-data" \
    eval '$trainer "$tmp/used" --no-verify --generate x --train-data "$tmp/s_*.bin" | grep -q ^x'
given() { make -nB CC="$1" train_fp8 | grep -c 'O3.*-fvect-cost-model'; }
check "only a compiler that knows -fvect-cost-model is given it" equal "$(given false) $(given gcc)" "0 1"

# ---- The plan as JSON, compared with the printed plan and with the first line of the log.

cat >"$tmp/plan.py" <<'PY'
import json, re, sys
folder, world = sys.argv[1], int(sys.argv[2])
plan = json.loads(open(folder + "/plan.json").read())
text, _, traffic = open(folder + "/plan.txt").read().partition("\ntraffic of a step")
moved = [(c["collective"], c["rank_receives_bytes"], c["host_receives_bytes"], c["moved_by"]) for c in plan["traffic"]]
moved = [(name, f"{rank / 1e6:.2f}", f"{host / 1e6:.2f}", by) for name, rank, host, by in moved if rank] + (
    [("total", *(f"{sum(c[i] for c in moved) / 1e6:.2f}" for i in (1, 2)), "")] if world > 1 else [])
assert moved == re.findall(r"^  (\S.*?) {2,}([0-9.]+) +([0-9.]+)(?:  (.*))?$", traffic, re.M), (moved, traffic)
assert (world > 1) == bool(traffic), traffic
names = dict(line.split(None, 1) for line in text.split("\n") if re.match(r"[a-z]\S+ +\S", line))
for key in ("parameters", "checkpoint_bytes", "vocab_size", "model_flops_per_token"):
    shown = names[key.replace("_", "-")]
    assert plan[key] == float(shown), (key, plan[key], shown)
for key, value in plan["settings"].items():
    if key.startswith("fp8-") and plan["settings"]["precision"] != "fp8":
        assert key not in names, key
        continue
    shown = names.get(key, "")
    off = value == "off" and key in ("dry-run", "log-dir")
    assert off or str(value) == shown or float(value) == float(shown), (key, value)
memory = plan["memory"]
printed = {name: float(mib) for name, mib in re.findall(r"^  (\S.*?) {2,}([0-9.]+)$", text, re.M)}
for group in memory["groups"] + [{"name": "total", "bytes": memory["total_bytes"]}]:
    assert abs(group["bytes"] / 2**20 - printed.pop(group["name"])) <= 0.051, group
assert not printed, printed
assert sum(group["bytes"] for group in memory["groups"]) + memory["other_bytes"] == memory["total_bytes"], memory
row = r"^  (\S+) +(fprop|dgrad|wgrad) +(\d+) +(\d+) +(\d+)  (\S+(?: \S+)?) +x (\S+(?: (?:tensor|row|\d\S*))?)"
gemms = re.findall(row, text, re.M)
operand = lambda o: " ".join([o["dtype"]] + [o[key] for key in ("scale_per",) if key in o])
wanted = []
for g in plan["gemms"]:
    roles = {"fprop": "xw", "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[g["gemm"]]
    sizes = [str(g[key]) for key in ("M", "N", "K")]
    wanted.append((g["linear"], g["gemm"], *sizes, *(operand(g[role]) for role in roles)))
assert wanted == gemms, (wanted, gemms)
fp8 = sum(len(g["layers"]) for g in plan["gemms"] if "scale_per" in g.get("x", g.get("dy")))
assert plan["fp8_gemms"] == fp8 and plan["world_size"] == world, (plan["fp8_gemms"], fp8)
log = json.loads(open(folder + "/log.jsonl").readline()) if world < 3 else None
if log:
    assert log["fp8_gemms"] == fp8 and log["memory_plan_bytes"] == memory["total_bytes"] - memory["other_bytes"]
    for key in ("build", "memory", "gemms", "checkpoint_bytes", "ranks_per_replica", "fp8_filter_decided"):
        assert log[key] == plan[key], key
    assert {**log["settings"], "dry-run": "on", "log-dir": ""} == {**plan["settings"], "log-dir": ""}
print("fp8_gemms", fp8)
PY
# $1 the last line that plan.py must print, $2 ranks, then options. With 2 ranks or fewer the run also trains, and its
# log is compared too.
plans() {
    local expected=$1 ranks=$2 folder=$tmp/$RANDOM
    shift 2
    mkdir "$folder"
    if [ "$ranks" -le 2 ]; then
        make_launch "$ranks"
        "${launch[@]}" $trainer "$@" --log-dir "$folder" >/dev/null || return 1
    else
        launch=()
        set -- "$@" --world-size "$ranks"
    fi
    "${launch[@]}" $trainer "$@" --dry-run >"$folder/plan.txt" || return 1
    "${launch[@]}" $trainer "$@" --dry-run --json >"$folder/plan.json" || return 1
    equal "$(wc -l <"$folder/plan.json")" 1 &&
        equal "$(python3 "$tmp/plan.py" "$folder" "$ranks" 2>&1 | tail -n 1)" "$expected"
}
check "the JSON plan of bf16 equals the printed plan and the log" plans "fp8_gemms 0" 1 tiny $data
check "the JSON plan of fp32 equals the printed plan and the log" plans "fp8_gemms 0" 1 tiny $data --precision fp32
check "the JSON plan of fp8 on 2 ranks equals the printed plan and the log" \
    plans "fp8_gemms 24" 2 tiny $data --precision fp8
check "the JSON plan of fp8 with a filter equals the printed plan and the log" \
    plans "fp8_gemms 9" 1 tiny $data --precision fp8 --fp8-filter first,down
check "the JSON plan with weight gradients in bf16 equals the printed plan and the log" \
    plans "fp8_gemms 16" 1 tiny $data --precision fp8 --fp8-recipe rowwise_with_gw_hp
check "the JSON plan of a recipe that does not suit tiny's sizes has no FP8 GEMM" \
    plans "fp8_gemms 0" 1 tiny $data --precision fp8 --fp8-recipe blockwise --batch-size 4
check "the JSON plan of 512 ranks equals the printed plan" plans "fp8_gemms 384" 512 llama3.1-8b $data --precision fp8

tokens="--sequence-length 32 --tokens-per-step 1024"
check "--tokens-per-step sets the micro-steps of 4 ranks" \
    eval '$trainer llama3.1-8b $tokens --world-size 4 --dry-run --json | grep -Fq "\"grad-accumulation-steps\": 8,"'
$trainer tiny $data $tokens --num-steps 1 >"$tmp/tokens"
check "a run prints the micro-steps of --tokens-per-step" holds "$tmp/tokens" "derived   --grad-accumulation-steps 32"
check "--tokens-per-step with other --grad-accumulation-steps is refused" \
    says_one_line tiny $data $tokens --grad-accumulation-steps 1

sources=$(ls train_fp8.c train_fp8.cu llmc/*/*.h llmc/*/*.cuh | xargs cat | sha256sum | cut -c1-12)
check "make names the sources" \
    equal "$(make -Bn train_fp8 | grep -o 'TRAINER_BUILD="[^"]*"')" "TRAINER_BUILD=\"$sources\""
check "the JSON plan has a name of the sources" \
    eval '$trainer tiny $data --dry-run --json | grep -Eq "\"build\": \"[0-9a-f]{12}\""'

# ---- what a run prints before its first step, on stdout and stderr: at most 25 lines; --dry-run prints more

# $1 ranks, the rest: arguments. Leaves the lines before the first step in $tmp/start.
starts() {
    make_launch "$1"
    shift
    "${launch[@]}" $trainer "$@" >"$tmp/start.out" 2>&1 || { tail -n 3 "$tmp/start.out"; return 1; }
    sed '/^step /Q' "$tmp/start.out" >"$tmp/start"
    holds "$tmp/start.out" "step 1/" && equal "$(sed -n '1s/:.*//p' "$tmp/start")" "train_fp8 $version" &&
        equal "$(($(wc -l <"$tmp/start") <= 25))" 1
}
version=$($trainer tiny --train-data "$tmp/s_train.bin" --dry-run --json | sed 's/.*"version": "\([^"]*\)".*/\1/')
val="--val-data $tmp/s_val.bin --log-dir $tmp/started"
check "a bf16 run prints at most 25 lines before step 1" starts 1 tiny $data $val
check "a bf16 run prints its recipe" holds "$tmp/start" "recipe    bf16: all GEMMs, with fp32 accumulation"
check "a bf16 run prints no memory plan" lacks "$tmp/start" "memory plan"
check "a bf16 run prints no table of GEMMs" lacks "$tmp/start" "fprop"
check "a run of FP8 GEMMs alone starts" starts 1 tiny $data --fast
check "a run prints what a shorthand sets" \
    holds "$tmp/start" "derived   --precision fp8 --fp8-recipe tensorwise_bounded --fp8-format hybrid --fp8-lm-head all"
check "a run of FP8 GEMMs alone names no bf16 linear layer" lacks "$tmp/start" "bf16 linear layers"
check "an fp8 run prints at most 25 lines before step 1" starts 1 tiny $data $val --precision fp8 --fp8-filter first
check "an fp8 run prints which linear layers run in bf16" \
    holds "$tmp/start" "bf16 linear layers: lm_head, qkv in 1 of 2 layers, attn_out in 1 of 2 layers"
check "an fp8 run prints the options that are set" \
    holds "$tmp/start" "options   --val-data $tmp/s_val.bin --sequence-length 32 --num-steps 2"
check "an fp8 run prints the options that are derived" holds "$tmp/start" \
    "derived   --fp8-format hybrid --master-weights bf16 --optimizer-state bf16"
check "an fp8 run prints one line about the log of the earlier run" \
    equal "$(grep -c 'the earlier log.jsonl is now' "$tmp/start")" 1
check "FP8 sums over 64 micro-steps start" starts 1 tiny $data $val --grad-accum-dtype fp8 --grad-accumulation-steps 64
check "FP8 sums over 64 micro-steps say how much too large the norm may be" \
    holds "$tmp/start" "sums      FP8 over 64 micro-steps: noise makes the norm up to 2% too large (bf16: 0.01%)"
check "2 ranks print at most 25 lines before step 1" starts 2 tiny $data $val --precision fp8 --fp8-recipe delayed
check "2 ranks print their replica and sharding" holds "$tmp/start" "ranks     2: 1 replica of 2 ranks, sharding full"
check "2 ranks print the derived --fp8-all-gather, which one rank leaves out" holds "$tmp/start" "--fp8-all-gather on"
checkpoints="--checkpoint-dir $tmp/started/steps --checkpoint-every 1 --keep-checkpoints 1"
check "a run that saves prints at most 25 lines before step 1" starts 1 tiny $data $val $checkpoints --resume
check "a resumed run trains" eval '$trainer tiny $data $val $checkpoints --resume --num-steps 3 >"$tmp/resumed"'
check "a resumed run prints at most 25 lines before its first step" \
    equal "$(($(sed '/^step /Q' "$tmp/resumed" | wc -l) <= 25))" 1
check "a resumed run prints the checkpoint that it continues from" \
    holds "$tmp/resumed" "resume: continuing from $tmp/started/steps/step-00000002"
# Sets options to the values that they have anyway. Options in left_out, and options that are empty, on or off, are not
# set.
many=$($trainer tiny $data --precision fp8 --fp8-recipe delayed --dry-run --json | python3 -c '
import json, sys
left_out = ("train-data", "val-data", "sequence-length", "num-steps", "fp8-filter", "shard-size", "world-size",
            "copy-engines", "log-dir", "checkpoint-dir", "export-hf")
for name, value in json.load(sys.stdin)["settings"].items():
    if value not in ("", "on", "off") and name not in left_out: print("--" + name, value)')
check "a run with $(wc -l <<<"$many") options prints at most 25 lines before step 1" starts 2 tiny $data $val $many
check "exactly one line before step 1 ends in an ellipsis" equal "$(grep -c ' \.\.\.$' "$tmp/start")" 1
$trainer tiny $data --precision fp8 --dry-run >"$tmp/start"
check "--dry-run prints settings, memory plan and table of GEMMs" equal \
    "$(grep -cE '^(model|eps|stall-timeout) |^memory plan|^  (lm_head|down) ' "$tmp/start")" 10

# ---- --log-every N: a run prints the step lines of its first and last step and of each step that N divides; log.jsonl
# has all steps

printed() { grep '^step ' "$1" | sed 's|^step *\([0-9]*\)/.*|\1|' | paste -sd' '; }
rm -rf "$tmp/every"
$trainer tiny $data --val-data "$tmp/s_val.bin" --val-every 2 --num-steps 11 --log-every 4 --log-dir "$tmp/every" \
    --sample-every 5 --max-tokens 4 --checkpoint-dir "$tmp/every/steps" >"$tmp/every.out"
check "--log-every 4 prints steps 1, 4, 8 and 11 of 11" equal "$(printed "$tmp/every.out")" "1 4 8 11"
check "--log-every: log.jsonl has every step" equal "$(grep -c '"type": "step"' "$tmp/every/log.jsonl")" 11
check "--log-every: validation, sample and save lines are all printed" \
    equal "$(grep -cE '^(validation|sample|saved checkpoint) after step' "$tmp/every.out")" 10
$trainer tiny $data --num-steps 14 --log-every 6 --checkpoint-dir "$tmp/every/steps" --resume >"$tmp/every.out"
check "--log-every 6 prints steps 12 and 14 of a run resumed after step 11" equal "$(printed "$tmp/every.out")" "12 14"
timeout -s TERM 3 $trainer tiny $data --num-steps 10000000 --log-every 10000000 >"$tmp/every.out"
check "--log-every prints the step at which a signal ends the run" \
    equal "$(printed "$tmp/every.out")" \
    "1 $(sed -n 's/^stopped by signal 15 after step \([0-9]*\);.*/\1/p' "$tmp/every.out")"
rm -rf "$tmp/every"
build/synth_stories --out "$tmp/long" --bytes 20000000 --seed 4 >/dev/null
$trainer tiny $data --val-data "$tmp/long_train.bin" --val-every 3 --val-steps 1000000 --num-steps 50 --log-every 10 \
    --log-dir "$tmp/every" >"$tmp/every.out" &
await 10 eval '[ "$(grep -c "\"type\": \"step\"" "$tmp/every/log.jsonl")" = 3 ]'
kill -TERM $!
wait $!
check "--log-every prints the last step if the signal comes during the validation after it" \
    equal "$(printed "$tmp/every.out")" "1 3"

# ---- A learning rate at which weights that are rounded to nearest lose updates

warning() {
    $trainer tiny $data --dry-run --master-weights "$@" 2>&1 >"$tmp/plan" |
    sed 's/.*learning rate: //; s/, where many.*weights \([^ ]*\).*/; use \1/'
}
check "FP16 masters rounded to nearest: a warning of a low --learning-rate" \
    equal "$(warning fp16 --learning-rate 1e-5)" "--learning-rate 1e-05 is below 3.1e-05; use fp16-stochastic"
check "FP16 masters rounded to nearest: a warning of the end of a schedule" equal \
    "$(warning fp16 --learning-rate 3e-4 --lr-schedule cosine)" \
    "--lr-schedule cosine ends below 3.1e-05; use fp16-stochastic"
check "weights rounded stochastically, or a higher rate: no warning" \
    equal "$(warning fp16; warning fp16 --learning-rate 1e-4; warning fp16-stochastic; warning bf16)" ""

number() { $trainer llama3.1-8b --dry-run --json | json_number "$1"; }
check "json_number reads numbers of the JSON plan" \
    equal "$(number parameters) $(number sequence-length)" "8030261248 2048"
finish
