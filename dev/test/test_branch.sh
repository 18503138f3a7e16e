#!/usr/bin/env bash
# Tests --branch on the CPU trainer: the same bits as the run that it branches from, precisions that change, resumes,
# the lineage in the log, and what is refused. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/cpu_trainer.sh
build/synth_stories --out "$tmp/s" --bytes 30000 --seed 3 >/dev/null
common="tiny --train-data $tmp/s_train.bin --sequence-length 32 --batch-size 2 --learning-rate 3e-3 --deterministic"

# run: $1 the run's name, which is that of its folder, $2 --num-steps, the rest: options. Saves every 3 steps.
run() {
    local name=$1 steps=$2
    shift 2
    trains $common --num-steps "$steps" --checkpoint-dir "$tmp/$name" --log-dir "$tmp/$name" \
        --checkpoint-every 3 --keep-checkpoints 9 "$@"
}
# Steps, losses, norms and rates of run $1, from step $2 on.
steps() {
    sed -n 's/{"type": "step", \(.*\), "ms".*/\1/p' "$tmp/$1/log.jsonl" | awk -F'[:,]' -v first="$2" '$2 >= first'
}
# True if two runs have equal steps from step $3 on, finite, and equal checkpoints after step 8.
same() {
    local lines file
    lines=$(steps "$1" "$3")
    equal "$lines" "$(steps "$2" "$3")" && equal "$(grep -c 'loss": [0-9]' <<<"$lines")" $((9 - $3)) || return
    for file in model optimizer; do
        cmp "$tmp/$1/step-00000008/$file.safetensors" "$tmp/$2/step-00000008/$file.safetensors" || return
    done
}
branches() { grep '"type": "settings"' "$tmp/$1/log.jsonl" | tail -n 1 | grep -o '"branches": \[[^]]*\]'; }
stretch() { echo "{\"step\": $1, \"precision\": \"$2\", \"fp8_recipe\": $3, \"rounding_seed\": $4}"; }

# ---- A branch with the settings of its trunk has the trunk's bits, and changes nothing of the trunk.

check "the trunk trains" run trunk 8
before=$(find "$tmp/trunk" -type f -exec md5sum {} + | sort)
trunk=$tmp/trunk/step-00000003
check "a branch with the same settings trains" run same 8 --branch "$trunk"
check "it names its checkpoint" holds "$out" "branch: continuing from $trunk"
check "it prints the lineage" holds "$out" "lineage: bf16 to step 3 (rounding seed 42), then this run"
check "it tells of no setting" lacks "$out" "in the checkpoint"
check "it has the bits of the trunk" same trunk same 4
check "its log has the lineage" equal "$(branches same)" "\"branches\": [$(stretch 3 bf16 null 42)]"
check "its log has the checkpoint" holds "$tmp/same/log.jsonl" "\"branched_from\": \"$trunk\""
check "the trunk has no lineage" equal "$(branches trunk)" '"branches": []'
check "a branch with another --rounding-seed trains" run seed 8 --branch "$trunk" --rounding-seed 7
check "it tells of it" holds "$out" "branch: --rounding-seed is 42 in the checkpoint, 7 now"
check "it has other bits" eval '! same trunk seed 4 >/dev/null'

# ---- Other precisions. Each branch is run to its end, and stopped after step 6 and resumed.

fp8="--precision fp8"
delayed="$fp8 --fp8-recipe delayed --fp8-amax-history 4"
check "a trunk in FP8 trains" run tensorwise 8 $fp8
check "a trunk with delayed scaling trains" run delayed 8 $delayed
while IFS='|' read -r name from options recipe; do
    check "$name: it trains" run "$name" 8 --branch "$tmp/$from/step-00000003" $options --beta1 0.8
    check "$name: --beta1 is told" holds "$out" "branch: --beta1 is 0.9 in the checkpoint, 0.8 now"
    check "$name: told settings are logged" holds "$tmp/$name/log.jsonl" '"beta1": "0.9"}'
    check "$name: the first part trains" run "$name-parts" 6 --branch "$tmp/$from/step-00000003" $options --beta1 0.8
    check "$name: it resumes" run "$name-parts" 8 --branch "$tmp/gone" $options --beta1 0.8 --resume
    check "$name: it resumes from its own checkpoint" \
        holds "$out" "resume: continuing from $tmp/$name-parts/step-00000006"
    check "$name: the resumed run has the bits of the unbroken one" same "$name" "$name-parts" 4
    check "$name: its lineage survives the resume" \
        equal "$(branches "$name-parts")" "\"branches\": [$(stretch 3 "${recipe% *}" "${recipe#* }" 42)]"
done <<CASES
to-bf16|tensorwise|--precision bf16|fp8 "tensorwise"
to-fp8|trunk|$fp8|bf16 null
to-delayed|trunk|$delayed|bf16 null
from-delayed|delayed|--precision bf16|fp8 "delayed"
other-history|delayed|$delayed --fp8-amax-history 5|fp8 "delayed"
CASES
check "precisions are told" holds "$tmp/to-fp8/log.jsonl" '"checkpoint_settings": {"precision": "bf16"'
check "a branch without FP8 has no state of delayed scaling" \
    eval '[ ! -e "$tmp/from-delayed/step-00000008/fp8_state.safetensors" ]'
check "a branch with the same delayed scaling trains" run delayed-same 8 $delayed --branch "$tmp/delayed/step-00000003"
check "it has the bits of its trunk" same delayed delayed-same 4

# ---- A branch of a branch, from the newest checkpoint of a folder that is whole.

cp -r "$tmp/to-fp8" "$tmp/damaged"
echo >>"$tmp/damaged/step-00000008/model.safetensors"
check "a branch of a branch trains" run twice 8 --branch "$tmp/damaged" --rounding-seed 5
check "it skips a damaged checkpoint" holds "$out" "branch: skipping $tmp/damaged/step-00000008: "
check "it has both stretches" equal "$(branches twice)" \
    "\"branches\": [$(stretch 3 bf16 null 42), $(stretch 6 fp8 '"tensorwise"' 42)]"

# ---- Refusals.

# no_branch: status $1, text $2, the rest: options of a run that would save in $tmp/refused.
no_branch() { refuses "$1" "$2" $common --num-steps 8 --checkpoint-dir "$tmp/refused" "${@:3}"; }
check "another seed is refused" no_branch 1 "cannot branch from $trunk with other settings:
  --seed is 42 in the checkpoint, 43 now" --branch "$trunk" --seed 43
while IFS='|' read -r options text; do
    check "$options is refused" no_branch 1 "--$text now" --branch "$trunk" $options
done <<CASES
--sequence-length 16|sequence-length is 32 in the checkpoint, 16
--shuffle off|shuffle is on in the checkpoint, off
--optimizer-state fp32|optimizer-state is bf16 in the checkpoint, fp32
--master-weights fp32|master-weights is bf16 in the checkpoint, fp32
--precision fp32|master-weights is bf16 in the checkpoint, fp32
--train-data $tmp/s_val.bin|train-data has 30112 tokens in the checkpoint, 1627
CASES
mkdir "$tmp/model"
sed 's/"intermediate_size": [0-9]*/"intermediate_size": 112/' "$trunk/config.json" >"$tmp/model/config.json"
check "another model is refused" eval 'common="$tmp/model ${common#tiny }" no_branch 1 \
    "cannot branch from $trunk: it is a checkpoint of another model:" --branch "$trunk"'
check "a missing checkpoint is refused" no_branch 1 "--branch $tmp/none: it is missing" --branch "$tmp/none"
check "a folder without checkpoints is refused" no_branch 1 "--branch $tmp/model: no checkpoint there can be used" \
    --branch "$tmp/model"
check "a damaged checkpoint is refused" no_branch 1 "model.safetensors has " --branch "$tmp/damaged/step-00000008"
check "the trunk's folder is refused" no_branch 2 "share a folder" --branch "$tmp/trunk" --checkpoint-dir "$tmp/trunk"
check "the trunk's folder is refused with --resume" \
    no_branch 2 "share a folder" --branch "$trunk/" --checkpoint-dir "$tmp/./trunk" --resume
rm -rf "$tmp/refused"
cp -r "$tmp/trunk" "$tmp/refused"
check "--resume refuses another precision" no_branch 1 "--precision is bf16 in the checkpoint, fp8 now
use the checkpoint's settings, or go on with these settings by --branch $tmp/refused/step-00000008 and another" \
    $fp8 --resume
check "nothing of the trunk has changed" equal "$before" "$(find "$tmp/trunk" -type f -exec md5sum {} + | sort)"
finish
