"""usage: scripts/verdict.sh MODEL... [options] [-- trainer options]

Answers what FP8 costs in loss, and gives in speed and energy, for each MODEL (a preset, or a folder with config.json).
Trains it in BF16 and by each FP8 recipe, from equal weights on equal data in equal order, with several seeds. Then
makes a report with intervals: FOLDER/report.html. Paths are relative to the repository's root. Lists are separated by
commas. Defaults are in parentheses.

  --recipes LIST          FP8 recipes: fp8 (tensorwise), fp8:RECIPE, fp8:RECIPE:emulate (fp8,fp8:rowwise)
  --seeds LIST            seeds of initial weights, data order and stochastic rounding; two are too few for a narrow
                          interval (42,43,44)
  --rounding-seeds LIST   seeds of stochastic rounding; each is run with every seed of --seeds; several show the noise
                          of rounding alone (each run's seed is also its rounding seed)
  --train-data GLOB       training shards (data/tinystories_llama3_train.bin or ..._qwen_train.bin for models named
                          llama* or qwen*; other models need it)
  --val-data GLOB         validation shards (the training shards' name with _val or _valid in place of _train)
  --sequence-length T     tokens in a sequence (2048)
  --num-steps N           steps of each run (one pass over the data, at most 2000; with --repeat 1000)
  --lr RATE               learning rate after warm-up (3e-4; with --repeat 1e-5)
  --repeat                the regime of the B200 benchmark in docs/CLAIMS.md: the data may repeat, constant learning
                          rate, no clipping. Without it each sequence is read at most once, with a warm-up of 5% of
                          the steps, a cosine schedule and --grad-clip 1, as in pre-training
  --gpus N                GPUs, or ranks of the CPU trainer, of each run (1)
  --parallel N            runs side by side, each on GPUs of its own (as many as fit; 1 on the CPU)
  --price X               price of a GPU hour, for the cost
  --trainer PROGRAM       ./train_fp8cu, or ./train_fp8 on the CPU (./train_fp8cu)
  --out FOLDER            folder of the report and of all runs (log/verdict)
  --no-report             make no report, and do not ask for its libraries; scripts/report.py FOLDER makes it later
  --dry-run               print the command of each run and exit
  --                      all options after this one are passed to the trainer; those that begin with --fp8 are passed
                          to FP8 runs only; --msamp is refused, because it sets --precision

Start it again to continue: finished runs are kept, and so are runs that the GPU cannot do (out of memory, no GEMMs for
the recipe). Models, recipes and seeds may be added, --parallel and --price may change; once a run has finished, other
settings may not. Ctrl-C or SIGTERM stops the current runs, which start from the beginning next time. Exit status 0:
every run finished, or the GPU cannot do it. 1: a run failed, there is no report (unless --no-report), the command is
wrong, or FOLDER cannot be used. 128 plus the signal's number: a signal stopped the verdict.
"""
import datetime
import glob
import importlib.util
import itertools
import json
import math
import os
import shlex
import struct
import subprocess
import sys
import time

from report import venv
from runs.options import check_extra, end, fail, number, parse, say, split
from runs.runner import ANSWERS, Pool, Run, refuse_other_settings, write_text
from runs.trainer import NO_GPU, SHARDS, Trainer, data_of, folder_names, nvidia_smi, precision_words, visible_gpus

DEFAULTS = {"recipes": "fp8,fp8:rowwise", "seeds": "42,43,44", "rounding-seeds": "", "train-data": "", "val-data": "",
            "sequence-length": "2048", "num-steps": "", "lr": "", "gpus": "1", "parallel": "", "price": "",
            "trainer": "./train_fp8cu", "out": "log/verdict"}
SET_HERE = ("train-data", "val-data", "sequence-length", "num-steps", "precision", "fp8-recipe", "fp8-emulate", "seed",
            "rounding-seed", "learning-rate", "lr-schedule", "warmup-steps", "log-dir")
LIBRARIES = ("arch", "jinja2", "matplotlib", "scipy")  # of scripts/report.py
VALIDATION_SEQUENCES = 256  # enough for an interval
TRIAL_STEPS = 4
SHARD_MAGICS = (20240520, 20240801)  # tokens of 2 and of 4 bytes


def number_list(option, text):
    values = [number(option, word, low=0) for word in text.replace(",", " ").split()]
    if len(set(values)) < len(values):
        fail(f"{option}: \"{text}\" must name different numbers, with commas between")
    return values


def count_sequences(pattern, length):
    """Returns the sequences in all shards (header: llmc/data/dataloader.h), as the trainer counts them."""
    count = 0
    for path in glob.glob(pattern):
        with open(path, "rb") as file:
            header = file.read(16)
        magic, version, tokens, high = struct.unpack("<4i", header) if len(header) == 16 else (0, 0, 0, 0)
        if magic not in SHARD_MAGICS:
            fail(f"{path} is not a token shard; data/README.md shows how to make some")
        tokens = (tokens & 0xffffffff) + ((high << 32) if version == 8 else 0)
        count += max(0, (tokens - 1) // length)
    return count


def validation_of(train, given):
    if given and not glob.glob(given):
        fail(f"no validation shards {given}")
    found = [name for name in (train.replace("_train", "_val"), train.replace("_train", "_valid"))
             if name != train and glob.glob(name)]
    if not given and not found:
        fail(f"no validation shards beside {train}; name some with --val-data: a verdict also compares the loss on "
             "data that was not trained on")
    return given or found[0]


def schedule(o, steps):
    """Returns the trainer's options for the learning rate and clipping of a run of `steps` steps."""
    if o.repeat:
        return ["--learning-rate", o.lr or "1e-5", "--lr-schedule", "constant", "--warmup-steps", "0"]
    return ["--learning-rate", o.lr or "3e-4", "--lr-schedule", "cosine", "--warmup-steps",
            str(max(1, steps // 20)), "--grad-clip", "1"]


class Plan:
    """The checked options, and what follows from them for each model."""

    def __init__(self, models, o, extra):
        self.models, self.o, self.extra = models, o, extra
        if not models:
            fail("no MODEL given; for example: scripts/verdict.sh llama3.2-1b")
        self.trainer = Trainer(o.trainer)
        self.length = number("--sequence-length", o.sequence_length)
        self.gpus = number("--gpus", o.gpus)
        self.price = number("--price", o.price, float, 0.001) if o.price else None
        self.seeds = number_list("--seeds", o.seeds)
        self.roundings = number_list("--rounding-seeds", o.rounding_seeds) if o.rounding_seeds else [None]
        self.recipes = ["bf16"] + split(o.recipes)
        self.trainer.check_precisions("--recipes", self.recipes[1:])
        check_extra(extra, SET_HERE, "verdict")
        if o.lr:
            number("--lr", o.lr, float, 0)
        self.train = {m: data_of(m, {**SHARDS, "": o.train_data}, "--train-data") for m in models}
        self.val = {m: validation_of(self.train[m], o.val_data) for m in models}
        self.names = folder_names(models)
        self.described = {m: self.describe(m) for m in models}
        self.steps = {m: self.steps_of(m) for m in models}

    def describe(self, model):
        """Returns the trainer's --dry-run --json of the BF16 run. Dies if that of BF16 or of a recipe is an error."""
        described = None
        for recipe in reversed(self.recipes):
            command = ([self.trainer.program, model, "--train-data", self.train[model], "--val-data", self.val[model],
                        "--sequence-length", str(self.length), "--world-size", str(self.gpus), "--dry-run", "--json"] +
                       precision_words(recipe, self.extra))
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                fail(f"{model}, {recipe}: " + result.stderr.strip().removeprefix("error: "))
            described = json.loads(result.stdout)
        return described

    def steps_of(self, model):
        settings, sequences = self.described[model]["settings"], count_sequences(self.train[model], self.length)
        per_step = self.gpus * settings["batch-size"] * settings["grad-accumulation-steps"]
        one_pass = sequences // per_step
        if self.o.num_steps:
            steps = number("--num-steps", self.o.num_steps)
        else:
            steps = 1000 if self.o.repeat else min(2000, one_pass)
        if not self.o.repeat and steps > one_pass:
            fail(f"{self.train[model]} has {sequences} sequences of {self.length} tokens, enough for {one_pass} steps "
                 f"of {per_step}, not for {steps}; take fewer --num-steps or more data, or let data repeat with "
                 "--repeat")
        if steps < 40:
            fail(f"{steps} steps are too few for an interval; at least 40 are needed")
        return steps

    def val_every(self, model):
        return max(1, self.steps[model] // 6)

    def tokens(self, model):
        s = self.described[model]["settings"]
        return self.steps[model] * self.gpus * self.length * s["batch-size"] * s["grad-accumulation-steps"]

    def command(self, model, recipe, seed, rounding, folder, steps=None):
        words = [self.trainer.program, model, "--train-data", self.train[model], "--val-data", self.val[model],
                 "--sequence-length", str(self.length), "--num-steps", str(steps or self.steps[model]), "--seed",
                 str(seed)]
        words += ["--rounding-seed", str(rounding)] if rounding is not None else []
        words += schedule(self.o, steps or self.steps[model]) + ["--val-steps", str(VALIDATION_SEQUENCES)]
        words += ["--val-every", str(self.val_every(model))] if steps is None else []
        return (self.trainer.launch(self.gpus) + words + ["--log-every", "100", "--log-dir", folder] +
                precision_words(recipe, self.extra))

    def runs(self):
        """All runs; the runs of one seed stand together, BF16 first, so that pairs are complete early."""
        runs = []
        for model, seed, rounding, recipe in itertools.product(self.models, self.seeds, self.roundings, self.recipes):
            name = f"{self.names[model]}.{recipe.replace(':', '-')}.s{seed}"
            title = f"{model}, {recipe}, seed {seed}"
            if rounding is not None:
                name, title = f"{name}.r{rounding}", f"{title}, rounding seed {rounding}"
            folder = os.path.join(self.o.out, name)
            command = self.command(model, recipe, seed, rounding, folder)
            runs.append(Run(folder, command, title, model, recipe, self.gpus, self.steps[model]))
            runs[-1].name, runs[-1].seed, runs[-1].rounding = name, seed, rounding
        return runs

    def fixed(self):
        """The settings that runs of one folder share."""
        keys = ("train-data", "val-data", "lr", "repeat", "trainer")
        return {**{key: vars(self.o)[key.replace("-", "_")] for key in keys}, "sequence-length": self.length,
                "gpus": self.gpus, "num-steps": {self.names[m]: n for m, n in self.steps.items()},
                "trainer options": " ".join(self.extra)}


def git(*words):
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def places_of(plan):
    """Returns (GPUs of which each run gets its own, or None on the CPU; the number of runs side by side)."""
    wanted = number("--parallel", plan.o.parallel) if plan.o.parallel else None
    if plan.trainer.on_cpu:
        return None, wanted or 1
    gpus, needed = visible_gpus(), plan.gpus * (wanted or 1)
    if len(gpus) < needed:
        fail(f"{needed} GPUs are needed and {len(gpus)} are here ({NO_GPU}")
    count = wanted or len(gpus) // plan.gpus
    return gpus[:count * plan.gpus], count


def need_libraries():
    """Dies if the report's libraries are neither here nor in the folder where scripts/setup_report.sh puts them."""
    found = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    if not all(map(importlib.util.find_spec, LIBRARIES)) and not (
            venv.PYTHON.exists() and subprocess.run([venv.PYTHON, "-c", found, *LIBRARIES]).returncode == 0):
        fail("the libraries of the report are missing: run scripts/setup_report.sh first, or give --no-report to train "
             "without a report")


def check_folder(plan, runs):
    """Returns (the entries of verdict.json for runs that this start does not have, the settings that differ, as texts).

    If settings differ, there are no entries. Dies if verdict.json is damaged, if a run of another model has the
    folder of one of these runs, or if settings differ and a run of the folder is finished.
    """
    path = os.path.join(plan.o.out, "verdict.json")
    if not os.path.exists(path):
        return [], []
    models, now = {run.name: run.model for run in runs}, plan.fixed()
    try:
        before = json.load(open(path))
        fixed, entries = before["fixed"], before["runs"]
        others = [entry for entry in entries if entry["folder"] not in models]
        shared = [entry["folder"] for entry in entries
                  if models.get(entry["folder"], entry["model"]) != entry["model"]]
        steps = {entry["num_steps"] for entry in entries}
        now["num-steps"] = {**fixed["num-steps"], **now["num-steps"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        fail(f"{path} is damaged; remove this one file to go on with the finished runs, or give another --out")
    if shared:
        fail(f"two models would share the folder {shared[0]} in {plan.o.out}; give another --out")
    different = [f"{key}: {fixed.get(key)!r} there, {value!r} now" for key, value in now.items()
                 if fixed.get(key) != value and not (key == "num-steps" and value.items() >= fixed[key].items())]
    refuse_other_settings(plan.o.out, different, steps)
    return [] if different else others, different


def receipt(plan, runs, others):
    words = ["scripts/verdict.sh"] + sys.argv[1:]
    entries = [{"folder": r.name, "model": r.model, "recipe": r.precision, "seed": r.seed,
                "rounding_seed": r.seed if r.rounding is None else r.rounding, "num_steps": r.steps} for r in runs]
    return {"command": shlex.join(words), "commit": git("rev-parse", "--short", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "models": plan.models,
            "recipes": plan.recipes, "seeds": plan.seeds,
            "rounding_seeds": ["same" if r is None else r for r in plan.roundings], "num_steps": plan.steps,
            "sequence_length": plan.length, "gpus": plan.gpus, "price": plan.price,
            "regime": "repeat" if plan.o.repeat else "fresh", "driver": "".join(nvidia_smi("driver_version")[:1]),
            "gpu_names": nvidia_smi("name"), "fixed": plan.fixed(), "runs": entries + others}


def time_steps(plan, pool):
    """Sets the expected seconds of each run, from a finished run of its model, or else from a trial in BF16.

    They are 0 if a run of the model is known to be out of memory and none has finished, or if the trial fails.
    """
    for model in plan.models:
        own = [run for run in pool.runs if run.model == model]
        finished = [run.summary() for run in own if run.kind == "done"]
        expected = finished[0]["seconds"]["wall"] if finished else 0.0
        if not finished and not any(run.kind == "memory" for run in own):
            say(f"{model}: timing {TRIAL_STEPS} steps and a validation in BF16")
            folder = os.path.join(plan.o.out, "trial." + plan.names[model])
            command = plan.command(model, "bf16", plan.seeds[0], None, folder, TRIAL_STEPS)
            trial = Run(folder, command, "trial", model, "bf16", plan.gpus, TRIAL_STEPS)
            pool.train([trial])
            if trial.kind == "done":
                s = trial.summary()
                validations = math.ceil(plan.steps[model] / plan.val_every(model))
                expected = (s["seconds"]["start"] + plan.steps[model] * s["median_ms"] / 1e3 +
                            validations * s["seconds"]["validation"])
        for run in own:
            run.expected = expected


def announce(plan, pool):
    left = [run for run in pool.runs if run.kind not in ANSWERS]
    for model in plan.models:
        roundings = f" x {len(plan.roundings)} rounding seeds" if len(plan.roundings) > 1 else ""
        say(f"{model}: {len(plan.recipes)} precisions x {len(plan.seeds)} seeds{roundings}, each run "
            f"{plan.steps[model]} steps of {plan.tokens(model) // plan.steps[model]} tokens")
    seconds = sum(run.expected for run in left) / pool.parallel
    text = f"{len(left)} of {len(pool.runs)} runs to do, {pool.parallel} side by side"
    if seconds:
        text += f": about {seconds / 60:.0f} minutes at the speed of BF16, until "
        text += time.strftime("%H:%M", time.localtime(time.time() + seconds))
        if plan.price is not None:
            hours = sum(run.expected for run in left) * plan.gpus / 3600
            text += f"; {hours:.2f} GPU hours cost {hours * plan.price:.2f} at {plan.price:g} an hour"
    say(text)


def make_report(plan):
    words = [sys.executable, "scripts/report.py", plan.o.out]
    return subprocess.run(words + (["--price", str(plan.price)] if plan.price is not None else [])).returncode


def main(words):
    o, models, extra = parse(words, __doc__, DEFAULTS, ("repeat", "no-report", "dry-run"), takes_words=True)
    plan = Plan(list(dict.fromkeys(model.rstrip("/") for model in models)), o, extra)
    runs = plan.runs()
    if o.dry_run:
        for run in runs:
            say(shlex.join(run.command))
        return 0
    places = places_of(plan)
    others, different = check_folder(plan, runs)
    if not o.no_report:
        need_libraries()
    if plan.gpus > 1:
        plan.trainer.check_mpirun()
    hint = f"scripts/report.py {shlex.quote(o.out)} makes a report of the finished runs"
    with Pool(o.out, runs, *places, ANSWERS, "verdict", hint) as pool:
        if different:
            pool.forget(different)
        text = json.dumps(receipt(plan, runs, others), indent=1) + "\n"
        write_text(os.path.join(o.out, "verdict.json"), text)
        time_steps(plan, pool)
        announce(plan, pool)
        pool.train()
    report = 0 if o.no_report else make_report(plan)
    return 1 if report or any(run.kind == "failed" for run in runs) else 0


if __name__ == "__main__":
    end(main)
