#!/usr/bin/env bash
# Tests runs whose reader of the output goes away, whose stdout is closed or on a full disk, whose log or checkpoints
# may not grow, that get a signal together with the reader, or twice, whose clock goes back, with a decimal comma, and
# with paths that are not UTF-8. Also tests run scripts in some of these cases, and with a trainer that makes no
# progress. Needs mpirun and python3. Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
. dev/test/lib/cpu_trainer.sh
build/synth_stories --out "$tmp/s" --bytes 60000 --seed 3 >/dev/null
data="--train-data $tmp/s_train.bin --sequence-length 32"

saved() { compgen -G "$1/step-????????" >/dev/null; }
steps() { grep -c '"type": "step"' "$1/log.jsonl"; }
# True if the last line of a log is its summary with the number of its step lines.
whole_log() { tail -n 1 "$1/log.jsonl" | grep -q "^{\"type\": \"summary\", \"steps\": $(steps "$1"), .*}$"; }

# ---- Starts a run with a long step. A second SIGTERM will end it in the middle of that step, after the next tests.

./train_fp8 small $data --sequence-length 4096 --batch-size 8 >"$tmp/long.out" 2>&1 &
long=$!

# ---- A signal to the trainer and to the reader of its output at the same time, like Ctrl-C in a terminal.

for signal in INT TERM HUP; do
    at=$tmp/$signal
    set -m
    # Under nohup these tests inherit an ignored SIGHUP, which the trainer would leave ignored.
    env --default-signal=HUP,INT,TERM \
        bash -c "./train_fp8 tiny $data --num-steps 1000000 --checkpoint-dir $at --log-dir $at 2>&1 | tee $at.out" \
        >/dev/null &
    group=$!
    set +m
    await 60 grep -q '^step  *3/' "$at.out"
    kill -$signal -- -$group
    wait $group 2>/dev/null
    check "SIG$signal to the trainer and tee: the run saves a checkpoint" await 60 saved "$at"
    check "SIG$signal to the trainer and tee: log.jsonl ends with a summary of all steps" await 60 whole_log "$at"
done

# ---- Readers that go away, a full disk, closed streams: the run goes on, or stops with --on-output-lost stop.

at=$tmp/lost
run="./train_fp8 tiny $data --num-steps 30 --checkpoint-dir $at --log-dir $at"
# Checks that a run with status $1, whose stderr is in $tmp/err, ended with status 0, saved a checkpoint and wrote a
# whole log. Its stderr must be $2 (one line, or empty). Its log must have $3 steps.
ended() {
    equal "$1 $(cat "$tmp/err")" "0 $2" && equal "$(steps "$at")" "$3" && saved "$at" && whole_log "$at"
}
on="; the run goes on without them" off="; the run stops (--on-output-lost stop)"
fresh() { rm -rf "$at"; : >"$tmp/err"; }
fresh; $run 2>"$tmp/err" | head -n 1 >/dev/null; status=${PIPESTATUS[0]}
check "the run goes on if the reader of stdout goes away" \
    ended $status "warning: lines printed to stdout are lost: Broken pipe$on" 30
fresh; $run 2>&1 | head -n 1 >/dev/null; status=${PIPESTATUS[0]}
check "the run goes on if the reader of stdout and stderr goes away" ended $status "" 30
fresh; $run --num-steps 1000000 --on-output-lost stop 2>"$tmp/err" | grep -m1 '^step' >/dev/null
status=${PIPESTATUS[0]}
check "--on-output-lost stop ends the run with status 0 and a warning" \
    equal "$status $(cat "$tmp/err")" "0 warning: lines printed to stdout are lost: Broken pipe$off"
check "--on-output-lost stop saves a checkpoint and a whole log" eval 'saved "$at" && whole_log "$at"'
fresh; $run >/dev/full 2>"$tmp/err"
check "the run goes on if stdout is on a full disk" \
    ended $? "warning: lines printed to stdout are lost: No space left on device$on" 30
fresh; $run >&- 2>"$tmp/err"
check "the run goes on if stdout is closed" ended $? "" 30
fresh; $run >&- 2>&- <&-
check "the run goes on if stdin, stdout and stderr are closed" ended $? "" 30
fresh; mpirun --allow-run-as-root --oversubscribe -np 2 bash -c "exec $run >/dev/full" 2>"$tmp/err"
check "2 ranks go on if stdout is on a full disk" \
    ended $? "warning: lines printed to stdout are lost: No space left on device$on" 30
fresh; mpirun --allow-run-as-root --oversubscribe -np 2 \
    bash -c "exec $run --on-output-lost stop --num-steps 1000000 >/dev/full" 2>"$tmp/err"
check "2 ranks stop with --on-output-lost stop if stdout is on a full disk" equal "$? $(cat "$tmp/err")" \
    "0 warning: lines printed to stdout are lost: No space left on device$off"

# ---- Files that may not grow past a limit (ulimit -f). If the log reaches it, the run prints one warning and goes on
# to its last step. If every checkpoint reaches it, the run trains to its last step and ends with an error. Also: a
# resumed run appends to a log after its last complete line.

fresh; (ulimit -f 12; exec $run --num-steps 60 --checkpoint-dir "") 2>"$tmp/err" | cat >"$tmp/out"
check "the run goes on with one warning if log.jsonl may not grow" \
    equal "${PIPESTATUS[0]} $(cat "$tmp/err") $(grep -c '^step' "$tmp/out")" \
    "0 warning: $at/log.jsonl: cannot be written (File too large); the run goes on without the lost lines 60"
check "a log.jsonl that may not grow has complete lines" \
    python3 -c "import json, sys; assert len([json.loads(line) for line in open(sys.argv[1])]) > 10" "$at/log.jsonl"
fresh; (ulimit -f 20; exec $run --checkpoint-every 10) >"$tmp/out" 2>"$tmp/err"
status=$?
warning="^warning: saving checkpoint $at/step-.* failed: .*: File too large: .*; the save is tried again"
error="^error: saving checkpoint .*: File too large: .* No other save follows: no checkpoint has a step"
check "a run whose checkpoints may not grow tries each of three saves again and ends with an error" \
    equal "$status $(grep -c "$warning" "$tmp/err") $(grep -c "$error" "$tmp/err")" "1 3 1"
fresh; $run --checkpoint-every 10 >"$tmp/out"
printf '{"type": "step", "st' >>"$at/log.jsonl"
check "a run with half a line in log.jsonl resumes" $run --num-steps 40 --resume >/dev/null
check "log.jsonl of the resumed run has complete lines: 40 steps, and a summary of each run" \
    python3 -c "import collections, json, sys; found = [json.loads(line)['type'] for line in open(sys.argv[1])]
assert found.count('step') == 40 and found.count('summary') == 2 and found[-1] == 'summary', found" "$at/log.jsonl"

# ---- Three SIGTERMs to the run with the long step: the first, a repeat after 0.3 s, which does not count, and one 2 s
# later, which ends the run at once.

kill -TERM $long
sleep 0.3
kill -TERM $long
check "a SIGTERM that is repeated 0.3 s later, as by mpirun, counts once" kill -0 $long
sleep 2
kill -TERM $long
wait $long 2>/dev/null
check "a second SIGTERM ends the run with status 143 within its first step" \
    equal "$? $(grep -c '^step' "$tmp/long.out")" "143 0"

# ---- A path that is not UTF-8 is written as JSON that Python reads back as that path.

odd=$tmp/$'odd\xff\xe9-\xc3\xa9'
mkdir "$odd"
cp "$tmp/s_train.bin" "$odd/"
check "a run trains with paths that are not UTF-8" \
    ./train_fp8 tiny --train-data "$odd/s_train.bin" --sequence-length 32 --num-steps 1 \
    --log-dir "$odd" --checkpoint-dir "$odd" --export-hf "$odd/hf" >"$tmp/out" 2>&1
cat >"$tmp/paths.py" <<'END'
import json, os, sys
folder = os.fsencode(sys.argv[1])
settings = json.loads(open(folder + b"/log.jsonl", "rb").readline().decode("utf-8"))["settings"]
assert os.fsencode(settings["train-data"]) == folder + b"/s_train.bin", settings
assert os.fsencode(settings["log-dir"]) == folder, settings
json.loads(open(folder + b"/step-00000001/trainer.json", "rb").read().decode("utf-8"))
END
check "log.jsonl gives back paths that are not UTF-8, and trainer.json is valid JSON" python3 "$tmp/paths.py" "$odd"
check "a run resumes with paths that are not UTF-8" \
    ./train_fp8 tiny --train-data "$odd/s_train.bin" --sequence-length 32 \
    --num-steps 2 --checkpoint-dir "$odd" --resume >"$tmp/out" 2>&1

# ---- A wall clock (CLOCK_REALTIME) that goes back an hour each time it is read, and a locale with a decimal comma.

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
check "the library with a clock that goes back compiles" gcc -shared -fPIC -o "$tmp/clock.so" "$tmp/clock.c"
back() { LD_PRELOAD=$tmp/clock.so "$@" >"$tmp/out" 2>&1; }
check "a run trains with a clock that goes back" \
    back $run --num-steps 3 --checkpoint-dir "$tmp/back" --log-dir "$tmp/back"
check "a run resumes with a clock that goes back" back $run --checkpoint-dir "$tmp/back" --log-dir "$tmp/back" --resume
check "a clock that goes back does not change the losses" equal "$(losses "$tmp/back")" "$(losses "$tmp/plain")"
check "with a clock that goes back all step times are above 0" \
    python3 -c "import json, sys; assert all(json.loads(line).get('ms', 1) > 0 for line in open(sys.argv[1]))" \
    "$tmp/back/log.jsonl"
clocks='\btime\(|gettimeofday|CLOCK_REALTIME|localtime'
check "the trainers read the clock of the day for one thing, the hour at which a run will end" \
    equal "$(grep -ohE "$clocks" llmc/*/*.h llmc/*/*.cuh train_fp8.c train_fp8.cu | tr '\n' ' ')" "time( localtime "
check "that is in logger_format_left" \
    equal "$(sed -n '/ logger_format_left(/,/^}/p' llmc/run/logger.h | grep -cE "$clocks")" 2
check "a sweep and a verdict read it for that hour only: their durations stay right when the clock is set" \
    equal "$(grep -hE 'time\.time\(|date \+%s' scripts/{verdict,sweep}* scripts/runs/* | xargs)" \
    "text += time.strftime(%H:%M, time.localtime(time.time() + seconds))"

cat >"$tmp/run.sh" <<'END'
set -u
. scripts/run_common.sh
model=tiny tokenizer=llama3
options=(--sequence-length 32 --num-steps "$STEPS" --checkpoint-every 10)
run_until_done "$@"
END
export TRAINER=./train_fp8 DATA=$tmp/s GPUS=1 STEPS=40
planned() {
    OUT=$tmp/planned PRICE=2.5 "$@" bash "$tmp/run.sh" --dry-run >"$tmp/planned.out" 2>&1
    grep -a -E '^(cost|disk)' "$tmp/planned.out" | sed 's/[0-9.]* GiB are free//'
}
if mkdir "$tmp/locales" && localedef -i de_DE -f UTF-8 "$tmp/locales/de_DE.UTF-8" 2>/dev/null; then
    german() { env LOCPATH="$tmp/locales" LC_ALL=de_DE.UTF-8 "$@"; }
    check "Python prints a decimal comma in the locale of this test" \
        equal "$(german python3 -c 'import locale; locale.setlocale(locale.LC_ALL, ""); print(locale.str(1.5))')" 1,5
    german $run --log-dir "$tmp/german" >/dev/null 2>&1
    check "a decimal comma does not change the losses" equal "$(losses "$tmp/german")" "$(losses "$tmp/plain")"
    check "a decimal comma does not change a run script's estimates" equal "$(planned german)" "$(planned env)"
else
    echo "skipped: a decimal comma (localedef has no de_DE here)"
fi

# ---- The run scripts: a reader that goes away, a closed terminal, a trainer that makes no progress.

OUT=$tmp/r bash "$tmp/run.sh" 2>/dev/null | head -n 1 >/dev/null
check "a run script trains to the end if the reader of its stdout goes away" \
    equal "${PIPESTATUS[0]} $(ls "$tmp/r/steps" | tail -n 1) $(grep -c '^step .*40/40' "$tmp/r/stdout.txt")" \
    "0 step-00000040 1"
set -m
STEPS=1000000 OUT=$tmp/hup env --default-signal=HUP bash "$tmp/run.sh" >"$tmp/hup.out" 2>&1 &
script=$!
set +m
await 60 saved "$tmp/hup/steps"
kill -HUP $script
wait $script
check "a run script that gets SIGHUP, as from a closed terminal, saves" \
    equal "$? $(grep -c "^stopped after $(ls "$tmp/hup/steps" | tail -n 1); run the same command" "$tmp/hup.out")" "0 1"
# At each start to train, this stand-in for the trainer leaves one checkpoint, of step 2 or of step 1 in turn, and kills
# itself.
mkdir "$tmp/bin" "$tmp/stuck"
cat >"$tmp/bin/train_fp8" <<END
#!/usr/bin/env bash
case " \$* " in *" --dry-run "*) exec ./train_fp8 "\$@" ;; esac
cd $tmp/stuck/steps 2>/dev/null || { mkdir -p $tmp/stuck/steps && cd $tmp/stuck/steps; }
if [ -d step-00000002 ]; then rmdir step-00000002 && mkdir step-00000001
else rm -rf step-00000001 && mkdir step-00000002
fi
kill -KILL \$\$
END
chmod +x "$tmp/bin/train_fp8"
TRAINER=$tmp/bin/train_fp8 OUT=$tmp/stuck timeout 60 bash "$tmp/run.sh" >"$tmp/stuck.out" 2>&1
check "a run script gives up on a trainer without progress" \
    equal "$? $(grep -c '^error: three starts in a row failed' "$tmp/stuck.out")" "1 1"
finish
