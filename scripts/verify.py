#!/usr/bin/env python3
"""Checks a run's receipts (--receipt) by a replay on this machine, on any number of GPUs."""
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time

from runs.options import end, fail, number, parse, say
from runs.trainer import Trainer

USAGE = """usage: scripts/verify.py RUN [--step S] [--ranks N] [--program P] [--checkpoints DIR] [-- TRAINER OPTIONS]
Replays the run whose --log-dir was RUN from its nearest checkpoint before step S (default: the last receipt) up to S,
and compares each receipt: "equal" (status 0), or the first step, tensor and array that differ (status 1).
  --ranks N          ranks of the replay (default: the run's; any number has the bits of sharding full and grad_op)
  --program P        the trainer (default: ./ and the run's program)
  --checkpoints DIR  the run's checkpoints, if they are no longer where the run saved them
Options after -- go to the trainer, for example --train-data where the shards have moved.
"""
# settings that say where a run writes, how it starts, or what it does beside training
ELSEWHERE = ("log-dir", "checkpoint-dir", "checkpoint-every", "keep-checkpoints", "resume", "branch", "export-hf",
             "init-from", "val-data", "val-every", "sample-every", "fp8-audit", "profile", "check-links", "dry-run",
             "world-size", "tokens-per-step", "step-ms", "network-gbps", "memory-limit", "fast", "msamp",
             "share-gpu", "no-verify", "grad-accumulation-steps")
NOT_ARRAYS = ("type", "step", "samples", "chain", "ranks", "tensors")
MASK = 2**64 - 1


def mix(z):
    """llmc/base/rng.h: rng_mix."""
    z = ((z ^ z >> 30) * 0xbf58476d1ce4e5b9) & MASK
    z = ((z ^ z >> 27) * 0x94d049bb133111eb) & MASK
    return z ^ z >> 31


def arrays(receipt):
    """{array: the hashes of its tensors, of 16 digits each}."""
    return {key: [text[i:i + 16] for i in range(0, len(text), 16)]
            for key, text in receipt.items() if key not in NOT_ARRAYS}


class Stretch:
    """What one process of the run has logged: its settings and receipts, and the chain so far."""

    def __init__(self, settings):
        self.settings, self.receipts, self.tensors, self.chain = settings, {}, [], 0

    def add(self, receipt):
        self.tensors = receipt.get("tensors", self.tensors)
        values = [receipt["step"], receipt["samples"]]
        values += [int(value, 16) for array in arrays(receipt).values() for value in array]
        for value in values:
            self.chain = mix((self.chain + 0x9e3779b97f4a7c15) & MASK ^ value)
        if f"{self.chain:016x}" != receipt["chain"]:
            fail(f"step {receipt['step']}: the receipt does not follow from those before it: the log was changed or "
                 "has lost lines")
        self.receipts[receipt["step"]] = receipt


def read_stretches(path):
    stretches = []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if line.startswith('{"type": "settings"'):
                    stretches.append(Stretch(json.loads(line)))
                elif line.startswith('{"type": "receipt"') and line.endswith("\n"):
                    stretches[-1].add(json.loads(line))
    except (OSError, ValueError, KeyError, IndexError) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or 'it is damaged'}")
    return stretches


def find_start(folder, first, step, named):
    """The checkpoint of the highest step before `step` in a folder, or (0, None) for a run that began at step 0."""
    names = os.listdir(folder) if folder and os.path.isdir(folder) else []
    steps = [int(name[5:]) for name in names if name[:5] == "step-" and name[5:].isdigit()]
    nearest = max((number for number in steps if number < step), default=None)
    if nearest is not None:
        return nearest, os.path.join(folder, f"step-{nearest:08d}")
    if first:
        fail(f"no checkpoint before step {step} in {folder or 'the run (it had no --checkpoint-dir)'}, and the run "
             f"began at step {first}; {named}")
    return 0, None


def command_of(trainer, settings, ranks, start, log, extra):
    given, world = settings["settings"], settings["world_size"]
    micro = given["grad-accumulation-steps"] * world
    if micro % ranks:
        fail(f"--ranks {ranks}: the run has {micro} micro-batches in a step; give a number that divides them")
    words = trainer.launch(ranks) + [trainer.program, start or settings.get("model_folder", settings["model"])]
    usage = subprocess.run([trainer.program, "--help", "all"], capture_output=True, text=True).stdout
    flags = re.findall(r"^ +--([\w-]+)(?:  |$)", usage, re.MULTILINE)  # options without a value
    for name, value in given.items():
        if name not in ELSEWHERE and value not in ("", "off" if name in flags else ""):
            words += [f"--{name}" if name in flags else f"--{name}={value}"]
    words += [f"--grad-accumulation-steps={micro // ranks}", f"--log-dir={log}"]
    return words + ([f"--branch={start}"] if start else []) + extra


def difference(stretch, expected, now):
    """Says which tensors and arrays of two receipts differ; "" if none does. Gradients are there only after a step."""
    old, new = arrays(expected), arrays(now)
    places = [(i, key) for key in old if key in new for i, (a, b) in enumerate(zip(old[key], new[key])) if a != b]
    if not places:
        return ""
    key, i = next(((key, i) for i, key in places if key == "gradients"), (places[0][1], places[0][0]))
    tensor = stretch.tensors[i] if len(old[key]) == len(stretch.tensors) else "delayed scaling"
    ranks = [str(r) for r, (a, b) in enumerate(zip(expected["ranks"], now["ranks"])) if a != b]
    same = len(expected["ranks"]) == len(now["ranks"]) and "gradients" in old and "gradients" in new
    held = f"; rank {', '.join(ranks)} held it" if same and len(ranks) < len(expected["ranks"]) else ""
    return f"{key} of {tensor} ({len(places)} of {sum(map(len, old.values()))} hashes){held}"


def replay(command, stretch, step, log):
    """Runs the trainer until it has a receipt of `step` or one that differs. Returns the exit status."""
    with open(os.path.join(log, "stdout.txt"), "w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
        seen, path, compared = set(), os.path.join(log, "log.jsonl"), 0
        try:
            while True:
                running = process.poll() is None
                own = read_stretches(path)[-1:] if os.path.exists(path) else []
                for at, receipt in sorted(own[0].receipts.items()) if own else []:
                    if at in seen or at not in stretch.receipts or at > step:
                        continue
                    seen.add(at)
                    compared += len(arrays(receipt))
                    wrong = difference(stretch, stretch.receipts[at], receipt)
                    if wrong:
                        before = max((s for s in seen if s < at), default=None)
                        since = f"; equal up to step {before}" if before is not None else ""
                        say(f"step {at} differs: {wrong}{since}")
                        return 1
                if step in seen:
                    say(f"equal: {len(seen)} receipts, steps {min(seen)} to {step}, {compared} arrays of "
                        f"{len(stretch.tensors)} tensors")
                    return 0
                if not running:
                    out.seek(0)
                    fail("the replay ended early: " + (out.read().strip().splitlines() or ["it printed nothing"])[-1])
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def main(words):
    options, runs, extra = parse(words, USAGE, {"step": "", "ranks": "", "program": "", "checkpoints": ""}, (), True)
    if len(runs) != 1:
        fail("give the --log-dir of one run; --help lists all options")
    stretches = [s for s in read_stretches(os.path.join(runs[0], "log.jsonl")) if s.receipts]
    if not stretches:
        fail(f"{runs[0]} has no receipts; train with --deterministic --receipt N --log-dir {runs[0]}")
    step = number("--step", options.step) if options.step else max(stretches[-1].receipts)
    stretch = next((s for s in reversed(stretches) if step in s.receipts and step > min(s.receipts)), None)
    if not stretch:
        near = sorted({at for s in stretches for at in s.receipts})
        fail(f"--step {step} has no receipt after a step; receipts are of steps {near[0]} to {near[-1]}")
    settings = stretch.settings
    ranks = number("--ranks", options.ranks) if options.ranks else settings["world_size"]
    if ranks != settings["world_size"] and "any number" not in settings.get("same_bits", ""):
        fail(f"--ranks {ranks}: this run has the same bits {settings.get('same_bits')}")
    trainer = Trainer(options.program or "./" + settings["program"])
    checkpoints = options.checkpoints or settings["settings"]["checkpoint-dir"]
    at, start = find_start(checkpoints, min(stretch.receipts), step, "give --checkpoints DIR")
    with tempfile.TemporaryDirectory() as log:
        command = command_of(trainer, settings, ranks, start, log, extra)
        say(f"replay of steps {at + 1} to {step}, from {start or 'new weights'}, on {ranks} ranks")
        status = replay(command, stretch, step, log)
        own = read_stretches(os.path.join(log, "log.jsonl"))[-1].settings
        for key in ("device", "versions", "build"):
            if own[key] != settings[key]:
                say(f"the run had another {key}: {settings[key]}, now {own[key]}; equal bits are promised for one "
                    "program on one kind of device alone")
        if status:
            say("the replay was: " + shlex.join(command))
    return status


if __name__ == "__main__":
    end(main)
