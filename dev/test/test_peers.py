#!/usr/bin/env python3
"""Tests dev/peers without a GPU and without torch: the shard reader, the energy counter, command lines, options and
results of torchtitan, and compare.py with stand-ins.

A stand-in writes what the trainer or a peer writes, and fails where a test wants it. "Our" commands and runs are those
that compare.py makes for this repository's trainer; the CPU trainer must accept the commands. Ends with "N passed, N
failed".
"""
import argparse
import csv
import json
import os
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from counted import ROOT, check, finish  # noqa: E402

PEERS = os.path.join(ROOT, "dev", "peers")
sys.path.insert(0, PEERS)
import compare
import shards
import titan_train
from energy import EnergyCounter, StepEnergy

# Stands for ./train_fp8cu, alone or as rank 0 of mpirun. Writes a log.jsonl with settings, a step and a summary. With
# qwen3-4b it first sleeps for a minute. With llama3.2-3b in FP8 it prints an error line and fails.
TRAINER = r'''#!/usr/bin/env python3
import json, os, sys, time
words = " ".join(sys.argv[2:]).replace("--fast", "--precision fast").split()
of = dict(zip(words[::2], words[1::2]))
print("pretending to train", sys.argv[1], os.environ["CUDA_VISIBLE_DEVICES"])
if sys.argv[1] == "llama3.2-3b" and of["--precision"] != "bf16":
    print("error: out of memory on GPU 0: 90 GiB wanted", file=sys.stderr)
    sys.exit(3)
if sys.argv[1] == "qwen3-4b":
    time.sleep(60)
with open(os.path.join(of["--log-dir"], "log.jsonl"), "w") as file:
    print(json.dumps({"type": "settings", "program": "train_fp8cu", "version": "0.1", "device": "GPU X"}), file=file)
    print(json.dumps({"type": "step", "step": 1}), file=file)
    speed = {"bf16": 10000.25, "fp8": 12000.5, "fast": 14000}[of["--precision"]]
    print(json.dumps({"type": "summary", "steps": int(of["--num-steps"]), "last_loss": 9.5, "median_ms": 20.5,
                      "tokens_per_second_per_gpu": speed, "memory_bytes": 3 << 30, "joules_per_token": 0.05}),
          file=file)
'''

# Stands for a Python with torch: `hf_train.py MODEL PRECISION T ...`, or torchrun and `titan_train.py PRECISION T`.
# Fails with precision rowwise.
PYTHON = r'''#!/usr/bin/env python3
import json, sys
words = sys.argv[1:]
at = next(i for i, word in enumerate(words) if word.endswith("_train.py"))
titan = words[at].endswith("titan_train.py")
precision = words[at + 1 if titan else at + 2]
if precision == "rowwise":
    print("Traceback (most recent call last):\n  File \"x.py\", line 1\nRuntimeError: no rowwise today")
    print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====")
    sys.exit(1)
print("a warning of some library")
print("rank 1", end="")
print(json.dumps({"type": "summary", "program": "peer 1.0", "device": "GPU X", "steps": 10, "median_ms": 25.0,
                  "tokens_per_second_per_gpu": 8000.0 if precision == "fp8" else 6000.0, "memory_bytes": 5 << 30,
                  **({"joules_per_token": 0.0625} if precision == "fp8" else {})}),
      "rank 1 again")
print("and a line to read")
'''

# Stands for NVML with one GPU, "GPU-1", that uses 1.5 J between two readings.
NVML = r'''
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)nvmlInit_v2;
    return strcmp(uuid, "GPU-1") ? 6 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    static unsigned long long used = 1ull << 40;
    *millijoules = used += 1500;
    return device != (void *)nvmlInit_v2;
}
'''

# Stands for mpirun: starts one rank only.
MPIRUN = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in */trainer) exec "$@" ;; esac; shift; done
"""


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)
    return path


def shard_bytes(magic, version, tokens, code, count=None):
    count = len(tokens) if count is None else count
    head = struct.pack("<4i", magic, version, count, 0)
    return head + bytes(1024 - len(head)) + struct.pack("<%d%s" % (len(tokens), code), *tokens)


def raises(function, *words):
    try:
        function(*words)
    except (shards.BadShard, argparse.ArgumentTypeError) as error:
        return str(error)
    return None


def test_shards(folder):
    path = os.path.join(folder, "x.bin")
    tokens = list(range(100000, 100021))
    for magic, version, code in ((20240801, 7, "I"), (20240801, 8, "I"), (20240520, 1, "H")):
        values = tokens if code == "I" else [token - 99000 for token in tokens]
        view = shards.read_shard(write(path, shard_bytes(magic, version, values, code)))
        check(list(view) == values, "read_shard returns the tokens of a shard:", magic, version)
    view = shards.read_shard(write(path, shard_bytes(20240801, 7, tokens, "I")))
    # 21 tokens are 5 sequences of 4 inputs. The last target of one is the first input of the next.
    check(list(shards.sequence(view, 4, 0)) == tokens[:5], "sequence 0 has the first 5 tokens")
    check(list(shards.sequence(view, 4, 4)) == tokens[16:21], "sequence 4 has the last 5 tokens")
    check(list(shards.sequence(view, 4, 5)) == tokens[:5], "sequence 5 begins the second epoch")
    check(raises(shards.sequence, view, 21, 0) is not None, "a sequence with more tokens than the shard is refused")
    for name, data in (("empty", b""), ("short", b"1234"), ("text", b"x" * 4096),
                       ("cut", shard_bytes(20240801, 7, tokens, "I", 22)),
                       ("too long", shard_bytes(20240801, 7, tokens, "I", 20)),
                       ("other version", shard_bytes(20240801, 9, tokens, "I"))):
        check(path in (raises(shards.read_shard, write(path, data)) or ""), "the error names a damaged shard:", name)


def test_energy(folder):
    source = write(os.path.join(folder, "nvml.c"), NVML.encode())
    library = os.path.join(folder, "nvml.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    counter = EnergyCounter("GPU-1", library)
    before = counter.joules()
    check(before > 1e9 and abs(counter.joules() - before - 1.5) < 1e-3,
          "the counter grows by 1.5 J between two readings:", before)
    check(EnergyCounter("GPU-2", library).joules() is None, "an unknown GPU has no reading")
    check(EnergyCounter("GPU-1", os.path.join(folder, "none.so")).joules() is None, "there is no reading without NVML")
    check(EnergyCounter("GPU-1", "libm.so.6").joules() is None, "a library without NVML's functions gives no reading")
    # The counter grows by 1.5 J from the first counted step to the end.
    for times, expected in (([9.0] + [0.5] * 7, None), ([9.0] + [0.5] * 8, 1.5 / 4), ([9.0] * 6, 1.5 / 2),
                            ([9.0] + [0.125] * 31, None), ([9.0] + [0.125] * 32, 1.5 / 16)):
        energy = StepEnergy(EnergyCounter("GPU-1", library), 4)
        for step in range(len(times)):
            energy.begin_step(times[:step])
        joules = energy.joules_per_step(times)
        check(joules == expected or expected and abs(joules - expected) < 1e-3, "joules of a step:", times, joules)
    energy = StepEnergy(EnergyCounter("GPU-2", library), 4)
    energy.begin_step([9.0] * 6)
    check(energy.joules_per_step([9.0] * 9) is None, "an unknown GPU has no joules")


def test_rows():
    check(compare.parse_row("qwen3-4b:4096") == ("qwen3-4b:4096", "qwen3-4b", 4096, "tensorwise"),
          "MODEL:T is read as a row")
    check(compare.parse_row("qwen3-4b:64:rowwise").recipe == "rowwise", "MODEL:T:RECIPE is read as a row")
    for text in ("", "qwen3-4b", "qwen3-4b:x", "qwen9:64", "qwen3-4b:64:mxfp8", "qwen3-4b:64:rowwise:1"):
        check(raises(compare.parse_row, text), "this text is refused as a row:", text)
    check(compare.parse_titan_row("rowwise:fp32") == ("rowwise", "fp32"),
          "RECIPE:MASTERS is read as a row of torchtitan")
    for text in ("", "bf16", "fp8:fp32", "bf16:fp16", "bf16:fp32:1"):
        check(raises(compare.parse_titan_row, text), "this text is refused as a row of torchtitan:", text)


def run(program, *words):
    command = [sys.executable, os.path.join(PEERS, program), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_command_lines(folder):
    shard = write(os.path.join(folder, "y.bin"), shard_bytes(20240801, 7, range(100), "I"))
    large = write(os.path.join(folder, "z.bin"), shard_bytes(20240801, 7, range(400), "I"))
    for program, words, text in (
            ("hf_train.py", ("llama9", "bf16", "64"), "MODEL"),
            ("hf_train.py", ("llama3.2-1b", "fp9", "64"), "PRECISION"),
            ("hf_train.py", ("llama3.2-1b", "bf16", "0"), "T[,...]"),
            ("hf_train.py", ("llama3.2-1b", "bf16", "64", "--steps", "4"), "--steps"),
            ("hf_train.py", ("llama3.2-1b", "bf16", "64", "--sequences"), "--data"),
            ("hf_train.py", ("llama3.2-1b", "bf16", "64", "--data", __file__), "no training shard"),
            ("titan_train.py", ("bf16", "64"), "--data"),
            ("titan_train.py", ("bf16", "64", "--data", shard, "--steps", "12"), "--steps"),
            ("titan_train.py", ("bf16", "100", "--data", shard), "no sequence"),
            ("accelerate_gather.py", ("fp4", "--data", shard, "--log-dir", folder), "invalid choice: 'fp4'"),
            ("accelerate_gather.py", ("fp8", "--data", __file__, "--log-dir", folder), "no training shard"),
            ("accelerate_gather.py", ("fp8", "--data", shard, "--log-dir", folder), "no sequence of 2048"),
            ("accelerate_gather.py", ("fp8", "--data", shard, "--log-dir", folder, "--steps", "0"), "--steps"),
            ("accelerate_gather.py", ("fp8", "--data", large, "--log-dir", folder, "--model", "small",
                                      "--sequence-length", "8"), "token 399"),
            ("compare.py", ("--rows", "x:1"), "MODEL:T"),
            ("compare.py", ("--gpus", "0,0"), "--gpus"),
            ("compare.py", ("--ranks", "2"), "--ranks"),
            ("compare.py", ("--titan-rows", "bf16:fp32"), "--gpus 0,1"),
            ("compare.py", ("--peer-steps", "4"), "--peer-steps"),
            ("compare.py", ("--limit", "0"), "--limit"),
            ("compare.py", ("--trainer", "./no_such_program"), "no_such_program")):
        status, _, errors = run(program, *words)
        check(status == 2 and text in errors and "Traceback" not in errors,
              f"status 2 and \"{text}\" are expected of", program, *words, "->", status, errors)
    status, printed, _ = run("compare.py", "--dry-run", "--gpus", "0,1", "--titan-rows", "bf16:fp32,tensorwise:bf16")
    lines = printed.splitlines()
    check(status == 0 and len(lines) == 29, "--dry-run prints 29 commands:", len(lines))
    fp32 = [line for line in lines if "--master-weights fp32 --optimizer-state fp32 --reduce-dtype fp32" in line]
    check(len(fp32) == 1 and "mpirun -np 2" in fp32[0],
          "one of our commands has fp32 master weights, on 2 ranks:", fp32)


def test_titan_result():
    args = argparse.Namespace(model="llama3.1-8b", precision="fp8", masters="fp32", length=8192, ac="none", steps=20)
    records = [(step, {"throughput(tps)": tps, "memory/max_active(GiB)": gib, "memory/max_reserved(GiB)": gib + 1,
                       "loss_metrics/global_avg_loss": 12.0 - step / 10})
               for step, tps, gib in ((1, 50.0, 90.0), (5, 7000.0, 99.5), (10, 8000.0, 99.0), (15, 8192.0, 99.0),
                                      (20, 8200.0, 99.0))]
    result = titan_train.summarize(args, records, 2, "torchtitan", "GPU X")
    speed = result["tokens_per_second_per_gpu"]
    check(speed == 8192.0 and result["median_ms"] == 1000.0,
          "torchtitan's median leaves out the first 5 steps:", result)
    check(result["memory_bytes"] == int(99.5 * 2**30) and result["last_loss"] == 10.0,
          "the result has torchtitan's peak memory and last loss")
    args = argparse.Namespace(model="llama3.1-8b", precision="fp8", masters="bf16", length=64, ac="none", steps=20,
                              out="x", options=["--debug.seed", "1"])
    words = " ".join(titan_train.titan_options(args))
    check("enable_fsdp_float8_all_gather" in words and "--training.dtype bfloat16" in words
          and words.endswith("--debug.seed 1"),
          "tensorwise with bf16 weights has FP8 all-gather and dtype bfloat16:", words)
    args.precision = "rowwise"
    words = " ".join(titan_train.titan_options(args))
    check("recipe_name rowwise" in words and "all_gather" not in words, "rowwise has no FP8 all-gather:", words)


def run_compare(folder, *words):
    stand_ins = []
    for name, text in (("trainer", TRAINER), ("python", PYTHON), ("mpirun", MPIRUN)):
        path = write(os.path.join(folder, name), text.encode())
        os.chmod(path, 0o755)
        stand_ins.append(path)
    data = write(os.path.join(folder, "data.bin"), shard_bytes(20240801, 7, range(100), "I"))
    out = os.path.join(folder, "out")
    environment = dict(os.environ, PATH=folder + ":" + os.environ["PATH"])
    command = [sys.executable, os.path.join(PEERS, "compare.py"), "--trainer", stand_ins[0], "--python", stand_ins[1],
               "--llama-data", data, "--qwen-data", data, "--out", out, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    table, rows = "", []
    if os.path.exists(os.path.join(out, "table.md")):
        with open(os.path.join(out, "table.md"), encoding="utf-8") as file:
            table = file.read()
        with open(os.path.join(out, "table.csv"), encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    return done.returncode, table, rows, done.stdout + done.stderr


def test_compare(folder):
    status, table, rows, printed = run_compare(folder, "--rows", "llama3.2-1b:2048")
    line = ("| llama3.2-1b | 2048 | 10,000 | 12,000 | 14,000 | 1.20x | 3.0 GiB | 3.0 GiB | 6,000 | 8,000 | 5.0 GiB | "
            "1.67x | 1.50x | 1.75x |")
    check(status == 0 and line in table and "Failed" not in table,
          "table.md has a row whose runs finish:", status, table, printed)
    check("| llama3.2-1b | 2048 | 0.05000 | 0.05000 | 0.05000 |  | 0.06250 |" in table,
          "table.md has the joules per token of the row:", table)
    check([row["run"] for row in rows] == ["ours_bf16", "peer_bf16", "ours_fp8", "peer_fp8", "ours_fast"]
          and rows[2]["tokens_per_second_per_gpu"] == "12000.5" and rows[2]["program"] == "train_fp8cu 0.1"
          and "--log-dir" in rows[0]["command"], "table.csv has the runs of the row:", rows)
    status, table, rows, printed = run_compare(
        folder, "--rows", "llama3.2-3b:64,llama3.2-1b:64:rowwise", "--gpus", "4,7")
    check(status == 1, "status 1 if a run failed:", status, printed)
    line = "| llama3.2-3b | 64 | 10,000 | failed | failed |  |  |  | 6,000 | 8,000 | 5.0 GiB | 1.67x |  |  |"
    check(line in table, "table.md has our failed run:", table)
    check("status 3: out of memory on GPU 0: 90 GiB wanted" in table,
          "table.md has the reason why our run failed:", table)
    line = "| llama3.2-1b, rowwise | 64 | 10,000 | 12,000 |  | 1.20x | 3.0 GiB |  | 6,000 | failed |"
    check(line in table, "table.md has the peer's failed run:", table)
    check("status 1: RuntimeError: no rowwise today" in table,
          "table.md has the reason why the peer's run failed:", table)
    check(sum(bool(row["failure"]) for row in rows) == 3, "table.csv has the failed runs:", rows)
    with open(os.path.join(folder, "out", "transformers_llama3.2-3b_64_ours_fp8", "stdout.txt")) as file:
        check(file.readline().split()[-1] in ("4", "7"), "a row runs on one of the GPUs of --gpus")


def test_titan_rows(folder):
    status, table, _, printed = run_compare(folder, "--rows", "none", "--gpus", "0,1", "--titan-rows",
                                            "tensorwise:fp32,rowwise:fp32,bf16:bf16")
    line = "| FP8 tensorwise | fp32 | 12,000 | 3.0 GiB | 8,000 | 5.0 GiB | 1.50x |"
    check(line in table, "table.md has torchtitan's tensorwise row:", table, printed)
    check("| BF16 | bf16 | 10,000 | 3.0 GiB | 6,000 | 5.0 GiB | 1.67x |" in table,
          "table.md has torchtitan's BF16 row:", table, printed)
    check(status == 1 and "| FP8 rowwise | fp32 | 12,000 | 3.0 GiB | failed |" in table,
          "table.md has torchtitan's failed run:", table)


def test_real_trainer(folder):
    """The CPU trainer takes our commands as dry runs, and the log.jsonl of a run holds what the table needs."""
    trainer = os.path.join(ROOT, "train_fp8")
    if not os.path.exists(trainer):
        print("skipped: our commands and the trainer's own log, because ./train_fp8 is not built")
        return
    sys.argv[1:] = ["--dry-run", "--gpus", "0,1", "--titan-rows", compare.TITAN_ROWS, "--rows",
                    "llama3.1-8b:8192,qwen3-4b:4096:rowwise"]
    args = compare.parse_arguments()
    runs = [run for row in args.rows for run in compare.row_runs(args, row)]
    runs += [run for row in args.titan_rows for run in compare.titan_runs(args, row)]
    for run in runs:
        if run.ours:
            words = run.words[run.words.index("./train_fp8cu") + 1:]
            done = subprocess.run([trainer, *words, "--dry-run", "--json", "--world-size", str(run.ranks)],
                                  capture_output=True, text=True)
            check(done.returncode == 0, "the trainer accepts our command:", *words, done.stderr)
    data = write(os.path.join(folder, "data.bin"), shard_bytes(20240520, 1, [i * i % 257 for i in range(2000)], "H"))
    done = subprocess.run([trainer, "tiny", "--train-data", data, "--sequence-length", "64", "--num-steps", "6",
                           "--log-dir", folder], capture_output=True, text=True)
    write(os.path.join(folder, "stdout.txt"), b"")
    result = compare.read_result(folder, True, done.returncode)
    check(result["program"].startswith("train_fp8 ") and compare.speed(result) > 0 and result["memory_bytes"] > 0,
          "read_result reads the trainer's own log:", result)


def test_limit(folder):
    status, table, rows, printed = run_compare(folder, "--rows", "qwen3-4b:64", "--limit", "2")
    check(status == 1 and "ended by --limit" in table and "not begun: --limit 2 s" in table,
          "--limit ends a run and begins no other:", table, printed)
    check(len(rows) == 5 and all(row["failure"] for row in rows),
          "table.csv has a failure for each run that --limit ended or did not begin:", rows)


def main():
    for test in (test_shards, test_energy, test_command_lines, test_compare, test_titan_rows, test_real_trainer,
                 test_limit):
        with tempfile.TemporaryDirectory() as folder:
            test(folder)
    test_rows()
    test_titan_result()
    finish()


if __name__ == "__main__":
    main()
