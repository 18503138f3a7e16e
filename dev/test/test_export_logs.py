#!/usr/bin/env python3
"""Tests scripts/export_logs.py: event files hold losses and other scalars of the logs, with valid checksums.

The files are read here by their format (TFRecord with masked CRC-32C, Event messages). Needs ./train_fp8,
build/synth_stories and tensorboardX; if this Python lacks tensorboardX, build/report-venv (scripts/setup_report.sh)
runs the test, and without that it is skipped. Ends with "N passed, N failed".
"""
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from counted import ROOT, check, finish, go_on_with_report_libraries  # noqa: E402

try:
    from tensorboardX.proto.event_pb2 import Event
except ImportError as missing:
    go_on_with_report_libraries(missing, "event files")


def crc32c(data):
    """CRC-32C (Castagnoli, RFC 3720, appendix B.4), bit by bit."""
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff


def read_events(path):
    """Returns {(name, step): (value, wall time)} of an event file, after checking its checksums. Each step of the run
    has one event: a run of a million steps is exported in minutes."""
    data, at, scalars, steps = path.read_bytes(), 0, {}, []
    while at < len(data):
        size, = struct.unpack("<Q", data[at:at + 8])
        body = data[at + 12:at + 12 + size]
        sums = struct.unpack("<I", data[at + 8:at + 12]) + struct.unpack("<I", data[at + 12 + size:at + 16 + size])
        check(sums == (masked(data[at:at + 8]), masked(body)), f"{path}: the checksums at byte {at} are right")
        event = Event.FromString(body)
        for value in event.summary.value:
            scalars[value.tag, event.step] = value.simple_value, event.wall_time
        steps += [event.step] if event.summary.value else []
        at += 16 + size
    check(len(steps) == len(set(steps)), f"{path}: each step has one event: {steps}")
    return scalars


def export(*words):
    return subprocess.run([sys.executable, "scripts/export_logs.py", *words], cwd=ROOT, capture_output=True, text=True)


def trained(folder):
    subprocess.run(["build/synth_stories", "--out", f"{folder}/s", "--bytes", "60000", "--seed", "3"], cwd=ROOT,
                   check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["./train_fp8", "tiny", "--train-data", f"{folder}/s_train.bin", "--val-data", f"{folder}/s_val.bin",
                    "--sequence-length", "32", "--num-steps", "6", "--val-every", "4", "--log-dir", f"{folder}/run"],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in open(f"{folder}/run/log.jsonl")]


def test_events(folder):
    records = trained(folder)
    for _ in range(2):  # a second export replaces the first
        result = export(f"{folder}/run", "--out", f"{folder}/events")
        check(result.returncode == 0 and "6 steps" in result.stdout, result.stdout + result.stderr)
    files = list(pathlib.Path(folder, "events").glob("*/events.out.tfevents.*"))
    check(len(files) == 1, f"there is one event file: {files}")
    scalars = read_events(files[0])
    names = {"loss": "loss/training", "norm": "optimizer/gradient_norm", "lr": "optimizer/learning_rate",
             "ms": "time/step_ms", "optimizer_ms": "time/optimizer_ms", "memory_bytes": "gpu/memory_bytes"}
    steps = [record for record in records if record["type"] == "step"]
    for record in steps:
        for key, name in names.items():
            value = scalars.get((name, record["step"]), (None, 0))[0]
            want = struct.unpack("<f", struct.pack("<f", record[key]))[0]
            check(value == want, f"{name} of step {record['step']} is {want}: {value}")
    validations = {name_step[1]: value[0] for name_step, value in scalars.items() if name_step[0] == "loss/validation"}
    wanted = {r["step"]: r["loss"] for r in records if r["type"] == "validation"}
    check(sorted(validations) == sorted(wanted) == [4, 6],
          f"events have the validation losses of steps 4 and 6: {validations}")
    check(all(abs(validations[s] - wanted[s]) < 1e-6 for s in wanted),
          f"the validation losses are {wanted}: {validations}")
    check(not any("mfu" in name for name, _ in scalars), "a null (mfu on the CPU) is not exported")
    times = [scalars["loss/training", step][1] for step in range(1, 7)]
    check(times == sorted(times) and 0 <= time.time() - times[-1] < 600,
          f"the times of events never decrease, and the last one is less than 600 s ago: {times}")


def test_follow(folder):
    """A log that grows while it is followed. Each step has one event, and its validation, which comes after it."""
    lines = pathlib.Path(folder, "run", "log.jsonl").read_text().splitlines(keepends=True)
    log = pathlib.Path(folder, "grows", "log.jsonl")
    log.parent.mkdir()
    fourth = next(i for i, line in enumerate(lines) if '"step", "step": 4,' in line)
    log.write_text("".join(lines[:fourth + 1]) + lines[fourth + 1][:20])
    command = [ROOT / "scripts/export_logs.py", log.parent, "--out", f"{folder}/live", "--follow"]
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    log.write_text("".join(lines))
    second = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    check("4 steps" in first and "6 steps" in second and process.returncode == 0, f"it follows: {first} {second}")
    whole, live = ({key: value[0] for path in pathlib.Path(folder, name).rglob("events.*")
                    for key, value in read_events(path).items()} for name in ("events", "live"))
    check(whole == live, "events of a followed log are those of the whole log")


def test_equal_names(folder):
    """Runs of one name in two folders get names that are paths. All events must still be in --out."""
    for name in ("a", "b"):
        shutil.copytree(f"{folder}/run", f"{folder}/{name}/same")
    result = export(f"{folder}/a/same", f"{folder}/b/same", "--out", f"{folder}/both")
    files = list(pathlib.Path(folder, "both").glob("*/events.out.tfevents.*"))
    others = list(pathlib.Path(folder, "a").rglob("events.*")) + list(pathlib.Path(folder, "b").rglob("events.*"))
    check(result.returncode == 0 and len(files) == 2 and not others,
          f"two runs of one name are exported to --out: {files} {others} {result.stderr}")


def test_errors(folder):
    for message, words in (("no folder is given", []), ("unknown option --bogus", ["--bogus"]),
                           ("is not a folder", ["/bogus"]), ("has no run", [folder + "/empty"])):
        os.makedirs(folder + "/empty", exist_ok=True)
        result = export(*words)
        check(result.returncode == 1 and result.stderr.startswith("error: ") and message in result.stderr,
              f"\"{message}\" expected: {result.stderr}")
    log = pathlib.Path(folder, "run", "log.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]) + "{damaged\n" + "".join(lines[3:]))
    result = export(f"{folder}/run", "--out", f"{folder}/damaged")
    check(result.returncode == 1 and "log.jsonl" in result.stderr and not os.path.exists(f"{folder}/damaged"),
          f"a damaged log is refused: {result.stderr}")


def main():
    check(crc32c(b"123456789") == 0xe3069283, "crc32c() gives the check value of CRC-32C")
    with tempfile.TemporaryDirectory() as folder:
        test_events(folder)
        test_follow(folder)
        test_equal_names(folder)
        test_errors(folder)
    finish()


if __name__ == "__main__":
    main()
