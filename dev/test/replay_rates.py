#!/usr/bin/env python3
"""Measures how often --replay-every finds a flipped bit, beside the computed rate, and flips bits of gathered weights.

usage: dev/test/replay_rates.py cpu|gpu|gathered|verify TRIALS [JOBS [PLACE ...]]
cpu and gpu: rates. gathered: weights on the GPU. In each trial, a run of two ranks, one bit of one pass is flipped
(lib/faulty_rank.h). verify: one bit is flipped in each place of lib/flips.cuh in runs of one GPU, and in gathered
weights; scripts/verify.py must name the step and a tensor. Needs ./train_fp8cu, build/faulty_rank or
build/faulty_rankcu, and build/synth_stories; on one GPU the ranks share it.
"""
import concurrent.futures
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile

STEPS, LAYERS = 8, 4
STATE = ("weights", "exp_avg", "exp_avg_sq")
PLACES = ("weights", "first moments", "second moments", "gradients", "FP8 weights", "activations", "gathered")


def options(kind, data):
    model = "tiny --sequence-length 32" if kind == "cpu" else "small --sequence-length 256"
    return f"{model} --train-data {data}_train.bin --batch-size 1 --learning-rate 1e-3 --precision fp8 " \
           f"--num-steps {STEPS} --deterministic".split()


class Trials:
    def __init__(self, kind, folder, jobs):
        self.program = "build/faulty_rank" + ("" if kind == "cpu" else "cu")
        self.folder, self.jobs, self.count = folder, jobs, 0
        subprocess.run(["build/synth_stories", "--out", f"{folder}/s", "--bytes", "400000", "--seed", "3"], check=True,
                       stdout=subprocess.DEVNULL)
        self.options = options(kind, f"{folder}/s")
        self.gpus = 0 if kind == "cpu" else \
            subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.count(b"GPU-")
        if self.gpus == 1:
            self.options.append("--share-gpu")

    def run(self, number, more, world=2, **fault):
        """One run. Returns its status, what rank 0 and 1 said, and the receipts."""
        log = f"{self.folder}/{number}"
        ranks = []
        if self.gpus > 1 and world == 1:
            fault["CUDA_VISIBLE_DEVICES"] = str(number % self.gpus)
        for r in range(world):
            settings = dict(os.environ, RANK=str(r), WORLD_SIZE=str(world), OMP_NUM_THREADS="1", **fault)
            arguments = [self.program, *self.options, "--init-from", f"file:{log}.meeting", *more]
            ranks.append(subprocess.Popen(arguments + ["--log-dir", log], env=settings, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        said = "".join(process.communicate(timeout=120)[0] for process in ranks)
        with open(f"{log}/log.jsonl") as lines:
            receipts = [record for record in map(json.loads, lines) if record["type"] == "receipt"]
        return max(process.returncode for process in ranks), said, receipts

    def verify(self, case):
        """A faulty run and its replay by the trainer without faults. Returns the run's receipts and what was said."""
        receipts = self.run(**case)[2]
        settings = dict(os.environ, CUDA_VISIBLE_DEVICES=str(case["number"] % self.gpus))
        replay = subprocess.run(["scripts/verify.py", f"{self.folder}/{case['number']}", "--program", "./train_fp8cu",
                                 "--ranks", "1"], capture_output=True, text=True, env=settings)
        return receipts, replay.stdout + replay.stderr

    def all(self, cases):
        """Runs cases, dictionaries of run's arguments, some at a time."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            waiting = []
            for case in cases:
                self.count += 1
                waiting.append(pool.submit(self.run, self.count, **case))
            return [one.result() for one in waiting]


def found(result, rank):
    """True if the replay ended the run and named the rank, or said that it was one of the two."""
    status, said, _ = result
    named = re.search(r"rank (\d) on .* computed wrongly(, or rank (\d))?", said)
    if not named and status:
        sys.exit(f"a run failed for another reason: {said[-600:]}")
    return bool(named) and str(rank) in (named[1], named[3])


def interval(k, n):
    """95%, by Wilson."""
    z, p = 1.96, k / n
    middle, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def passing_faults(trials, number):
    """A bit of one training pass. Of N steps with A micro-steps each, one pass of N A is replayed."""
    for every, micro in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 2)):
        cases, ranks = [], []
        for _ in range(number):
            rank, k = random.randrange(2), random.randrange(STEPS * micro)
            own = k + 1 + k // (every * micro)  # replays are passes, too
            ranks.append(rank)
            cases.append({"more": ["--replay-every", str(every), "--grad-accumulation-steps", str(micro)],
                          "FAULTY_RANK": str(rank), "FAULTY_PASS": str(own)})
        k = sum(found(result, rank) for result, rank in zip(trials.all(cases), ranks))
        low, high = interval(k, number)
        print(f"--replay-every {every}, {micro} micro-steps: {k} of {number} flips found and named, "
              f"{100 * k / number:.0f}% [{100 * low:.0f}, {100 * high:.0f}], computed {100 / every / micro:.0f}%",
              flush=True)


def gathered_weights(trials, number):
    """A bit of a gathered layer: what it changes, and whether receipts and a replay of each step find it."""
    for precision in ("fp8", "bf16"):
        base = ["--precision", precision, "--receipt", "1"]
        clean = trials.all([{"more": base}])[0][2]
        faults, replays = [], []
        for _ in range(number):
            # in the first three steps, forward or backward
            fault = {"FAULTY_RANK": str(random.randrange(2)), "FAULTY_WEIGHTS": str(random.getrandbits(40))}
            k = random.randrange(3 * 2 * LAYERS)
            faults.append({"more": base, "FAULTY_PASS": str(k + 1), **fault})
            own = k + 1 + k // (2 * LAYERS) * 2 * LAYERS
            replays.append({"more": base + ["--replay-every", "1"], "FAULTY_PASS": str(own), **fault})
        changed = by_receipt = by_replay = missed = 0
        for case, faulty, replayed in zip(faults, trials.all(faults), trials.all(replays)):
            last = [(a, b) for a, b in zip(clean, faulty[2])][-1]
            differs = any(last[0].get(name) != last[1].get(name) for name in STATE)
            receipt = last[0]["chain"] != last[1]["chain"]
            replay = found(replayed, case["FAULTY_RANK"])
            changed, by_receipt, by_replay = changed + differs, by_receipt + receipt, by_replay + replay
            missed += differs and not (receipt and replay)
        print(f"flips in gathered weights, {precision}: {changed} of {number} changed weights or moments, {by_receipt} "
              f"found by receipts, {by_replay} by replays of each step; {missed} changed something and were missed",
              flush=True)


def verified(trials, number):
    """A bit of each place: how often it changed a result, and whether verify.py named the step and a tensor."""
    base = ["--precision", "fp8", "--receipt", "1"]
    for place in sys.argv[4:] or PLACES:
        cases = []
        for i in range(number):
            step = random.randrange(2, STEPS)
            if place == "gathered":
                fault = {"world": 2, "FAULTY_RANK": str(i % 2), "FAULTY_WEIGHTS": str(random.getrandbits(40)),
                         "FAULTY_PASS": str((step - 1) * 2 * LAYERS + random.randrange(2 * LAYERS) + 1)}
            else:
                fault = {"world": 1, "FAULTY_PLACE": place, "FAULTY_STEP": str(step), "FAULTY_BIT": str(i)}
            trials.count += 1
            cases.append({"number": trials.count, "more": base, **fault})
        clean = trials.all([{"more": base, "world": cases[0]["world"]}])[0][2]
        with concurrent.futures.ThreadPoolExecutor(trials.jobs) as pool:
            results = list(pool.map(trials.verify, cases))
        changed = named = ended = 0
        for receipts, said in results:
            first = next((new["step"] for old, new in zip(clean, receipts) if old["chain"] != new["chain"]), 0)
            ended += len(receipts) < len(clean)  # the run stopped, because a gradient was not finite
            changed += any(clean[-1].get(name) != receipts[-1].get(name) for name in STATE)
            words = rf"step {first} differs: \w+ of (model\.|lm_head|delayed)" if first else "equal: "
            right = re.search(words, said)
            named += bool(first and right)
            if not right:
                print(f"missed or misnamed, the first receipt that differs is of step {first}: {said[-300:]}")
        example = next((line for _, said in results for line in said.splitlines() if "differs" in line), "")
        print(f"flips in {place}: {changed} of {number} changed weights or moments, {ended} ended the run, verify.py "
              f"named the step and a tensor of {named}, for example: {example}", flush=True)


def main():
    kind, number = sys.argv[1], int(sys.argv[2])
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
    random.seed(1)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(kind, folder, int(sys.argv[3]) if len(sys.argv) > 3 else 2)
        {"gathered": gathered_weights, "verify": verified}.get(kind, passing_faults)(trials, number)


if __name__ == "__main__":
    main()
