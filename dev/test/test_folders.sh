#!/usr/bin/env bash
# Tests how a run treats folders and files: links, folders of other programs, damaged models, saves that fail, limits of
# the process, names with control characters. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. dev/test/lib/cpu_trainer.sh
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
build/synth_stories --out "$tmp/s" --bytes 30000 --seed 3 >/dev/null
run="./train_fp8 tiny --train-data $tmp/s_train.bin --sequence-length 16"

# trains: a run succeeds. refuses: a run ends with status 1 and one error, and its output contains the text $1. ranks:
# runs a command as 2 ranks.
trains() { timeout 60 "$@" >"$out" 2>&1 || { tail -n 3 "$out"; false; }; }
refuses() {
    local text=$1
    shift
    timeout 60 "$@" >"$out" 2>&1
    equal $? 1 && holds "$out" "$text" && equal "$(grep -c '^error: ' "$out")" 1
}
ranks() { timeout 60 mpirun --oversubscribe -np 2 "$@"; }

# ---- Links.

mkdir "$tmp/user"
echo mine >"$tmp/user/thesis"
mkdir "$tmp/ck"
ln -s ../user "$tmp/ck/step-00000001.tmp"
check "a run trains with a link among the leftovers of saves" trains $run --num-steps 1 --checkpoint-dir "$tmp/ck"
check "a run prints that it does not remove the link" holds "$out" \
    "interrupted save or removal: $tmp/ck/step-00000001.tmp is not removed: it is a link to ../user"
check "the link still leads to its folder" equal "$(cat "$tmp/ck/step-00000001.tmp/thesis")" mine
check "a checkpoint is saved beside the link" test -f "$tmp/ck/step-00000001/trainer.json"

mv "$tmp/ck/step-00000001" "$tmp/archive"
ln -s ../archive "$tmp/ck/step-00000001"
before=$(ls -A "$tmp/archive")
check "a run resumes where a checkpoint was moved and linked back" \
    trains $run --num-steps 6 --checkpoint-every 1 --keep-checkpoints 1 --checkpoint-dir "$tmp/ck" --resume
check "the run continues from the linked checkpoint" holds "$out" "resume: continuing from $tmp/ck/step-00000001"
check "the run prints once that it does not remove the linked checkpoint" equal \
    "$(grep -c 'step-00000001 is older .*, but is not removed: it is a link to' "$out")" 1
check "the linked checkpoint keeps all its files" equal "$(ls -A "$tmp/archive")" "$before"
check "other old checkpoints are removed" equal "$(ls "$tmp/ck")" "step-00000001
step-00000001.tmp
step-00000006"
check "a run that names steps trains" trains $run --num-steps 6 --checkpoint-every 1,2,4 --keep-checkpoints 1 \
    --checkpoint-dir "$tmp/named"
check "the checkpoints of named steps are kept" \
    equal "$(echo $(ls "$tmp/named"))" "step-00000001 step-00000002 step-00000004 step-00000006"
saves="$run --checkpoint-every 1 --keep-checkpoints 1 --checkpoint-dir $tmp/noted"
trains $saves --num-steps 1
mkdir "$tmp/noted/step-00000001/notes"
before=$(ls -A "$tmp/noted/step-00000001")
check "a run saves beside an old checkpoint that somebody has put a folder into" trains $saves --num-steps 3 --resume
check "the run says once that it keeps that checkpoint" equal \
    "$(grep -c 'step-00000001 is older .*, but is not removed: it holds the folder notes' "$out")" 1
check "that checkpoint keeps all its files" equal "$(ls -A "$tmp/noted/step-00000001")" "$before"

# ---- Files that are no files, in the newest checkpoint: the one before it is resumed.

for kind in pipe hole folder; do
    rm -rf "$tmp/odd" && trains $run --num-steps 2 --checkpoint-every 1 --checkpoint-dir "$tmp/odd"
    file=$tmp/odd/step-00000002/trainer.json
    rm "$file"
    case $kind in pipe) mkfifo "$file" ;; hole) truncate -s 1T "$file" ;; folder) mkdir "$file" ;; esac
    check "a $kind in place of trainer.json: a run resumes from the checkpoint before it" \
        trains $run --num-steps 2 --checkpoint-dir "$tmp/odd" --resume
    check "a $kind in place of trainer.json is named" \
        holds "$out" "skipping $tmp/odd/step-00000002: cannot read $file: "
done
mkdir "$tmp/model" && mkfifo "$tmp/model/config.json"
check "a pipe in place of config.json is refused" refuses "config.json: it is not a regular file" \
    ./train_fp8 "$tmp/model" --train-data "$tmp/s_train.bin"
ln -s ck "$tmp/dir"
ln -s missing "$tmp/lost"
ln -s loop "$tmp/loop"
check "a run takes folders that are links" \
    trains $run --num-steps 7 --checkpoint-dir "$tmp/dir" --log-dir "$tmp/dir" --resume
check "a link to nothing is refused as --checkpoint-dir" \
    refuses "it is there already and is a link to missing, which cannot be followed" $run --checkpoint-dir "$tmp/lost"
check "a link to itself is refused as --log-dir" \
    refuses "is a link to loop, which cannot be followed" $run --log-dir "$tmp/loop"
check "a folder inside a file is refused as --export-hf" \
    refuses "cannot make folder $tmp/s.tokenizer: it is there already and is a file" \
    $run --export-hf "$tmp/s.tokenizer/x"

mkdir "$tmp/log"
ln -s ../user/thesis "$tmp/log/log.jsonl"
check "a run trains if log.jsonl is a link" trains $run --num-steps 1 --log-dir "$tmp/log"
check "the file that log.jsonl links to is not written" equal "$(cat "$tmp/user/thesis")" mine
ln -sf ../user/new "$tmp/log/log.jsonl"
check "a run trains if log.jsonl is a link to nothing" trains $run --num-steps 1 --log-dir "$tmp/log"
check "a link to nothing is moved aside, and its target is not made" \
    test ! -e "$tmp/user/new" -a -f "$tmp/log/log.jsonl" -a -L "$tmp/log/log.2.jsonl"

# ---- Folders of another program.

for name in hf.tmp hf.old.tmp; do
    mkdir "$tmp/$name"
    echo '{}' >"$tmp/$name/config.json"
    echo weights >"$tmp/$name/model.safetensors"
    check "an export refuses another program's $name" \
        refuses "$tmp/$name is in the way" $run --num-steps 1 --export-hf "$tmp/hf"
    check "another program's $name stays" equal "$(cat "$tmp/$name/model.safetensors")" weights
    rm -r "${tmp:?}/$name"
    ln -s user "$tmp/$name"
    check "an export refuses a link $name" refuses "$tmp/$name is in the way" $run --num-steps 1 --export-hf "$tmp/hf"
    rm "$tmp/$name"
done
check "the file in the folder that the links lead to stays" equal "$(cat "$tmp/user/thesis")" mine

# ---- MODEL compared with its hashes.

flip() {
    python3 -c 'import sys
with open(sys.argv[1], "r+b") as f:
    f.seek(-9, 2)
    byte = f.read(1)[0]
    f.seek(-9, 2)
    f.write(bytes([byte ^ 1]))' "$1"
}
model="--train-data $tmp/s_train.bin --sequence-length 16 --num-steps 1"
check "a run exports a model" trains $run --num-steps 1 --export-hf "$tmp/hf"
check "other programs stop at the separator of its shards" holds "$tmp/hf/config.json" '"eos_token_id": 256,'
check "a folder of checkpoints is refused as MODEL" \
    refuses "is a folder of checkpoints; give one of them, such as $tmp/ck/step-00000007" ./train_fp8 "$tmp/ck" $model
check "an export trains as MODEL" trains ./train_fp8 "$tmp/hf" $model
for folder in "$tmp/hf" "$tmp/ck/step-00000007"; do
    flip "$folder/model.safetensors"
    check "a damaged MODEL is refused" refuses \
        "MODEL $folder: $folder/model.safetensors is damaged: its XXH64 hash is" ./train_fp8 "$folder" $model
    check "a damaged MODEL is refused before step 1" no_step "$out"
    check "a damaged MODEL trains with --no-verify" trains ./train_fp8 "$folder" $model --no-verify
done
check "a damaged MODEL is refused on 2 ranks" eval '! ranks ./train_fp8 "$tmp/hf" $model >"$out" 2>&1'
check "one of 2 ranks prints that MODEL is damaged" equal "$(grep -c '^error: .*is damaged' "$out")" 1
rm "$tmp/hf/train_fp8.json"
check "a MODEL without hashes trains" trains ./train_fp8 "$tmp/hf" $model

# ---- The tokenizer's files, in checkpoints and exports.

mkdir "$tmp/qwen" "$tmp/shards"
cp "$tmp/archive/config.json" "$tmp/archive/model.safetensors" "$tmp/qwen/"
echo '{"model": 1}' >"$tmp/qwen/tokenizer.json"
cp "$tmp"/s_train.bin "$tmp"/s.tokenizer "$tmp/shards/"
qwen="./train_fp8 $tmp/qwen --train-data $tmp/s_train.bin --sequence-length 16 --checkpoint-dir $tmp/qwen-ck"
check "a run of a folder saves" trains $qwen --num-steps 1
check "its checkpoint has the tokenizer" cmp "$tmp/qwen/tokenizer.json" "$tmp/qwen-ck/step-00000001/tokenizer.json"
rm "$tmp/qwen/tokenizer.json"
check "the run goes on when the folder has lost its tokenizer" \
    trains $qwen --num-steps 2 --resume --keep-checkpoints 1 --export-hf "$tmp/qwen-hf"
check "its export has the checkpoint's" equal "$(cat "$tmp/qwen-hf/tokenizer.json")" '{"model": 1}'
check "its next checkpoint has it too" cmp "$tmp/qwen-hf/tokenizer.json" "$tmp/qwen-ck/step-00000002/tokenizer.json"
check "without a tokenizer beside the shards, a preset is exported" trains $run --num-steps 1 --export-hf "$tmp/none-hf"
check "the run says that the export has no tokenizer" holds "$out" \
    "without a tokenizer for transformers: copy the tokenizer.json that made the shards there"
cp "$tmp/qwen-hf/tokenizer.json" "$tmp/shards/"
check "a preset's export has the tokenizer beside the shards" trains ./train_fp8 tiny --train-data \
    "$tmp/shards/s_train.bin" --sequence-length 16 --num-steps 1 --export-hf "$tmp/beside-hf"
check "that export has it" cmp "$tmp/shards/tokenizer.json" "$tmp/beside-hf/tokenizer.json"
echo '{"added_tokens": [{"id": 0, "content": "<|endoftext|>"}]}' >"$tmp/shards/tokenizer.json"
check "a tokenizer of other shards is left out" trains ./train_fp8 tiny --train-data \
    "$tmp/shards/s_train.bin" --sequence-length 16 --num-steps 1 --export-hf "$tmp/other-hf"
check "with a warning" holds "$out" "shards/tokenizer.json is not that of the shards"
check "that export has none" test ! -e "$tmp/other-hf/tokenizer.json"
mkfifo "$tmp/qwen/tokenizer.json"
check "a tokenizer that cannot be read ends a run before it begins" \
    refuses "cannot read $tmp/qwen/tokenizer.json: it is not a regular file" $qwen --num-steps 3 --resume
check "before step 3" no_step "$out"

# ---- Saves that fail: in each process, the first $FAILING calls of mkdir for a checkpoint return an error. (Calls for
# step-00000000 succeed: with it a run tries at its start if it can save.) Without --on-save-error stop, a failed save
# is tried a second time at once.

cat >"$tmp/failing.c" <<'C'
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
int mkdir(const char *path, mode_t mode) {
    static int n;
    if (strstr(path, "/step-") && !strstr(path, "/step-00000000") && n++ < atoi(getenv("FAILING"))) return errno = \
    EIO, -1;
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
C
gcc -shared -fPIC -o "$tmp/failing.so" "$tmp/failing.c" || exit 1
fails="env LD_PRELOAD=$tmp/failing.so FAILING"

check "a run succeeds if the first try of a save fails" \
    trains $fails=1 $run --num-steps 2 --checkpoint-every 1 --checkpoint-dir "$tmp/once" --log-dir "$tmp/once"
check "one try fails: the run prints that it tries again" holds "$out" \
    "Input/output error; checkpoints of earlier steps are untouched; the save is tried again"
check "one try fails: the checkpoints of both steps are there at the end" \
    equal "$(ls -d "$tmp"/once/step*)" "$tmp/once/step-00000001
$tmp/once/step-00000002"
check "one try fails: log.jsonl has the error" holds "$tmp/once/log.jsonl" \
    '{"type": "save", "step": 1, "error": "saving checkpoint'
twice() { ranks $fails=2 $run --num-steps 2 --checkpoint-every 1 --checkpoint-dir "$tmp/twice" >"$out" 2>&1; }
check "2 ranks succeed if both tries of the first save fail" twice
check "both tries fail: the run prints that it goes on" holds "$out" \
    "the second try failed too. Still unsaved: all steps; the run goes on, and tries again"
check "both tries fail: one rank warns of each" equal "$(grep -c '^warning: ' "$out")" 2
check "both tries fail: only the next checkpoint is there" equal "$(ls "$tmp/twice")" step-00000002
check "a run whose saves all fail ends with an error" \
    refuses "No other save follows: no checkpoint has a step of this run" $fails=9 $run \
    --num-steps 2 --checkpoint-every 1 --checkpoint-dir "$tmp/never" --export-hf "$tmp/all"
check "a run whose saves all fail still exports" test -f "$tmp/all/model.safetensors"
check "--on-save-error stop: the run ends with an error" \
    refuses "saving checkpoint $tmp/stop/step-00000001 failed" $fails=1 $run --num-steps 2 \
    --checkpoint-every 1 --checkpoint-dir "$tmp/stop" --on-save-error stop
check "--on-save-error stop: no step follows the failed save" lacks "$out" "step 2/"

# ---- Limits of the process.

check "a checkpoint larger than ulimit -f ends the run with an error" \
    refuses "No other save follows" bash -c 'ulimit -f 100; exec "$@"' "$0" $run --num-steps 1 \
    --checkpoint-dir "$tmp/limited"
check "the error names ulimit -f" holds "$out" \
    "this process may write files of 102400 bytes at most; raise that limit with ulimit -f"
check "a stack of 64 KiB is refused" refuses "the stack of this process may have 64 KiB" \
    bash -c 'ulimit -s 64; exec "$@"' "$0" $run --num-steps 1
mkdir "$tmp/many"
for i in $(seq 40); do cp "$tmp/s_train.bin" "$tmp/many/x_$i.bin"; done
many='exec ./train_fp8 tiny --train-data "$0" --sequence-length 16 --num-steps 1'
check "a run opens more shards than the soft limit of open files" \
    trains bash -c "ulimit -Sn 30; $many" "$tmp/many/x_*.bin"
check "more shards than the hard limit of open files are refused" refuses \
    "Too many open files: there are 40 shards, and each stays open; raise the limit with ulimit -n" bash -c \
    "ulimit -n 30; $many" "$tmp/many/x_*.bin"

# ---- Names that contain terminal control characters.

mkdir "$tmp/names"
cp "$tmp/archive/config.json" "$tmp/names/"
python3 - "$tmp/archive/model.safetensors" "$tmp/names/model.safetensors" <<'PY'
import json, struct, sys
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + n])
header["\x1b]0;owned\x07"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data) - 8 - n] * 2}
text = json.dumps(header).encode()
open(sys.argv[2], "wb").write(struct.pack("<Q", len(text)) + text + data[8 + n:])
PY
check "the error prints the terminal control bytes of a tensor's name as \\xNN" refuses \
    'tensor \x1b]0;owned\x07 does not belong to a model' ./train_fp8 "$tmp/names" $model
check "the error has no ESC byte" eval '! grep -q $'"'\\x1b'"' "$out"'

finish
