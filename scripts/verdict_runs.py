"""The runs of a verdict (scripts/verdict.py): starts several side by side, records how each ended, says what is left.

A run is a folder with the trainer's stdout.txt and log.jsonl, and `result` if it did not finish: kind, seconds and
message with tabs between, as in a sweep. A run has finished if its log ends with the summary of all its steps and
there is no `result`: a run that ends with another exit status than 0 after its summary has failed.
"""
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

# Exit statuses of the trainer (its --help lists all) that are answers, not failures.
KINDS = {3: "memory", 4: "unsupported"}
WORDS = {"memory": "out of memory", "unsupported": "not possible on this GPU", "failed": "failed"}
STOP_SECONDS = 30  # between SIGTERM and SIGKILL


def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def write_text(path, text):
    """Replaces a file by this text, whole or not at all, also if the machine stops. Dies if it cannot be written."""
    try:
        with open(path + ".tmp", "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def say(text):
    """Prints a line at once. If the reader of the output has gone, the verdict goes on without it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finished_summary(folder, steps):
    """The summary with which the run's log ends, if it is one of `steps` steps; else None."""
    try:
        with open(os.path.join(folder, "log.jsonl"), "rb") as file:
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
        summary = json.loads(last)
    except (OSError, ValueError):
        return None
    ends = isinstance(summary, dict) and summary.get("type") == "summary" and summary.get("steps") == steps
    return summary if ends else None


class Run:
    def __init__(self, name, folder, command, model, recipe, seed, rounding, steps, gpus):
        self.name, self.folder, self.command, self.model, self.recipe = name, folder, command, model, recipe
        self.seed, self.rounding, self.steps, self.gpus = seed, rounding, steps, gpus
        self.expected, self.kind, self.seconds, self.message, self.process = 0.0, "", 0.0, "", None
        self.recall()

    def recall(self):
        """Reads how an earlier start ended."""
        try:
            with open(os.path.join(self.folder, "result")) as file:
                self.kind, seconds, self.message = file.read().rstrip("\n").split("\t", 2)
            self.seconds = float(seconds)
        except FileNotFoundError:
            self.kind = "done" if finished_summary(self.folder, self.steps) else ""
        except (OSError, ValueError):
            self.kind = ""

    def is_kept(self):
        return self.kind in ("done", "memory", "unsupported")

    def seconds_known(self):
        summary = finished_summary(self.folder, self.steps)
        return summary["seconds"]["wall"] if summary else None

    def begin(self, environment, lock):
        self.started = time.monotonic()
        try:
            os.makedirs(self.folder, exist_ok=True)
            for name in ("log.jsonl", "result"):  # in this order: the log of a failed run may end with its summary
                if os.path.exists(os.path.join(self.folder, name)):
                    os.remove(os.path.join(self.folder, name))
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}")
        try:
            out = open(os.path.join(self.folder, "stdout.txt"), "w")
        except OSError as error:
            fail(f"cannot write {error.filename}: {error.strerror}")
        with out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                                            env={**os.environ, **environment}, start_new_session=True,
                                            pass_fds=[lock])  # if the verdict is killed, its runs keep the lock

    def end(self, status):
        """Sets the run's kind and seconds. Writes the file `result` if the run did not finish."""
        self.seconds, self.process = time.monotonic() - self.started, None
        if finished_summary(self.folder, self.steps) and status == 0:
            self.kind = "done"
            return
        self.kind, self.message = KINDS.get(status, "failed"), self.reason(status)
        write_text(os.path.join(self.folder, "result"), f"{self.kind}\t{self.seconds:.1f}\t{self.message}\n")

    def reason(self, status):
        """The trainer's error, or else the exit status and the last line of the output."""
        with open(os.path.join(self.folder, "stdout.txt"), errors="replace") as file:
            lines = [line.strip() for line in file if line.strip(" -\n")]
        errors = [re.sub(r"^.*?error: ", "", line) for line in lines if re.match(r"(rank \d+: )?error: ", line)]
        if errors:
            return errors[0][:400].replace("\t", " ")
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return (f"ended with {how}" + (f"; last line: {lines[-1][:300]}" if lines else "")).replace("\t", " ")

    def words(self):
        text = f"{self.model}, {self.recipe}, seed {self.seed}"
        return text if self.rounding is None else f"{text}, rounding seed {self.rounding}"

    def outcome(self):
        if self.kind != "done":
            return f"{WORDS[self.kind]}: {self.message}"
        s = finished_summary(self.folder, self.steps)
        text = f"loss {s['last_loss']:.4f}" if s["last_loss"] is not None else "loss not finite"
        text += f", {s['median_ms']:.2f} ms a step"
        return text + (f", {s['joules_per_token']:.3g} J/token" if s.get("joules_per_token") else "")


class Pool:
    """Trains the runs that Run.is_kept() does not keep, one in each slot at a time.

    A slot is a dictionary of environment variables that gives a run its GPUs.
    """

    def __init__(self, folder, runs, slots):
        self.folder, self.runs, self.slots, self.free = folder, runs, slots, list(range(len(slots)))
        self.busy, self.starting, self.pending = {}, False, None

    def __enter__(self):
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.lock = open(os.path.join(self.folder, "lock"), "w")
        except OSError as error:
            fail(f"cannot write in {self.folder}: {error.strerror}")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(f"another verdict, or a run of a killed one, still works in {self.folder}")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.stop)
        return self

    def __exit__(self, *unused):
        for run in self.runs:  # after an error
            if run.process:
                self.signal_group(run, signal.SIGTERM)
        self.lock.close()

    def stop(self, number, frame):
        """Stops the runs in progress, which start from the beginning next time, and ends the program.

        While a run starts, its process is not known yet and would go on: the signal waits until it is.
        """
        if self.starting:
            self.pending = number
            return
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        running = [run for run in self.runs if run.process]
        for run in running:
            self.signal_group(run, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for run in running:
            try:
                run.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            self.signal_group(run, signal.SIGKILL)
        done = sum(run.kind == "done" for run in self.runs)
        say(f"\nstopped after {done} of {len(self.runs)} runs; start the verdict again to continue; "
            f"scripts/report.py {shlex.quote(self.folder)} makes a report of the finished runs")
        os._exit(128 + number)

    @staticmethod
    def signal_group(run, number):
        try:
            os.killpg(run.process.pid, number)
        except ProcessLookupError:
            pass

    def say(self, run, before=False):
        index = self.runs.index(run) + 1
        say(f"[{index}/{len(self.runs)}] {run.words()}: {run.outcome()}{', from before' if before else ''}"
            f"{'' if before else self.left()}")

    def left(self):
        """How many runs are left and until when, from the times of finished runs. "" if none is left, or if this start
        has finished none."""
        open_runs = [run for run in self.runs if not run.kind]
        done = [run for run in self.runs if run.kind == "done" and run.seconds]
        if not open_runs or not done:
            return ""
        scale = sum(run.seconds for run in done) / max(1e-9, sum(run.expected or run.seconds for run in done))
        mean = sum(run.seconds for run in done) / len(done)
        seconds = sum(scale * run.expected or mean for run in open_runs)
        now = time.monotonic()
        seconds -= sum(min(now - run.started, scale * run.expected or mean) for run in open_runs if run.process)
        end = time.time() + seconds / len(self.slots)
        return f" | {len(open_runs)} left, until about {time.strftime('%H:%M', time.localtime(end))}"

    def train(self):
        waiting = []
        for run in self.runs:
            if run.is_kept():
                self.say(run, before=True)
            else:
                run.kind = ""
                waiting.append(run)
        while waiting or self.busy:
            while waiting and self.free:
                slot = self.free.pop(0)
                run = waiting.pop(0)
                self.starting = True
                run.begin(self.slots[slot], self.lock.fileno())
                self.starting = False
                if self.pending:
                    self.stop(self.pending, None)
                self.busy[slot] = run
            time.sleep(0.05)
            for slot, run in list(self.busy.items()):
                status = run.process.poll()
                if status is not None:
                    run.end(status)
                    del self.busy[slot]
                    self.free.append(slot)
                    self.say(run)
