#!/usr/bin/env python3
"""Runs ours (train_fp8cu) and the PyTorch peers in turns on the same GPUs and writes tables: see --help, README.md."""
import argparse
import collections
import csv
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "qwen3-4b", "qwen3-14b")
RECIPES = {"tensorwise": "fp8", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise_with_gw_hp"}  # peers' names
ROWS = "llama3.1-8b:8192,llama3.1-8b:2048,qwen3-4b:4096,llama3.2-3b:4096,llama3.2-1b:2048"
TITAN_ROWS = "tensorwise:fp32,bf16:fp32,tensorwise:bf16,bf16:bf16,rowwise:fp32"
TITAN_MODEL = "llama3.1-8b"
SYNTHESISED_BYTES = 2000000
CSV_HEAD = ["table", "row", "run", "program", "device", "model", "precision", "masters", "gpus", "steps",
            "tokens_per_second_per_gpu", "median_ms", "memory_bytes", "joules_per_token", "last_loss", "seconds",
            "failure", "command"]

Run = collections.namedtuple("Run", "table row name ours words ranks precision masters")
Row = collections.namedtuple("Row", "text model length recipe")


class NoResult(Exception):
    """A run that ended without its result; the text says why."""


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse_row(text):
    words = text.split(":") + ["tensorwise"]
    if len(words) not in (3, 4) or words[0] not in MODELS or not words[1].isdigit() or words[2] not in RECIPES:
        raise argparse.ArgumentTypeError("\"%s\" is not MODEL:T or MODEL:T:RECIPE (models: %s; recipes: %s)" % (
            text, ", ".join(MODELS), ", ".join(RECIPES)))
    return Row(text, words[0], int(words[1]), words[2])


def parse_titan_row(text):
    words = text.split(":")
    if len(words) != 2 or words[0] not in ("bf16", *RECIPES) or words[1] not in ("fp32", "bf16"):
        raise argparse.ArgumentTypeError("\"%s\" is not bf16:MASTERS or RECIPE:MASTERS (masters: fp32, bf16)" % text)
    return words[0], words[1]


def list_of(parse):
    return lambda text: [] if text == "none" else [parse(word) for word in text.split(",")]


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("\"%s\" is not a positive whole number" % text)
    return int(text)


def parse_arguments():
    p = argparse.ArgumentParser(
        description="Runs ours (train_fp8cu) and the PyTorch peers in turns on the same GPUs; writes OUT/table.md and "
        "OUT/table.csv. Ends with status 1 if a run failed.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--gpus", default="0", help="GPUs to use, with commas; rows of --rows run side by side")
    p.add_argument("--rows", type=list_of(parse_row), default=ROWS, metavar="LIST",
                   help="rows against transformers and torchao: MODEL:T or MODEL:T:RECIPE; or none")
    p.add_argument("--ranks", type=positive, default=1, help="GPUs of one row of --rows; both sides shard over them")
    p.add_argument("--titan-rows", type=list_of(parse_titan_row), default="none", metavar="LIST",
                   help="rows against torchtitan, %s on all --gpus (2 or more): bf16:MASTERS or RECIPE:MASTERS, such "
                   "as %s; or none" % (TITAN_MODEL, TITAN_ROWS))
    p.add_argument("--titan-length", type=positive, default=8192, help="tokens per sequence of --titan-rows")
    p.add_argument("--titan-ac", default="none", choices=("none", "selective", "full"),
                   help="activation checkpointing of torchtitan; ours recomputes layers only with full")
    p.add_argument("--num-steps", type=positive, default=12, help="steps of ours")
    p.add_argument("--peer-steps", type=positive, default=10, help="steps of transformers, 5 or more")
    p.add_argument("--titan-steps", type=positive, default=20, help="steps of torchtitan, a multiple of 5, 10 or more")
    for name, path in (("llama", "data/tinystories_llama3_train.bin"), ("qwen", "data/tinystories_qwen_train.bin")):
        p.add_argument("--%s-data" % name, default=path, help="a shard of tokens; synthesised if missing")
    p.add_argument("--limit", type=positive, default=3600, help="seconds in all; runs beyond are ended or not begun")
    p.add_argument("--out", default="log/peers", help="a folder for the output of every run and the tables")
    p.add_argument("--trainer", default="./train_fp8cu", help="the program of ours")
    p.add_argument("--python", default=sys.executable, help="the Python that has torch")
    p.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    args = p.parse_args()
    args.gpus = args.gpus.split(",")
    if "" in args.gpus or len(set(args.gpus)) != len(args.gpus):
        p.error("--gpus takes different GPUs with commas between them")
    if args.rows and args.ranks > len(args.gpus):
        p.error("--ranks %d needs as many --gpus" % args.ranks)
    if args.titan_rows and len(args.gpus) < 2:
        p.error("--titan-rows needs 2 GPUs or more, such as --gpus 0,1")
    if args.peer_steps < 5 or args.titan_steps < 10 or args.titan_steps % 5:
        p.error("--peer-steps must be 5 or more, --titan-steps a multiple of 5 and 10 or more")
    if not args.dry_run and not os.access(os.path.join(ROOT, args.trainer), os.X_OK):
        p.error("there is no program %s; build it with make" % args.trainer)
    return args


# ----------------------------------------------------------------------------------------------------------------------
# Commands


def launch_ours(args, ranks):
    if ranks == 1:
        return [args.trainer]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", "-np", str(ranks), "--bind-to", "none"] + root + [args.trainer]


def launch_peer(args, ranks, script):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0"]
    return [args.python] + (torchrun if ranks > 1 else []) + [os.path.join("dev", "peers", script)]


def data_of(args, model):
    """The shard for a model: the tokens of its own vocabulary, or synthesised ones (bytes) if there are none."""
    path = args.qwen_data if model.startswith("qwen") else args.llama_data
    return path if os.path.exists(os.path.join(ROOT, path)) else os.path.join(args.out, "synth_train.bin")


def our_words(args, model, T, recipe, steps):
    words = [model, "--train-data", data_of(args, model), "--shuffle", "off", "--sequence-length", str(T)]
    words += ["--num-steps", str(steps), "--learning-rate", "1e-5"]
    if recipe == "fast":
        return words + ["--fast"]
    return words + (["--precision", "bf16"] if recipe == "bf16" else ["--precision", "fp8", "--fp8-recipe", recipe])


def row_runs(args, row):
    """The runs of a row, in the order in which they take turns: four, and --fast beside tensorwise."""
    for recipe in ["bf16", row.recipe] + ["fast"] * (row.recipe == "tensorwise"):
        kind = recipe if recipe in ("bf16", "fast") else "fp8"
        words = launch_ours(args, args.ranks) + our_words(args, row.model, row.length, recipe, args.num_steps)
        yield Run("transformers", row.text, "ours_" + kind, True, words, args.ranks, recipe, "bf16")
        if recipe == "fast":  # no peer has it
            continue
        words = launch_peer(args, args.ranks, "hf_train.py") + [
            row.model, RECIPES.get(recipe, recipe), str(row.length), "--steps", str(args.peer_steps), "--data",
            data_of(args, row.model), "--sequences"]
        yield Run("transformers", row.text, "peer_" + kind, False, words, args.ranks, recipe, "bf16")


def titan_runs(args, row):
    """The two runs of a row against torchtitan: both clip the gradient norm at 1; with fp32 masters both keep the
    moments in fp32 and reduce gradients in fp32."""
    (recipe, master), ranks, T = row, len(args.gpus), args.titan_length
    words = launch_ours(args, ranks) + our_words(args, TITAN_MODEL, T, recipe, args.num_steps) + ["--grad-clip", "1"]
    if master == "fp32":
        words += ["--master-weights", "fp32", "--optimizer-state", "fp32", "--reduce-dtype", "fp32"]
    if args.titan_ac == "full":
        words += ["--recompute", "layer"]
    text = "%s:%s" % row
    yield Run("torchtitan", text, "ours", True, words, ranks, recipe, master)
    words = launch_peer(args, ranks, "titan_train.py") + [
        RECIPES.get(recipe, recipe), str(T), "--data", data_of(args, TITAN_MODEL), "--masters", master, "--steps",
        str(args.titan_steps), "--ac", args.titan_ac, "--out", os.path.join(args.out, "torchtitan")]
    yield Run("torchtitan", text, "peer", False, words, ranks, recipe, master)


# ----------------------------------------------------------------------------------------------------------------------
# Running


def folder_of(args, run):
    return os.path.join(args.out, "%s_%s_%s" % (run.table, run.row.replace(":", "_"), run.name))


def last_summary(path):
    """The last JSON object of type `summary` in a file of lines, or None."""
    found = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            at = line.find("{\"type\": \"summary\"")
            if at >= 0:  # another rank may have written on the line, too
                found, _ = json.JSONDecoder().raw_decode(line[at:])
    return found


def reason(path, status):
    """The status of a failed run, and its message: the error of ours, or else the last exception of a Python program,
    or else the last line."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    ours = [line for line in lines if re.search(r"(^|rank \d+: )error: ", line)]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Exit)\b.*:", line)
              and "ChildFailedError" not in line]
    words = ours[0] if ours else raised[-1] if raised else lines[-1] if lines else "no output"
    return "status %d: %s" % (status, re.sub(r"^error: ", "", words)[:300])


def read_result(folder, ours, status):
    """The summary of a run; raises NoResult if the run failed or has no summary with a speed."""
    output = os.path.join(folder, "stdout.txt")
    log = os.path.join(folder, "log.jsonl") if ours else output
    try:
        found = last_summary(log) if os.path.exists(log) else None
    except ValueError as error:
        raise NoResult("%s is damaged: %s" % (log, error))
    if status != 0 or found is None:
        raise NoResult(reason(output, status))
    if not (found.get("tokens_per_second_per_gpu") or 0) > 0:
        raise NoResult("its summary has no speed")
    if ours:
        with open(log, encoding="utf-8") as file:
            settings = json.loads(file.readline())
        found.update(program="%s %s" % (settings["program"], settings["version"]), device=settings["device"])
    return found


class Runner:
    """Runs commands, several at a time, within the time limit; the tables on disk hold what is finished so far."""

    def __init__(self, args, runs):
        self.args, self.runs, self.begin, self.lock = args, runs, time.monotonic(), threading.Lock()
        self.results = {(run.table, run.row, run.name): dict(failure="not begun: interrupted") for run in runs}
        self.children, self.threads, self.stopped = set(), [], False

    def time_left(self):
        return self.args.limit - (time.monotonic() - self.begin)

    def stop(self):
        self.stopped = True
        for child in list(self.children):
            end(child)
        for thread in self.threads:
            thread.join(5)

    def wait(self, words, gpus, output):
        """The status of a command that has these GPUs. When the time limit is over, ends the command with all its
        children and raises NoResult."""
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(gpus), PYTHONUNBUFFERED="1")
        with open(output, "w") as file:
            child = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file,
                                     stderr=subprocess.STDOUT, start_new_session=True)
            self.children.add(child)
            try:
                return child.wait(max(1, self.time_left()))
            except subprocess.TimeoutExpired:
                end(child)
                raise NoResult("ended by --limit after %d s" % self.args.limit)
            finally:
                self.children.discard(child)

    def execute(self, run, gpus):
        folder = folder_of(self.args, run)
        os.makedirs(os.path.join(ROOT, folder), exist_ok=True)
        words = run.words + (["--log-dir", folder] if run.ours else [])
        result = dict(seconds=0, command=" ".join(words))
        begin = time.monotonic()
        try:
            if self.stopped:
                raise NoResult("not begun: interrupted")
            if self.time_left() <= 0:
                raise NoResult("not begun: --limit %d s is over" % self.args.limit)
            absolute = os.path.join(ROOT, folder)
            if os.path.exists(os.path.join(absolute, "log.jsonl")):
                os.remove(os.path.join(absolute, "log.jsonl"))  # of an earlier start
            status = self.wait(words, gpus, os.path.join(absolute, "stdout.txt"))
            result.update(read_result(absolute, run.ours, status))
        except (NoResult, OSError) as error:
            result["failure"] = str(error)
        result["seconds"] = round(time.monotonic() - begin, 1)
        with self.lock:
            self.results[run.table, run.row, run.name] = result
            write_tables(self.args, self.runs, self.results)
            figure = "failed: " + result["failure"] if "failure" in result else "%.0f tok/s/GPU" % speed(result)
            print("%4d s | GPU %s | %s %s %s | %.0f s | %s" % (time.monotonic() - self.begin, ",".join(gpus), run.table,
                                                              run.row, run.name, result["seconds"], figure), flush=True)

    def run_rows(self, rows, slots):
        """Runs lists of runs, a list at a time on each set of GPUs in `slots`."""
        todo = queue.Queue()
        for row in rows:
            todo.put(row)

        def work(gpus):
            while True:
                try:
                    row = todo.get_nowait()
                except queue.Empty:
                    return
                for run in row:
                    self.execute(run, gpus)

        self.threads = [threading.Thread(target=work, args=(gpus,), daemon=True) for gpus in slots]
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()


def end(child):
    """Sends SIGTERM to a process and its children. When the process has ended, or after 10 s, sends SIGKILL."""
    for what, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(child.pid, what)
            child.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def synthesise(args):
    """Makes a shard of byte tokens if the data of a model is missing, unless an earlier start has made it."""
    path = os.path.join(args.out, "synth")
    models = {row.model for row in args.rows} | ({TITAN_MODEL} if args.titan_rows else set())
    if not any(data_of(args, model).startswith(path) for model in models) or os.path.exists(
            os.path.join(ROOT, path + "_train.bin")):
        return
    print("data: %s, %s or both are missing; making stories of byte tokens: %s_train.bin" % (
        args.llama_data, args.qwen_data, path), flush=True)
    subprocess.run(["make", "-s", "build/synth_stories"], cwd=ROOT, check=True)
    subprocess.run(["build/synth_stories", "--out", path, "--bytes", str(SYNTHESISED_BYTES)], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def speed(result):
    """Tokens per second and GPU, or None."""
    return result.get("tokens_per_second_per_gpu")


def show(result):
    """The speed; nothing for an empty result, which stands for no run."""
    return "" if not result else "failed" if speed(result) is None else "{:,.0f}".format(speed(result))


def show_ratio(a, b):
    return "" if speed(a) is None or speed(b) is None else "%.2fx" % (speed(a) / speed(b))


def show_memory(result):
    return "" if result.get("memory_bytes") is None else "%.1f GiB" % (result["memory_bytes"] / 2**30)


def transformers_cells(row, results):
    our_bf16, peer_bf16, ours, peer = (results["transformers", row.text, name]
                                       for name in ("ours_bf16", "peer_bf16", "ours_fp8", "peer_fp8"))
    fast = results.get(("transformers", row.text, "ours_fast"), {})
    name = row.model if row.recipe == "tensorwise" else "%s, %s" % (row.model, row.recipe)
    return [name, str(row.length), show(our_bf16), show(ours), show(fast), show_ratio(ours, our_bf16),
            show_memory(ours), show_memory(fast), show(peer_bf16), show(peer), show_memory(peer),
            show_ratio(our_bf16, peer_bf16), show_ratio(ours, peer), show_ratio(fast, peer)]


def show_joules(result):
    return "" if result.get("joules_per_token") is None else "%.5f" % result["joules_per_token"]


def energy_cells(row, results):
    shown = [show_joules(results.get(("transformers", row.text, name), {}))
             for name in ("ours_bf16", "ours_fp8", "ours_fast", "peer_bf16", "peer_fp8")]
    return [row.model if row.recipe == "tensorwise" else "%s, %s" % (row.model, row.recipe), str(row.length)] + shown


def titan_cells(row, results):
    ours, peer = (results["torchtitan", "%s:%s" % row, name] for name in ("ours", "peer"))
    precision = "BF16" if row[0] == "bf16" else "FP8 " + row[0]
    return [precision, row[1], show(ours), show_memory(ours), show(peer), show_memory(peer), show_ratio(ours, peer)]


def markdown(title, head, rows):
    lines = [title, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def make_tables(args, results):
    """The Markdown text of the tables, with the programs' versions and what failed."""
    parts = []
    if args.rows:
        gpus = "one GPU" if args.ranks == 1 else "%d GPUs, sharded" % args.ranks
        head = ["model", "T", "ours BF16", "ours FP8", "--fast", "FP8 / BF16", "memory FP8", "of --fast",
                "PyTorch BF16", "torchao FP8", "its memory", "ours / PyTorch BF16", "ours / torchao",
                "--fast / torchao"]
        rows = [transformers_cells(row, results) for row in args.rows]
        title = "Tokens per second and GPU on %s, batch 1, no recompute, bf16 masters:" % gpus
        parts.append(markdown(title, head, rows))
        head = ["model", "T", "ours BF16", "ours FP8", "--fast", "PyTorch BF16", "torchao FP8"]
        rows = [cells for cells in (energy_cells(row, results) for row in args.rows) if any(cells[2:])]
        if rows:  # only where NVML tells the energy
            parts.append(markdown("Joules per token of all GPUs, without the warm-up, steps of the first 2 s and our "
                                  "last step; empty where a run is too short for them:", head, rows))
    if args.titan_rows:
        head = ["precision", "masters", "ours", "memory", "torchtitan", "its memory", "ours / torchtitan"]
        rows = [titan_cells(row, results) for row in args.titan_rows]
        ac = "none" if args.titan_ac == "none" else args.titan_ac + " activation checkpointing in torchtitan"
        parts.append(markdown("%s, T %d, %d GPUs, batch 1 a GPU, recompute: %s; tokens per second and GPU:" % (
            TITAN_MODEL, args.titan_length, len(args.gpus), ac), head, rows))
    programs = sorted({"%s on %s" % (r["program"], r["device"]) for r in results.values() if "program" in r})
    parts.append("Programs: " + ("; ".join(programs) or "none finished") + ".\n")
    failed = ["- %s %s %s: %s" % (*key, r["failure"]) for key, r in results.items() if "failure" in r]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed) + "\n")
    return "\n".join(parts)


def write_tables(args, runs, results):
    """Writes table.md and table.csv. Returns the text of table.md."""
    text = make_tables(args, results)
    path = os.path.join(ROOT, args.out, "table")
    with open(path + ".md", "w", encoding="utf-8") as file:
        file.write(text)
    with open(path + ".csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_HEAD)
        for run in runs:
            result = results[run.table, run.row, run.name]
            known = dict(result, table=run.table, row=run.row, run=run.name, precision=run.precision,
                         masters=run.masters, gpus=run.ranks)
            writer.writerow([known.get(key, "") for key in CSV_HEAD])
    return text


def main():
    args = parse_arguments()
    rows = [list(row_runs(args, row)) for row in args.rows]
    titan = [list(titan_runs(args, row)) for row in args.titan_rows]
    runs = [run for row in rows + titan for run in row]
    if args.dry_run:
        for run in runs:
            print(" ".join(run.words + (["--log-dir", folder_of(args, run)] if run.ours else [])))
        return 0
    os.makedirs(os.path.join(ROOT, args.out), exist_ok=True)
    synthesise(args)
    runner = Runner(args, runs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    slots = [args.gpus[i:i + args.ranks] for i in range(0, len(args.gpus) - args.ranks + 1, args.ranks)]
    try:
        runner.run_rows(rows, slots)
        runner.run_rows(titan, [args.gpus])
    except KeyboardInterrupt:
        runner.stop()
    print("\n" + write_tables(args, runs, runner.results))
    return 1 if any("failure" in result for result in runner.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
