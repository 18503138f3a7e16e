#!/usr/bin/env bash
# Whole runs of train_fp8cu on a GPU: against the CPU trainer, repeated, resumed, interrupted, and with more than the GPU holds.
# Needs ./train_fp8, ./train_fp8cu, build/synth_stories and build/compare_checkpoints. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
. dev/test/lib/gpu_lines.sh

build/synth_stories --out "$tmp/synth" --bytes 300000 --seed 3 >/dev/null || bad "synth_stories"
data="--train-data $tmp/synth_train.bin --shuffle off"

# A run that ends with an error, and one that does so before any work. $1 what the message must hold, then the command; its output is $tmp/refused.log.
fails() {
    local expected=$1 status
    shift
    "$@" >"$tmp/refused.log" 2>&1
    status=$?
    if [ $status -ne 0 ] && [ $status -lt 128 ] && grep -q -- "^error: .*$expected" "$tmp/refused.log"; then ok "$(grep -a -m1 '^error' "$tmp/refused.log" | cut -c1-150)"; else bad "expected \"$expected\": $(tail -n 2 "$tmp/refused.log")"; fi
}
refused() { fails "$@" && check "refused before the first step" lacks "$tmp/refused.log" "step 1/"; }

# CPU and GPU start from the same weights and round at the same places; they differ in the order of sums, which turns a share of the bf16
# roundings (2^-9 each) the other way, and with FP8 a share of its roundings (2^-4 and 2^-3). How far that alone goes was measured on this very
# step by compiling the CPU trainer with -Ofast, which reorders its sums: worst gradient 5.2e-3 with bf16 and 6.4e-2 with fp8 (q and k projections,
# whose gradients are differences of nearly equal terms). The bounds are 1.5 to 2 times that. $1 name, $2 options, $3 largest loss error, $4 largest
# gradient error.
against_cpu() {
    local args="small $data $2 --sequence-length 256 --batch-size 2 --num-steps 1 --optimizer-state fp32"
    rm -rf "$tmp/cpu" "$tmp/gpu"
    cpu cpu $args --checkpoint-dir "$tmp/cpu" && gpu gpu $args --checkpoint-dir "$tmp/gpu" || return
    near "$1: loss" "$(field gpu loss 1)" "$(field cpu loss 1)" "$3"
    if build/compare_checkpoints "$tmp/gpu/step-00000001" "$tmp/cpu/step-00000001" "$4"; then ok "$1: gradients"; else bad "$1: gradients"; fi
}
against_cpu bf16 "--precision bf16" 1e-4 1e-2
for recipe in tensorwise delayed rowwise rowwise_with_gw_hp blockwise; do against_cpu "$recipe" "--precision fp8 --fp8-recipe $recipe" 1e-3 1e-1; done
for recipe in mxfp8 tensorwise rowwise; do against_cpu "$recipe, emulated" "--precision fp8 --fp8-recipe $recipe --fp8-emulate" 1e-3 1e-1; done
against_cpu "bf16, weights rounded to nearest" "--precision bf16 --master-weights bf16-nearest" 1e-4 1e-2
against_cpu "tensorwise, all e4m3" "--precision fp8 --fp8-format e4m3" 1e-3 1e-1
against_cpu "blockwise, hybrid" "--precision fp8 --fp8-recipe blockwise --fp8-format hybrid" 1e-3 1e-1
against_cpu "tensorwise, filtered" "--precision fp8 --fp8-filter first,down" 1e-3 1e-1

# Kernels that are loaded beforehand start as soon as they are enqueued, and what is enqueued first may take longer than the host takes for what is next:
# a model whose memory takes milliseconds to clear.
run="llama3.2-1b $data --precision bf16 --sequence-length 64 --num-steps 2 --deterministic"
if ! ./train_fp8cu $run >"$tmp/a.log" 2>&1 && grep -q "GiB are free" "$tmp/a.log"; then echo "skipped: llama3.2-1b needs more memory than this GPU has"
else
    CUDA_MODULE_LOADING=EAGER gpu b $run
    same "kernels loaded beforehand" a b
fi

common="small $data --sequence-length 256 --batch-size 2 --deterministic --learning-rate 1e-3"
for precision in bf16 fp8 "fp8 --fp8-recipe delayed --fp8-amax-history 4" "fp8 --fp8-recipe rowwise" "fp8 --fp8-recipe rowwise_with_gw_hp" "fp8 --fp8-recipe blockwise" "fp8 --fp8-recipe mxfp8 --fp8-emulate"; do
    run="$common --precision $precision --num-steps 12"
    rm -rf "$tmp/ck"
    gpu a $run && gpu b $run
    same "$precision: two runs" a b

    # stopped after 5 of 12 steps by num-steps, then resumed
    ck="--checkpoint-dir $tmp/ck"
    gpu c $common --precision $precision --num-steps 5 $ck && gpu d $run $ck --resume
    same "$precision: resumed" a d 7

    # two micro-steps of one sequence see the tokens of one micro-step of two; gradients are rounded to bf16 once more
    gpu e $common --precision $precision --num-steps 12 --batch-size 1 --grad-accumulation-steps 2
    near "$precision: accumulation, last loss" "$(field e loss 12)" "$(field a loss 12)" 1e-2
done

# layers computed again in backward are quantized to the same bytes; with every layer filtered, FP8 is BF16
for recipe in tensorwise delayed rowwise rowwise_with_gw_hp blockwise; do
    run="$common --precision fp8 --fp8-recipe $recipe --num-steps 6"
    gpu a $run && gpu b $run --recompute layer
    same "$recipe, --recompute layer" a b
    [ $recipe = rowwise_with_gw_hp ] && continue
    gpu b $run --fp8-weight-cache on && gpu c $run --fp8-weight-cache on --recompute layer --fp8-filter first &&
        gpu d $run --fp8-filter first
    same "$recipe, --fp8-weight-cache on" a b
    same "$recipe, --fp8-weight-cache on, computed again, filtered" d c
done
gpu a $common --precision bf16 --num-steps 6 && gpu b $common --precision fp8 --fp8-filter attention,mlp --num-steps 6
same "FP8 with everything filtered, and BF16" a b
gpu a ${common/--deterministic/} --precision fp8 --fp8-filter auto --fp8-audit 2 --log-dir "$tmp/audit" --num-steps 4
if [ $? -eq 0 ] && { grep -q '"type": "fp8_audit"' "$tmp/audit/log.jsonl" || grep -q 'no GEMM runs in FP8' "$tmp/a.log"; }; then ok "filter auto and audit"; else bad "filter auto and audit: $(tail -n 3 "$tmp/a.log")"; fi

# Gradients lie where activations were: a norm of 80 values leaves gaps between the vectors, and a model of one layer has no layers to give way. An embedding of
# its own has room for the logits of 64 tokens, but not of 512, and for the activations of a layer.
mkdir "$tmp/odd"
for shape in "1 320 true" "5 320 true" "1 16384 false" "5 16384 false"; do
    read -r layers vocabulary tied <<<"$shape"
    cat >"$tmp/odd/config.json" <<END
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": $vocabulary, "hidden_size": 80, "intermediate_size": 208, "num_hidden_layers": $layers, "num_attention_heads": 2,
 "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": $tied, "hidden_act": "silu"}
END
    for T in 64 512; do
        name="$layers layers of 80, vocabulary $vocabulary, T $T" args="$tmp/odd $data --sequence-length $T --num-steps 5 --learning-rate 1e-3 --optimizer-state fp32 --master-weights fp32"
        cpu a $args && gpu b $args --deterministic
        # five steps of bf16 roundings at other places than the CPU's sums: a norm moves by less than 2^-9 for each
        near "$name: gradient norm" "$(field b norm 5)" "$(field a norm 5)" 1e-2
        args="$args --precision fp8 --deterministic"
        gpu a $args && gpu b $args --recompute layer && gpu c $args --fp8-weight-cache on
        same "$name: FP8, layers computed again" a b
        same "$name: FP8, weights kept" a c
    done
done

# The same 256 sequences as one batch, and as 256 micro-steps: in fp32, which auto takes here, and in bf16. An fp32 sum differs from the large batch's gradient by
# the roundings of 256 gradients to bf16, and FP8's by other scales. What bf16 sums add is noise of 1.8e-6 to 2.7e-6 of the square a micro-step
# (llmc/reference/gradient_sum.h): 0.03% of the norm, and a few times that by chance, since few elements make most of it. Rounded to nearest they lost 0.3% and more.
for case in "bf16 auto 1e-3" "bf16 bf16 4e-3" "fp8 auto 1e-2"; do
    read -r precision dtype limit <<<"$case"
    run="small $data --sequence-length 64 --num-steps 1 --precision $precision --deterministic"
    gpu a $run --batch-size 256 && gpu b $run --batch-size 1 --grad-accumulation-steps 256 --grad-accum-dtype $dtype && gpu c $run --batch-size 1 --grad-accumulation-steps 256 --grad-accum-dtype $dtype
    near "$precision, 256 micro-steps added up in $dtype: norm" "$(field b norm 1)" "$(field a norm 1)" $limit
    same "$precision, 256 micro-steps added up in $dtype: two runs" b c
done
cpu a small $data --sequence-length 64 --num-steps 2 --grad-accumulation-steps 5 --grad-accum-dtype fp32 && gpu b small $data --sequence-length 64 --num-steps 2 --grad-accumulation-steps 5 --grad-accum-dtype fp32
near "fp32 sums as the CPU's: norm" "$(field b norm 2)" "$(field a norm 2)" 1e-2

# sums with fewer bits in all products: other losses, near by
run="$common --precision fp8 --num-steps 12"
gpu a $run && gpu b $run --fp8-fast-accum all && near "--fp8-fast-accum all, last loss" "$(field b loss 12)" "$(field a loss 12)" 1e-2

# Validation, and a sample longer than the sequences, by a model that has learned a little: its first words are those of the CPU's, as its choices are few;
# later ones may differ, where a draw falls between two roundings.
gpu a small $data --sequence-length 64 --batch-size 16 --num-steps 300 --learning-rate 1e-3 --export-hf "$tmp/told"
run="$tmp/told --train-data $tmp/synth_train.bin --val-data $tmp/synth_val.bin --val-every 1 --val-steps 7 --sequence-length 16 --batch-size 2 --num-steps 2 --learning-rate 0 --sample-every 2 --sample-tokens 40"
story() { sed -n 's/^sample after step 2: //p' "$tmp/$1.log"; }
cpu a $run && gpu b $run && near "validation loss" "$(validation b)" "$(validation a)" 1e-3
check "two validations" equal "$(grep -c '^validation after step' "$tmp/b.log")" 2
check "the CPU's story: $(story a)" equal "$(story b | cut -c1-16)" "$(story a | cut -c1-16)"
check "a story longer than the sequences: $(story b)" [ "$(story b | wc -c)" -gt 30 ]

# The table of a step's operations: products and what moves memory, with shares of their limits.
gpu a $common --precision fp8 --num-steps 3 --profile
check "--profile: $(grep -A 3 '^profile of' "$tmp/a.log")" grep -qE '^  AdamW +1 .* GB/s +[0-9.]+%$' "$tmp/a.log"
check "--profile has products" grep -qE '^  [a-z].* TFLOP/s +[0-9.]+%$' "$tmp/a.log"

# An export is the checkpoint's model. With weights of 3.4e38 in it, whose products overflow, nothing of a step may be saved, and the tensor that holds them is
# named, in whichever block it is.
gpu a $common --precision bf16 --num-steps 2 --checkpoint-dir "$tmp/whole" --export-hf "$tmp/export"
for file in config.json model.safetensors; do check "exported $file" cmp "$tmp/export/$file" "$tmp/whole/step-00000002/$file"; done
rm -rf "$tmp/damaged" && cp -r "$tmp/export" "$tmp/damaged" && spoil "$tmp/damaged" model.norm.weight
refused "damaged/model.safetensors is damaged: its XXH64 hash is" ./train_fp8cu "$tmp/damaged" $data --sequence-length 256 --num-steps 20
rm "$tmp/export/train_fp8.json"  # the hashes, with which these weights would be refused as damaged
while IFS='|' read -r tensor place; do
    rm -rf "$tmp/spoiled-model" && cp -r "$tmp/export" "$tmp/spoiled-model" && spoil "$tmp/spoiled-model" "$tensor"
    for precision in bf16 fp8 "fp8 --fp8-recipe rowwise --recompute layer"; do
        fails "step 1: the gradient norm is not finite. It begins in $place, in the forward pass; the largest weight there is 3.38953e+38, in $tensor, element 0. The loss is .* Nothing of this step is saved" \
            ./train_fp8cu "$tmp/spoiled-model" $data --sequence-length 256 --num-steps 20 --precision $precision
    done
done <<'END'
model.layers.0.self_attn.q_proj.weight|the attention block of layer 0
model.layers.2.self_attn.v_proj.weight|the attention block of layer 2
model.layers.1.post_attention_layernorm.weight|the MLP of layer 1
model.layers.3.mlp.up_proj.weight|the MLP of layer 3
model.norm.weight|the final norm or lm_head
END
spoil "$tmp/export" model.layers.0.self_attn.q_proj.weight
fails "step 1: the gradient norm is not finite" ./train_fp8cu "$tmp/export" $data --sequence-length 256 --num-steps 1 --checkpoint-dir "$tmp/spoiled" --checkpoint-every 1 --export-hf "$tmp/spoiled-export"
check "nothing of that step is saved" equal "$(find "$tmp/spoiled" "$tmp/spoiled-export" -type f 2>/dev/null)" ""
fails "10 steps in a row had a gradient norm that is not finite" ./train_fp8cu "$tmp/export" $data --sequence-length 256 --num-steps 20 --on-nonfinite skip
check "skipped steps say so" equal "$(grep -c '^warning: step [0-9]* skipped: the gradient norm is not finite. It begins in the attention block of layer 0' "$tmp/refused.log")" 9

# With delayed scaling a skipped step leaves no trace in histories and scales: where all steps are skipped, and where a learning rate that is far too high lets
# some pass. Steps that stay are the same whether or not skipping is allowed.
fails "10 steps in a row had a gradient norm that is not finite" ./train_fp8cu "$tmp/export" $data --sequence-length 256 --num-steps 20 --precision fp8 --fp8-recipe delayed --on-nonfinite skip \
    --grad-accumulation-steps 2 --checkpoint-dir "$tmp/ck_skipped" --checkpoint-every 1 --keep-checkpoints 1000
skips_leave_no_trace "all steps skipped" "$tmp/refused.log" "$tmp/ck_skipped"
./train_fp8cu $common --precision fp8 --fp8-recipe delayed --learning-rate 1000 --num-steps 60 --on-nonfinite skip --val-data "$tmp/synth_val.bin" --val-every 3 --checkpoint-dir "$tmp/ck_some" --checkpoint-every 1 \
    --keep-checkpoints 1000 >"$tmp/some.log" 2>&1
skips_leave_no_trace "a learning rate of 1000" "$tmp/some.log" "$tmp/ck_some"
run="$common --precision fp8 --fp8-recipe delayed --fp8-amax-history 4 --num-steps 8 --grad-clip 1 --grad-accumulation-steps 2"
gpu a $run && gpu b $run --on-nonfinite skip && same "delayed, with --on-nonfinite skip" a b

# A learning rate that is far too high: no moment that is saved is infinite.
for mode in stop skip; do
    ./train_fp8cu $common --precision bf16 --learning-rate 1000 --num-steps 60 --on-nonfinite $mode --checkpoint-dir "$tmp/ck_high_$mode" --checkpoint-every 1 --keep-checkpoints 1000 >"$tmp/high.log" 2>&1
    check "a learning rate of 1000, $mode: says why it ends: $(grep '^error' "$tmp/high.log")" grep -q '^error: step .* gradient norm' "$tmp/high.log"
    saved=0 infinite=0
    for folder in "$tmp/ck_high_$mode"/step-????????; do saved=$((saved + 1)); infinite=$((infinite + $(infinities "$folder"))); done
    check "a learning rate of 1000, $mode: checkpoints are saved" [ $saved -ge 1 ]
    check "a learning rate of 1000, $mode: infinite moments in $saved checkpoints" equal $infinite 0
    rm -rf "$tmp/ck_high_$mode"
done

# memory plans of runs that no machine here could hold
for plan in "llama3.1-70b --world-size 64" "llama3.1-405b --world-size 512 --recompute layer"; do
    if CUDA_VISIBLE_DEVICES= ./train_fp8cu $plan --precision fp8 --sequence-length 8192 --dry-run >"$tmp/plan.log" 2>&1 && grep -q '^  total ' "$tmp/plan.log"; then ok "plan of $plan: $(grep '^  total ' "$tmp/plan.log") MiB"; else bad "plan of $plan: $(tail -n 2 "$tmp/plan.log")"; fi
done

# a signal: finish the step, save once, exit 0; the run continues from there
for signal in TERM INT USR1; do
    (trap - INT; exec ./train_fp8cu $common --num-steps 100000 --checkpoint-dir "$tmp/sig_$signal") >"$tmp/s.log" 2>&1 &
    pid=$!
    for _ in $(seq 200); do grep -q '^step ' "$tmp/s.log" && break; sleep 0.1; done
    kill -$signal $pid
    wait $pid
    status=$?
    saved=$(ls "$tmp/sig_$signal" 2>/dev/null | wc -l)
    if [ $status -eq 0 ] && [ "$saved" -eq 1 ]; then ok "SIG$signal: saved $(ls "$tmp/sig_$signal"), status 0"; else bad "SIG$signal: status $status, $saved checkpoints: $(tail -n 2 "$tmp/s.log")"; fi
done

# bad input: a message and a non-zero status, before any work
refused "GiB of GPU memory" ./train_fp8cu llama3.1-70b --train-data "$tmp/synth_train.bin" --sequence-length 4096
refused "every rank needs its own GPU" mpirun --allow-run-as-root --oversubscribe -np $(($(nvidia-smi -L | grep -c '^GPU') + 1)) ./train_fp8cu small $data
refused "does not divide" ./train_fp8cu small $data --dry-run --world-size 6 --sharding hybrid --shard-size 4
refused "fp32 is the CPU trainer" ./train_fp8cu small $data --precision fp32
refused "have GEMMs for --fp8-recipe mxfp8" ./train_fp8cu small $data --precision fp8 --fp8-recipe mxfp8
refused "is outside" ./train_fp8cu small $data --sequence-length 0
refused "no token shard" ./train_fp8cu small --train-data "$tmp/none.bin"

finish
