#!/usr/bin/env bash
# Readers of the output that go away, full disks under stdout and the log, signals that come twice, clocks that are set back, decimal commas, paths that are not
# UTF-8: none costs a run its checkpoint or its log. Needs build/synth_stories and python3. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
. scripts/tally.sh
make -s train_fp8 build/synth_stories || exit 1
export OMP_NUM_THREADS=1
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
build/synth_stories --out "$tmp/s" --bytes 60000 --seed 3 >/dev/null
data="--train-data $tmp/s_train.bin --sequence-length 32"

# Waits up to 60 s until the command holds.
await() { for _ in $(seq 600); do "$@" 2>/dev/null && return; sleep 0.1; done; false; }
saved() { compgen -G "$1/step-????????" >/dev/null; }
steps() { grep -c '"type": "step"' "$1/log.jsonl"; }
# Whether the last line of a log is its summary, of as many steps as it has.
whole_log() { tail -n 1 "$1/log.jsonl" | grep -q "^{\"type\": \"summary\", \"steps\": $(steps "$1"), .*}$"; }

# ---- a second SIGTERM does not wait for the end of a step of many seconds; it goes on while the next tests run

./train_fp8 small $data --sequence-length 4096 --batch-size 8 >"$tmp/long.out" 2>&1 &
long=$!

# ---- a signal to the trainer and the program that reads its output at once, as Ctrl-C in a terminal is

for signal in INT TERM HUP; do
    at=$tmp/$signal
    set -m
    bash -c "./train_fp8 tiny $data --num-steps 1000000 --checkpoint-dir $at --log-dir $at 2>&1 | tee $at.out" >/dev/null &
    group=$!
    set +m
    await grep -q '^step  *3/' "$at.out"
    kill -$signal -- -$group
    wait $group 2>/dev/null
    check "SIG$signal to the trainer and tee: a checkpoint" await saved "$at"
    check "SIG$signal to the trainer and tee: the log" await whole_log "$at"
done

# ---- readers that go away, and a full disk: the run goes on, or stops if it is told to

at=$tmp/lost
run="./train_fp8 tiny $data --num-steps 30 --checkpoint-dir $at --log-dir $at"
# $1 status, $2 what stderr says (one line, or none), $3 number of steps ("few": less than all), after a run whose stderr is in err.
ended() {
    local count
    count=$(steps "$at")
    if [ "$3" = few ]; then [ "$count" -lt 30 ] && count=few; fi
    equal "$1 $(cat "$tmp/err")" "0 $2" && equal "$count" "$3" && saved "$at" && whole_log "$at"
}
on="; the run goes on without it" off="; the run saves and stops (--on-output-lost stop)"
fresh() { rm -rf "$at"; : >"$tmp/err"; }
fresh; $run 2>"$tmp/err" | head -n 1 >/dev/null; status=${PIPESTATUS[0]}
check "a reader of stdout that goes away" ended $status "warning: stdout cannot be written: Broken pipe$on" 30
fresh; $run 2>&1 | head -n 1 >/dev/null; status=${PIPESTATUS[0]}
check "a reader of both that goes away" ended $status "" 30
fresh; $run --num-steps 1000000 --on-output-lost stop 2>"$tmp/err" | grep -m1 '^step' >/dev/null; status=${PIPESTATUS[0]}
check "--on-output-lost stop" equal "$status $(cat "$tmp/err")" "0 warning: stdout cannot be written: Broken pipe$off"
check "--on-output-lost stop: a checkpoint and a whole log" eval 'saved "$at" && whole_log "$at"'
fresh; $run >/dev/full 2>"$tmp/err"
check "stdout on a full disk" ended $? "warning: stdout cannot be written: No space left on device$on" 30
fresh; $run >&- 2>"$tmp/err"
check "stdout closed" ended $? "" 30
fresh; $run >&- 2>&- <&-
check "all closed" ended $? "" 30
fresh; mpirun --allow-run-as-root --oversubscribe -np 2 bash -c "exec $run >/dev/full" 2>"$tmp/err"
check "stdout of 2 ranks on a full disk" ended $? "warning: stdout cannot be written: No space left on device$on" 30
fresh; mpirun --allow-run-as-root --oversubscribe -np 2 bash -c "exec $run --on-output-lost stop --num-steps 1000000 >/dev/full" 2>"$tmp/err"
check "stdout of 2 ranks on a full disk, and stop" equal "$? $(cat "$tmp/err")" "0 warning: stdout cannot be written: No space left on device$off"

# ---- a log that cannot grow: said once, the run goes on to its end, and a resumed run's lines follow whole ones

fresh; (ulimit -f 8; exec $run --num-steps 60 --checkpoint-dir "") 2>"$tmp/err" | cat >"$tmp/out"
check "a log that may not grow" equal "${PIPESTATUS[0]} $(cat "$tmp/err") $(grep -c '^step' "$tmp/out")" "0 warning: $at/log.jsonl: cannot be written (File too large); the run goes on without the lines that do not fit 60"
check "a log that may not grow: whole lines" python3 -c "import json, sys; assert len([json.loads(line) for line in open(sys.argv[1])]) > 10" "$at/log.jsonl"
fresh; (ulimit -f 20; exec $run --checkpoint-every 10) >"$tmp/out" 2>"$tmp/err"
check "a checkpoint that may not grow" equal "$? $(grep -c "^warning: saving checkpoint $at/step-.* failed: .*: File too large: .*; it is tried again" "$tmp/err") $(grep -c "^error: saving checkpoint .*: File too large: .* That was the last save: no step" "$tmp/err")" "1 3 1"
printf '{"type": "step", "st' >>"$at/log.jsonl"
check "the same run later" $run --resume >/dev/null
check "the same run later: whole lines" python3 -c "import json, sys; assert [json.loads(line)['type'] for line in open(sys.argv[1])][-1] == 'summary'" "$at/log.jsonl"

# ---- the second SIGTERM, to the run above

kill -TERM $long
sleep 0.3
kill -TERM $long
check "the same SIGTERM by way of mpirun is one" kill -0 $long
sleep 2
kill -TERM $long
wait $long 2>/dev/null
check "a second SIGTERM ends a long step" equal "$? $(grep -c '^step' "$tmp/long.out")" "143 0"

# ---- a path that is not UTF-8 is JSON that Python reads, and is that path again

odd=$tmp/$'odd\xff\xe9-\xc3\xa9'
mkdir "$odd"
cp "$tmp/s_train.bin" "$odd/"
check "a path that is not UTF-8" ./train_fp8 tiny --train-data "$odd/s_train.bin" --sequence-length 32 --num-steps 1 --log-dir "$odd" --checkpoint-dir "$odd" --export-hf "$odd/hf" >"$tmp/out" 2>&1
cat >"$tmp/paths.py" <<'END'
import json, os, sys
folder = os.fsencode(sys.argv[1])
settings = json.loads(open(folder + b"/log.jsonl", "rb").readline().decode("utf-8"))["settings"]
assert os.fsencode(settings["train-data"]) == folder + b"/s_train.bin" and os.fsencode(settings["log-dir"]) == folder, settings
json.loads(open(folder + b"/step-00000001/trainer.json", "rb").read().decode("utf-8"))
END
check "a path that is not UTF-8: in JSON" python3 "$tmp/paths.py" "$odd"
check "a path that is not UTF-8: resumed" ./train_fp8 tiny --train-data "$odd/s_train.bin" --sequence-length 32 --num-steps 2 --checkpoint-dir "$odd" --resume >"$tmp/out" 2>&1

# ---- the clock set back an hour by every look at it; a locale with a decimal comma

losses() { sed -n 's/.*"type": "step", "step": \([0-9]*\), "loss": \([^,]*\), .*/\1 \2/p' "$1/log.jsonl"; }
run="./train_fp8 tiny $data --num-steps 6 --learning-rate 1.5e-3 --val-data $tmp/s_val.bin"
$run --log-dir "$tmp/plain" >/dev/null 2>&1
cat >"$tmp/clock.c" <<'END'
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long now = 2000000000;
time_t time(time_t *out) { now -= 3600; if (out) *out = now; return now; }
int gettimeofday(struct timeval *t, void *zone) { (void)zone; t->tv_sec = time(0); t->tv_usec = 0; return 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    if (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE) return (int)syscall(SYS_clock_gettime, id, t);
    t->tv_sec = time(0), t->tv_nsec = 0;
    return 0;
}
END
check "a clock that goes back" gcc -shared -fPIC -o "$tmp/clock.so" "$tmp/clock.c"
back() { LD_PRELOAD=$tmp/clock.so "$@" >"$tmp/out" 2>&1; }
check "a run with it" back $run --num-steps 3 --checkpoint-dir "$tmp/back" --log-dir "$tmp/back"
check "a resumed run with it" back $run --checkpoint-dir "$tmp/back" --log-dir "$tmp/back" --resume
check "the same losses" equal "$(losses "$tmp/back")" "$(losses "$tmp/plain")"
check "no time below 0" python3 -c "import json, sys; assert all(json.loads(line).get('ms', 1) > 0 for line in open(sys.argv[1]))" "$tmp/back/log.jsonl"
check "no other clock is asked" equal "$(grep -nE '\btime\(|gettimeofday|CLOCK_REALTIME|localtime' llmc/*/*.h llmc/*/*.cuh train_fp8.c train_fp8.cu)" ""

cat >"$tmp/run.sh" <<'END'
set -u
. scripts/run_common.sh
model=tiny tokenizer=llama3
options=(--sequence-length 32 --num-steps "$STEPS" --checkpoint-every 10)
run_until_done "$@"
END
export TRAINER=./train_fp8 DATA=$tmp/s GPUS=1 STEPS=40
planned() { OUT=$tmp/planned PRICE=2.5 "$@" bash "$tmp/run.sh" --dry-run >"$tmp/planned.out" 2>&1; grep -a -E '^(cost|disk)' "$tmp/planned.out" | sed 's/[0-9.]* are free//'; }
if mkdir "$tmp/locales" && localedef -i de_DE -f UTF-8 "$tmp/locales/de_DE.UTF-8" 2>/dev/null; then
    german() { env LOCPATH="$tmp/locales" LC_ALL=de_DE.UTF-8 "$@"; }
    check "a decimal comma is known here" equal "$(german python3 -c 'import locale; locale.setlocale(locale.LC_ALL, ""); print(locale.str(1.5))')" 1,5
    german $run --log-dir "$tmp/german" >/dev/null 2>&1
    check "a decimal comma: the same losses" equal "$(losses "$tmp/german")" "$(losses "$tmp/plain")"
    check "a decimal comma: the same plan of a run script" equal "$(planned german)" "$(planned env)"
else
    echo "skipped: a decimal comma (localedef has no de_DE here)"
fi

# ---- the run scripts: a reader that goes away, a closed terminal, a trainer that comes no further

OUT=$tmp/r bash "$tmp/run.sh" 2>/dev/null | head -n 1 >/dev/null
check "a run script whose reader goes away" equal "${PIPESTATUS[0]} $(ls "$tmp/r/steps" | tail -n 1) $(grep -c '^step .*40/40' "$tmp/r/stdout.txt")" "0 step-00000040 1"
set -m
STEPS=1000000 OUT=$tmp/hup bash "$tmp/run.sh" >"$tmp/hup.out" 2>&1 &
script=$!
set +m
await saved "$tmp/hup/steps"
kill -HUP $script
wait $script
check "a run script whose terminal is closed saves" equal "$? $(grep -c "^stopped after $(ls "$tmp/hup/steps" | tail -n 1); start again" "$tmp/hup.out")" "0 1"
# Saves another checkpoint each time, none later than the second.
mkdir "$tmp/bin" "$tmp/stuck"
cat >"$tmp/bin/train_fp8" <<END
#!/usr/bin/env bash
case " \$* " in *" --dry-run "*) exec ./train_fp8 "\$@" ;; esac
cd $tmp/stuck/steps 2>/dev/null || { mkdir -p $tmp/stuck/steps && cd $tmp/stuck/steps; }
if [ -d step-00000002 ]; then rmdir step-00000002 && mkdir step-00000001; else rm -rf step-00000001 && mkdir step-00000002; fi
kill -KILL \$\$
END
chmod +x "$tmp/bin/train_fp8"
TRAINER=$tmp/bin/train_fp8 OUT=$tmp/stuck timeout 60 bash "$tmp/run.sh" >"$tmp/stuck.out" 2>&1
check "a trainer that comes no further is given up" equal "$? $(grep -c '^error: three starts in a row failed' "$tmp/stuck.out")" "1 1"
finish
