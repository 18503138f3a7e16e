"""Trains runs, each in a folder of its own, side by side; records how each ended; says how many are left.

A run's folder holds the trainer's stdout.txt and log.jsonl, and once the run has ended `result`: kind, seconds and
message with tabs between. A run is done if the trainer exits with status 0 and the log ends with the summary of all
steps on all ranks. `result` may lack if a sweep was killed: then the log alone says if the run is done.
"""
import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import signal
import subprocess
import time

from runs.options import fail, say
from sweep_folder import Damaged, clean, ran_in_fp8, read_line, read_result, show, why_missing

STATUSES = {3: "memory", 4: "unsupported"}  # exit statuses of the trainer (its --help all lists them) that are answers
ANSWERS = ("done", "memory", "unsupported")
STOP_SECONDS = 30  # between SIGTERM and SIGKILL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints in its own
FULL_BYTES = 16384  # a disk with less room than this is full: no run can write its log


def write_file(path, content):
    """Replaces a file by this text or these bytes, whole or not at all, also if the machine stops."""
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
    try:
        with open(f"{path}.tmp", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path)


def ends_of(path):
    """The first and the last line of a log as dictionaries; Nones if they are damaged or missing."""
    try:
        with open(path, "rb") as file:
            first = file.readline()
            file.seek(max(0, os.path.getsize(path) - 65536))
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
        return read_line(first), read_line(last)
    except (OSError, Damaged):
        return None, None


def summary_of(folder, ranks=None):
    """The summary with which the log in a folder ends, or None. With `ranks`, only that of a run on so many: an mpirun
    of another MPI than the trainer's starts single ranks."""
    first, last = ends_of(os.path.join(folder, "log.jsonl"))
    whole = first and first["type"] == "settings" and last["type"] == "summary"
    return last if whole and ranks in (None, first["world_size"]) else None


def duration(seconds):
    minutes = round(seconds / 60)
    return (f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else
            f"{minutes // 60} h {minutes % 60} min")


class Run:
    """`title` names the run in printed lines, `expected` is in proportion to its time. `parent`: the run from whose
    checkpoint it branches, or None; `kept`: the step whose checkpoint stays when no run needs it any more."""

    def __init__(self, folder, command, title, model, precision, gpus, steps, expected=0.0):
        self.folder, self.command, self.title, self.model, self.precision = folder, command, title, model, precision
        self.gpus, self.steps, self.expected, self.process = gpus, steps, expected, None
        self.parent, self.kept, self.taken = None, 0, []
        self.recall()

    def path(self, name):
        return os.path.join(self.folder, name)

    def summary(self):
        summary = summary_of(self.folder, self.gpus)
        return summary if summary and summary["steps"] == self.steps else None

    def recall(self):
        """Reads how an earlier start ended."""
        self.kind, self.seconds, self.message = "", 0.0, ""
        with contextlib.suppress(OSError, ValueError):
            kind, seconds, self.message = read_result(self.folder) or ("", 0, "")
            self.kind, self.seconds = kind, float(seconds)
        if self.kind in ("", "done"):
            self.kind = "done" if self.summary() else ""
        self.earlier = bool(self.kind)

    def record(self, kind, seconds, message):
        self.kind, self.seconds, self.message, self.earlier = kind, seconds, message, False
        os.makedirs(self.folder, exist_ok=True)
        write_file(self.path("result"), f"{kind}\t{seconds:.1f}\t{message}\n")

    def begin(self, environment, lock):
        self.started = time.monotonic()
        os.makedirs(self.folder, exist_ok=True)
        for name in ("log.jsonl", "result"):  # in this order: the log of a failed run may end with its summary
            if os.path.exists(self.path(name)):
                os.remove(self.path(name))
        shutil.rmtree(self.path(CHECKPOINTS), ignore_errors=True)
        with open(self.path("stdout.txt"), "w") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                                            env={**os.environ, **environment}, start_new_session=True,
                                            pass_fds=[lock])  # if this program is killed, its runs keep the lock

    def end(self, status):
        seconds, self.process = time.monotonic() - self.started, None
        if self.summary() and status == 0:
            first, _ = ends_of(self.path("log.jsonl"))
            in_fp8 = ran_in_fp8({"kind": "done", "precision": self.precision, "settings": first})
            self.record("done", seconds, "" if in_fp8 else "nothing ran in FP8")
        else:
            self.record(STATUSES.get(status, "failed"), seconds, self.reason(status))

    def reason(self, status):
        """Why a run has failed: a wrong number of ranks, or the trainer's error, or else the exit status and the last
        line of the output."""
        signal_number = -status if status < 0 else status - 128
        how = "ended with " + (f"signal {signal_number}" if status < 0 else f"status {status}" + (
            f" (signal {signal_number})" if status > 128 else ""))
        with open(self.path("stdout.txt"), encoding="utf-8", errors="replace") as file:
            lines = [clean(line.strip().replace("\t", " ")) for line in file if line.strip(" -\n")]
        errors = [re.sub(r"^.*?error: ", "", line) for line in lines if re.match(r"(rank \d+: )?error: ", line)]
        first, _ = ends_of(self.path("log.jsonl"))
        if self.summary():
            return f"{how} after its summary" + (f": {errors[0][:300]}" if errors else "")
        if first and first.get("world_size") != self.gpus:
            return (f"the trainer did not run on {self.gpus} ranks: is {self.command[0]} of the MPI that the trainer "
                    "was built with?")
        return errors[0][:400] if errors else how + (f"; last line: {lines[-1][:300]}" if lines else "")

    def outcome(self):
        if self.kind != "done":
            return why_missing({"kind": self.kind, "message": self.message})
        s = self.summary()
        text = f"done in {duration(self.seconds)}{f' ({self.message})' if self.message else ''}: "
        text += f"loss {show('%.4f', s['last_loss'])}, median step {show('%.2f', s['median_ms'])} ms, "
        text += f"{show('%.0f', s['tokens_per_second_per_gpu'])} tok/s/GPU"
        return text + (f", {s['joules_per_token']:.3g} J/token" if s.get("joules_per_token") else "")

    def drop_checkpoints(self, runs):
        """Removes the checkpoints that no run needs any more, if the GPU can do or has done all that branch from it."""
        if any(run.parent is self and run.kind not in ANSWERS for run in runs):
            return
        for path in glob.glob(os.path.join(glob.escape(self.path(CHECKPOINTS)), "step-*")):
            if os.path.basename(path) != f"step-{self.kept:08d}":
                shutil.rmtree(path, ignore_errors=True)

    def signal_group(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Pool:
    """The runs of a folder, which it holds locked.

    `gpus` are the GPUs of which each run gets its own, by CUDA_VISIBLE_DEVICES; None: runs take what they find. At most
    `parallel` runs go on at a time. Runs whose kind is in `keep` are not trained again. `name` is what the user started
    and `hint` is printed when a signal stops it.
    """

    def __init__(self, folder, runs, gpus, parallel, keep, name, hint):
        self.folder, self.runs, self.gpus, self.parallel, self.keep = folder, runs, gpus, parallel, keep
        self.name, self.hint, self.free, self.busy, self.signal = name, hint, list(gpus or []), {}, 0

    def __enter__(self):
        os.makedirs(self.folder, exist_ok=True)
        self.lock = open(os.path.join(self.folder, "lock"), "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(f"another {self.name}, or a run of a killed one, still works in {self.folder}")
        self.recall()
        return self

    def __exit__(self, *unused):
        self.stop()
        self.lock.close()

    def recall(self):
        for run in self.runs:
            run.recall()
            if run.kind == "done" and not os.path.exists(run.path("result")):  # it outlived a killed sweep
                run.record("done", 0.0, "")
                run.earlier = True

    def forget(self, different):
        """Removes the results of runs of other settings, none of which has finished, so that all runs start again."""
        say(f"no run in {self.folder} has finished, so its settings are replaced ({'; '.join(different)})")
        for path in glob.glob(os.path.join(glob.escape(self.folder), "*", "result")):
            os.remove(path)
        self.recall()

    def stop(self):
        """Ends all runs with SIGTERM, and with SIGKILL after 30 s. They get no result and start anew next time."""
        for run in self.busy:
            run.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for run in self.busy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(max(0.1, deadline - time.monotonic()))
            run.signal_group(signal.SIGKILL)
        self.busy = {}

    def caught(self, number, frame):
        self.signal = self.signal or number

    def stop_if_signalled(self):
        if not self.signal:
            return
        self.stop()
        done = sum(run.kind == "done" for run in self.runs)
        say(f"\ninterrupted after {done} of {len(self.runs)} runs; start the {self.name} again to continue; "
            f"{self.hint}")
        raise SystemExit(128 + self.signal)

    def left(self, waiting):
        """How many runs are left and how long they take, from the times of finished runs. "" if none is left or no time
        is known."""
        done = [run for run in self.runs if run.kind == "done" and run.seconds]
        expected = sum(run.expected for run in done)
        if not expected or not (waiting or self.busy):
            return ""
        scale, now, seconds = sum(run.seconds for run in done) / expected, time.monotonic(), 0.0
        for run in [*waiting, *self.busy]:
            spent = now - run.started if run in self.busy else 0.0
            beside = self.parallel if self.gpus is None else max(1, min(self.parallel, len(self.gpus) // run.gpus))
            seconds += max(0.0, scale * run.expected - spent) / beside
        return f" | {len(waiting) + len(self.busy)} left, about {duration(seconds)}"

    def say(self, run, waiting):
        index = self.runs.index(run) + 1
        say(f"[{index}/{len(self.runs)}] {run.title}: {run.outcome()}{', from before' if run.earlier else ''}"
            f"{'' if run.earlier else self.left(waiting)}")

    def fits(self, run):
        return (len(self.busy) < self.parallel and (self.gpus is None or run.gpus <= len(self.free)) and
                (not run.parent or run.parent.kind == "done"))

    def near(self, run):
        """True if the GPUs of the run that it branches from are free: GPUs of one kind differ a little in speed."""
        return bool(run.parent and run.parent.taken) and set(run.parent.taken) <= set(self.free)

    def begin(self, run):
        taken = (run.parent.taken if self.near(run) else self.free[:run.gpus]) if self.gpus else []
        self.free = [gpu for gpu in self.free if gpu not in taken]
        run.taken = taken
        run.begin({"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}, self.lock.fileno())
        self.busy[run] = taken

    def end(self, run, status, waiting):
        self.free = sorted(self.free + self.busy.pop(run), key=(self.gpus or []).index)
        run.end(status)
        if run in self.runs:
            self.say(run, waiting)
            (run.parent or run).drop_checkpoints(self.runs)
            run.drop_checkpoints(self.runs)
        for child in [child for child in waiting if child.parent is run and run.kind != "done"]:
            waiting.remove(child)
            child.record(run.kind, 0.0, f"{run.title}, from which it branches: {run.message or run.kind}")
            self.say(child, waiting)
        room = os.statvfs(self.folder)
        if run.kind == "failed" and room.f_bavail * room.f_frsize < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.folder)

    def train(self, runs=None):
        """Trains the given runs, or all that are not kept. Catches signals that are not ignored already: they stop the
        runs and end the program."""
        handlers = {number: signal.signal(number, self.caught) for number in SIGNALS
                    if signal.getsignal(number) != signal.SIG_IGN}
        waiting = list(runs or [])
        for run in self.runs if runs is None else []:
            if run.kind in self.keep:
                self.say(run, waiting)
            else:
                run.kind = ""
                waiting.append(run)
        while waiting or self.busy:
            while fitting := list(filter(self.fits, waiting)):
                run = max(fitting, key=lambda run: (run.kept > 0, self.near(run)))  # trunks first: arms wait for them
                waiting.remove(run)
                self.begin(run)
            time.sleep(0.05)
            self.stop_if_signalled()
            for run in list(self.busy):
                status = run.process.poll()
                if status is not None:
                    self.end(run, status, waiting)
        self.stop_if_signalled()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def refuse_other_settings(folder, different, steps):
    """Dies if settings differ and a run of the folder has finished. `different`: the settings that differ, as texts;
    `steps`: the numbers of steps that the runs had; None if that is not known."""
    finished = (summary_of(os.path.dirname(path)) for path in
                glob.glob(os.path.join(glob.escape(folder), "*", "log.jsonl")))
    if different and any(summary and (steps is None or summary["steps"] in steps) for summary in finished):
        fail(f"{folder} holds runs of other settings ({'; '.join(different)}); give another --out")
