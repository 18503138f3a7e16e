#!/usr/bin/env bash
# Tests whole runs of train_fp8cu on one GPU: compared with the CPU trainer and with runs of other options, repeated,
# resumed, interrupted, with weights that overflow, and refused. Needs ./train_fp8, ./train_fp8cu, build/sums_fp8,
# build/sums_fp8cu, build/synth_stories, build/compare_checkpoints, nvidia-smi, mpirun and python3. Ends with
# "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
. dev/test/lib/gpu_lines.sh

build/synth_stories --out "$tmp/synth" --bytes 300000 --seed 3 >/dev/null || bad "synth_stories"
data="--train-data $tmp/synth_train.bin --shuffle off"

# fails: the run must end with an error. refused: it must do so before the first step. $1 regular expression that the
# error must match, then the command. The command's output is in $tmp/refused.log.
fails() {
    local expected=$1 status
    shift
    "$@" >"$tmp/refused.log" 2>&1
    status=$?
    if [ $status -ne 0 ] && [ $status -lt 128 ] && grep -q -- "^error: .*$expected" "$tmp/refused.log"; then
        ok "$(grep -a -m1 '^error' "$tmp/refused.log" | cut -c1-150)"
    else
        bad "expected \"$expected\": $(tail -n 2 "$tmp/refused.log")"
    fi
}
refused() { fails "$@" && check "a refused run ends before step 1" no_step "$tmp/refused.log"; }

# Compares one step with the CPU trainer. Both start from equal weights and round at equal places. They differ in the
# order of sums, which changes some bf16 roundings (by about 2^-8), and with FP8 some FP8 roundings (2^-4 and 2^-3). To
# measure that effect alone, the CPU trainer was compiled with -Ofast, which reorders its sums: the worst gradient of
# this step was off by 5.2e-3 with bf16 and 6.4e-2 with fp8 (q and k projections, whose gradients are differences of
# nearly equal terms). The bounds of gradients are 1.5 to 2 times that. $1 name, $2 options, $3 largest relative error
# of the loss, $4 of a tensor's gradient (norm of the difference over the norm).
against_cpu() {
    local args="small $data $2 --sequence-length 256 --batch-size 2 --num-steps 1 --optimizer-state fp32"
    rm -rf "$tmp/cpu" "$tmp/gpu"
    cpu cpu $args --checkpoint-dir "$tmp/cpu" && gpu gpu $args --checkpoint-dir "$tmp/gpu" || return
    near "$1: first loss on GPU and CPU" "$(field gpu loss 1)" "$(field cpu loss 1)" "$3"
    check "$1: gradients on GPU and CPU" \
        build/compare_checkpoints "$tmp/gpu/step-00000001" "$tmp/cpu/step-00000001" "$4"
}
against_cpu bf16 "--precision bf16" 1e-4 1e-2
mapfile -t recipes < <(./train_fp8cu --list recipes | sed 's/^mxfp8$/& --fp8-emulate/') # Hopper has no GEMMs for mxfp8
for recipe in "${recipes[@]}"; do
    against_cpu "$recipe" "--precision fp8 --fp8-recipe $recipe" 1e-3 1e-1
done
for recipe in tensorwise rowwise; do
    against_cpu "$recipe, emulated" "--precision fp8 --fp8-recipe $recipe --fp8-emulate" 1e-3 1e-1
done
against_cpu "bf16, weights rounded to nearest" "--precision bf16 --master-weights bf16-nearest" 1e-4 1e-2
against_cpu "tensorwise, all e4m3" "--precision fp8 --fp8-format e4m3" 1e-3 1e-1
against_cpu "blockwise, hybrid" "--precision fp8 --fp8-recipe blockwise --fp8-format hybrid" 1e-3 1e-1
against_cpu "tensorwise, FP8 from FP16 masters" "--precision fp8 --master-weights fp16-stochastic" 1e-3 1e-1
against_cpu "tensorwise, filtered" "--precision fp8 --fp8-filter first,down" 1e-3 1e-1
against_cpu "bf16, documents" "--precision bf16 --document-mask on" 1e-4 1e-2
against_cpu "tensorwise, documents" "--precision fp8 --document-mask on" 1e-3 1e-1
python3 dev/test/lib/mask_shard.py "$tmp/synth_train.bin" "$tmp/masked.bin"
against_cpu "bf16, loss mask" "--precision bf16 --train-data $tmp/masked.bin" 1e-4 1e-2
against_cpu "tensorwise, loss mask, documents" \
    "--precision fp8 --train-data $tmp/masked.bin --document-mask 256 --grad-accumulation-steps 2" 1e-3 1e-1

# Results do not depend on when kernels are loaded. With CUDA_MODULE_LOADING=EAGER all are loaded at start-up, and
# loading does not delay a launch. Clearing the memory of this model takes milliseconds, longer than the host needs to
# enqueue the next operation. An operation that does not wait until the memory is cleared could change the result.
run="llama3.2-1b $data --precision bf16 --sequence-length 64 --num-steps 2 --deterministic"
if ! ./train_fp8cu $run >"$tmp/a.log" 2>&1 && grep -q "GiB are free" "$tmp/a.log"; then
    echo "skipped: llama3.2-1b needs more memory than is free on this GPU"
else
    CUDA_MODULE_LOADING=EAGER gpu b $run
    same "kernels loaded at start-up, and at first use" a b
fi

common="small $data --sequence-length 256 --batch-size 2 --deterministic --learning-rate 1e-3"
for precision in bf16 "fp8 --fp8-recipe delayed --fp8-amax-history 4" "${recipes[@]/#/fp8 --fp8-recipe }"; do
    run="$common --precision $precision --num-steps 12"
    rm -rf "$tmp/ck"
    gpu a $run && gpu b $run
    same "$precision: two runs" a b

    # This run ends after 5 of 12 steps, and is then resumed.
    ck="--checkpoint-dir $tmp/ck"
    gpu c $common --precision $precision --num-steps 5 $ck && gpu d $run $ck --resume
    same "$precision: an unbroken and a resumed run" a d 7

    # Two micro-steps of one sequence have the tokens of one micro-step of two sequences. Their gradients are rounded to
    # bf16 once more.
    gpu e $common --precision $precision --num-steps 12 --batch-size 1 --grad-accumulation-steps 2
    near "$precision: last loss with two micro-steps a step and with one" "$(field e loss 12)" "$(field a loss 12)" 1e-2
done

gpu a $common --document-mask on --num-steps 8 && gpu b $common --document-mask on --num-steps 8 --recompute layer
same "documents: without and with --recompute layer" a b

# Without --grad-clip, --optimizer-in-backward changes no bit. A run that began with the option may be resumed without
# it.
for options in "bf16" "fp8" "fp8 --fp8-recipe delayed" "fp8 --optimizer-state coat" \
    "fp8 --fast" \
    "fp8 --fp8-recipe rowwise --recompute layer --optimizer-state coat-stochastic" \
    "bf16 --optimizer-state fp32 --master-weights fp32" "fp8 --optimizer-state msamp" \
    "bf16 --optimizer-state msamp --master-weights fp32" \
    "fp8 --optimizer-state msamp --master-weights fp16-stochastic" \
    "fp8 --fp8-recipe delayed --optimizer-state msamp --master-weights fp16" \
    "fp8 --fp8-recipe rowwise --optimizer-state fp32 --master-weights fp16" \
    "fp8 --optimizer-state fp32 --master-weights fp16"; do
    run="$common --precision $options"
    rm -rf "$tmp/ck"
    gpu a $run --num-steps 8 && gpu b $run --num-steps 8 --optimizer-in-backward
    same "$options: without and with --optimizer-in-backward" a b
    gpu c $run --num-steps 5 --optimizer-in-backward --checkpoint-dir "$tmp/ck" &&
        gpu d $run --num-steps 8 --checkpoint-dir "$tmp/ck" --resume
    same "$options: resumed without --optimizer-in-backward" a d 3
done
# FP8 weights that are cast from FP16 masters: casts for each pass and casts of recomputed layers are equal. Weights of
# an export, which are loaded without scales, give nearly the CPU's loss. A resume from a checkpoint, whose scales are
# loaded, exports the weights that the first run exported.
run="$common --precision fp8 --optimizer-state msamp --master-weights fp16-stochastic --num-steps 6"
rm -rf "$tmp/ck"
gpu a $run --checkpoint-dir "$tmp/ck" --export-hf "$tmp/masters" && gpu c $run --recompute layer
same "FP8 from FP16 masters: without and with --recompute layer" a c
masters="${common#small } --precision fp8 --optimizer-state msamp --master-weights fp16-stochastic"
gpu d "$tmp/masters" $masters --num-steps 1 && cpu e "$tmp/masters" $masters --num-steps 1
near "FP8 from FP16 masters: first loss from exported weights on GPU and CPU" \
    "$(field d loss 1)" "$(field e loss 1)" 1e-3
gpu f $run --checkpoint-dir "$tmp/ck" --resume --export-hf "$tmp/again"
check "FP8 from FP16 masters: a resume exports the weights of the run that saved" \
    cmp "$tmp/masters/model.safetensors" "$tmp/again/model.safetensors"
# --grad-clip with --optimizer-in-backward: a clip value above all norms changes no bit, a low one gives nearly the loss
# and norm of the CPU trainer, and a resumed run has the bits of an unbroken one.
for options in "bf16" "fp8" "fp8 --fp8-recipe delayed --optimizer-state coat-stochastic" \
    "fp8 --optimizer-state msamp --master-weights fp16-stochastic" \
    "bf16 --optimizer-state fp32 --master-weights fp32"; do
    run="$common --precision $options --optimizer-in-backward"
    rm -rf "$tmp/ck"
    gpu a $run --num-steps 8 && gpu b $run --num-steps 8 --grad-clip 1000000
    same "$options: in backward, without and with a --grad-clip above all norms" a b
    gpu c $run --num-steps 8 --grad-clip 0.2 && cpu d ${run/--deterministic/} --num-steps 8 --grad-clip 0.2
    clipped="$options: in backward with --grad-clip 0.2"
    near "$clipped: last loss on GPU and CPU" "$(field c loss 8)" "$(field d loss 8)" 2e-3
    near "$clipped: last norm on GPU and CPU" "$(field c norm 8)" "$(field d norm 8)" 2e-2
    gpu a $run --num-steps 5 --grad-clip 0.2 --checkpoint-dir "$tmp/ck" &&
        gpu b $run --num-steps 8 --grad-clip 0.2 --checkpoint-dir "$tmp/ck" --resume
    same "$clipped: an unbroken and a resumed run" c b 3
done
# --offload moments and --offload master change no bit, whether an array moves in one part or in many. A resumed run may
# drop the option or set it again.
for case in "small|moments|bf16" "small|moments|fp8 --optimizer-state coat-stochastic --optimizer-in-backward" \
    "llama3.2-1b|moments|fp8 --optimizer-state coat-stochastic --optimizer-in-backward --grad-clip 0.2" \
    "small|master|bf16 --master-weights fp32" \
    "small|moments,master|fp8 --master-weights fp32 --optimizer-state fp32 --optimizer-in-backward" \
    "llama3.2-1b|master|fp8 --master-weights fp32 --optimizer-state coat --optimizer-in-backward" \
    "llama3.2-1b|moments,master|bf16 --master-weights fp32 --optimizer-in-backward --grad-clip 1" \
    "llama3.2-1b|moments,master|bf16 --optimizer-state fp32 --master-weights fp32 --grad-accumulation-steps 2"; do
    IFS='|' read -r model offload options <<<"$case"
    run="$model ${common#small } --precision $options"
    rm -rf "$tmp/ck"
    gpu a $run --num-steps 5 && gpu b $run --num-steps 5 --offload $offload
    same "$model, $options: without and with --offload $offload" a b
    [ "$model" = small ] || continue
    gpu c $run --num-steps 2 --offload $offload --checkpoint-dir "$tmp/ck" &&
        gpu d $run --num-steps 3 --checkpoint-dir "$tmp/ck" --resume &&
        gpu c $run --num-steps 5 --checkpoint-dir "$tmp/ck" --resume --offload $offload
    same "$options: resumed without --offload $offload, then with it" a c 2
done
refused "this run has none: add --master-weights fp32" ./train_fp8cu small $data --offload master
# --offload activations changes no bit. Validation comes after every second step. The activations of 6 of the 9 layers
# leave the GPU.
mkdir "$tmp/deep"
cat >"$tmp/deep/config.json" <<END
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 256,
 "intermediate_size": 768, "num_hidden_layers": 9, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
 "tie_word_embeddings": true}
END
for options in "bf16" "fp8" "fp8 --fp8-activations on" "bf16 --recompute attention" "fp8 --recompute layer" \
    "bf16 --grad-accumulation-steps 2" "fp8 --optimizer-in-backward" "fp8 --fp8-recipe mxfp8 --fp8-emulate" \
    "fp8 --fp8-filter first,down --grad-accumulation-steps 2 --grad-accum-dtype fp8" \
    "fp8 --optimizer-state coat-stochastic --optimizer-in-backward|moments," \
    "bf16 --master-weights fp32 --optimizer-in-backward|moments,master,"; do
    IFS='|' read -r options others <<<"$options"
    run="$tmp/deep ${common#small } --precision $options --val-data $tmp/synth_val.bin --val-every 2 --val-steps 2"
    gpu a $run --num-steps 5 && gpu b $run --num-steps 5 --offload ${others}activations
    same "$options: without and with --offload ${others}activations" a b
done
# Compares runs with --optimizer-in-backward on the GPU with runs without this option on the CPU.
for options in "--optimizer-state coat" "--optimizer-state msamp" "--optimizer-state msamp --master-weights fp16" \
    "--optimizer-state fp32 --master-weights fp16" "--precision fp8 --fp8-activations on" \
    "--precision fp8 --optimizer-state msamp --master-weights fp16"; do
    run="small $data --sequence-length 256 --batch-size 2 --learning-rate 1e-3 --num-steps 8 $options"
    cpu a $run && gpu b $run --optimizer-in-backward
    near "$options: last loss on GPU with --optimizer-in-backward and on CPU without" \
        "$(field b loss 8)" "$(field a loss 8)" 1e-3
done

# Recomputing changes no bit, because recomputed activations are cast to equal bytes. If --fp8-filter excludes every
# linear layer, FP8 equals BF16.
for recipe in "${recipes[@]}"; do
    run="$common --precision fp8 --fp8-recipe $recipe --num-steps 6"
    gpu a $run
    for part in norm attention mlp layer; do
        gpu b $run --recompute $part
        same "$recipe: without and with --recompute $part" a b
    done
    # Activations in FP8 do not change the first loss. Recomputing attention as well changes nothing more.
    gpu b $run --fp8-activations on && gpu c $run --fp8-activations on --recompute attention
    same "$recipe, --fp8-activations on: without and with --recompute attention" b c
    near "$recipe: first loss without and with --fp8-activations on" "$(field a loss 1)" "$(field b loss 1)" 0
    near "$recipe: last loss without and with --fp8-activations on" "$(field a loss 6)" "$(field b loss 6)" 1e-2
    gpu c $run --recompute layer --fp8-filter first && gpu d $run --fp8-filter first
    same "$recipe, --fp8-filter first: without and with --recompute layer" d c
done
gpu a $common --precision bf16 --num-steps 6 && gpu b $common --precision fp8 --fp8-filter attention,mlp --num-steps 6
same "FP8 with every linear layer filtered, and BF16" a b
gpu a ${common/--deterministic/} --precision fp8 --fp8-filter auto --fp8-audit 2 --log-dir "$tmp/audit" --num-steps 4
if [ $? -eq 0 ] && { grep -q '"type": "fp8_audit"' "$tmp/audit/log.jsonl" ||
    grep -q '"fp8_gemms": 0,' "$tmp/audit/log.jsonl"; }; then
    ok "--fp8-filter auto: log.jsonl has an audit, or no GEMM runs in FP8"
else
    bad "filter auto and audit: $(tail -n 3 "$tmp/a.log")"
fi

# A second start takes the GEMM algorithms that the first one has timed; with --deterministic it does not.
run="small $data --sequence-length 256 --batch-size 2 --precision fp8 --num-steps 1"
export XDG_CACHE_HOME=$tmp/cache
gpu a $run && gpu b $run && gpu c $run --deterministic
export XDG_CACHE_HOME=/dev/null
known='^cuBLASLt  ([0-9]+) of \1 algorithms are those of earlier starts, in '
check "GEMM algorithms of an earlier start" \
    equal "$(for log in a b c; do grep -Ec "$known" "$tmp/$log.log"; done | xargs)" "0 1 0"

# log.jsonl says where time and energy went. If nvidia-smi can read the power, NVML must read the energy, here in 4 s.
energy=$(nvidia-smi --query-gpu=power.draw --format=csv,noheader,nounits 2>/dev/null | grep -q '^[0-9]' &&
    echo --energy)
if gpu a $common --precision fp8 --num-steps 1200 --val-data "$tmp/synth_val.bin" --val-steps 5 --val-every 600 \
    --log-dir "$tmp/times" &&
    problem=$(python3 dev/test/lib/check_log.py "$tmp/times/log.jsonl" 1 $energy 2>&1); then
    ok "log.jsonl has times, energy where it can be read, and losses of validation sequences"
else
    bad "times, energy and losses of validation sequences: $problem"
fi

# Models whose buffers share memory in different ways. Layer gradients reuse memory of activations. Norm weights of 80
# values leave gaps between vectors, and a model of one layer has no other layers' activations. An untied embedding's
# gradient has room for the activations of a layer, and for the logits of 64 tokens, but not for those of 512. Two
# vocabularies are no multiples of 8, as GEMMs need.
mkdir "$tmp/odd"
for shape in "1 321 true" "5 320 true" "1 16384 false" "5 16391 false"; do
    read -r layers vocabulary tied <<<"$shape"
    cat >"$tmp/odd/config.json" <<END
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": $vocabulary, "hidden_size": 80,
 "intermediate_size": 208, "num_hidden_layers": $layers, "num_attention_heads": 2, "num_key_value_heads": 1,
 "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
 "tie_word_embeddings": $tied, "hidden_act": "silu"}
END
    for T in 64 512; do
        name="$layers layers of 80, vocabulary $vocabulary, T $T"
        args="$tmp/odd $data --sequence-length $T --num-steps 5 --learning-rate 1e-3 --optimizer-state fp32"
        args="$args --master-weights fp32"
        cpu a $args && gpu b $args --deterministic
        # bf16 roundings differ from the CPU's. In each of the five steps that moves the norm by less than 2^-9.
        near "$name: gradient norm on GPU and CPU" "$(field b norm 5)" "$(field a norm 5)" 1e-2
        args="$args --precision fp8 --deterministic"
        gpu a $args && gpu b $args --recompute layer
        same "$name, FP8: without and with --recompute layer" a b
        gpu b $args --recompute attention && gpu d $args --recompute mlp
        same "$name, FP8: without and with --recompute attention" a b
        same "$name, FP8: without and with --recompute mlp" a d
    done
done

# Runs 256 sequences as one batch and as 256 micro-steps, with fp32 gradient sums (which auto chooses here) and bf16
# sums. An fp32 sum differs from the large batch's gradient by the bf16 roundings of 256 gradients, with FP8 also by
# other scales. bf16 sums add noise: each micro-step 1.8e-6 to 2.7e-6 of the squared norm
# (llmc/reference/gradient_sum.h), in all 0.03% of the norm. By chance it may be a few times more, since few elements
# make up most of the norm. Rounding to nearest instead lost 0.3% of the norm and more. FP8 sums may make the norm 8.6%
# too large (llmc/reference/gradient_fp8.h); rounding to nearest lost a third of it.
for case in "bf16 auto 1e-3" "bf16 bf16 4e-3" "fp8 auto 1e-2" "bf16 fp8 9e-2"; do
    read -r precision dtype limit <<<"$case"
    run="small $data --sequence-length 64 --num-steps 1 --precision $precision --deterministic"
    gpu a $run --batch-size 256 && gpu b $run --batch-size 1 --grad-accumulation-steps 256 --grad-accum-dtype $dtype &&
        gpu c $run --batch-size 1 --grad-accumulation-steps 256 --grad-accum-dtype $dtype
    near "$precision, sums in $dtype: gradient norm of 256 micro-steps and of one" \
        "$(field b norm 1)" "$(field a norm 1)" $limit
    same "$precision, 256 micro-steps, sums in $dtype: two runs" b c
done
# FP8 sums beside fp32 sums of the same gradients: the mean slope over rounding seeds is one, and the norm is what noise
# of their rms error makes of it. Few elements make up most of the gradient of `tiny`, so that one seed's slope varies
# with a standard deviation of 0.4%. $1 trainer, $2 model, $3 number of seeds.
fp8_sums() {
    local seed
    for seed in $(seq "$3"); do
        trains "sums_$seed" "$1" "$2" $data --sequence-length 64 --batch-size 1 --grad-accumulation-steps 257 \
            --num-steps 1 --precision bf16 --grad-accum-dtype fp8 --rounding-seed "$seed"
        grep '^FP8 sums of' "$tmp/sums_$seed.log"
    done | tr -d , | awk -v seeds="$3" '{ runs[$4]++; slope[$4] += $7; square[$4] += $10 * $10; norm[$4] += $12 }
        END {
            for (n in runs)
                if (runs[n] == seeds) print n, slope[n] / seeds, sqrt(square[n] / seeds), norm[n] / seeds
        }' \
        >"$tmp/sums.txt"
    check "$1 $2: each of $3 runs has FP8 sums of 3 numbers of micro-steps" equal "$(grep -c . "$tmp/sums.txt")" 3
    while read -r n slope error norm; do
        near "$1 $2: slope of FP8 sums of $n micro-steps (rms error $error)" "$slope" 1 5e-3
        near "$1 $2: norm of FP8 sums of $n micro-steps" "$norm" "$(awk "BEGIN { print sqrt(1 + $error ^ 2) }")" 1e-2
        check "$1 $2: $error is at most the rms error of gradient_fp8.h for $n micro-steps" \
            awk "BEGIN { exit !($error < 1.05 * sqrt(7e-4 * $n)) }"
    done <"$tmp/sums.txt"
}
fp8_sums build/sums_fp8 tiny 8
fp8_sums build/sums_fp8cu tiny 8
fp8_sums build/sums_fp8cu llama3.2-1b 1
# FP8 gradients: two runs have equal bits, and so has a resumed one. The norms are close to those with bf16 gradients,
# and losses and norms to those of the CPU, whose GEMMs sum in another order: that moves some gradients to other codes.
for options in "bf16" "fp8 --optimizer-state msamp --master-weights fp16" "bf16 --grad-clip 0.5 --master-weights fp32" \
    "fp8 --optimizer-state coat-stochastic --grad-accumulation-steps 3" \
    "bf16 --optimizer-state fp32 --grad-accumulation-steps 2"; do
    run="$common --num-steps 8 --precision $options"
    rm -rf "$tmp/ck"
    gpu a $run --grad-accum-dtype fp8 && gpu b $run --grad-accum-dtype fp8 && gpu c $run &&
        cpu d $run --grad-accum-dtype fp8
    same "FP8 gradients, $options: two runs" a b
    near "FP8 gradients, $options: first norm with FP8 and bf16 gradients" "$(field a norm 1)" "$(field c norm 1)" 1e-2
    near "FP8 gradients, $options: last loss with FP8 and bf16 gradients" "$(field a loss 8)" "$(field c loss 8)" 1e-2
    near "FP8 gradients, $options: first norm on GPU and CPU" "$(field a norm 1)" "$(field d norm 1)" 1e-2
    near "FP8 gradients, $options: last loss on GPU and CPU" "$(field a loss 8)" "$(field d loss 8)" 1e-2
    gpu c $run --num-steps 5 --grad-accum-dtype fp8 --checkpoint-dir "$tmp/ck" &&
        gpu d $run --grad-accum-dtype fp8 --checkpoint-dir "$tmp/ck" --resume
    same "FP8 gradients, $options: an unbroken and a resumed run" a d 3
done
cpu a small $data --sequence-length 64 --num-steps 2 --grad-accumulation-steps 5 --grad-accum-dtype fp32 &&
    gpu b small $data --sequence-length 64 --num-steps 2 --grad-accumulation-steps 5 --grad-accum-dtype fp32
near "gradient norm with fp32 sums on GPU and CPU" "$(field b norm 2)" "$(field a norm 2)" 1e-2

# With fast_accum in all GEMMs the last loss changes by 1% at most.
run="$common --precision fp8 --num-steps 12"
gpu a $run && gpu b $run --fp8-fast-accum all &&
    near "last loss with and without --fp8-fast-accum all" "$(field b loss 12)" "$(field a loss 12)" 1e-2

# Validation, and a sample of 40 tokens with training sequences of 16, with a model that has learned a little. The
# sample's first 16 characters equal those of the CPU, because few tokens are likely. Later words may differ where GPU
# and CPU round a probability differently and the random draw falls between these two values.
gpu a small $data --sequence-length 64 --batch-size 16 --num-steps 300 --learning-rate 1e-3 --export-hf "$tmp/told"
run="$tmp/told --train-data $tmp/synth_train.bin --val-data $tmp/synth_val.bin --val-every 1 --val-steps 7"
run="$run --sequence-length 16 --batch-size 2 --num-steps 2 --learning-rate 0 --sample-every 2 --max-tokens 40"
story() { sed -n 's/^sample after step 2: //p' "$tmp/$1.log"; }
cpu a $run && gpu b $run && near "validation loss on GPU and CPU" "$(validation b)" "$(validation a)" 1e-3
check "--val-every 1 validates after each of 2 steps" equal "$(grep -c '^validation after step' "$tmp/b.log")" 2
check "the GPU's story begins like the CPU's: $(story a)" equal "$(story b | cut -c1-16)" "$(story a | cut -c1-16)"
check "a story of 40 tokens has more than 30 bytes: $(story b)" [ "$(story b | wc -c)" -gt 30 ]

# --profile prints a table of the operations of the last step: GEMMs in TFLOP/s, AdamW and other kernels that memory
# limits in GB/s, and the percentage of their limits. AdamW is called twice: for the root (embedding, final norm,
# lm_head) and for all layers.
gpu a $common --precision fp8 --num-steps 3 --profile
check "--profile has AdamW in GB/s: $(grep -A 3 '^profile of' "$tmp/a.log")" \
    grep -qE '^  AdamW +2 .* GB/s +[0-9.]+%$' "$tmp/a.log"
check "--profile has GEMMs in TFLOP/s" grep -qE '^  [a-z].* TFLOP/s +[0-9.]+%$' "$tmp/a.log"

# An export equals the model of the checkpoint. If some weights of a model are 3.4e38, GEMMs overflow: then nothing of
# the step may be saved, and the error names the tensor, whichever block it is in.
gpu a $common --precision bf16 --num-steps 2 --checkpoint-dir "$tmp/whole" --export-hf "$tmp/export"
for file in config.json model.safetensors; do
    check "the export and the checkpoint have equal $file" cmp "$tmp/export/$file" "$tmp/whole/step-00000002/$file"
done
rm -rf "$tmp/damaged" && cp -r "$tmp/export" "$tmp/damaged" && spoil "$tmp/damaged" model.norm.weight
refused "damaged/model.safetensors is damaged: its XXH64 hash is" ./train_fp8cu "$tmp/damaged" $data \
    --sequence-length 256 --num-steps 20
rm "$tmp/export/train_fp8.json"  # the hashes, by which these weights would be refused as damaged
while IFS='|' read -r tensor place; do
    rm -rf "$tmp/spoiled-model" && cp -r "$tmp/export" "$tmp/spoiled-model" && spoil "$tmp/spoiled-model" "$tensor"
    for precision in bf16 fp8 "fp8 --fp8-recipe rowwise --recompute layer"; do
        message="step 1: the gradient norm is not finite. The problem begins in $place, in the forward pass;"
        message="$message the largest weight there is 3.38953e+38, in $tensor, element 0. The loss is .* Nothing of"
        message="$message this step is saved"
        fails "$message" ./train_fp8cu "$tmp/spoiled-model" $data --sequence-length 256 --num-steps 20 \
            --precision $precision
    done
done <<'END'
model.layers.0.self_attn.q_proj.weight|the attention block of layer 0
model.layers.2.self_attn.v_proj.weight|the attention block of layer 2
model.layers.1.post_attention_layernorm.weight|the MLP of layer 1
model.layers.3.mlp.up_proj.weight|the MLP of layer 3
model.norm.weight|the final norm or lm_head
END
spoil "$tmp/export" model.layers.0.self_attn.q_proj.weight
fails "step 1: the gradient norm is not finite" ./train_fp8cu "$tmp/export" $data --sequence-length 256 --num-steps 1 \
    --checkpoint-dir "$tmp/spoiled" --checkpoint-every 1 --export-hf "$tmp/spoiled-export"
check "no file of the step with a gradient that is not finite is saved" \
    equal "$(find "$tmp/spoiled" "$tmp/spoiled-export" -type f 2>/dev/null)" ""
# With the optimizer in the backward pass and clipping, layers whose gradient is not finite are not updated, and the run
# ends after the step, whatever the optimizer's states are.
for states in bf16 coat coat-stochastic msamp; do
    fails "step 1: the gradient norm is not finite. The problem begins in" ./train_fp8cu "$tmp/export" $data \
        --sequence-length 256 --num-steps 3 --precision fp8 --optimizer-in-backward --grad-clip 1 \
        --optimizer-state $states
done
fails "10 steps in a row were skipped, now because the gradient norm is not finite" ./train_fp8cu "$tmp/export" $data \
    --sequence-length 256 --num-steps 20 --on-nonfinite skip
warning="skipped: the gradient norm is not finite. The problem begins in the attention block of layer 0"
check "each of the first 9 skipped steps prints a warning" \
    equal "$(grep -c "^warning: step [0-9]* $warning" "$tmp/refused.log")" 9

# With delayed scaling, skipped steps do not change amax histories and scales: neither when all steps are skipped, nor
# when a learning rate that is far too high lets some steps pass. If no step is skipped, --on-nonfinite skip changes
# nothing.
fails "10 steps in a row were skipped, now because the gradient norm is not finite" ./train_fp8cu "$tmp/export" $data \
    --sequence-length 256 --num-steps 20 --precision fp8 --fp8-recipe delayed --on-nonfinite skip \
    --grad-accumulation-steps 2 --checkpoint-dir "$tmp/ck_skipped" --checkpoint-every 1 --keep-checkpoints 1000
skips_leave_no_trace "all steps skipped" "$tmp/refused.log" "$tmp/ck_skipped"
./train_fp8cu $common --precision fp8 --fp8-recipe delayed --learning-rate 1000 --num-steps 60 --on-nonfinite skip \
    --val-data "$tmp/synth_val.bin" --val-every 3 --checkpoint-dir "$tmp/ck_some" --checkpoint-every 1 \
    --keep-checkpoints 1000 >"$tmp/some.log" 2>&1
skips_leave_no_trace "a learning rate of 1000" "$tmp/some.log" "$tmp/ck_some"
run="$common --precision fp8 --fp8-recipe delayed --fp8-amax-history 4 --num-steps 8 --grad-clip 1"
run="$run --grad-accumulation-steps 2"
gpu a $run && gpu b $run --on-nonfinite skip && same "delayed scaling without and with --on-nonfinite skip" a b

# With a learning rate that is far too high, every saved moment is finite.
for mode in stop skip; do
    ./train_fp8cu $common --precision bf16 --learning-rate 1000 --num-steps 60 --on-nonfinite $mode \
        --checkpoint-dir "$tmp/ck_high_$mode" --checkpoint-every 1 --keep-checkpoints 1000 >"$tmp/high.log" 2>&1
    check "a learning rate of 1000, $mode: the error gives the reason: $(grep '^error' "$tmp/high.log")" \
        grep -q '^error: step .* gradient norm' "$tmp/high.log"
    saved=0 infinite=0
    for folder in "$tmp/ck_high_$mode"/step-????????; do
        saved=$((saved + 1))
        infinite=$((infinite + $(infinities "$folder")))
    done
    check "a learning rate of 1000, $mode: checkpoints are saved" [ $saved -ge 1 ]
    check "a learning rate of 1000, $mode: every moment in $saved checkpoints is finite" equal $infinite 0
    rm -rf "$tmp/ck_high_$mode"
done

# --dry-run plans the memory of runs that are too large for this machine.
for plan in "llama3.1-70b --world-size 64" "llama3.1-405b --world-size 512 --recompute layer"; do
    if CUDA_VISIBLE_DEVICES= ./train_fp8cu $plan --precision fp8 --sequence-length 8192 --dry-run >"$tmp/plan.log" \
        2>&1 && grep -q '^  total ' "$tmp/plan.log"; then
        ok "memory plan of $plan: $(grep -m1 '^  total ' "$tmp/plan.log") MiB"
    else
        bad "memory plan of $plan: $(tail -n 2 "$tmp/plan.log")"
    fi
done

CUDA_VISIBLE_DEVICES= ./train_fp8cu small $data --offload moments --dry-run >"$tmp/plan.log" 2>&1
check "the estimate of a step with --offload says that its copies are not counted" \
    grep -q '^estimate of a step: .*; the copies of --offload are not counted' "$tmp/plan.log"

# After SIGTERM, SIGINT or SIGUSR1 a run finishes the step, saves once and exits with status 0.
for signal in TERM INT USR1; do
    rm -f "$tmp/s.log"  # else await could find the steps of an earlier run
    (trap - INT; exec ./train_fp8cu $common --num-steps 100000 --checkpoint-dir "$tmp/sig_$signal") >"$tmp/s.log" 2>&1 &
    pid=$!
    await 20 grep -q '^step ' "$tmp/s.log"
    kill -$signal $pid
    wait $pid
    status=$?
    saved=$(ls "$tmp/sig_$signal" 2>/dev/null | wc -l)
    if [ $status -eq 0 ] && [ "$saved" -eq 1 ]; then
        ok "SIG$signal: saved $(ls "$tmp/sig_$signal"), status 0"
    else
        bad "SIG$signal: status $status, $saved checkpoints: $(tail -n 2 "$tmp/s.log")"
    fi
done

# A run that cannot work ends with an error and a non-zero status before its first step.
refused "this GPU has free, with CUDA's own memory," \
    ./train_fp8cu llama3.1-70b --train-data "$tmp/synth_train.bin" --sequence-length 4096
refused "every rank needs its own GPU" mpirun \
    --allow-run-as-root --oversubscribe -np $(($(nvidia-smi -L | grep -c '^GPU') + 1)) ./train_fp8cu small $data
refused "does not divide" ./train_fp8cu small $data --dry-run --world-size 6 --sharding hybrid --shard-size 4
refused "fp32 runs only in the CPU trainer" ./train_fp8cu small $data --precision fp32
refused "have GEMMs for --fp8-recipe mxfp8" ./train_fp8cu small $data --precision fp8 --fp8-recipe mxfp8
refused "is outside" ./train_fp8cu small $data --sequence-length 0
refused "no token shard" ./train_fp8cu small --train-data "$tmp/none.bin"

finish
