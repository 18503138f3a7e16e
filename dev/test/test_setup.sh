#!/usr/bin/env bash
# Tests what a run refuses before its first step, and what it prints about its start: weights, output folders, data,
# options. Also tests a second Ctrl-C. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/cpu_trainer.sh
build/synth_stories --out "$tmp/s" --bytes 30000 --seed 3 >/dev/null
data="--train-data $tmp/s_train.bin --sequence-length 32"

# ---- The source of the starting weights.

mkdir "$tmp/model"
cat >"$tmp/model/config.json" <<JSON
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 643, "hidden_size": 32,
 "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
 "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
 "tie_word_embeddings": true, "initializer_range": 0.05, "torch_dtype": "float32"}
JSON
check "a preset trains" trains tiny $data --num-steps 1
check "a preset starts from random weights" holds "$out" "starting weights: random, from --seed 42"
check "a folder without weights trains" trains "$tmp/model" $data --num-steps 1 --seed 7 --checkpoint-dir "$tmp/ck"
check "the run prints that the folder has no weights" \
    holds "$out" "starting weights: random, from --seed 7 ($tmp/model holds none)"
check "a folder with weights trains" trains "$tmp/ck/step-00000001" $data --num-steps 1
check "the run prints the folder of its starting weights" holds "$out" "starting weights: from $tmp/ck/step-00000001"
check "a resumed run trains" trains "$tmp/model" $data --num-steps 2 --seed 7 --checkpoint-dir "$tmp/ck" --resume
check "a resumed run prints no line about starting weights" lacks "$out" "starting weights"
check "--resume without a checkpoint trains" trains tiny $data --num-steps 1 --checkpoint-dir "$tmp/none" --resume
check "--resume without a checkpoint starts from random weights" holds "$out" "starting weights: random"
for name in pytorch_model.bin model-00001-of-00002.safetensors consolidated.00.pth weights.pt model.gguf; do
    touch "$tmp/model/$name"
    check "a model folder whose weights are in $name is refused" \
        refuses 1 "MODEL $tmp/model holds $name, but weights are read from model.safetensors" "$tmp/model" $data
    rm "$tmp/model/$name"
done
touch "$tmp/model/model.gguf" "$tmp/model/training_args.bin"
check "a resumed run trains although the model folder holds model.gguf" \
    trains "$tmp/model" $data --num-steps 3 --seed 7 --checkpoint-dir "$tmp/ck" --resume
rm "$tmp/model/model.gguf"
check "a model folder with training_args.bin, which is no file of weights, trains" \
    trains "$tmp/model" $data --num-steps 1
rm "$tmp/model/training_args.bin"

# ---- The folder of an export. A run checks before its first step that it can write the export after the last one.

mkdir "$tmp/e"
check "a run exports a model" trains "$tmp/model" $data --num-steps 1 --export-hf "$tmp/e/hf"
cp "$tmp/e/hf/model.safetensors" "$tmp/first"
check "a run exports over an earlier export" \
    trains "$tmp/model" $data --num-steps 1 --seed 5 --export-hf "$tmp/e/../e/hf/."
check "the new export replaces the earlier one" [ "$(ls "$tmp/e/hf")" = "config.json
model.safetensors
tokens.tokenizer
train_fp8.json" -a "$(ls "$tmp/e")" = hf ]
check "the new export has other weights than the earlier one" eval '! cmp -s "$tmp/first" "$tmp/e/hf/model.safetensors"'
for option in log-dir checkpoint-dir; do
    for name in hf hf/deep/../down new new/logs; do
        check "--$option $name, which is --export-hf or inside it, is refused" refuses 2 \
            "--$option $tmp/e/$name is in --export-hf $tmp/e/${name%%/*}/, which may hold only the export" tiny $data \
            --$option "$tmp/e/$name" --export-hf "$tmp/e/${name%%/*}/"
    done
done
for suffix in .tmp .old.tmp; do
    check "--checkpoint-dir hf$suffix, a temporary folder of the export, is refused" \
        refuses 2 "is in --export-hf $tmp/e/hf$suffix, which may hold only the export" \
        tiny $data --checkpoint-dir "$tmp/e/hf$suffix" --export-hf "$tmp/e/hf"
done
mkdir "$tmp/e/hf.old.tmp"
check "a run exports where a killed run left an empty hf.old.tmp" \
    trains "$tmp/model" $data --num-steps 1 --export-hf "$tmp/e/hf"
mv "$tmp/e/hf" "$tmp/e/hf.old.tmp"
check "an export is refused if MODEL is the earlier export, which a kill left under another name" \
    refuses 1 "would replace" "$tmp/e/hf.old.tmp" $data --num-steps 1 --export-hf "$tmp/e/hf"
check "a run exports where a kill left an earlier export under another name" trains "$tmp/model" $data --num-steps 1 \
    --export-hf "$tmp/e/hf"
check "the run prints that it renames the earlier export back" holds "$out" "an earlier export, back to $tmp/e/hf"
check "a run accepts log and checkpoint folders beside the export" \
    trains tiny $data --num-steps 1 --log-dir "$tmp/all" --checkpoint-dir "$tmp/all/steps" --export-hf "$tmp/all/hf"
check "an export over the model that the run starts from is refused" \
    refuses 1 "would replace or remove $tmp/e/hf, the folder of MODEL" "$tmp/e/hf" $data --export-hf "$tmp/e/./hf/"
sed -i 's/written_by/written_of/' "$tmp/all/hf/model.safetensors"
check "an export over a model of another program is refused" refuses 1 \
    "may be no earlier export: this program did not write its file model.safetensors" tiny $data \
    --export-hf "$tmp/all/hf"
check "a refused export leaves no new file" equal "$(ls "$tmp/all")" "hf
log.jsonl
steps"
if unshare -m true 2>/dev/null; then
    mounted() {
        unshare -m bash -c 'mount --bind "$0" "$0" && exec timeout 60 ./train_fp8 "$@"' "$tmp/e/hf" tiny $data \
            --num-steps 1 --export-hf "$tmp/e/hf" >"$out" 2>&1
    }
    check "an export to a mounted folder is refused before step 1" eval \
        '! mounted && holds "$out" "it cannot be replaced: Device or resource busy" && no_step "$out"'
    check "an export to a mounted folder leaves no new file" equal "$(ls "$tmp/e")" hf
else
    echo "skipped: an export to a mounted folder (this user may not mount)"
fi

# ---- Only one run at a time may use a folder of checkpoints.

./train_fp8 "$tmp/model" $data --num-steps 1000000 --checkpoint-dir "$tmp/busy" --checkpoint-every 2 \
    --keep-checkpoints 1 >"$tmp/busy.out" 2>&1 &
busy=$!
await 30 grep -q '^saved checkpoint after step 4 ' "$tmp/busy.out"
kill -STOP $busy  # it holds its lock, and takes no time from the run that waits for it
check "a second run with the same --checkpoint-dir is refused" \
    refuses 1 "--checkpoint-dir $tmp/busy: another run is using it" \
    "$tmp/model" $data --checkpoint-dir "$tmp/busy" --resume
kill -CONT $busy
check "the first run with that --checkpoint-dir goes on" kill -0 $busy
kill -KILL $busy
check "a run resumes right after the one that was killed" \
    trains "$tmp/model" $data --num-steps 1 --checkpoint-dir "$tmp/busy" --resume
wait $busy 2>/dev/null

# ---- The log.

check "a --log-dir that cannot be made is refused" refuses 1 "--log-dir /proc/x: cannot make folder" tiny $data \
    --log-dir /proc/x --checkpoint-dir "$tmp/late"
check "a refused --log-dir leaves no checkpoint folder" [ ! -e "$tmp/late" ]
check "a run with a new --log-dir trains" \
    trains tiny $data --num-steps 3 --log-dir "$tmp/log" --checkpoint-dir "$tmp/log"
check "a resumed run trains with the same --log-dir" \
    trains tiny $data --num-steps 4 --log-dir "$tmp/log" --checkpoint-dir "$tmp/log" --resume
check "a resumed run appends to its log.jsonl" \
    equal "$(ls "$tmp/log" | grep -c jsonl) $(grep -c '"type": "step"' "$tmp/log/log.jsonl")" "1 4"
check "a new run trains with the --log-dir of an earlier run" trains tiny $data --num-steps 1 --log-dir "$tmp/log"
check "the new run prints where the earlier log is now" holds "$out" "the earlier log.jsonl is now $tmp/log/log.1.jsonl"
check "the new and the earlier log have all their steps" \
    equal "$(grep -c '"type": "step"' "$tmp/log/log.jsonl") $(grep -c '"type": "step"' "$tmp/log/log.1.jsonl")" "1 4"

./train_fp8 small $data --num-steps 1000000 --log-dir "$tmp/log" --sequence-length 4096 --batch-size 4 \
    >"$tmp/logs.out" 2>&1 &
busy=$!
await 60 grep -q '^memory' "$tmp/logs.out"  # it has locked the folder by then
kill -STOP $busy
check "a second run with the same --log-dir is refused" \
    refuses 1 "--log-dir $tmp/log: another run is using it" tiny $data --log-dir "$tmp/log"

# ---- A second Ctrl-C ends the run in the middle of a long step.

(trap - INT; exec ./train_fp8 small $data --sequence-length 4096 --batch-size 4) >"$tmp/long.out" 2>&1 &
long=$!
await 60 grep -q '^memory' "$tmp/long.out"  # the first step begins then
sleep 0.5
kill -INT $long
sleep 0.3
kill -INT $long
check "a Ctrl-C that is repeated 0.3 s later, as by mpirun, counts once" kill -0 $long
sleep 2
kill -INT $long
wait $long
check "a second Ctrl-C ends the run with status 130" equal $? 130
kill -KILL $busy
wait $busy 2>/dev/null

# ---- Options that the CPU trainer refuses, and unusual input that it takes.

check "--profile is refused on the CPU" refuses 4 "--profile needs the GPU trainer" tiny $data --profile
check "--copy-engines on is refused on the CPU" \
    refuses 4 "--copy-engines on needs the GPU trainer" tiny $data --copy-engines on
check "--offload moments,master is refused on the CPU" \
    refuses 4 "--offload moments,master needs the GPU trainer" tiny $data --offload moments,master --master-weights fp32
check "--offload activations is refused on the CPU" \
    refuses 4 "--offload activations needs the GPU trainer" tiny $data --offload activations
check "a run trains with less validation data than a batch" \
    trains tiny $data --val-data "$tmp/s_val.bin" --batch-size 512 --num-steps 1 --val-steps 1000000
check "a run trains with sequences longer than the model's positions" \
    trains "$tmp/model" $data --sequence-length 600 --num-steps 1
check "the run warns of sequences longer than the model's positions" holds "$out" \
    "warning: --sequence-length 600 is more than the 512 positions"
mkdir "$tmp/run[1]"
cp "$tmp/s_train.bin" "$tmp/run[1]/"
check "an existing path with wildcards in its name is taken as it is" \
    trains tiny --train-data "$tmp/run[1]/s_train.bin" --sequence-length 32 --num-steps 1
check "--resume past --num-steps succeeds" trains tiny $data --num-steps 3 --checkpoint-dir "$tmp/log" --resume
check "--resume past --num-steps prints that nothing is left to train" holds "$out" \
    "resume: 4 steps are done and --num-steps is 3: nothing is left to train"

# ---- Resuming on other data with the old name, and on the old data with another name.

cp "$tmp/s_train.bin" "$tmp/same.bin"
check "a run saves a checkpoint" trains tiny --train-data "$tmp/same.bin" --sequence-length 32 --num-steps 1 \
    --checkpoint-dir "$tmp/same"
build/synth_stories --out "$tmp/o" --bytes 50000 --seed 4 >/dev/null
mkdir "$tmp/elsewhere"
cp "$tmp/same.bin" "$tmp/elsewhere/moved.bin"
check "a run trains with --resume on data that was moved" trains tiny --train-data "$tmp/elsewhere/moved.bin" \
    --sequence-length 32 --num-steps 2 --checkpoint-dir "$tmp/same" --resume
check "the run on moved data continues from its checkpoint" holds "$out" "resume: continuing from"
cp "$tmp/o_train.bin" "$tmp/same.bin"
check "--resume on other data is refused" refuses 1 " tokens in the checkpoint, " tiny --train-data "$tmp/same.bin" \
    --sequence-length 32 --num-steps 2 --checkpoint-dir "$tmp/same" --resume
check "the error gives the size of the other data" holds "$out" "--train-data has "

# ---- Shards and their tokenizer tables.

mkdir "$tmp/t"
cp "$tmp/s_train.bin" "$tmp/t/a_train_1.bin"
cp "$tmp/s_train.bin" "$tmp/t/a_train_2.bin"
cp "$tmp/s.tokenizer" "$tmp/t/a.tokenizer"
cp "$tmp/s_train.bin" "$tmp/t/b_train_1.bin"
LC_ALL=C sed 's/e/x/' "$tmp/s.tokenizer" >"$tmp/t/b.tokenizer"  # the table differs in a few letters
cp "$tmp/s_val.bin" "$tmp/t/c_val.bin"
check "shards of one tokenizer train" trains tiny --train-data "$tmp/t/a_train_*.bin" --val-data "$tmp/s_val.bin" \
    --sequence-length 32 --num-steps 1
check "a validation shard without a tokenizer table trains" trains tiny --train-data "$tmp/t/a_train_*.bin" \
    --val-data "$tmp/t/c_val.bin" --sequence-length 32 --num-steps 1
check "a training shard of another tokenizer is refused" refuses 1 \
    "b_train_1.bin belongs to the tokenizer table $tmp/t/b.tokenizer" tiny --train-data "$tmp/t/*_train_*.bin" \
    --sequence-length 32
check "the error names both tokenizer tables" holds "$out" "but the first training shard belongs to $tmp/t/a.tokenizer"
check "a validation shard of another tokenizer is refused" refuses 1 \
    "b_train_1.bin belongs to the tokenizer table $tmp/t/b.tokenizer" tiny --train-data "$tmp/t/a_train_1.bin" \
    --val-data "$tmp/t/b_train_1.bin" --sequence-length 32

# Without a table, a shard's largest id tells the size of its vocabulary. The error blames the shard, not the model.
python3 - "$tmp/t/huge.bin" <<'PY'
import struct, sys
header = struct.pack("<256i", 20240801, 7, 100, *[0] * 253)
open(sys.argv[1], "wb").write(header + struct.pack("<100I", *[1] * 77, 2**32 - 1, *[1] * 22))
PY
check "a token id that no vocabulary has is refused" refuses 1 \
    "$tmp/t/huge.bin: token 77 has id 4294967295, but a vocabulary has at most 16777216" tiny \
    --train-data "$tmp/t/huge.bin" --sequence-length 32

# The shard's ids fit the model, but its separator does not. Samples begin with the separator.
sed 's/"vocab_size": 643/"vocab_size": 64/' "$tmp/model/config.json" >"$tmp/t/config.json"
python3 - "$tmp/s_train.bin" "$tmp/t/low.bin" "$tmp/t/low.tokenizer" <<'PY'
import struct, sys
shard = open(sys.argv[1], "rb").read()
tokens = (len(shard) - 1024) // 4
open(sys.argv[2], "wb").write(shard[:1024] + struct.pack("<%dI" % tokens, *[i % 60 for i in range(tokens)]))
open(sys.argv[3], "wb").write(struct.pack("<4I", 20251121, 1, 100, 99) + 100 * struct.pack("<Ic", 1, b"x"))
PY
check "a separator outside the model's vocabulary is refused" refuses 1 \
    "the separator of the shard's tokenizer is token 99, but the model's vocabulary is 64" "$tmp/t" \
    --train-data "$tmp/t/low.bin" --sequence-length 32 --sample-every 1

finish
