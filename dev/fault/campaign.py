#!/usr/bin/env python3
"""The fault campaign: crashes, full and bad disks, power cuts, damaged files, hostile input.

A test point runs ./train_fp8 with one fault, or damages its newest checkpoint, and then resumes the run without a
fault. It passes if the resumed run starts from the newest complete checkpoint, leaves no .tmp, and has the losses,
norms and weights of an uninterrupted run, bit for bit. In save, ranks and resume, the newest complete checkpoint must
not be older than the last one that was reported as saved. A point of section export runs the export again instead, and
one of section fuzz runs a fuzz target; both have checks of their own. Ends with a table and "N passed, N failed".
"""
import argparse
import collections
import concurrent.futures
import functools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILLS = ["kill-before", "kill-after", "kill-middle", "power-cut", "power-names"]
ERRORS = ["enospc", "eio", "enospc-on", "eio-on", "short", "eintr"]
MESSAGES = {"enospc": "No space left on device", "eio": "Input/output error", "eintr": "Interrupted system call"}
DAMAGES = ["bit flipped", "truncated", "longer", "4 KiB zeroed", "words swapped", "byte changed", "deleted",
           "of an older checkpoint"]
TARGETS = ["json", "safetensors", "config", "index", "shard", "tokenizer", "trainer", "log", "options"]
SECTIONS = ["save", "ranks", "export", "log", "damage", "resume", "fuzz"]
SAVE_STEPS, SAVE_EVERY = 6, 2
MSAMP = ["--optimizer-state", "msamp", "--master-weights", "fp16"]
# A run with these options saves moments and FP16 masters of MS-AMP with their scales, and the amax histories and scales
# of delayed scaling. It has no state of COAT, and no norms of clipping in the backward pass.
ALL_STATES = ["--precision", "fp8", "--fp8-recipe", "delayed", "--fp8-amax-history", 16, *MSAMP]

Call = collections.namedtuple("Call", "number name path")
Run = collections.namedtuple("Run", "status out err struck")
Fault = collections.namedtuple("Fault", "kind at dir rank calls delay", defaults=(None, None, 0))


class Wrong(Exception):
    """A test point failed; the text says why."""


def require(condition, text):
    if not condition:
        raise Wrong(text)


class Trainer:
    """Runs the trainer, and makes the folders of runs under `scratch`."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.data = scratch / "data"
        self.data.mkdir()
        self.next_folder = 0
        self.lock = threading.Lock()
        command = [ROOT / "build/synth_stories", "--out", self.data / "s", "--bytes", "20000", "--seed", "3"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def folder(self):
        with self.lock:
            self.next_folder += 1
            path = self.scratch / f"p{self.next_folder}"
        path.mkdir()
        return path

    def run(self, folder, options, ranks=1, fault=None, seconds=120):
        """Runs the trainer on `ranks` ranks, with `fault`. Raises Wrong if it has not ended after `seconds`."""
        report = folder / "report"
        report.unlink(missing_ok=True)
        (folder / "state").unlink(missing_ok=True)
        # With these variables, Open MPI does not wait a second before it kills the other ranks, and its shared memory
        # is in a folder that is removed at the end. Its session folder is this run's own: in a shared one, an mpirun
        # that ends can remove a folder that another mpirun has just found, and then that one ends with
        # "orte_session_dir failed".
        env = dict(os.environ, OMP_NUM_THREADS="1", OMPI_MCA_odls_base_sigkill_timeout="0",
                   OMPI_MCA_btl_vader_backing_directory=str(self.scratch), OMPI_MCA_orte_tmpdir_base=str(folder))
        if fault:
            env.update(LD_PRELOAD=str(ROOT / "build/fault/inject.so"), FAULT_DIR=str(fault.dir), FAULT_KIND=fault.kind,
                       FAULT_AT=str(fault.at), FAULT_REPORT=str(report),
                       FAULT_STATE=str(folder / "state"), FAULT_DELAY=str(fault.delay))
            if fault.calls:
                env["FAULT_CALLS"] = fault.calls
            if ranks > 1:
                env["FAULT_RANK"] = str(fault.rank)
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
        command += [str(ROOT / "train_fp8"), "tiny", "--train-data", str(self.data / "s_train.bin"),
                    "--sequence-length", "16", "--learning-rate", "3e-3", *map(str, options)]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, start_new_session=True)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Wrong(f"a run hangs: it has not ended after {seconds} s")
        lines = report.read_text().splitlines() if report.exists() else []
        struck = [line.split()[2] for line in lines if line.startswith("struck ")]
        return Run(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), struck)

    def calls(self, folder, options, ranks, fault):
        """Returns the file system calls that inject.c counts in a run without a fault, in order. `fault` has their
        folder and rank.
        """
        run = self.run(folder, options, ranks, fault._replace(kind="none", at=0))
        if run.status:
            raise SystemExit(f"a run without a fault fails:\n{run.err}")
        lines = [line.split(" ", 4) for line in (folder / "report").read_text().splitlines()]
        return [Call(int(number), name, path) for _, number, name, _, path in lines]


def files_of(folder):
    """Returns {name: content} of the files of a checkpoint or an export; {} if there is no such folder."""
    if not folder.is_dir() or folder.is_symlink():
        return {}
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def content_of(files):
    """Returns the files that are equal in all runs: without trainer.json, which names folders, and hidden files."""
    return {name: content for name, content in files.items() if name != "trainer.json" and name[0] != "."}


def log_steps(path):
    """Returns {step: [(loss, norm), ...]} of a log; every line must be JSON."""
    steps = collections.defaultdict(list)
    for n, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise Wrong(f"line {n} of log.jsonl is not JSON: {error}")
        if entry["type"] == "step":
            steps[entry["step"]].append((entry["loss"], entry["norm"]))
    return steps


class Reference:
    """An uninterrupted run of one configuration: its losses, norms and checkpoints, and how often `rank` reads data."""

    def __init__(self, trainer, options, ranks, steps, every, rank=0):
        self.trainer, self.ranks, self.num_steps = trainer, ranks, steps
        self.options = [*options, "--num-steps", steps, "--checkpoint-every", every]
        folder = trainer.folder()
        self.reads = len(trainer.calls(folder, [*self.run_options(folder), "--keep-checkpoints", 1000], ranks,
                                       Fault("none", 0, trainer.data, rank, "pread")))
        self.steps = log_steps(folder / "log/log.jsonl")
        saved = {step: files_of(folder / f"ck/step-{step:08d}") for step in range(1, steps + 1)}
        self.saved = {step: files for step, files in saved.items() if files}
        shutil.rmtree(folder)

    def run_options(self, folder):
        return [*self.options, "--checkpoint-dir", folder / "ck", "--log-dir", folder / "log"]

    def is_whole(self, checkpoints, step):
        """True if the checkpoint of a step equals that of the uninterrupted run; of trainer.json, only the step counts.
        """
        found = files_of(checkpoints / f"step-{step:08d}")
        is_trainer = self.is_trainer(found.get("trainer.json", b""), step)
        return is_trainer and content_of(found) == content_of(self.saved[step])

    def newest_whole(self, checkpoints):
        """Returns the newest step with a complete checkpoint in the folder; 0 if there is none."""
        return max([step for step in self.saved if self.is_whole(checkpoints, step)], default=0)

    def incomplete(self, checkpoints):
        """Returns the steps of incomplete checkpoints that have a checkpoint's name."""
        named = [step for step in self.saved if (checkpoints / f"step-{step:08d}").exists()]
        return [step for step in named if not self.is_whole(checkpoints, step)]

    @staticmethod
    def is_trainer(text, step):
        try:
            return json.loads(text)["step"] == step
        except (ValueError, KeyError):
            return False

    def resume(self, folder, from_step, keep=1):
        """Resumes the run in `folder`. It must start from `from_step`, leave no .tmp, and end like the uninterrupted
        run.
        """
        run = self.trainer.run(folder, [*self.run_options(folder), "--keep-checkpoints", keep, "--resume"], self.ranks)
        require(run.status == 0, f"the resumed run ends with status {run.status}: {run.err.strip()[-600:]}")
        went_on = re.search(r"^resume: continuing from .*/step-(\d+)$", run.out, re.MULTILINE)
        step = int(went_on.group(1)) if went_on else 0
        require(step == from_step, f"the resumed run starts from step {step}, not from {from_step}")
        left = [p.name for p in (folder / "ck").iterdir() if p.name.endswith(".tmp")]
        require(not left, f"the resumed run leaves {left}")
        require(self.newest_whole(folder / "ck") == self.num_steps, "the last checkpoint differs")
        self.check_log(folder)
        return run

    def check_log(self, folder):
        steps = log_steps(folder / "log/log.jsonl")
        for step, values in steps.items():
            for value in values:
                require(value == self.steps[step][0],
                        f"step {step} has loss and norm {value}, but {self.steps[step][0]} in the uninterrupted run")
        return steps


def last_saved(out):
    return max([int(step) for step in re.findall(r"^saved checkpoint after step (\d+)", out, re.MULTILINE)], default=0)


def check_end(run, kind):
    """Checks that a run ended as `kind` demands: killed, failed with the reason, or succeeded. True if it succeeded."""
    require(run.struck, "the fault did not strike: the run made fewer calls than the run without a fault; it ended "
                        f"with status {run.status}: {run.err.strip()[-400:]}")
    if kind in KILLS:
        require(run.status != 0, "the run should have been killed, but succeeded")
        return False
    if kind == "short" or (kind == "eintr" and run.struck[0] in ("write", "pwrite")):
        require(run.status == 0, f"the run ends with status {run.status}: {run.err.strip()[-400:]}")
    if run.status == 0:
        return True
    message = MESSAGES[kind.replace("-on", "")]
    require(run.status > 0 and "error: " in run.err and message in run.err,
            f"the run ends with status {run.status} and without the error \"{message}\": {run.err.strip()[-400:]}")
    return False


def save_point(reference, rank, kind, at, folder):
    """Strikes a run that saves checkpoints, and resumes it."""
    options = [*reference.run_options(folder), "--keep-checkpoints", 1]
    run = reference.trainer.run(folder, options, reference.ranks, Fault(kind, at, folder / "ck", rank))
    well = check_end(run, kind)
    said, whole = last_saved(run.out), reference.newest_whole(folder / "ck")
    require(whole >= said, f"step {said} was reported as saved, but the newest complete checkpoint is of step {whole}")
    incomplete = reference.incomplete(folder / "ck")
    require(not incomplete or kind == "power-names",
            f"incomplete checkpoints have a checkpoint's name: steps {incomplete}")
    require(not well or whole == reference.num_steps,
            f"the run succeeded, but its newest complete checkpoint is of step {whole}")
    reference.resume(folder, whole)
    require(set(reference.check_log(folder)) >= set(range(whole + 1, reference.num_steps + 1)), "log.jsonl lacks steps")


class Export:
    """Runs that export into a new folder, or over an earlier export."""

    def __init__(self, trainer):
        self.trainer, self.options = trainer, ["--precision", "bf16", "--num-steps", 1]
        self.old, self.new = self.export(["--seed", 7]), self.export([])
        require(self.old["model.safetensors"] != self.new["model.safetensors"], "the two exports are equal")
        self.wholes = [content_of(self.old), content_of(self.new)]

    def export(self, more):
        folder = self.trainer.folder()
        run = self.trainer.run(folder, [*self.options, *more, "--export-hf", folder / "x"])
        require(run.status == 0, f"an export without a fault fails: {run.err}")
        return files_of(folder / "x")

    def prepare(self, folder, over):
        (folder / "out").mkdir()
        if over:
            (folder / "out/x").mkdir()
            for name, content in self.old.items():
                (folder / "out/x" / name).write_bytes(content)
        return [*self.options, "--export-hf", folder / "out/x"]

    def point(self, over, kind, at, folder):
        options = self.prepare(folder, over)
        run = self.trainer.run(folder, options, fault=Fault(kind, at, folder / "out"))
        well = check_end(run, kind)
        found = content_of(files_of(folder / "out/x"))
        require(not found or found in self.wholes, "the export's folder holds an incomplete export")
        require(found == self.wholes[1] or not (well or "exported the weights" in run.out),
                "the run succeeded or reported its export, but the folder has no export or the earlier one")
        earlier = any(content_of(files_of(p)) == self.wholes[0] for p in (folder / "out").iterdir())
        require(not over or found or earlier, "neither the earlier export nor the new one is complete")
        run = self.trainer.run(folder, options)
        require(run.status == 0, f"the next run ends with status {run.status}: {run.err.strip()[-600:]}")
        require(content_of(files_of(folder / "out/x")) == self.wholes[1],
                "the export of the next run differs from that of an uninterrupted run")
        left = [p.name for p in (folder / "out").iterdir() if p.name != "x"]
        require(not left, f"the next run leaves {left}")


def log_point(reference, cut, n, folder):
    """Ends a run by SIGKILL at a random time. With `cut` the log also loses its tail, as in a power cut."""
    chance = random.Random(f"log {cut} {n}")
    at = chance.randrange(max(1, reference.reads - reference.num_steps), reference.reads)
    fault = Fault("kill-later", at, reference.trainer.data, calls="pread", delay=chance.randrange(4000))
    options = [*reference.run_options(folder), "--keep-checkpoints", 1]
    reference.trainer.run(folder, options, fault=fault)  # may end before the kill
    path = folder / "log/log.jsonl"
    if cut and path.exists():
        text = path.read_bytes()
        path.write_bytes(text[:len(text) - chance.randrange(min(len(text), 900))])
    before = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    whole = reference.newest_whole(folder / "ck")
    reference.resume(folder, whole)
    steps = reference.check_log(folder)
    kept = {entry["step"] for entry in map(json.loads, before) if entry["type"] == "step"} if whole else set()
    require(set(steps) >= kept | set(range(whole + 1, reference.num_steps + 1)), "log.jsonl lacks steps")


def damage_file(kind, path, older, chance):
    """Damages one file. Returns False if the file did not change."""
    before = path.read_bytes()
    data = bytearray(before)
    at = chance.randrange(len(data))
    if kind == "bit flipped":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "truncated":
        del data[at:]
    elif kind == "longer":
        data += chance.randbytes(chance.choice([1, 8, 4096]))
    elif kind == "4 KiB zeroed":
        at = at // 4096 * 4096
        data[at:at + 4096] = bytes(len(data[at:at + 4096]))
    elif kind == "words swapped":
        a, b = (chance.randrange(len(data) // 4) * 4 for _ in range(2))
        data[a:a + 4], data[b:b + 4] = data[b:b + 4], data[a:a + 4]
    elif kind == "byte changed":
        data[at] = chance.randrange(256)
    elif kind == "of an older checkpoint":
        data = bytearray((older / path.name).read_bytes())
    if kind == "deleted":
        path.unlink()
    elif data != before:
        path.write_bytes(data)
    return kind == "deleted" or data != before


def damage_point(reference, kind, n, folder):
    """Damages a file of the newer of two checkpoints, and resumes from the older one."""
    chance = random.Random(f"damage {kind} {n}")
    first, second = sorted(reference.saved)[:2]
    for step in (first, second):
        (folder / f"ck/step-{step:08d}").mkdir(parents=True)
        for name, content in reference.saved[step].items():
            (folder / f"ck/step-{step:08d}" / name).write_bytes(content)
    newest, older = folder / f"ck/step-{second:08d}", folder / f"ck/step-{first:08d}"
    names = sorted(p.name for p in newest.iterdir() if p.name[0] != ".")
    while True:
        name = chance.choice(names)
        if damage_file(kind, newest / name, older, chance):
            break
    run = reference.resume(folder, first, keep=2)
    line = re.search(rf"^resume: skipping .*/step-{second:08d}: (.*)$", run.out, re.MULTILINE)
    require(line, "the damaged checkpoint is not reported as skipped")
    require(name in line.group(1) or "has a wrong name" in line.group(1),
            f"{name} is damaged, but the message is \"{line.group(1)}\"")


def precisions():
    recipes = subprocess.check_output([ROOT / "train_fp8", "--list", "recipes"], text=True).split()
    # GEMMs of every recipe take a multiple of 128 tokens
    fp8 = [["--precision", "fp8", "--fp8-recipe", recipe, "--sequence-length", 128] for recipe in recipes]
    states = [[*fp8[0], "--optimizer-state", "coat-stochastic"], [*fp8[0], *MSAMP, "--grad-accum-dtype", "fp8"]]
    return [["--precision", "fp32"], ["--precision", "bf16"]] + fp8 + states


def resume_configurations(quick):
    """Yields (number, ranks, options): each row of precisions() with 8 splits into ranks, sharding and micro-steps.

    Apart from hybrid, the sharding of several ranks changes from row to row. With `quick`, every other row with one
    split. A configuration has one number, with and without `quick`, so that --at repeats it.
    """
    split = [(1, "full", 1), (1, "full", 2), (2, "grad_op", 1), (2, "full", 2), (3, "none", 1), (3, "full", 2),
             (4, "hybrid", 1), (4, "none", 2)]
    shards = ["full", "grad_op", "none"]
    for p, options in enumerate(precisions()):
        for s, (ranks, sharding, accumulation) in enumerate(split):
            if quick and (s != p % 3 or p % 2):
                continue
            if ranks > 1 and sharding != "hybrid":
                sharding = shards[(shards.index(sharding) + p) % 3]
            more = ["--sharding", "hybrid", "--shard-size", 2] if sharding == "hybrid" else ["--sharding", sharding]
            yield p * len(split) + s + 1, ranks, [*options, *more, "--grad-accumulation-steps", accumulation]


def resume_point(trainer, ranks, options, n, folder):
    """Ends one rank by SIGKILL within a step, at a random time in a micro-step."""
    chance = random.Random(f"resume {n}")
    steps, every, accumulation = 12, 5, int(options[-1])
    rank = chance.randrange(ranks)
    reference = Reference(trainer, options, ranks, steps, every, rank)
    after = chance.randrange(6, steps)  # number of steps done
    at = reference.reads - (steps - after) * accumulation + 1 + chance.randrange(accumulation)
    fault = Fault("kill-later", at, trainer.data, rank, "pread", chance.randrange(3000))
    run = trainer.run(folder, [*reference.run_options(folder), "--keep-checkpoints", 2], ranks, fault)
    if run.status == 0:  # on a busy machine the run may end before the kill
        shutil.rmtree(folder / "ck")
        shutil.rmtree(folder / "log")
        fault = fault._replace(kind="kill-before", delay=0)
        run = trainer.run(folder, [*reference.run_options(folder), "--keep-checkpoints", 2], ranks, fault)
    require(run.struck and run.status != 0, f"the run was not killed in step {after + 1}")
    whole = reference.newest_whole(folder / "ck")
    require(whole >= last_saved(run.out) and whole >= 5, f"the newest complete checkpoint is of step {whole}")
    reference.resume(folder, whole, keep=2)


def thinned(calls, kind, every):
    """Returns the numbers of all calls, but of consecutive writes to one file only the first, the last and each
    `every`th between. For kill-middle and short it returns only writes."""
    kept = []
    for i, call in enumerate(calls):
        writes = call.name in ("write", "pwrite")
        neighbours = [calls[j] for j in (i - 1, i + 1) if 0 <= j < len(calls)]
        same = [(other.name, other.path) == (call.name, call.path) for other in neighbours]
        if writes and same == [True, True] and i % every:
            continue
        if writes or kind not in ("kill-middle", "short"):
            kept.append(call.number)
    return kept


def chosen(calls, kind, most, every):
    """Returns the calls to strike: all of `thinned`, or a random `most` of them. At least most // 2 of these are calls
    other than open, write and close, if there are so many."""
    points = thinned(calls, kind, every)
    if most is None or len(points) <= most:
        return points
    chance = random.Random(kind)
    names = {call.number: call.name for call in calls}
    rare = [number for number in points if names[number] not in ("write", "pwrite", "open", "close")]
    picked = set(chance.sample(rare, min(len(rare), most // 2)))
    others = [number for number in points if number not in picked]
    return sorted(picked | set(chance.sample(others, most - len(picked))))


class Campaign:
    def __init__(self, args):
        self.args = args
        # /dev/shm is faster than a disk, and inject.c simulates the disk's faults anyway.
        in_memory = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 512 << 20
        folder = tempfile.mkdtemp(prefix="train_fp8_faults_", dir="/dev/shm" if in_memory else None)
        self.scratch = pathlib.Path(folder).resolve()
        self.trainer = Trainer(self.scratch)
        self.rows = collections.OrderedDict()  # name: [tried, passed]
        self.notes = {}
        self.lock = threading.Lock()
        self.begin = self.spoken = time.monotonic()

    def wants(self, section):
        return not self.args.only or section in self.args.only.split(",")

    def progress(self, section, done, total):
        if time.monotonic() - self.spoken < (0.5 if sys.stdout.isatty() else 15):
            return
        self.spoken = time.monotonic()
        failed = sum(tried - passed for tried, passed in self.rows.values())
        print(f"{section}: {done} of {total} points, {failed} failed so far, {self.spoken - self.begin:.0f} s",
              end="\r" if sys.stdout.isatty() else "\n", flush=True)

    def attempt(self, row, again, action):
        """Runs one point in a new folder and counts it. `again` holds the options that repeat this point. They also
        repeat the points with its number in other rows of its section.
        """
        folder = self.trainer.folder()
        problem = None
        try:
            action(folder)
        except Wrong as wrong:
            problem = str(wrong)
        if not self.args.keep:
            shutil.rmtree(folder, ignore_errors=True)
        with self.lock:
            self.rows[row][0] += 1
            self.rows[row][1] += problem is None
        if problem or self.args.keep:
            kept = f"  files: {folder}\n" if self.args.keep else ""
            print(f"{f'FAILED: {row}: {problem}' if problem else f'passed: {row}'}\n{kept}"
                  f"  to repeat it: dev/fault/campaign.py {again} --keep", flush=True)

    def sweep(self, section, points, jobs):
        """Runs all points, each a tuple (row, again, action)."""
        for row, _, _ in points:
            self.rows.setdefault(row, [0, 0])
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.attempt, *point) for point in points]
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                future.result()
                self.progress(section, done, len(points))

    def faults(self, row, section, kinds, calls, most, action, every=4):
        """Returns the points of one run: each kind of fault at each chosen call. Each runs action(kind, at, folder)."""
        points = []
        for kind in kinds:
            if self.args.kind and kind != self.args.kind:
                continue
            for at in [self.args.at] if self.args.at else chosen(calls, kind, most, every):
                again = f"--only {section} --kind {kind} --at {at}"
                points.append((f"{row}: {kind}", again, functools.partial(action, kind, at)))
        return points

    def saves(self):
        for section, ranks in (("save", 1), ("ranks", 2)):
            if not self.wants(section):
                continue
            reference, points = Reference(self.trainer, ALL_STATES, ranks, SAVE_STEPS, SAVE_EVERY), []
            for rank in range(ranks):
                folder = self.trainer.folder()
                options = [*reference.run_options(folder), "--keep-checkpoints", 1]
                calls = self.trainer.calls(folder, options, ranks, Fault("none", 0, folder / "ck", rank))
                kinds = KILLS + ERRORS if ranks == 1 else ["kill-before", "power-cut", "enospc", "eio", "short"]
                most = (8 if ranks == 1 else 1) if self.args.quick else None
                row = "save, 1 rank" if ranks == 1 else f"save, 2 ranks, rank {rank}"
                action = functools.partial(save_point, reference, rank)
                points += self.faults(row, section, kinds, calls, most, action, 4 * ranks)
            self.sweep(section, points, self.args.jobs if ranks == 1 else 3 * self.args.jobs)

    def exports(self):
        export, points = Export(self.trainer), []
        for over in (False, True):
            folder = self.trainer.folder()
            calls = self.trainer.calls(folder, export.prepare(folder, over), 1, Fault("none", 0, folder / "out"))
            row = "export over an earlier one" if over else "export, new folder"
            points += self.faults(row, "export", KILLS + ERRORS, calls, 4 if self.args.quick else None,
                                  functools.partial(export.point, over))
        self.sweep("export", points, self.args.jobs)

    def numbered(self, section, row, count, action):
        numbers = [self.args.at] if self.args.at else range(1, count + 1)
        return [(row, f"--only {section} --at {n}", functools.partial(action, n)) for n in numbers]

    def logs(self):
        reference = Reference(self.trainer, ["--precision", "bf16"], 1, 40, 4)
        points = []
        for cut in (False, True):
            row = "log: SIGKILL, tail cut" if cut else "log: SIGKILL"
            points += self.numbered("log", row, 4 if self.args.quick else 40,
                                    functools.partial(log_point, reference, cut))
        self.sweep("log", points, self.args.jobs)

    def damages(self):
        reference = Reference(self.trainer, ALL_STATES, 1, SAVE_STEPS, SAVE_EVERY)
        points = []
        for kind in DAMAGES:
            points += self.numbered("damage", f"damage: {kind}", 3 if self.args.quick else 50,
                                    functools.partial(damage_point, reference, kind))
        self.sweep("damage", points, self.args.jobs)

    def resumes(self):
        points = []
        for n, ranks, options in resume_configurations(self.args.quick):
            if self.args.at in (None, n):
                row = "kill and resume: " + (options[3] if options[1] == "fp8" else options[1])
                if "--optimizer-state" in options:
                    row += ", " + options[options.index("--optimizer-state") + 1]
                action = functools.partial(resume_point, self.trainer, ranks, options, n)
                points.append((row, f"--only resume --at {n}", action))
        self.sweep("resume", points, self.args.jobs)

    # Fuzzing.

    def fuzz_environment(self):
        return dict(os.environ, TMPDIR=str(self.scratch), ASAN_OPTIONS="detect_leaks=0", OMP_NUM_THREADS="1")

    def replay(self, target, runs, folder):
        runs *= 10 if target == "tokenizer" else 1  # runs of this target are short
        command = [ROOT / "build/fault/replay", target, str(runs)]
        start = time.monotonic()
        run = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env=self.fuzz_environment())
        require(run.returncode == 0, f"{run.stdout.decode('utf-8', 'replace')[-2500:]}")
        with self.lock:
            self.notes[f"fuzz, replayed: {target}"] = f"{runs:,} runs, {runs / (time.monotonic() - start):,.0f}/s"

    def libfuzzer(self, target, seconds, folder):
        corpus = folder / "corpus"
        corpus.mkdir()
        subprocess.run([ROOT / "build/fault/replay", target, "seeds", corpus], check=True, stdout=subprocess.DEVNULL)
        command = [ROOT / f"build/fault/fuzz_{target}", corpus, f"-max_total_time={seconds:.0f}", "-timeout=20",
                   "-print_final_stats=1", "-max_len=4096", f"-artifact_prefix={ROOT}/build/fault/"]
        run = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, env=self.fuzz_environment())
        text = run.stderr.decode("utf-8", "replace")
        runs, edges = re.search(r"stat::number_of_executed_units: (\d+)", text), re.findall(r" cov: (\d+)", text)
        with self.lock:
            if runs:
                n = int(runs.group(1))
                note = f"{n:,} runs, {n / seconds:,.0f}/s, {edges[-1] if edges else 0} edges"
                self.notes[f"fuzz, libFuzzer: {target}"] = note
        require(run.returncode == 0, text[-2500:])

    def fuzz(self):
        targets = [target for target in TARGETS if self.args.kind in (None, target)]
        runs = 3000 if self.args.quick else 50000
        points = [(f"fuzz, replayed: {t}", f"--only fuzz --kind {t}", functools.partial(self.replay, t, runs))
                  for t in targets]
        if not self.args.quick:
            compiler = find_libfuzzer()
            if compiler:
                build(*[f"build/fault/fuzz_{t}" for t in targets], f"FUZZ_CC={compiler}")
                seconds = 60 * self.args.minutes * self.args.jobs / len(targets)
                for t in targets:
                    action = functools.partial(self.libfuzzer, t, seconds)
                    points.append((f"fuzz, libFuzzer: {t}", f"--only fuzz --kind {t}", action))
            else:
                print("skipped: no clang with libFuzzer; fuzz targets run only on mutations of their seeds")
        self.sweep("fuzz", points, self.args.jobs)

    def report(self):
        width = max(len(row) for row in self.rows) if self.rows else 0
        print(f"\n{'fault':{width}}  tried  passed")
        for row, (tried, passed) in self.rows.items():
            note = self.notes.get(row, "")
            print(f"{row:{width}}  {tried:5d}  {passed:6d}  {'' if tried == passed else 'FAILED '}{note}".rstrip())
        passed = sum(p for _, p in self.rows.values())
        failed = sum(t - p for t, p in self.rows.values())
        print(f"\n{time.monotonic() - self.begin:.0f} s\n{passed} passed, {failed} failed")
        return 1 if failed or not passed else 0

    def run(self):
        self.saves()
        sections = {"export": self.exports, "log": self.logs, "damage": self.damages, "resume": self.resumes,
                    "fuzz": self.fuzz}
        for section, action in sections.items():
            if self.wants(section):
                action()
        return self.report()


def build(*targets):
    if subprocess.run(["make", "-s", *targets], cwd=ROOT).returncode:
        raise SystemExit(1)


def find_libfuzzer():
    """Returns a clang that links fuzz targets; None if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "empty.c"
        source.write_text("int LLVMFuzzerTestOneInput(const char *data, unsigned long n) { return data && n > 9; }\n")
        flags = ["-fsanitize=fuzzer,address,undefined", "-o", f"{folder}/empty", source]
        for compiler in filter(None, [os.environ.get("FUZZ_CC"), "clang", "clang-14"]):
            found = shutil.which(compiler)
            if found and subprocess.run([compiler, *flags], stderr=subprocess.DEVNULL).returncode == 0:
                return compiler
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="The full form takes about 15 minutes on 2 cores, and --minutes more for "
                                            "libFuzzer; --quick takes less than a minute.")
    parser.add_argument("--quick", action="store_true",
                        help="a few points of every kind, no libFuzzer; scripts/test.sh runs this")
    parser.add_argument("--minutes", type=float, default=20,
                        help="minutes of libFuzzer for all targets together [20]; 60 minutes are over 10 million runs")
    parser.add_argument("--only", metavar="SECTIONS", help=f"only these sections of {','.join(SECTIONS)}")
    parser.add_argument("--kind", help="only this kind of fault (" + ", ".join(KILLS + ERRORS) + "; in save, ranks and "
                                       "export) or this fuzz target; log, damage and resume run all their points")
    parser.add_argument("--at", type=int, help="only one point of each row: the number of the call, or of the point; "
                                               "fuzz ignores it")
    parser.add_argument("--keep", action="store_true",
                        help="keep the points' folders, and print their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="number of points that run at the same time [number of cores]; in ranks, three times it")
    args = parser.parse_args()
    for section in filter(None, (args.only or "").split(",")):
        if section not in SECTIONS:
            parser.error(f"--only {section}: the sections are {', '.join(SECTIONS)}")
    fuzzes = not args.only or "fuzz" in args.only.split(",")
    build("train_fp8", "build/synth_stories", "build/fault/inject.so", *(["build/fault/replay"] if fuzzes else []))
    campaign = Campaign(args)
    try:
        return campaign.run()
    finally:
        if not args.keep:
            shutil.rmtree(campaign.scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
