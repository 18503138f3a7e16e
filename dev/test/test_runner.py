#!/usr/bin/env python3
"""Tests how sweeps and verdicts place, end and judge runs (scripts/runs), with stand-ins for trainer, GPUs and mpirun.

A run sleeps, and takes the log of a run of ./train_fp8 for its own. Needs ./train_fp8 and build/synth_stories; mounts a
small disk if it may. Ends with "N passed, N failed".
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from counted import ROOT, check, finish  # noqa: E402

NAP = 0.4  # seconds of a run


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def make_stand_ins(tmp):
    """Makes a trainer for GPUs and one for the CPU, nvidia-smi with 2 GPUs, and an mpirun that starts one process."""
    subprocess.run([ROOT / "build" / "synth_stories", "--out", tmp / "s", "--bytes", "3000000", "--seed", "3"],
                   check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["./train_fp8", "tiny", "--train-data", tmp / "s_train.bin", "--sequence-length", "16",
                    "--num-steps", "4", "--log-dir", tmp / "log"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    text = f"""case "$*" in *--list*|*--dry-run*) exec ./train_fp8 "$@" ;; esac
options="$*"
while [ "$1" != --log-dir ]; do shift; done
begin=$(date +%s.%N)
sleep {NAP}
sed "s/\\"world_size\\": 1,/\\"world_size\\": ${{RANKS:-1}},/" {tmp}/log/log.jsonl >"$2/log.jsonl"
echo "${{CUDA_VISIBLE_DEVICES:-all}} $begin $(date +%s.%N)" >>{tmp}/placed
case "$options" in *"--seed 9"*) exit 9 ;; esac
"""
    program(tmp / "bin" / "nvidia-smi", 'case "$*" in *=index*) printf "0\\n1\\n" ;; esac\n')
    program(tmp / "bin" / "mpirun", 'export RANKS=$2; while ! [ -x "$1" ]; do shift; done; exec "$@"\n')
    program(tmp / "bin" / "train_fp8", text)
    return program(tmp / "bin" / "train_fp8cu", text)


def start(tmp, script, *words, **variables):
    """Returns the ended script, and how long it took."""
    environment = {**os.environ, "PATH": f"{tmp}/bin:{os.environ['PATH']}", **variables}
    begin = time.monotonic()
    ended = subprocess.run([f"scripts/{script}.sh", *words], cwd=ROOT, capture_output=True, text=True, env=environment)
    return ended, time.monotonic() - begin


def sweep(tmp, out, trainer, *words, **variables):
    return start(tmp, "sweep", "--trainer", trainer, "--data", f"{tmp}/s_train.bin", "--models", "tiny", "--num-steps",
                 "4", "--out", f"{tmp}/{out}", *words, **variables)


def placed(tmp):
    """Returns [GPUs, begin, end] of each run since the last call."""
    lines = (tmp / "placed").read_text().splitlines()
    (tmp / "placed").unlink()
    return [(words[0], float(words[1]), float(words[2])) for words in map(str.split, lines)]


def test_side_by_side(tmp, trainer):
    """8 runs of one GPU each take half of the time on 2 GPUs. No GPU has two runs at a time."""
    for visible in ("0", "0,1"):
        ended, _ = sweep(tmp, f"beside{visible}", trainer, "--sequence-lengths", "16,32,48,64", "--precisions",
                         "bf16,fp8", "--gpus", "1", CUDA_VISIBLE_DEVICES=visible)
        runs = placed(tmp)
        check(ended.returncode == 0 and len(runs) == 8, f"8 runs finish on GPUs {visible}: {ended}")
        for gpu in visible.split(","):
            times = sorted(run[1:] for run in runs if run[0] == gpu)
            check(len(times) == 8 / len(visible.split(",")), f"GPU {gpu} of {visible} gets its share: {runs}")
            check(all(a[1] <= b[0] for a, b in zip(times, times[1:])), f"GPU {gpu} has one run at a time: {times}")
        span = max(run[2] for run in runs) - min(run[1] for run in runs)
        work = sum(run[2] - run[1] for run in runs)  # both, so that a busy machine lengthens both
        check(work / 2 <= span < work - 3 * NAP if "," in visible else span >= work,
              f"8 runs of {NAP} s on GPUs {visible}: {span} s, in all {work} s")


def test_several_gpus(tmp, trainer):
    """A run of two GPUs gets both, and waits until they are free. Without mpirun's ranks a run has failed."""
    words = ("--sequence-lengths", "16", "--precisions", "bf16,fp8", "--gpus", "1,2")
    ended, _ = sweep(tmp, "several", trainer, *words)
    check(ended.returncode == 0 and sorted(run[0] for run in placed(tmp)) == ["0", "0,1", "0,1", "1"],
          f"two runs of one GPU each and two of both: {ended}")
    ended, _ = sweep(tmp, "elsewhere", trainer, *words, "--max-gpus", "4")
    times = sorted(run[1:] for run in placed(tmp))
    check(ended.returncode == 0 and all(a[1] <= b[0] for a, b in zip(times, times[1:])),
          f"with GPUs of other machines runs go one after another: {ended} {times}")
    ended, _ = sweep(tmp, "elsewhere", trainer, *words, "--max-gpus", "4", "--parallel", "2")
    check(ended.returncode == 1 and "cannot have GPUs of their own" in ended.stderr,
          f"--parallel with GPUs of other machines is refused: {ended}")


def test_failed_after_summary(tmp, trainer):
    ended, _ = sweep(tmp, "nine", trainer, "--sequence-lengths", "16", "--precisions", "bf16", "--gpus", "1", "--",
                     "--seed", "9")
    check(ended.returncode == 1 and ": failed: ended with status 9 after its summary" in ended.stdout
          and "0 of 1 runs finished" in ended.stdout, f"a run that fails after its summary has failed: {ended}")


def test_slow_names(tmp, trainer):
    """If localhost is looked up at a name server that does not answer, one line says so before the first run."""
    getent = tmp / "bin" / "getent"
    for nap, lines in ((0, 0), (5, 1)):
        program(getent, f"exec sleep {nap}\n")
        ended, _ = sweep(tmp, f"names{nap}", str(tmp / "bin" / "train_fp8"), "--sequence-lengths", "16", "--gpus", "2")
        check(ended.returncode == 0 and ended.stdout.count("127.0.0.1 localhost >>/etc/hosts") == lines,
              f"names that take {nap} s: {lines} lines in 2 runs: {ended}")
    getent.unlink()


def test_full_disk(tmp):
    """A full disk ends a verdict with one line, and no run goes on."""
    disk = tmp / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        print(f"skipped: a verdict on a full disk: {mounted.stderr.strip()}")
        return
    try:
        trainer = program(tmp / "full" / "train_fp8", """case "$*" in
    *--list*|*--dry-run*) exec ./train_fp8 "$@" ;;
    *"--precision fp8"*) exec sleep 60 ;;
    *"--num-steps 4 "*) exit 1 ;;
esac
while [ "$1" != --log-dir ]; do shift; done
head -c 100000 /dev/zero >"$2/log.jsonl"
""")
        ended, took = start(tmp, "verdict", "tiny", "--trainer", trainer, "--train-data", f"{tmp}/s_train.bin",
                            "--sequence-length", "32", "--parallel", "2", "--seeds", "1,2", "--recipes", "fp8",
                            "--num-steps", "3000", "--out", f"{disk}/out", "--no-report")
        lines = ended.stderr.splitlines()
        check(ended.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: ") and
              "disk is full" in lines[0],
              f"one line says that the disk is full: {ended}")
        check(took < 30, f"the other run was ended, not waited for: {took} s")
        check(subprocess.run(["flock", "-n", disk / "out" / "lock", "true"]).returncode == 0,
              "no run goes on: none holds the folder's lock")
    finally:
        subprocess.run(["umount", "-l", disk])


def main():
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with tempfile.TemporaryDirectory() as folder:
        tmp = pathlib.Path(folder)
        trainer = make_stand_ins(tmp)
        test_side_by_side(tmp, trainer)
        test_several_gpus(tmp, trainer)
        test_failed_after_summary(tmp, trainer)
        test_slow_names(tmp, trainer)
        test_full_disk(tmp)
    finish()


if __name__ == "__main__":
    main()
