#!/usr/bin/env bash
# Tests train_fp8 on several ranks of this machine (mpirun): every sharding strategy against one rank, validation, FP8
# all-gather, checkpoints resumed on other numbers of ranks, moments and gradients in FP8, FP16 masters, signals, killed
# ranks, wrong options, and more. Needs mpirun and python3. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1  # there are more ranks than cores, so threads would wait for each other
. dev/test/lib/cpu_trainer.sh
make -s build/compare_checkpoints || exit 1
bad() { check "$*" false; }
ranks() { local n=$1; shift; mpirun --allow-run-as-root --oversubscribe -np "$n" ./train_fp8 "$@"; }
launcher=ranks

# Writes the config.json of a model with 3 layers. $1 folder, $2 family, $3 true if the embedding is tied, then hidden
# size, intermediate size, query heads, head dimension.
write_model() {
    mkdir -p "$tmp/$1"
    cat >"$tmp/$1/config.json" <<JSON
{"architectures": ["${2^}ForCausalLM"], "model_type": "$2", "vocab_size": 643, "hidden_size": $4,
 "intermediate_size": $5, "num_hidden_layers": 3, "num_attention_heads": $6, "num_key_value_heads": 2, "head_dim": $7,
 "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
 "tie_word_embeddings": $3, "initializer_range": 0.05, "torch_dtype": "float32"}
JSON
}
# Qwen2 has biases. In the last two models, the sizes of the linear layers but lm_head suit FP8: they are multiples of
# 16 in fp8, of 128 in fp8-wide.
write_model qwen2 qwen2 false 52 76 6 10
write_model qwen3 qwen3 true 52 76 6 10
write_model llama llama false 52 76 6 10
write_model fp8 qwen3 true 48 80 6 8
write_model fp8-wide llama false 128 256 4 32
build/synth_stories --out "$tmp/s" --bytes 60000 --seed 3 >/dev/null || bad "synth_stories"
data="--train-data $tmp/s_train.bin --sequence-length 32 --learning-rate 3e-3"

# Prints "step loss norm" for every step in log folder $1, with all digits.
steps() {
    sed -n 's/.*"type": "step", "step": \([0-9]*\), "loss": \([^,]*\), "norm": \([^,]*\),.*/\1 \2 \3/p' "$1/log.jsonl"
}

# True if the losses in two files of `steps` agree to a relative error of $3, and the norms to 10 times that.
close() {
    [ -s "$1" ] && [ "$(wc -l <"$1")" -eq "$(wc -l <"$2")" ] && paste -d' ' "$1" "$2" | awk -v t="$3" '
        function off(a, b) { return a > b ? (a - b) / b : (b - a) / b }
        !($1 == $4 && off($2, $5) <= t && off($3, $6) <= 10 * t) { print "  " $0; wrong = 1 }
        END { exit wrong }'
}

# Runs $1 ranks (0: one rank without $launcher) with the log in folder $2, and writes the steps to $2.steps. If the run
# fails, counts a failed check and prints the end of the output.
train() {
    local n=$1 name=$2 program=./train_fp8
    shift 2
    [ "$n" -eq 0 ] || program="$launcher $n"
    if ! $program "$@" --log-dir "$tmp/$name" >"$tmp/$name.out" 2>&1; then
        bad "$name: $(tail -n 5 "$tmp/$name.out")"
        return 1
    fi
    steps "$tmp/$name" >"$tmp/$name.steps"
}

# ---- A global batch of 12 sequences on one rank without $launcher, and with it on 1 to 4 ranks: on 1 with --sharding
# full, on 2 or more also with grad_op and none, on 4 also with hybrid. Losses differ by the order of sums. With
# $launcher, the variant "clipped" splits the batch into 2 or 3 micro-steps. $1 family, $2 name of the variant, then its
# options.
against_one() {
    local family=$1 variant=$2
    shift 2
    local common="$tmp/$family $data --precision fp32 --num-steps 4 --val-data $tmp/s_val.bin $*"
    train 0 "$family-$variant-one" $common --batch-size 12 --val-steps 12
    local n strategy accumulation=1
    for n in 1 2 3 4; do
        [ "$variant" = clipped ] && accumulation=$((n == 3 ? 2 : 3))
        for strategy in full grad_op none "hybrid --shard-size 2"; do
            [ "${strategy% *}" = "hybrid --shard-size" ] && [ $n -ne 4 ] && continue
            [ $n -eq 1 ] && [ "$strategy" != full ] && continue
            local name="$family-$variant-$n-${strategy%% *}"
            train $n "$name" $common --sharding $strategy --grad-accumulation-steps $accumulation --val-steps 12 \
                --batch-size $((12 / n / accumulation)) || continue
            check "$name has the losses of one rank" close "$tmp/$name.steps" "$tmp/$family-$variant-one.steps" 1e-6
            local want have
            want=$(grep -o 'validation after step 4 | loss .*' "$tmp/$family-$variant-one.out" | sed 's/.* //')
            have=$(grep -o 'validation after step 4 | loss .*' "$tmp/$name.out" | sed 's/.* //')
            check "$name: validation loss '$have' equals '$want' to 1e-6" awk -v a="$have" -v b="$want" \
                'BEGIN { exit !(b > 0 && a / b - 1 < 1e-6 && b / a - 1 < 1e-6) }'
        done
    done
}
against_one qwen2 clipped --grad-clip 0.5
launcher=meet
against_one qwen2 plain
against_one qwen3 clipped --grad-clip 0.5
check "clipping changes the losses" \
    [ "$(cut -d' ' -f2 "$tmp/qwen2-plain-one.steps")" != "$(cut -d' ' -f2 "$tmp/qwen2-clipped-one.steps")" ]

# In bf16 each rank rounds its gradients before they are summed (by up to 2^-8). In 4 steps that moves a loss of about 6
# by well under 1e-3 of it.
train 0 bf16-one "$tmp/qwen3" $data --num-steps 4 --batch-size 12
for dtype in bf16 fp32; do
    train 4 "bf16-$dtype" "$tmp/qwen3" $data --num-steps 4 --batch-size 3 --reduce-dtype $dtype &&
        check "bf16, reduced in $dtype: 4 ranks have losses close to those of one rank" \
            close "$tmp/bf16-$dtype.steps" "$tmp/bf16-one.steps" 1e-3
done
# Gradients reduced in fp32 stay in fp32: the sum over 24 micro-steps on 2 ranks equals the gradient of one micro-step,
# except for the bf16 roundings of single gradients, most of which cancel.
sums="$tmp/qwen3 $data --num-steps 1 --reduce-dtype fp32"
train 2 sums-one $sums --batch-size 24 && train 2 sums-many $sums --batch-size 1 --grad-accumulation-steps 24 &&
    check "24 micro-steps reduced in fp32 have a loss and norm close to those of one micro-step" \
        close "$tmp/sums-many.steps" "$tmp/sums-one.steps" 1e-5
for accum in bf16 fp32; do
    sums="$tmp/qwen3 $data --num-steps 2 --batch-size 1 --grad-accumulation-steps 3 --grad-accum-dtype $accum"
    train 4 sums-none $sums --sharding none && train 4 sums-full $sums &&
        check "gradient sums in $accum: --sharding none and full have close losses" \
            close "$tmp/sums-none.steps" "$tmp/sums-full.steps" 1e-3
done
check "--reduce-dtype changes losses or norms" bash -c "! cmp -s $tmp/bf16-bf16.steps $tmp/bf16-fp32.steps"

# ---- Validation uses the same sequences on any number of ranks and with any batch size. The last batch may be partly
# filled, and ranks may have no sequence of it. Losses are printed to 6 digits after the point.
validated() { sed -n 's/^validation after step 1 | loss //p' "$tmp/validated.out"; }
for precision in fp32 bf16; do
    want=""
    for case in "0 1 7" "0 3 7" "2 1 7" "2 2 7" "4 1 7" "4 3 7"; do
        read -r n batch steps <<<"$case"
        train $n validated "$tmp/qwen2" $data --learning-rate 0 --num-steps 1 --precision $precision \
            --batch-size $batch --val-data "$tmp/s_val.bin" --val-steps $steps || continue
        have=$(validated) want=${want:-$have}
        check "validation, $precision, $n ranks, batches of $batch: '$have' equals '$want' to 2e-6" \
            awk -v a="$have" -v b="$want" 'BEGIN { exit !(b > 0 && a - b < 2e-6 && b - a < 2e-6) }'
    done
done
# log.jsonl has the loss of each validation sequence, equal to 2e-6 for any number of ranks and batch size, and the
# parts of each step's time.
want=""
for case in "0 1" "0 3" "2 1" "3 2"; do
    read -r n batch <<<"$case"
    train $n logged "$tmp/qwen2" $data --num-steps 3 --learning-rate 0 --precision fp32 --batch-size $batch \
        --val-data "$tmp/s_val.bin" --val-steps 7 --val-every 2 --checkpoint-dir "$tmp/logged/ck" || continue
    have=$(python3 dev/test/lib/check_log.py "$tmp/logged/log.jsonl" $((n ? n : 1)) 2>&1)
    want=${want:-$have}
    check "log.jsonl, $n ranks, batches of $batch: '$have' is '$want' to 2e-6" awk -v a="$have" -v b="$want" 'BEGIN {
        n = split(a, x); m = split(b, y)
        for (i = 1; i <= m; i++) if (!(y[i] > 0 && x[i] - y[i] < 2e-6 && y[i] - x[i] < 2e-6)) exit 1
        exit n != 7 || m != 7 }'
    rm -rf "$tmp/logged/ck"
done
# --rounding-seed changes nothing but stochastic rounding: the first loss stays, the last step changes.
rounded="$tmp/qwen2 $data --num-steps 3 --batch-size 2 --grad-accumulation-steps 2"
train 0 rounded-default $rounded --seed 5 && train 0 rounded-equal $rounded --seed 5 --rounding-seed 5 &&
    train 0 rounded-other $rounded --seed 5 --rounding-seed 6 &&
    check "--rounding-seed is --seed by default" cmp "$tmp/rounded-default.steps" "$tmp/rounded-equal.steps" &&
    check "--rounding-seed does not change the first loss" \
        [ "$(head -n 1 "$tmp/rounded-other.steps" | cut -d' ' -f2)" = \
        "$(head -n 1 "$tmp/rounded-default.steps" | cut -d' ' -f2)" ] &&
    check "--rounding-seed changes the loss or the norm of the last step" \
        [ "$(tail -n 1 "$tmp/rounded-other.steps")" != "$(tail -n 1 "$tmp/rounded-default.steps")" ]
check "the run prints how many sequences validation uses: $(grep '^validation: ' "$tmp/validated.out")" \
    grep -q '^validation: 7 of [0-9]* sequences' "$tmp/validated.out"
train 4 validated "$tmp/qwen2" $data --learning-rate 0 --num-steps 1 --batch-size 40 --val-data "$tmp/s_val.bin" \
    --val-steps 100000 &&
    check "validation data of less than a batch is all used" \
        grep -q '^validation: \([0-9]*\) of \1 sequences' "$tmp/validated.out"

# ---- Without FP16 masters, all-gathers in FP8 and in bf16 give equal bits. A layer with a bf16 GEMM is gathered in
# bf16.
gathered() { sed -n 's/.*{"name": "gathered weights", "bytes": \([0-9]*\)}.*/\1/p' "$1/log.jsonl"; }
for recipe in tensorwise "delayed --fp8-amax-history 2"; do
    for case in "2" "3 --fp8-filter first" "4 --sharding grad_op --master-weights fp32 --grad-accumulation-steps 2"; do
        n=${case%% *} name="${recipe%% *}, $case"
        fp8="$tmp/fp8 $data --precision fp8 --fp8-recipe $recipe --num-steps 5 --batch-size 2 ${case#"$n"}"
        train $n fp8-on $fp8 --fp8-all-gather on && train $n fp8-off $fp8 --fp8-all-gather off || continue
        check "$name: FP8 all-gather leaves the losses unchanged" cmp "$tmp/fp8-on.steps" "$tmp/fp8-off.steps"
        [ "$n" -eq 4 ] && check "$name: FP8 all-gather plans less memory for gathered weights" \
            awk -v on="$(gathered "$tmp/fp8-on")" -v off="$(gathered "$tmp/fp8-off")" \
            'BEGIN { exit !(on > 0 && on < off) }'
    done
done

# Scales of rows and blocks do not depend on the rows of other ranks. So the forward pass of step 1 equals that of one
# rank, except for the order in which losses are added (1e-6). In the backward pass each rank rounds its gradients to
# bf16 before they are added, as without FP8 (1e-3). In wgrad, a scale of a block covers the same tokens on 2 ranks as
# on one. A rowwise scale in wgrad covers the tokens of its rank. So it may differ by a power of two from the scale in a
# run on one rank, which covers all tokens. That changes only subnormal codes.
for recipe in $(./train_fp8 --list recipes); do
    fp8="$tmp/fp8-wide $data --precision fp8 --fp8-recipe $recipe --num-steps 4"
    # by default a recipe with one scale for each tensor all-gathers in FP8
    ./train_fp8 $fp8 --batch-size 4 --dry-run --json | grep -q '"fp8-all-gather": "on"' && continue
    train 0 one-$recipe $fp8 --batch-size 8 && train 2 two-$recipe $fp8 --batch-size 4 || continue
    check "$recipe: 2 ranks have losses close to those of one rank" \
        close "$tmp/two-$recipe.steps" "$tmp/one-$recipe.steps" 1e-3
    check "$recipe: 2 ranks have the first loss of one rank, to 1e-6" \
        awk 'NR == FNR { if (FNR == 1) a = $2; next } FNR == 1 { exit !(a / $2 - 1 < 1e-6 && $2 / a - 1 < 1e-6) }' \
        "$tmp/two-$recipe.steps" "$tmp/one-$recipe.steps"
    check "$recipe: fprop of qkv runs in FP8" \
        grep -q '"linear": "qkv", "gemm": "fprop", [^}]*"x": {"dtype": "e4m3"' "$tmp/two-$recipe/log.jsonl"
done

# The audit has a line for each FP8 operand, also for weights that are gathered in FP8.
train 2 audit "$tmp/fp8" $data --precision fp8 --num-steps 4 --batch-size 2 --fp8-audit 4 &&
    check "the audit of 2 ranks logs every FP8 operand" [ "$(grep -c '"fp8_audit"' "$tmp/audit/log.jsonl")" -eq 72 ]

# ---- Checkpoints: a run of 8 steps, and one that ends after 4 steps and is resumed.
resumed() {  # $1 ranks, $2 name, $3 largest error (0: equal bits), the rest: options
    local n=$1 name=$2 tolerance=$3
    shift 3
    cp -r "$tmp/ck" "$tmp/ck-$name"
    train "$n" "$name" $common --num-steps 8 "$@" --checkpoint-dir "$tmp/ck-$name" --resume || return
    if [ "$tolerance" = 0 ]; then
        check "$name: resumed losses equal those of an unbroken run in all digits" \
            cmp "$tmp/$name.steps" "$tmp/whole.last"
    else
        check "$name: resumed losses are close to those of an unbroken run" \
            close "$tmp/$name.steps" "$tmp/whole.last" "$tolerance"
    fi
}
for precision in fp32 bf16; do
    common="$tmp/llama $data --precision $precision"
    rm -rf "$tmp"/ck*
    train 4 whole $common --num-steps 8 --batch-size 3
    tail -n 4 "$tmp/whole.steps" >"$tmp/whole.last"
    train 4 saved $common --num-steps 4 --batch-size 3 --checkpoint-dir "$tmp/ck"
    resumed 4 four-$precision 0 --batch-size 3
    [ $precision = bf16 ] && continue
    resumed 2 two 1e-6 --batch-size 3 --grad-accumulation-steps 2
    resumed 3 three 1e-6 --batch-size 4 --sharding grad_op
    resumed 0 one 1e-6 --batch-size 12
    resumed 4 hybrid 1e-6 --batch-size 3 --sharding hybrid --shard-size 2
    resumed 4 none 1e-6 --batch-size 3 --sharding none
    # The checkpoint of one rank after these 4 steps has files of equal names, and tensor files of equal sizes. Its
    # tensors differ only by the order of sums. AdamW's division magnifies that difference where a gradient is nearly 0.
    train 0 alone $common --num-steps 4 --batch-size 12 --checkpoint-dir "$tmp/ck-alone"
    check "checkpoints of 4 ranks and of one rank have equal file names" \
        [ "$(ls "$tmp/ck/step-00000004")" = "$(ls "$tmp/ck-alone/step-00000004")" ]
    sizes() { stat -c '%n %s' "$1"/step-00000004/*.safetensors | sed 's|.*/||'; }
    check "checkpoints of 4 ranks and of one rank have files of equal sizes" \
        [ "$(sizes "$tmp/ck")" = "$(sizes "$tmp/ck-alone")" ]
    pair="$tmp/ck/step-00000004 $tmp/ck-alone/step-00000004"
    check "checkpoints of 4 ranks and of one rank have close weights" build/compare_checkpoints $pair 1e-6 model
    check "checkpoints of 4 ranks and of one rank have close AdamW moments" \
        build/compare_checkpoints $pair 1e-5 optimizer
    # A checkpoint is a model folder to start from. At learning rate 0, a run exports its weights with equal bytes.
    for strategy in full none "hybrid --shard-size 2"; do
        train 4 export "$tmp/ck/step-00000004" $data --precision fp32 --num-steps 1 --batch-size 3 --learning-rate 0 \
            --sharding $strategy --export-hf "$tmp/exported"
        check "an export with --sharding $strategy equals the checkpoint's model" \
            cmp "$tmp/exported/model.safetensors" "$tmp/ck/step-00000004/model.safetensors"
    done
done

# Delayed scaling: amax histories and scales are part of a checkpoint, with which any number of ranks may resume.
common="$tmp/fp8 $data --precision fp8 --fp8-recipe delayed --fp8-amax-history 3"
rm -rf "$tmp"/ck*
train 2 whole $common --num-steps 8 --batch-size 4
tail -n 4 "$tmp/whole.steps" >"$tmp/whole.last"
train 2 saved $common --num-steps 4 --batch-size 4 --checkpoint-dir "$tmp/ck"
check "fp8_state.safetensors is saved" [ -s "$tmp/ck/step-00000004/fp8_state.safetensors" ]
resumed 2 delayed-two 0 --batch-size 4
resumed 4 delayed-four 1e-3 --batch-size 2  # each rank rounds its gradients to bf16

# Moments in FP8: each group of 128 lies in one rank's slice, also where biases of q, k and v share a group (qwen2).
common="$tmp/qwen2 $data --optimizer-state coat-stochastic"
rm -rf "$tmp"/ck*
train 4 whole $common --num-steps 8 --batch-size 3
tail -n 4 "$tmp/whole.steps" >"$tmp/whole.last"
train 4 saved $common --num-steps 4 --batch-size 3 --checkpoint-dir "$tmp/ck"
resumed 4 coat-four 0 --batch-size 3
resumed 3 coat-three 1e-3 --batch-size 4  # each rank rounds its gradients to bf16
resumed 0 coat-one 1e-3 --batch-size 12
train 0 alone $common --num-steps 4 --batch-size 12 --checkpoint-dir "$tmp/ck-alone"
check "checkpoints of 4 ranks and of one rank have files of equal sizes, with FP8 moments" \
    [ "$(sizes "$tmp/ck")" = "$(sizes "$tmp/ck-alone")" ]
ranks 4 $common --num-steps 8 --batch-size 3 --checkpoint-dir "$tmp/ck" --resume --optimizer-state bf16 \
    >"$tmp/other.out" 2>&1
check "a resume with other moments is refused" \
    grep -q -- "--optimizer-state is coat-stochastic in the checkpoint, bf16 now" "$tmp/other.out"

# MS-AMP's moments and FP16 masters have one scale for each tensor, whatever part of the tensor a rank has. So ranks
# that shard the parameters write the same bytes as ranks that hold all of them.
common="$tmp/qwen2 $data --optimizer-state msamp --master-weights fp16-stochastic"
rm -rf "$tmp"/ck*
train 0 msamp-one $common --num-steps 8 --batch-size 12
train 4 msamp-four $common --num-steps 8 --batch-size 3 --checkpoint-dir "$tmp/ck-full"
train 4 msamp-none $common --num-steps 8 --batch-size 3 --checkpoint-dir "$tmp/ck-none" --sharding none
train 4 msamp-hybrid $common --num-steps 8 --batch-size 3 --sharding hybrid --shard-size 2
train 2 whole $common --num-steps 8 --batch-size 6
check "msamp: 4 ranks have losses close to those of one rank" close "$tmp/msamp-four.steps" "$tmp/msamp-one.steps" 1e-3
check "msamp: 2 ranks have losses close to those of one rank" close "$tmp/whole.steps" "$tmp/msamp-one.steps" 1e-3
check "msamp: --sharding hybrid has losses close to those of one rank" \
    close "$tmp/msamp-hybrid.steps" "$tmp/msamp-one.steps" 1e-3
for file in model optimizer; do
    check "msamp: $file.safetensors is equal with --sharding full and none" \
        cmp "$tmp"/ck-{full,none}/step-00000008/$file.safetensors
done
tail -n 4 "$tmp/whole.steps" >"$tmp/whole.last"
train 2 saved $common --num-steps 4 --batch-size 6 --checkpoint-dir "$tmp/ck"
resumed 2 msamp-two 0 --batch-size 6
resumed 0 msamp-alone 1e-3 --batch-size 12  # each rank rounds its gradients to bf16
resumed 4 msamp-fours 1e-3 --batch-size 3
# The export has the fp32 numbers that the FP16 masters stand for: FP16 divided by the scale.
train 4 export $common --num-steps 8 --batch-size 3 --checkpoint-dir "$tmp/ck-full" --resume \
    --export-hf "$tmp/exported"
check "msamp: the export equals the checkpoint's model" \
    cmp "$tmp/exported/model.safetensors" "$tmp/ck-full/step-00000008/model.safetensors"
check "msamp: exported weights times scales are FP16, and the largest of a tensor is 0 or about 65504/2 to 65504" \
    python3 - "$tmp/exported/model.safetensors" "$tmp/ck-full/step-00000008/optimizer.safetensors" <<'PY'
import json, struct, sys

def tensors(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    for name, t in json.loads(data[8 : 8 + size]).items():
        if t.get("dtype") == "F32":
            begin, end = t["data_offsets"]
            yield name, struct.unpack(f"<{(end - begin) // 4}f", data[8 + size + begin : 8 + size + end])

scales, elements, largest = dict(tensors(sys.argv[2])), 0, []
for name, values in tensors(sys.argv[1]):
    scaled = [x * scales["master_scale." + name][0] for x in values]
    assert all(struct.unpack("<e", struct.pack("<e", x))[0] == x for x in scaled), name
    elements += len(values)
    largest.append(max(map(abs, scaled)))
assert elements > 10000 and min(x for x in largest if x) > 65504 / 2.01 and max(largest) <= 65504, largest
PY
ranks 4 $common --num-steps 12 --batch-size 3 --checkpoint-dir "$tmp/ck-full" --resume --master-weights fp32 \
    >"$tmp/other.out" 2>&1
check "a resume with other masters is refused" \
    grep -q -- "--master-weights is fp16-stochastic in the checkpoint, fp32 now" "$tmp/other.out"

# Gradients in FP8: a resumed run has the bits of an unbroken one. E4M3 has 4 significant bits, so the losses and norms
# of several ranks are only close to those of one rank. On many ranks nothing saturates: the norm, which is checked to
# 1%, is that of a sum in bf16.
for dtype in fp8 bf16; do
    train 8 "msamp-$dtype" tiny $data --num-steps 2 --batch-size 1 --msamp O3 --reduce-dtype $dtype
done
check "--msamp O3: 8 ranks have the gradient norm of --reduce-dtype bf16" \
    close "$tmp/msamp-fp8.steps" "$tmp/msamp-bf16.steps" 1e-3
common="$tmp/fp8 $data --precision fp8 --optimizer-state msamp --reduce-dtype fp8 --grad-accumulation-steps 2"
rm -rf "$tmp"/ck*
train 0 fp8-gradients $common --num-steps 8 --batch-size 6
while read -r n options <&3; do
    train $n whole $common $options --num-steps 8 --batch-size $((6 / n)) --checkpoint-dir "$tmp/ck-whole"
    train $n saved $common $options --num-steps 4 --batch-size $((6 / n)) --checkpoint-dir "$tmp/ck"
    check "FP8 gradients, $n ranks, $options: the losses are close to those of one rank" \
        close "$tmp/whole.steps" "$tmp/fp8-gradients.steps" 3e-3
    tail -n 4 "$tmp/whole.steps" >"$tmp/whole.last"
    name="fp8-$n-${options//[- ]/}"
    resumed $n "$name" 0 --batch-size $((6 / n)) $options
    for file in model optimizer; do
        check "FP8 gradients, $n ranks, $options: a resumed and an unbroken run save equal $file.safetensors" \
            cmp "$tmp/ck-whole/step-00000008/$file.safetensors" "$tmp/ck-$name/step-00000008/$file.safetensors"
    done
    rm -rf "$tmp"/ck*
done 3<<'CASES'
1
2 --sharding full
3 --sharding none
6 --sharding none
6 --sharding hybrid --shard-size 2
2 --sharding grad_op --reduce-dtype bf16 --grad-accum-dtype fp8
3 --sharding none --reduce-dtype bf16 --grad-accum-dtype fp8
CASES

# FP8 weights are cast from the FP16 masters, without bf16 weights between. Scales and codes are those of whole tensors:
# equal on any number of ranks, with any sharding, and after a resume. Losses depend on the number of ranks, because
# each rank scales its own activations. audited: prints the audit of the weights at step 5, without SQNR.
common="$tmp/fp8 $data --precision fp8 --optimizer-state msamp --master-weights fp16 --fp8-audit 5"
rm -rf "$tmp"/ck*
audited() { sed -n 's/\(.*"step": 5,.*"operand": "w", .*\), "sqnr_db.*/\1/p' "$tmp/$1/log.jsonl"; }
train 4 whole $common --num-steps 8 --batch-size 3
for sharding in grad_op none; do
    train 4 masters-$sharding $common --num-steps 8 --batch-size 3 --sharding $sharding
    check "FP8 from FP16 masters: --sharding $sharding has the losses of full" \
        close "$tmp/masters-$sharding.steps" "$tmp/whole.steps" 1e-13
done
train 4 masters-bf16 $common --num-steps 8 --batch-size 3 --fp8-filter first
check "FP8 from FP16 masters: losses are close to those with a layer in bf16" \
    close "$tmp/masters-bf16.steps" "$tmp/whole.steps" 1e-2
tail -n 4 "$tmp/whole.steps" >"$tmp/whole.last"
train 4 saved $common --num-steps 4 --batch-size 3 --checkpoint-dir "$tmp/ck"
resumed 4 masters-four 0 --batch-size 3
resumed 2 masters-two 2e-2 --batch-size 6
resumed 0 masters-one 2e-2 --batch-size 12
check "FP8 from FP16 masters: the audit has 24 lines of weights ($(audited whole | wc -l))" \
    [ "$(audited whole | wc -l)" -eq 24 ]
for name in masters-four masters-two masters-one masters-none; do
    check "FP8 from FP16 masters: $name has the weights' amaxes, scales and flushed shares of the unbroken run" \
        [ "$(audited $name)" = "$(audited whole)" ]
done

# ---- Ranks that are killed, and signals to a rank.

# Starts a run that does not end by itself, and waits up to 30 s for its second step. $1 ranks, then options. Sets mpi
# and pids[rank] to the process ids of mpirun and of the ranks.
start() {
    local n=$1 pid rank
    shift
    rm -rf "$tmp/run" "$tmp/run.out"
    mpirun --allow-run-as-root --oversubscribe -np "$n" ./train_fp8 "$tmp/qwen2" $data --batch-size 2 \
        --num-steps 1000000 --checkpoint-dir "$tmp/run" "$@" >"$tmp/run.out" 2>&1 &
    mpi=$!
    await 30 grep -q '^step  *2/' "$tmp/run.out"
    pids=()
    for pid in $(cat /proc/$mpi/task/*/children); do
        rank=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')
        [ -n "$rank" ] && pids[$rank]=$pid
    done
    check "all $n ranks have started: $(tail -n 3 "$tmp/run.out")" [ ${#pids[@]} -eq "$n" ]
}

# Waits up to 60 s for mpirun to end, and kills the run otherwise. Sets status (124: mpirun did not end). Checks that
# all ranks end within 10 s more.
all_end() {
    status=124
    if await 60 eval '! kill -0 $mpi'; then wait $mpi; status=$?; else kill -9 $mpi "${pids[@]}"; fi
    await 10 eval '! alive'  # a killed process may need a moment to end
    check "all processes end; still running: $(alive)" equal "$(alive)" ""
}
# Prints the status files of ranks that have not ended. A zombie ("Z") has ended.
alive() { grep -ls '^State:.*[^Z] (' $(printf '/proc/%s/status ' "${pids[@]}"); }

# A rank is killed after the first save, in a run that saves every 5 steps and in one that saves every step.
for every in 5 1; do
    start 4 --checkpoint-every $every
    await 10 eval 'ls -d "$tmp"/run/step-????????'
    kill -KILL "${pids[2]}"
    all_end
    check "rank killed: mpirun's status $status is not 0" [ $status -ne 0 ] &&
        check "rank killed: mpirun ends within 60 s" [ $status -ne 124 ]
    check "rank killed: one line names the killed rank: $(tail -n 3 "$tmp/run.out")" \
        [ "$(grep -c 'rank 2 .*killed\|rank 2 .*Killed' "$tmp/run.out")" -eq 1 ]
    last=$(ls -d "$tmp"/run/step-???????? | tail -n 1)
    step=$((10#${last##*-}))
    ./train_fp8 "$tmp/qwen2" $data --batch-size 8 --num-steps $((step + 1)) --checkpoint-dir "$tmp/run" \
        --resume >"$tmp/resumed.out" 2>&1
    check "rank killed: the last checkpoint is complete: $(grep -m1 'skipping\|error' "$tmp/resumed.out")" \
        grep -q "continuing from $last\$" "$tmp/resumed.out"
done

# A signal to one rank: in a run that only trains, in one with a long validation, in one that saves every step.
stopped() {  # $1 signal, $2 rank, the rest: options
    local signal=$1 rank=$2 saves step
    shift 2
    start 4 "$@"
    kill -"$signal" "${pids[$rank]}"
    all_end
    check "SIG$signal to rank $rank: the run ends with status 0 ($status): $(tail -n 3 "$tmp/run.out")" \
        [ $status -eq 0 ]
    step=$(grep -o 'stopped by signal.*after step [0-9]*' "$tmp/run.out" | sed 's/.* //')
    saves=$(grep -c "^saved checkpoint after step $step " "$tmp/run.out")
    check "SIG$signal to rank $rank: the last step is saved once ($saves saves)" [ "$saves" -eq 1 ]
}
stopped TERM 3
stopped USR1 0 --sharding none
stopped INT 1 --val-data "$tmp/s_val.bin" --val-every 1 --val-steps 160
stopped TERM 2 --checkpoint-every 1 --keep-checkpoints 1

# ---- refused: checks that one error is printed, by rank 0, and that all ranks end. $1 ranks, $2 status, $3 regular
# expression that the error must match, then arguments.
refused() {
    local n=$1 expected=$2 message=$3 status
    shift 3
    ranks "$n" "$@" >"$tmp/refused.out" 2>&1
    status=$?
    check "\"$message\": the ranks end with status $expected ($status): $(cat "$tmp/refused.out")" \
        [ $status -eq "$expected" ]
    check "\"$message\": the ranks print one error: $(grep '^error' "$tmp/refused.out")" \
        [ "$(grep -c '^error: ' "$tmp/refused.out")" -eq 1 ]
    check "\"$message\" comes from rank 0: $(grep '^error' "$tmp/refused.out")" grep -q "^error: rank 0 on .*$message" \
        "$tmp/refused.out"
}
refused 4 2 "unknown option --batch" tiny --batch 3
refused 4 1 "no token shard matches" tiny --train-data "$tmp/nothing.bin"
refused 3 2 "shard-size 2 does not divide the 3 ranks" tiny $data --sharding hybrid --shard-size 2
# Without --shard-size, a shard group is the ranks of one host: here one rank.
alone_without_copies() {
    ./train_fp8 tiny $data --sharding hybrid --copy-engines on >"$tmp/refused.out" 2>&1
    [ $? -eq 2 ] && grep -q "^error: --copy-engines on: .*no weights are gathered" "$tmp/refused.out"
}
check "--copy-engines on is refused if hybrid's shard groups have one rank each" alone_without_copies
refused 2 2 "world-size is for --dry-run" tiny $data --world-size 2
refused 2 1 "already holds step-00000004" $common --checkpoint-dir "$tmp/ck"
message="the gradient norm is .* counts as not finite. The problem begins in the .* of layer .*, in backward order, is"
refused 4 7 "$message in .*, in the shard of rank .*; the largest weight there is" \
    "$tmp/qwen2" $data --precision fp32 --num-steps 50 --learning-rate 1000

# ---- A row of q_proj in layer 1 has huge values. Every rank searches the weights that it stores. The error of rank 0
# names the tensor and the element, whichever rank stores them.
train 0 export "$tmp/qwen2" $data --precision fp32 --num-steps 1 --export-hf "$tmp/spoiled"
python3 - "$tmp/spoiled/model.safetensors" <<'PY'
import json, struct, sys
with open(sys.argv[1], "r+b") as f:
    size = struct.unpack("<Q", f.read(8))[0]
    tensor = json.loads(f.read(size))["model.layers.1.self_attn.q_proj.weight"]
    f.seek(8 + size + tensor["data_offsets"][0] + 20 * tensor["shape"][1] * 4)
    f.write(struct.pack("<f", 3e38) * tensor["shape"][1])
PY
message="The problem begins in the attention block of layer 1, in the forward pass; the largest weight there is 3e+38,"
for sharding in full none "hybrid --shard-size 2"; do
    refused 4 7 "$message in model.layers.1.self_attn.q_proj.weight, element 1040. The loss is nan" \
        "$tmp/spoiled" $data --no-verify --precision fp32 --sharding $sharding
done

# ---- Without --grad-clip, --optimizer-in-backward changes no bit of weights and optimizer state, and a run that began
# without it may be resumed with it. Norms differ by the order of sums.
while read -r n options <&3; do
    common="$tmp/fp8 $data --num-steps 4 --batch-size 1 $options"
    rm -rf "$tmp/early" "$tmp/late" "$tmp/resumed"
    train "$n" late $common --checkpoint-dir "$tmp/late" --checkpoint-every 2 || continue
    train "$n" early $common --checkpoint-dir "$tmp/early" --optimizer-in-backward || continue
    check "--optimizer-in-backward, $n ranks, $options: equal losses" close "$tmp/late.steps" "$tmp/early.steps" 1e-14
    for file in "$tmp"/late/step-00000004/*.safetensors; do
        check "--optimizer-in-backward, $n ranks, $options: equal ${file##*/}" \
            cmp -s "$file" "$tmp/early/step-00000004/${file##*/}"
    done
    rm -rf "$tmp/late/step-00000004"
    train "$n" resumed $common --checkpoint-dir "$tmp/late" --optimizer-in-backward --resume || continue
    tail -n 2 "$tmp/early.steps" >"$tmp/early.last"
    check "--optimizer-in-backward, $n ranks, $options: a resumed run has equal losses" \
        cmp -s "$tmp/early.last" "$tmp/resumed.steps"
done 3<<'CASES'
0 --precision bf16
0 --precision fp8 --fp8-recipe delayed
0 --precision fp8 --optimizer-state msamp --master-weights fp16
2 --precision fp8 --fp8-recipe delayed
2 --precision fp8 --sharding none --reduce-dtype fp32 --master-weights fp32
3 --precision fp8 --optimizer-state coat
3 --precision bf16 --optimizer-state msamp --master-weights fp16
4 --precision fp8 --optimizer-state msamp --master-weights fp16-stochastic --sharding hybrid --shard-size 2
4 --precision fp8 --fp8-recipe rowwise --sharding grad_op
4 --precision fp8 --sharding hybrid --shard-size 2 --optimizer-state coat-stochastic
CASES
# With --grad-clip, 1, 2 and 4 ranks clip by equal estimates of the norm, up to the order of sums. A resumed run makes
# its first estimates from the norms in the checkpoint. The clip value is below all norms.
while read -r n options <&3; do
    common="$tmp/fp8 $data --num-steps 4 --precision fp32 --grad-clip 0.2 --batch-size $((4 / (n + !n))) $options"
    common="$common --optimizer-in-backward"
    rm -rf "$tmp/clips" "$tmp/resumed"
    train "$n" clips $common --checkpoint-dir "$tmp/clips" --checkpoint-every 2 || continue
    [ "$n" -eq 0 ] && cp "$tmp/clips.steps" "$tmp/clips-one.steps"
    check "--grad-clip in the backward pass, $n ranks, $options: the losses of one rank" \
        close "$tmp/clips.steps" "$tmp/clips-one.steps" 1e-6
    check "--grad-clip in the backward pass, $n ranks, $options: every norm is at least twice the clip value" \
        awk '$3 < 0.4 { exit 1 }' "$tmp/clips.steps"
    rm -rf "$tmp/clips/step-00000004"
    train "$n" resumed $common --checkpoint-dir "$tmp/clips" --resume || continue
    tail -n 2 "$tmp/clips.steps" >"$tmp/clips.last"
    check "--grad-clip in the backward pass, $n ranks, $options: a resumed run has equal losses" \
        cmp -s "$tmp/clips.last" "$tmp/resumed.steps"
done 3<<'CASES'
0
2 --sharding full
2 --sharding none
4 --sharding grad_op
4 --sharding hybrid --shard-size 2
CASES
# With --optimizer-in-backward, a gradient norm that counts as not finite ends the run, the error names its place, and
# the earlier checkpoint is still there.
train 2 burst "$tmp/qwen2" $data --num-steps 1 --checkpoint-dir "$tmp/burst" --optimizer-in-backward
refused 2 7 "is in .*, element [0-9]*.*The loss is" "$tmp/qwen2" $data --num-steps 40 --learning-rate 1000 \
    --checkpoint-dir "$tmp/burst" --resume --optimizer-in-backward
check "the earlier checkpoint is still there: $(ls "$tmp/burst")" [ -e "$tmp/burst/step-00000001" ]

# ---- Delayed scaling with --on-nonfinite skip: a skipped step does not change the saved amax histories and scales.
ranks 2 "$tmp/fp8" $data --precision fp8 --fp8-recipe delayed --fp8-amax-history 8 --learning-rate 1000 --num-steps 60 \
    --on-nonfinite skip --checkpoint-dir "$tmp/skips" --checkpoint-every 1 --keep-checkpoints 1000 \
    >"$tmp/skips.out" 2>&1
skips=0 before=""
for folder in "$tmp"/skips/step-????????; do
    step=$((10#${folder##*-}))
    if grep -q "^warning: step $step skipped" "$tmp/skips.out"; then
        skips=$((skips + 1))
        check "skipped step $step leaves fp8_state unchanged" cmp -s "$before" "$folder/fp8_state.safetensors"
    fi
    before="$folder/fp8_state.safetensors"
done
check "a learning rate of 1000: at least 9 skipped steps have a checkpoint ($skips): $(tail -n 2 "$tmp/skips.out")" \
    [ $skips -ge 9 ]

# ---- Rank 1 reads another file than rank 0, as hosts with their own disks may: a file with the tokens in another
# order, and a file with other tokens.
build/synth_stories --out "$tmp/other" --bytes 60000 --seed 5 >/dev/null
python3 - "$tmp/s_train.bin" "$tmp/turned.bin" <<'PY'
import sys
shard = open(sys.argv[1], "rb").read()
open(sys.argv[2], "wb").write(shard[:1024] + shard[-4000:] + shard[1024:-4000])
PY
for other in turned other_train; do
    mpirun --allow-run-as-root --oversubscribe -np 1 ./train_fp8 "$tmp/qwen2" $data : -np 1 ./train_fp8 "$tmp/qwen2" \
        $data --train-data "$tmp/$other.bin" >"$tmp/differ.out" 2>&1
    status=$?
    check "rank 1 reads $other: the ranks end with an error status ($status): $(cat "$tmp/differ.out")" \
        [ $status -ne 0 ]
    message="^error: rank 1 on .*$other.bin: here --train-data has .* give all hosts the same files"
    check "rank 1 reads $other: one error names the file: $(grep '^error' "$tmp/differ.out")" \
        [ "$(grep -c "$message" "$tmp/differ.out")" -eq 1 ]
done

# ---- After the first save, rank 1 sees an empty folder in place of the checkpoint folder, so a save fails there. All
# ranks stop, the error gives rank 1's reason, and the earlier checkpoints stay.
if unshare -m true 2>/dev/null; then
    common="$tmp/qwen2 $data --batch-size 2 --checkpoint-dir $tmp/half"
    again="./train_fp8 $common --num-steps 1000 --checkpoint-every 1 --keep-checkpoints 1000 --on-save-error stop"
    mkdir "$tmp/hidden"
    hide='(until [ -d "$0/half/step-00000001" ]; do sleep 0.01; done; mount --bind "$0/hidden" "$0/half") & exec "$@"'
    mpirun --allow-run-as-root --oversubscribe -np 1 $again : \
        -np 1 unshare -m bash -c "$hide" "$tmp" $again : -np 1 $again >"$tmp/half.out" 2>&1
    status=$?
    check "a save that fails on rank 1 ends the run with an error status ($status): $(tail -n 5 "$tmp/half.out")" \
        [ $status -ne 0 ]
    message='saving checkpoint .* failed: rank 1 on .*cannot open .* untouched'
    check "a save that fails on rank 1: rank 0 prints the reason: $(grep '^error' "$tmp/half.out")" \
        [ "$(grep -c "^error: rank 0 on .*$message" "$tmp/half.out")" -eq 1 ]
    check "a save that fails on rank 1 leaves the first checkpoint and no .tmp: $(ls "$tmp/half")" \
        [ "$(ls "$tmp/half" | head -n 1)$(ls "$tmp/half" | grep -c tmp)" = step-000000010 ]
else
    echo "skipped: a save that fails on one rank (this user may not mount)"
fi

# ---- Only rank 0 prints help and samples.
check "one of 2 ranks prints the help" [ "$(ranks 2 --help 2>&1 | grep -c '^usage')" -eq 1 ]
train 3 sample "$tmp/qwen2" $data --batch-size 1 --num-steps 2 --sample-every 1 --max-tokens 8 &&
    check "one of 3 ranks prints the samples" [ "$(grep -c '^sample after step' "$tmp/sample.out")" -eq 2 ]

# ---- Memory plans of 64 and 512 ranks, made by one process. A rank's shard must be the parameters divided by the
# ranks, or up to 1% larger.
planned() {  # $1 model, $2 ranks
    ./train_fp8 "$1" --dry-run --world-size "$2" --sequence-length 4096 >"$tmp/plan.out" 2>&1
    check "$1 on $2 ranks has a memory plan: $(tail -n 2 "$tmp/plan.out")" grep -q '^  total ' "$tmp/plan.out"
    check "$1 on $2 ranks: a rank's shard is its share of the parameters" awk -v w="$2" \
        '/^parameters /{p = $2} /^shard of a rank/{s = $5} END { exit !(p > 0 && s * w >= p && s * w / p < 1.01) }' \
        "$tmp/plan.out"
}
planned llama3.1-70b 64
planned llama3.1-405b 512
finish
