#!/usr/bin/env bash
# Tests train_fp8cu on several GPUs of one host: sharding strategies and recipes against one GPU, copy engines against
# NCCL, FP8 all-gather on and off, FP8 gradients, resuming on other numbers of GPUs, and memcheck. Uses 4 GPUs, or 2 if
# there are fewer; two ranks share a single GPU. Needs ./train_fp8cu, ./train_fp8, build/synth_stories, mpirun and
# python3. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/gpu_lines.sh
. dev/test/lib/gpu_ranks_setup.sh
# True if $tmp/refused.log has the error $1 and no step.
refuses_with() {
    grep -q -- "^error: .*$1" "$tmp/refused.log" && ! grep -q "^step " "$tmp/refused.log" && return
    tail -n 4 "$tmp/refused.log"
    return 1
}

# ---- Strategies against one GPU. A batch has one sequence. All ranks compute a sequence with equal bits, so only the
# order in which gradients are added differs (a bf16 sum is rounded by up to 2^-8). The first loss does not depend on
# gradients: it differs only by the rounding of the fp32 sum over sequences. In the first gradient, each element may
# differ by 2^-8, and its norm by much less. The last loss comes after $steps steps with such differences.
for precision in bf16 fp8; do run "one_$precision" 1 $common --precision $precision --num-steps $steps $(split 1); done
against_one() {
    local name=$1 precision=$2
    shift 2
    run "$name" $W $common --precision $precision --num-steps $steps $(split $W) "$@" || return
    near "first loss of $name and of one GPU" "$(field "$name" loss 1)" "$(field one_$precision loss 1)" 3e-6
    near "first gradient norm of $name and of one GPU" "$(field "$name" norm 1)" "$(field one_$precision norm 1)" 3e-3
    near "last loss of $name and of one GPU" "$(field "$name" loss $steps)" "$(field one_$precision loss $steps)" 2e-3
    near "validation loss of $name and of one GPU" "$(validation "$name")" "$(validation one_$precision)" 2e-3
}
for precision in bf16 fp8; do
    for sharding in full grad_op none; do against_one ${precision}_$sharding $precision --sharding $sharding; done
    against_one ${precision}_hybrid $precision --sharding hybrid --shard-size $((W / 2))
done
against_one bf16_full_fp32 bf16 --sharding full --reduce-dtype fp32 --copy-engines off
against_one bf16_none_fp32 bf16 --sharding none --reduce-dtype fp32
# All runs above clip gradients, so the norm is computed before AdamW. Without clipping AdamW computes it, with the same
# result up to rounding.
run one_unclipped 1 ${common/--grad-clip 1/} --precision bf16 --num-steps $steps $(split 1)
for sharding in full grad_op none "hybrid --shard-size $((W / 2))"; do
    name=${sharding%% *}
    run unclipped $W ${common/--grad-clip 1/} --precision bf16 --num-steps $steps $(split $W) --sharding $sharding ||
        continue
    near "$name: gradient norm computed by AdamW and before it" \
        "$(field unclipped norm 1)" "$(field bf16_$name norm 1)" 1e-5
    near "$name, unclipped: last loss of $W GPUs and of one" \
        "$(field unclipped loss $steps)" "$(field one_unclipped loss $steps)" 2e-3
done
# ---- Without --grad-clip, --optimizer-in-backward changes no bit.
for options in "full" "full --copy-engines off" "grad_op" "none --reduce-dtype fp32" \
    "full --optimizer-state msamp --master-weights fp16" "none --optimizer-state msamp" \
    "grad_op --copy-engines off --optimizer-state msamp --master-weights fp16-stochastic" \
    "hybrid --shard-size $((W / 2))"; do
    run="${common/--grad-clip 1/} --precision fp8 --num-steps $steps --val-steps 16 --sharding $options"
    run late $W $run && run early $W $run --optimizer-in-backward &&
        same "$options: without and with --optimizer-in-backward" late early
done
# --optimizer-in-backward with --grad-clip: the norms by which W GPUs and one GPU clip differ only by the order and the
# rounding of sums. The clip value of 1000000 is above all norms.
early="${common/--grad-clip 1/} --precision bf16 --num-steps $steps --optimizer-in-backward"
run one_clipped 1 $early --batch-size $W --grad-clip 0.2
for sharding in full "full --copy-engines off" grad_op "none" "hybrid --shard-size $((W / 2))"; do
    run unclipped $W $early --sharding $sharding && run high $W $early --sharding $sharding --grad-clip 1000000 &&
        same "$sharding, in backward: without and with a --grad-clip above all norms" unclipped high
    run clipped $W $early --sharding $sharding --batch-size 1 --grad-clip 0.2 || continue
    near "$sharding, in backward with --grad-clip 0.2: last loss of $W GPUs and of one" \
        "$(field clipped loss $steps)" "$(field one_clipped loss $steps)" 2e-3
done
# ---- Ranks that mpirun did not start find each other through a file.
meeting="--precision bf16 --num-steps $steps $(split $W) --sharding full --init-from file:$tmp/meet"
for ((r = 0; r < W; r++)); do
    RANK=$r WORLD_SIZE=$W timeout 120 ./train_fp8cu $common $meeting >"$tmp/met$r.log" 2>&1 &
done
wait
same "ranks with and without mpirun" bf16_full met0
# ---- Copy engines and NCCL. Unless --copy-engines is off, ranks of a shard group use copy engines if the GPUs can. For
# two ranks, copy engines and NCCL give equal fp32 sums; for more ranks they add in different orders.
if grep -q "^transport copy engines" "$tmp/bf16_full.log"; then
    ok "copy engines are used"
    run copies $W $common --precision bf16 --num-steps $steps $(split $W) --copy-engines on &&
        same "--copy-engines auto and on" bf16_full copies
else
    bad "copy engines are not used: $(grep -m1 '^transport' "$tmp/bf16_full.log")" \
        "$(grep -m1 '^no copy engines' "$tmp/bf16_full.log")"
fi
for sharding in full grad_op; do
    against_one nccl_bf16_$sharding bf16 --sharding $sharding --copy-engines off
    against_one nccl_fp8_$sharding fp8 --sharding $sharding --copy-engines off --reduce-dtype fp32
    [ $W -eq 2 ] || continue  # sums of two ranks are equal in any order
    run fp32_$sharding $W $common --precision fp8 --num-steps $steps $(split $W) --sharding $sharding \
        --copy-engines on --reduce-dtype fp32 &&
        same "$sharding: copy engines and NCCL in fp32" fp32_$sharding nccl_fp8_$sharding
done
check "--copy-engines off uses NCCL: $(grep -m1 '^transport' "$tmp/nccl_bf16_full.log")" \
    grep -q "^transport NCCL" "$tmp/nccl_bf16_full.log"
# With NCCL_P2P_DISABLE=1 the GPUs do not access each other's memory directly. Then copy engines are off, and
# --copy-engines on is an error. In fp32, sums of two ranks are equal with every transport.
pair="$common --precision bf16 --num-steps $steps $(split 2) --reduce-dtype fp32"
run pair 2 $pair
export NCCL_P2P_DISABLE=1
run no_peers 2 $pair && same "without and with NCCL_P2P_DISABLE=1" pair no_peers
check "NCCL_P2P_DISABLE=1: the run prints why it uses no copy engines" \
    holds "$tmp/no_peers.log" "no copy engines: NCCL_P2P_DISABLE=1"
check "NCCL_P2P_DISABLE=1: the run uses NCCL" holds "$tmp/no_peers.log" "transport NCCL"
timeout 120 $launcher -np 2 ./train_fp8cu $pair --copy-engines on >"$tmp/refused.log" 2>&1 </dev/null
check "NCCL_P2P_DISABLE=1: --copy-engines on is refused" refuses_with "--copy-engines on: NCCL_P2P_DISABLE=1"
unset NCCL_P2P_DISABLE
# --check-links changes no loss, and finds no slow link on one host.
run links $W $common --precision bf16 --num-steps $steps $(split $W) --check-links &&
    same "with --check-links" bf16_full links
[ -n "$share" ] || check "--check-links: no GPU and no link is slow: $(sed -n '/^links/,/^$/p' "$tmp/links.log")" \
    holds "$tmp/links.log" "no rank and no link was found slow"
# Runs as on two hosts: NCCL takes ranks with different NCCL_HOSTID for ranks of different hosts and moves data by TCP.
# With shard groups of one rank, gradients are only reduced over replicas. Otherwise copy engines move data inside a
# shard group, and NCCL between groups.
as_hosts='NCCL_HOSTID=host$((2 * OMPI_COMM_WORLD_RANK / OMPI_COMM_WORLD_SIZE)) exec ./train_fp8cu "$@"'
for size in $(printf '%s\n' 1 $((W / 2)) | uniq); do
    name=apart_$size
    trains $name $launcher -np $W -x NCCL_P2P_DISABLE=$((size == 1)) -x NCCL_SHM_DISABLE=1 -x NCCL_IB_DISABLE=1 \
        -x NCCL_SOCKET_IFNAME=lo bash -c "$as_hosts" sh $common --precision fp8 --num-steps $steps $(split $W) \
        --sharding hybrid --shard-size $size --check-links
    near "first loss of $name and of one GPU" "$(field $name loss 1)" "$(field one_fp8 loss 1)" 3e-6
    near "last loss of $name and of one GPU" "$(field $name loss $steps)" "$(field one_fp8 loss $steps)" 2e-3
    check "$name: NCCL reaches the other host over the network: $(sed -n '/^links/,/^$/p' "$tmp/$name.log")" \
        holds "$tmp/$name.log" "pairs over network"
    [ $size -eq 1 ] || check "$name: copy engines inside, NCCL across: $(grep ^transport "$tmp/$name.log")" \
        grep -q '^transport copy engines; .*over replicas in .* by NCCL' "$tmp/$name.log"
done
# ---- Ranks that choose their GPUs.
if [ -n "$share" ]; then
    echo "skipped: ranks that see GPUs of their own: there is one GPU"
else
    # Two ranks, each with a CUDA_VISIBLE_DEVICES of its own. $1 that of rank 0, $2 that of rank 1, then the trainer's
    # arguments.
    as_seen='export CUDA_VISIBLE_DEVICES=$(shift $OMPI_COMM_WORLD_LOCAL_RANK; echo $1); shift 2; exec ./train_fp8cu'
    as_seen="$as_seen \"\$@\""
    seeing() { $launcher -np 2 sh -c "$as_seen" sh "$@"; }
    export -f seeing
    export launcher as_seen
    IFS=, read -r a b _ <<<"$visible"
    for gpus_seen in "$a $b" "$b $a" "$b,$a $b,$a"; do
        trains seeing bash -c 'seeing "$@"' bash $gpus_seen $pair && same "ranks that see GPUs $gpus_seen" pair seeing
        grep -m1 -E "^(no copy engines|transport)" "$tmp/seeing.log"
    done
    for gpus_seen in "$a $a" "$a,$b $b,$a"; do
        timeout 120 bash -c 'seeing "$@"' bash $gpus_seen $pair >"$tmp/refused.log" 2>&1 </dev/null
        check "ranks that see GPUs $gpus_seen are refused: both use the same GPU" refuses_with \
             "ranks 0 and 1 on .* have the same GPU, GPU-.* needs its own GPU"
    done
fi
# ---- Hybrid has three communicators. NCCL allocates part of their memory at their first use. The memory plan must
# cover all memory that a GPU uses after a step.
if [ $W -lt 4 ]; then
    echo "skipped: the memory of hybrid's three communicators: 2 GPUs need only one communicator"
elif run hybrid_memory $W $common --precision fp8 --num-steps 2 $(split $W) --sharding hybrid --shard-size 2 \
    --log-dir "$tmp/hybrid"; then
    planned=$(sed -n 's/.*"total_bytes": *\([0-9]*\).*/\1/p' "$tmp/hybrid/log.jsonl" | head -n 1)
    used=$(sed -n 's/.*"memory_bytes": *\([0-9]*\).*/\1/p' "$tmp/hybrid/log.jsonl" | sort -n | tail -n 1)
    echo "hybrid: ${used:-no} bytes are in use after a step, and ${planned:-no} planned"
    check "hybrid uses no more memory than planned" [ "${used:-$((1 << 62))}" -le "${planned:-0}" ]
fi
# ---- log.jsonl says where time went, also how long ranks waited for each other.
run times $W $common --precision fp8 --num-steps 12 $(split $W) --log-dir "$tmp/times" &&
    check "the times and losses in log.jsonl add up; the last validation's losses: $(
        python3 dev/test/lib/check_log.py "$tmp/times/log.jsonl" $W 2>&1)" \
        python3 dev/test/lib/check_log.py "$tmp/times/log.jsonl" $W
# ---- Recipes that all-gather weights in bf16. (gpu_bits.sh compares all recipes with one GPU.)
for recipe in $(./train_fp8cu --list recipes); do
    [ $recipe != mxfp8 ] || continue # Hopper has no GEMMs for it
    all="$common --precision fp8 --fp8-recipe $recipe --num-steps $steps $(split $W)"
    ./train_fp8cu $all --dry-run --json | grep -q '"fp8-all-gather": "on"' && continue
    run full $W $all && run grad_op $W $all --sharding grad_op --recompute layer &&
        same "$recipe: --sharding full, and grad_op with recompute" full grad_op
done
echo "($SECONDS s)"

# ---- FP8 all-gather on and off: equal bits
for sharding in full grad_op; do
    run off_$sharding $W $common --precision fp8 --num-steps $steps $(split $W) --sharding $sharding \
        --fp8-all-gather off && same "$sharding: --fp8-all-gather on and off" fp8_$sharding off_$sharding
done
for more in "--fp8-recipe delayed --fp8-amax-history 3" "--fp8-filter first,down" \
    "--fast" "--fast --fp8-lm-head off --fp8-filter first,down" \
    "--fp8-recipe delayed --fp8-filter last --recompute layer"; do
    for gather in on off; do
        run gather_$gather $W $common --precision fp8 $more --num-steps $steps $(split $W) --fp8-all-gather $gather
    done
    same "$more: --fp8-all-gather on and off" gather_on gather_off
done

# ---- Gradients in FP8. On one GPU the gradient of a micro-step is added to the sum in fp32, and the result is cast.
# Over ranks the values of codes are added: each code, and the sum, is off by up to 2^-4 of it, up or down.
run one_fp8_gradients 1 $common --precision fp8 --num-steps $steps $(split 1) --grad-accum-dtype fp8
codes="$common --precision fp8 --num-steps $steps $(split $W) --reduce-dtype fp8"
for sharding in full grad_op none "hybrid --shard-size $((W / 2))"; do
    name=codes_${sharding%% *}
    run $name $W $codes --sharding $sharding || continue
    near "--reduce-dtype fp8, $sharding: first loss of $W GPUs and of one" \
        "$(field $name loss 1)" "$(field one_fp8_gradients loss 1)" 3e-6
    near "--reduce-dtype fp8, $sharding: first gradient norm of $W GPUs and of one" \
        "$(field $name norm 1)" "$(field one_fp8_gradients norm 1)" 1e-2
    near "--reduce-dtype fp8, $sharding: last loss of $W GPUs and of one" \
        "$(field $name loss $steps)" "$(field one_fp8_gradients loss $steps)" 3e-3
    run codes_again $W $codes --sharding $sharding && same "--reduce-dtype fp8, $sharding: two runs" $name codes_again
done
same "--reduce-dtype fp8: --sharding full and grad_op" codes_full codes_grad_op
run codes_bf16 $W ${codes/--reduce-dtype fp8/--reduce-dtype bf16} --grad-accum-dtype fp8 &&
    near "--grad-accum-dtype fp8 --reduce-dtype bf16: last loss of $W GPUs and of one" \
        "$(field codes_bf16 loss $steps)" "$(field one_fp8_gradients loss $steps)" 3e-3
run codes_bf16_none $W ${codes/--reduce-dtype fp8/--reduce-dtype bf16} --grad-accum-dtype fp8 --sharding none &&
    near "--grad-accum-dtype fp8 --reduce-dtype bf16, --sharding none: last loss of $W GPUs and of one" \
        "$(field codes_bf16_none loss $steps)" "$(field one_fp8_gradients loss $steps)" 3e-3
# The CPU trainer sums codes by the same rule. But its GEMMs add in another order, so that some codes differ.
trains codes_cpu $launcher -np $W -x OMP_NUM_THREADS=2 ./train_fp8 ${codes/small/tiny} --fp8-recipe tensorwise
run codes_tiny $W ${codes/small/tiny} --fp8-recipe tensorwise &&
    for step in 1 $steps; do
        near "--reduce-dtype fp8: loss $step of $W GPUs and of $W CPU ranks" \
            "$(field codes_tiny loss $step)" "$(field codes_cpu loss $step)" 1e-3
    done
# Copy engines and NCCL add codes in the order of ranks, so their sums are equal. Gradients of vectors and of the root
# stay bf16. On two ranks with one micro-step their sum is one addition, rounded once, and so is equal too.
for options in "--reduce-dtype fp8" "--msamp O1" "--msamp O2" "--msamp O3"; do
    [ $W -eq 2 ] || break
    one_micro="$common --precision fp8 --num-steps $steps --val-steps 16 $options"
    run levels $W $one_micro && run levels_nccl $W $one_micro --copy-engines off &&
        same "$options: copy engines and NCCL" levels levels_nccl
done
run codes_save $W $codes --msamp O2 --num-steps 4 --checkpoint-dir "$tmp/ck_codes"
run codes_whole $W $codes --msamp O2
for ranks in $W 1; do
    rm -rf "$tmp/ck_now" && cp -r "$tmp/ck_codes" "$tmp/ck_now"
    run codes_resumed $ranks ${codes/$(split $W)/$(split $ranks)} --msamp O2 --checkpoint-dir "$tmp/ck_now" --resume ||
        continue
    if [ $ranks -eq $W ]; then
        same "--msamp O2: an unbroken and a resumed run" codes_whole codes_resumed $((steps - 4 + 1))
    else
        near "--msamp O2: first loss of an unbroken run and of one resumed on one GPU" \
            "$(field codes_resumed loss 1)" "$(field codes_whole loss 5)" 3e-6
    fi
done
echo "($SECONDS s)"

# ---- An untied embedding whose slices end in the middle of a row, and vectors that do not fill their slices. With one
# micro-step per step, the gathered embedding lies in the memory of the root's gradient; with two it does not. With
# T 64 all ranks together have fewer tokens than the embedding has rows, so each rank computes its part of the
# embedding's gradient from the input gradients of all ranks; with T 256 the embedding's gradient is reduced.
mkdir "$tmp/untied"
cat >"$tmp/untied/config.json" <<'END'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 327, "hidden_size": 80,
 "intermediate_size": 208, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
 "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false,
 "hidden_act": "silu"}
END
for case in "1 64" "2 64" "2 256"; do
    micro=${case% *} name="untied, $micro micro-steps of ${case#* }"
    untied="${common/#small/$tmp/untied} --precision bf16 --num-steps $steps --val-steps 4"
    untied="$untied --sequence-length ${case#* } --grad-accumulation-steps"
    rm -rf "$tmp/ck_untied"
    run untied_one 1 $untied $((micro * W)) && run untied $W $untied $micro || continue
    near "first loss of $name and of one GPU" "$(field untied loss 1)" "$(field untied_one loss 1)" 3e-6
    near "first gradient norm of $name and of one GPU" "$(field untied norm 1)" "$(field untied_one norm 1)" 3e-3
    near "last loss of $name and of one GPU" "$(field untied loss $steps)" "$(field untied_one loss $steps)" 2e-3
    run untied_save $W $untied $micro --num-steps 4 --checkpoint-dir "$tmp/ck_untied"
    run untied_resume $W $untied $micro --checkpoint-dir "$tmp/ck_untied" --resume
    same "$name: an unbroken and a resumed run" untied untied_resume $((steps - 4 + 1))
    run untied_nccl $W $untied $micro --copy-engines off &&
        near "last loss of $name with NCCL and of one GPU" \
            "$(field untied_nccl loss $steps)" "$(field untied_one loss $steps)" 2e-3
done

# ---- Delayed scaling updates its scales after each step, on any number of GPUs.
delayed="$common --precision fp8 --fp8-recipe delayed --fp8-amax-history 3"
run delayed $W $delayed --num-steps $steps $(split $W)
run delayed_save $W $delayed --num-steps 4 $(split $W) --checkpoint-dir "$tmp/ck_delayed"
run delayed_resume $W $delayed --num-steps $steps $(split $W) --checkpoint-dir "$tmp/ck_delayed" --resume
same "delayed scaling: an unbroken and a resumed run" delayed delayed_resume $((steps - 4 + 1))

# A skipped step does not change the state of delayed scaling on any rank. The rank that holds the spoiled weight names
# it.
run whole 1 $common --precision bf16 --num-steps 1 $(split 1) --export-hf "$tmp/spoiled" &&
    spoil "$tmp/spoiled" model.layers.0.self_attn.q_proj.weight
for sharding in full none; do
    rm -rf "$tmp/ck_skipped"
    $launcher -np $W ./train_fp8cu ${common/#small/$tmp/spoiled} --no-verify --precision fp8 \
        --fp8-recipe delayed --fp8-amax-history 3 --num-steps 20 $(split $W) --sharding $sharding --on-nonfinite skip \
        --checkpoint-dir "$tmp/ck_skipped" --checkpoint-every 1 --keep-checkpoints 1000 >"$tmp/skipped.log" 2>&1
    skips_leave_no_trace "delayed, $sharding, all steps skipped" "$tmp/skipped.log" "$tmp/ck_skipped"
    warning="step 1 skipped: the gradient norm is not finite. The problem begins in the attention block of layer 0"
    warning="$warning, in the forward pass; the largest weight there is 3.38953e+38"
    warning="$warning, in model.layers.0.self_attn.q_proj.weight, element 0"
    check "$sharding: the warning names the huge weight: $(grep -m1 '^warning: step 1 ' "$tmp/skipped.log")" \
        grep -q "^warning: $warning" "$tmp/skipped.log"
done

# ---- Checkpoints: saved by W ranks after 4 steps, continued by W ranks, by half as many, and by one.
run save $W $common --precision fp8 --num-steps 4 $(split $W) --checkpoint-dir "$tmp/ck"
for ranks in $W $((W / 2)) 1; do
    [ -e "$tmp/resume_$ranks.log" ] && continue
    rm -rf "$tmp/ck_now" && cp -r "$tmp/ck" "$tmp/ck_now"
    run resume_$ranks $ranks $common --precision fp8 --num-steps $steps $(split $ranks) --checkpoint-dir "$tmp/ck_now" \
        --resume || continue
    same "an unbroken run and one resumed on $ranks GPUs" fp8_full resume_$ranks $((steps - 4 + 1))
done
echo "($SECONDS s)"

# ---- memcheck of 2 ranks. NCCL makes CUDA calls that may fail, so errors of API calls are not reported.
if ! command -v compute-sanitizer >/dev/null; then
    echo "skipped: compute-sanitizer is not installed"
else
    timeout 100 $launcher -np 2 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        ./train_fp8cu tiny --train-data "$tmp/synth_train.bin" --precision fp8 --sequence-length 160 --batch-size 2 \
        --grad-accumulation-steps 2 --num-steps 2 --deterministic --reduce-dtype fp8 $share >"$tmp/memcheck.log" 2>&1
    status=$?
    if [ $status -eq 0 ] && [ "$(grep -c 'ERROR SUMMARY: 0 errors' "$tmp/memcheck.log")" -eq 2 ]; then
        ok "memcheck of 2 ranks: 0 errors"
    else
        bad "memcheck: status $status: $(grep -E -m12 '=====|error' "$tmp/memcheck.log")"
    fi
fi
echo "($SECONDS s)"
finish
