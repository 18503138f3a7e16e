#!/usr/bin/env bash
# Tests that ranks started with other options, another model, other data or another program than rank 0 end before the
# first step, with an error that names the first difference. Ranks that read equal data and an equal model from other
# folders train. Needs mpirun and python3. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
. dev/test/lib/cpu_trainer.sh
build/synth_stories --out "$tmp/s" --bytes 60000 --seed 3 >/dev/null
trainer=$PWD/train_fp8
data="--train-data $tmp/s_train.bin --sequence-length 32 --num-steps 3"

# Starts two ranks: rank 0 in $tmp with the options $zero, rank 1 in $dir with the program $program and the options $1.
# Sets status. A run that has not ended after a minute is taken to hang, and is killed.
both() {
    timeout -k 5 60 mpirun --allow-run-as-root --oversubscribe -np 1 -wdir "$tmp" "$trainer" $zero : \
        -np 1 -wdir "$dir" "$program" $1 >"$tmp/out" 2>&1
    status=$?
}
zero="tiny $data" dir=$tmp program=$trainer
# Rank 1, with the options $1, must end the run with status 2 before the first step. The error of rank 1 must be $2, and
# there must be no other error.
differs() {
    both "$1"
    check "\"$1\" ends with status 2 before a step" equal "$status $(grep -c '^step' "$tmp/out")" "2 0"
    check "\"$1\" ends with this error alone: $2" \
        equal "$(grep '^error: ' "$tmp/out")" "error: rank 1 on $(hostname): $2"
}
together="start all ranks with the same program, model and options"

differs "tiny $data --seed 43" "--seed is 43 here, 42 on rank 0; $together"
differs "tiny $data --learning-rate 2e-5" "--learning-rate is 2e-05 here, -1 on rank 0; $together"
differs "tiny $data --sharding none" "--sharding is none here, full on rank 0; $together"
differs "tiny $data --num-steps 4 --seed 43" "--num-steps is 4 here, 3 on rank 0; $together"
differs "tiny $data --val-data $tmp/s_val.bin" "--val-data is given here, not given on rank 0; $together"
differs "tiny $data --checkpoint-dir $tmp/ck" "--checkpoint-dir is $tmp/ck here, not given on rank 0; $together"
differs "tiny $data --dry-run" "--dry-run is on here, off on rank 0; $together"
differs "tiny $data --help" "--help is on here, off on rank 0; $together"
differs "" "MODEL is not given here, tiny on rank 0; $together"
differs "small $data" "MODEL is small here, tiny on rank 0; $together"
timeout -k 5 60 mpirun --allow-run-as-root --oversubscribe -np 3 "$trainer" $zero : -np 1 "$trainer" $zero --seed 7 : \
    -np 1 "$trainer" $zero --seed 8 >"$tmp/out" 2>&1
check "if two of five ranks differ, the run ends with status 2 and only the first of them prints an error" \
    equal "$? $(grep '^error: ' "$tmp/out")" "2 error: rank 3 on $(hostname): --seed is 7 here, 42 on rank 0; $together"

# Makes a copy of the trainer in which its name or version is replaced. The linker may store such a text as the end of a
# longer one, so any byte may stand before it.
rename() {  # $1 copy, $2 old text, $3 new text
    python3 - "$trainer" "$tmp/$1" "$2" "$3" <<'PY' && chmod +x "$tmp/$1"
import sys
old, new = (text.encode() + b"\0" for text in sys.argv[3:])
program = open(sys.argv[1], "rb").read()
assert old in program
open(sys.argv[2], "wb").write(program.replace(old, new))
PY
}
check "a copy of the program with another version is made" rename newer 0.2 0.3
program=$tmp/newer
differs "$zero" "the program's version is 0.3 here, 0.2 on rank 0; $together"
if ldd ./train_fp8cu 2>/dev/null | grep -q libnccl && ! ldd ./train_fp8cu | grep -q "not found"; then
    program=$PWD/train_fp8cu
    differs "$zero" "the program is train_fp8cu here, train_fp8 on rank 0; $together"
else
    check "a copy of the program with another name is made" rename other train_fp8 train_gp8
    program=$tmp/other
    differs "$zero" "the program is train_gp8 here, train_fp8 on rank 0; $together"
fi
program=$trainer

# Each rank reads MODEL from its own folder, as on hosts with their own disks, so files with equal names may differ. In
# the last cases it reads data from its own folder too.
mkdir -p "$tmp/host/model" "$tmp/model"
model() {
    cat <<JSON
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 643, "hidden_size": 32,
 "intermediate_size": $1, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
 "hidden_act": "silu", "rms_norm_eps": $2, "rope_theta": 10000.0,
 "max_position_embeddings": 512, "tie_word_embeddings": true, "initializer_range": 0.05, "torch_dtype": "float32"}
JSON
}
model 48 1e-5 >"$tmp/model/config.json"
zero="model $data" dir=$tmp/host
model 64 1e-5 >"$tmp/host/model/config.json"
differs "$zero" "MODEL's intermediate_size is 64 here, 48 on rank 0; give all hosts the same model"
model 48 1e-6 >"$tmp/host/model/config.json"
differs "$zero" "MODEL's rms_norm_eps is 1e-06 here, 1e-05 on rank 0; give all hosts the same model"
model 48 1e-5 | tr -d '\n' >"$tmp/host/model/config.json"
both "$zero"
check "an equal model in a config.json with other bytes trains" equal "$status $(grep -c '^step' "$tmp/out")" "0 3"
for seed in 1 2; do
    check "weights of seed $seed are exported" \
        "$trainer" "$tmp/model" $data --num-steps 1 --seed $seed --export-hf "$tmp/weights$seed" >/dev/null
done
cp "$tmp/weights1/model.safetensors" "$tmp/model/"
differs "$zero" "MODEL's folder is without weights here, with weights on rank 0; give all hosts the same model"
cp "$tmp/weights2/model.safetensors" "$tmp/host/model/"
both "$zero"
message="file 1 of MODEL's weights is [0-9]+ bytes with fingerprint .* here, .* on rank 0; give all hosts"
check "weights that differ from rank 0's are refused" equal \
    "$status $(grep -cE "^error: rank 1 on .*: $message" "$tmp/out") $(grep -c '^step' "$tmp/out")" "2 1 0"
cp "$tmp/weights1/model.safetensors" "$tmp/host/model/"
cp "$tmp"/s* "$tmp/host/"
both "model --train-data s_train.bin --val-data $tmp/host/s_val.bin ${data#*.bin}"  # rank 0 has no --val-data
check "--val-data on rank 1 alone is refused" \
    equal "$status $(grep -c 'error: rank 1 on .*: --val-data is given here, not given on rank 0; ' "$tmp/out")" "2 1"
zero="$zero --val-data $tmp/s_val.bin"
both "model --train-data s_train.bin --val-data s_val.bin ${data#*.bin}"
check "equal model, weights and data in other folders train" equal "$status $(grep -c '^step' "$tmp/out")" "0 3"
both "model --train-data s_train.bin --val-data s_train.bin ${data#*.bin}"
message="s_train.bin: here --val-data has .*; give all hosts the same files"
check "validation data that differs from rank 0's is refused" equal \
    "$status $(grep -c "^error: rank 1 on .*: $message" "$tmp/out") $(grep -c '^step' "$tmp/out")" "1 1 0"
finish
