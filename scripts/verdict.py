"""usage: scripts/verdict.sh MODEL... [options] [-- trainer options]

Answers what FP8 costs in loss, and gives in speed and energy, for each MODEL (a preset, or a folder with config.json).
Trains one BF16 run for each seed, the trunk. From its checkpoint after step B, soon after warm-up, every arm branches:
each FP8 recipe, and BF16 again with another rounding seed, which shows how far chance alone moves a loss. Trunk and
arms end a quarter, half and all of the way from B to N, each time with a decay of the rate (wsd). Then makes a report
with intervals: FOLDER/report.html. Paths are relative to the repository's root. Lists are separated by commas. Defaults
are in parentheses.

  --recipes LIST          FP8 recipes: fp8 (tensorwise), fp8:RECIPE, fp8:RECIPE:emulate, fp8:fast (the trainer's
                          --fast), each also with options of its own, as in fp8+fp8-filter=first/last (/ for a comma);
                          none: a pilot, which shows how small a cost a verdict can see (fp8,fp8:rowwise)
  --against RECIPE        the recipe of trunks and null arms instead of BF16, named as in --recipes: each recipe is then
                          compared with it (bf16)
  --seeds LIST            seeds of trunks: of initial weights, data order and stochastic rounding; two are too few for a
                          narrow interval (42,43,44)
  --margin X%             the largest cost in loss that is acceptable: the report's first line says if FP8 keeps it
  --looks LIST            numbers of trunks after which you will read the verdict; the intervals allow for all of them
                          (the number of --seeds)
  --branch-step B         the step after which arms branch (N/10)
  --one-length            train to N alone: a third less GPU time, but no trend over tokens and no cost at equal loss
  --tokens-per-step LIST  tokens of an optimizer step of all GPUs (batch size x T x accumulation x GPUs); with several,
                          trunks train with the first, the largest, and from step B on each trains on as many tokens,
                          BF16 too, with --lr times the root of its ratio to the first
  --whole                 pairs that differ from step 0 on, with a cosine schedule, instead of branches: they say what
                          the first steps cost, and differ by chance about ten times more
  --rounding-seeds LIST   with --whole: seeds of stochastic rounding; each is run with every seed of --seeds (each run's
                          seed is also its rounding seed)
  --train-data GLOB       training shards (data/tinystories_llama3_train*.bin or ..._qwen_train*.bin for models named
                          llama* or qwen*; other models need it)
  --val-data GLOB         validation shards (the training shards' name with _val or _valid in place of _train)
  --sequence-length T     tokens in a sequence (2048)
  --num-steps N           steps of each run (one pass over the data, at most 2000; with --repeat 1000)
  --lr RATE               learning rate after warm-up (3e-4; with --repeat 1e-5)
  --repeat                the regime of the B200 benchmark in docs/CLAIMS.md: --whole, and the data may repeat, constant
                          learning rate, no clipping. Without it each sequence is read at most once, with a warm-up of
                          5% of the steps and --grad-clip 1, as in pre-training
  --gpus N                GPUs, or ranks of the CPU trainer, of each run (1)
  --parallel N            runs side by side, each on GPUs of its own (as many as fit; 1 on the CPU)
  --price X               price of a GPU hour, for the cost
  --trainer PROGRAM       ./train_fp8cu, or ./train_fp8 on the CPU (./train_fp8cu)
  --out FOLDER            folder of the report and of all runs (log/verdict)
  --no-report             make no report, and do not ask for its libraries; scripts/report.py FOLDER makes it later
  --dry-run               print the command of each run and exit
  --                      all options after this one are passed to the trainer; those that begin with --fp8 are passed
                          to FP8 runs only; --fast and --msamp are refused, because they set --precision

Start it again to continue: finished runs are kept, and so are runs that the GPU cannot do (out of memory, no GEMMs for
the recipe). Models, recipes and seeds may be added, --parallel and --price may change; once a run has finished, other
settings may not. Ctrl-C or SIGTERM stops the current runs, which start from the beginning next time. Exit status 0:
every run finished, or the GPU cannot do it. 1: a run failed, there is no report (unless --no-report), the command is
wrong, or FOLDER cannot be used. 128 plus the signal's number: a signal stopped the verdict.
"""
import datetime
import functools
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
from report.pairs import reword
from runs import branches
from runs.options import check_extra, end, fail, in_a_name, number, parse, say, split
from runs.runner import ANSWERS, CHECKPOINTS, Pool, Run, refuse_other_settings, write_file
from runs.trainer import (NO_GPU, SHARDS, Trainer, data_of, folder_names, nvidia_smi, output_of, precision_words,
                          visible_gpus)

DEFAULTS = {"recipes": "fp8,fp8:rowwise", "against": "bf16", "seeds": "42,43,44", "margin": "", "looks": "",
            "branch-step": "", "tokens-per-step": "", "rounding-seeds": "", "train-data": "", "val-data": "",
            "sequence-length": "2048", "num-steps": "", "lr": "", "gpus": "1", "parallel": "", "price": "",
            "trainer": "./train_fp8cu", "out": "log/verdict"}
SET_HERE = ("train-data", "val-data", "sequence-length", "num-steps", "precision", "fp8-recipe", "fp8-emulate", "seed",
            "rounding-seed", "learning-rate", "lr-schedule", "decay-steps", "warmup-steps", "tokens-per-step",
            "grad-accumulation-steps", "checkpoint-every", "branch", "log-dir")
VALIDATION_SEQUENCES = 256  # enough for an interval
TRIAL_STEPS = 4
AUDITS = 8  # in each FP8 run of the first seed, for the numerics over time
PER_CASE = ("num-steps", "branch-step")  # settings of which a folder has one for each case
SHARD_MAGICS = (20240520, 20240801)  # tokens of 2 and of 4 bytes


def number_list(option, text, low=0):
    values = [number(option, word, low=low) for word in text.replace(",", " ").split()]
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


class Case:
    """A model, its tokens per step (None: what the trainer makes of its options) and what follows from them."""

    def __init__(self, plan, model, batch):
        self.plan, self.model, self.batch = plan, model, batch
        self.name = plan.names[model] + (f".b{batch}" if len(plan.batches) > 1 else "")
        self.title = model + (f", {batch} tokens per step" if len(plan.batches) > 1 else "")
        # the beginning of the command of every run
        self.words = [plan.trainer.program, model, "--train-data", plan.train[model], "--val-data", plan.val[model],
                      "--sequence-length", str(plan.length)]
        self.words += ["--tokens-per-step", str(batch)] if batch else []
        self.described = self.describe()
        settings = self.described["settings"]
        self.tokens = (plan.gpus * plan.length * settings["batch-size"] * settings["grad-accumulation-steps"])
        first = next((case for case in plan.cases if case.model == model), self)
        self.rate = f"{float(plan.rate) * math.sqrt(batch / first.batch):.6g}" if first is not self else plan.rate
        if first is not self and not plan.whole:
            self.branch_from(first)
            return
        self.steps = self.steps_of(first.steps * first.batch // batch if first is not self else None)
        self.warmup = max(1, self.steps // 20)
        self.branch = 0 if plan.whole else self.branch_of(plan.o.branch_step)
        self.lengths = None if plan.whole else branches.Lengths(self.steps, self.branch, not plan.o.one_length)

    def describe(self):
        """Returns the trainer's --dry-run --json of the trunk. Dies if that of a recipe is an error."""
        plan, described = self.plan, None
        for recipe in reversed(plan.recipes):
            command = [*self.words, "--world-size", str(plan.gpus), "--dry-run", "--json",
                       *precision_words(recipe, plan.extra)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                fail(f"{self.title}, {recipe}: " + result.stderr.strip().removeprefix("error: "))
            described = json.loads(result.stdout)
        return described

    def steps_of(self, steps):
        """The steps of this case: `steps`, or --num-steps, or one pass. Dies if there is not enough data."""
        o, train = self.plan.o, self.plan.train[self.model]
        sequences, per_step = count_sequences(train, self.plan.length), self.tokens // self.plan.length
        one_pass, least = sequences // per_step, 40 if self.plan.whole else 80
        if steps is None and o.num_steps:
            steps = number("--num-steps", o.num_steps)
        elif steps is None:
            steps = 1000 if o.repeat else min(2000, one_pass)
        if not o.repeat and steps > one_pass:
            fail(f"{train} has {sequences} sequences of {self.plan.length} tokens, enough for {one_pass} steps of "
                 f"{per_step}, not for {steps}; take fewer --num-steps or more data, or let data repeat with --repeat")
        if steps < least:
            fail(f"{steps} steps are too few for an interval; at least {least} are needed")
        return steps

    def branch_of(self, given):
        step = number("--branch-step", given) if given else self.steps // 10
        last = max(at for at in range(self.steps)
                   if branches.Lengths(self.steps, at, not self.plan.o.one_length).decay_follows())
        if not self.warmup <= step <= last:
            fail(f"--branch-step {step}: take {self.warmup} (warm-up) to {last} (the shortest run decays after it)")
        return step

    def branch_from(self, first):
        """Takes over the trunk of the first tokens per step."""
        self.lengths = branches.Lengths(first.steps, first.branch, not self.plan.o.one_length, first.batch / self.batch)
        self.steps, self.warmup, self.branch = self.lengths.ends[-1], first.warmup, first.branch
        if not self.lengths.decay_follows() or self.lengths.decays[0] < 4:
            fail(f"{self.title}: the shortest run has {self.lengths.ends[0] - self.branch} steps after the branch; "
                 f"take more --num-steps than {first.steps}, or fewer tokens per step")

    def val_every(self):
        return max(1, self.steps // 6)

    def schedule(self, horizon):
        """The trainer's options for the learning rate and clipping of a run of so many steps."""
        words = ["--learning-rate", self.rate]
        if self.plan.o.repeat:
            return words + ["--lr-schedule", "constant", "--warmup-steps", "0"]
        words += ["--warmup-steps", str(self.warmup), "--grad-clip", "1", "--lr-schedule"]
        if self.plan.whole:
            return words + ["cosine"]
        return words + ["wsd", "--decay-steps", str(self.lengths.decays[self.lengths.ends.index(horizon)])]

    def command(self, recipe, seed, rounding, folder, horizon=None, more=()):
        """The command of a run; without a horizon that of a trial of TRIAL_STEPS."""
        plan, steps = self.plan, horizon or TRIAL_STEPS
        words = [*self.words, "--num-steps", str(steps), "--seed", str(seed)]
        words += ["--rounding-seed", str(rounding)] if rounding is not None else []
        words += self.schedule(steps) if horizon else ["--learning-rate", self.rate]
        words += ["--val-steps", str(VALIDATION_SEQUENCES)]
        words += ["--val-every", str(self.val_every())] if horizon == self.steps else []
        return (plan.trainer.launch(plan.gpus) + words + ["--log-every", "100", "--log-dir", folder, *more] +
                precision_words(recipe, plan.extra))

    def run(self, seed, recipe, rounding, horizon, parent, saves):
        """A run that ends at step `horizon`, from step 0 or from (run, step). It is saved after the steps `saves`."""
        name, title = f"{self.name}.{in_a_name(recipe)}.s{seed}", f"{self.title}, {recipe}, seed {seed}"
        if rounding is not None:
            name, title = f"{name}.r{rounding}", f"{title}, rounding seed {rounding}"
        if horizon < self.steps:
            name, title = f"{name}.to{horizon}", f"{title}, to step {horizon}"
        folder = os.path.join(self.plan.o.out, name)
        start = os.path.join(parent[0].folder, CHECKPOINTS, f"step-{parent[1]:08d}") if parent else None
        more = ["--branch", start] if parent else []
        if saves:
            more += ["--checkpoint-dir", os.path.join(folder, CHECKPOINTS), "--checkpoint-every",
                     ",".join(map(str, saves)) + "," * (len(saves) == 1)]  # a number alone would be an interval
        if recipe.startswith("fp8") and seed == self.plan.seeds[0] and horizon == self.steps and \
                not any(word.split("=")[0] == "--fp8-audit" for word in self.plan.extra):
            more += ["--fp8-audit", str(max(1, horizon // AUDITS))]
        command = self.command(recipe, seed, rounding, folder, horizon, more)
        run = Run(folder, command, title, self.model, recipe, self.plan.gpus, horizon - (parent[1] if parent else 0))
        run.name, run.case, run.seed, run.rounding, run.horizon = name, self, seed, rounding, horizon
        run.parent, run.start = parent and parent[0], start
        return run

    def runs(self, seed, trunk=None):
        """The runs of a seed, trunk first, so that pairs are complete early. trunk: that of other tokens per step."""
        plan = self.plan
        make = functools.partial(self.run, seed)
        if not plan.whole:
            return branches.trunk_runs(make, self.lengths, seed, plan.recipes, trunk)
        return [make(recipe, rounding, self.steps, None, [])
                for rounding, recipe in itertools.product(plan.roundings, plan.recipes)]


class Plan:
    """The checked options, and the cases to run."""

    def __init__(self, models, o, extra):
        self.models, self.o, self.extra = models, o, extra
        if not models:
            fail("no MODEL given; for example: scripts/verdict.sh llama3.2-1b")
        self.trainer = Trainer(o.trainer)
        self.length = number("--sequence-length", o.sequence_length)
        self.gpus = number("--gpus", o.gpus)
        self.price = number("--price", o.price, float, 0.001) if o.price else None
        self.margin = number("--margin", o.margin.removesuffix("%"), float, 0.001, "100") if o.margin else None
        self.whole = o.whole or o.repeat
        self.read_lists(o)
        check_extra(extra, SET_HERE, "verdict")
        self.rate = o.lr or ("1e-5" if o.repeat else "3e-4")
        number("--lr", self.rate, float, 0)
        self.train = {m: data_of(m, {**SHARDS, "": o.train_data}, "--train-data") for m in models}
        self.val = {m: validation_of(self.train[m], o.val_data) for m in models}
        self.names = folder_names(models)
        self.cases = []
        for model, batch in itertools.product(models, self.batches):
            self.cases.append(Case(self, model, batch))

    def read_lists(self, o):
        self.order = self.seeds = number_list("--seeds", o.seeds)  # order: with those of earlier starts before them
        self.looks = sorted(number_list("--looks", o.looks, 1)) if o.looks else [len(self.seeds)]
        self.batches = number_list("--tokens-per-step", o.tokens_per_step, 1) if o.tokens_per_step else [None]
        if not self.whole and self.batches[0] and self.batches[0] < max(self.batches):
            fail(f"--tokens-per-step {o.tokens_per_step}: put {max(self.batches)} first: with more tokens than the "
                 "trunk the rate would leap up at the branch, which throws runs off")
        if o.rounding_seeds and not self.whole:
            fail("--rounding-seeds is for --whole; the null arm of every trunk has a rounding seed of its own")
        if (o.branch_step or o.one_length) and self.whole:
            fail("--branch-step and --one-length are for branches, not for --whole or --repeat")
        self.roundings = number_list("--rounding-seeds", o.rounding_seeds) if o.rounding_seeds else [None]
        recipes = [] if o.recipes == "none" else split(o.recipes)
        if self.whole and not recipes:
            fail("--recipes none is a pilot of branches; with --whole or --repeat name a recipe")
        self.recipes = [o.against] + recipes
        self.trainer.check_precisions("--recipes", recipes)
        self.trainer.check_precisions("--against", [o.against], ("bf16",))
        if o.against in recipes:
            fail(f"--recipes names {o.against}, which --against compares with; name other recipes")

    def runs(self):
        found, trunks = [], {}
        for case, seed in itertools.product(self.cases, self.seeds):
            runs = case.runs(seed, trunks.get((case.model, seed)))
            trunks.setdefault((case.model, seed), runs[0])
            found += runs
        return found

    def fixed(self):
        """The settings that runs of one folder share."""
        keys = ("train-data", "val-data", "lr", "repeat", "whole", "trainer")
        return {**{key: vars(self.o)[key.replace("-", "_")] for key in keys}, "sequence-length": self.length,
                "gpus": self.gpus, "looks": self.looks, "num-steps": {case.name: case.steps for case in self.cases},
                "branch-step": {case.name: case.branch for case in self.cases}, "trainer options": " ".join(self.extra)}


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
    if not all(map(importlib.util.find_spec, venv.LIBRARIES)) and not (
            venv.PYTHON.exists() and subprocess.run([venv.PYTHON, "-c", found, *venv.LIBRARIES]).returncode == 0):
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
        steps = {entry.get("trained_steps", entry["num_steps"]) for entry in entries}
        order = list(dict.fromkeys(before["seeds"] + plan.seeds))
        now["against"], fixed["against"] = plan.recipes[0], before["recipes"][0]
        now["num-steps"] = {**fixed["num-steps"], **now["num-steps"]}
        now["branch-step"] = {**fixed.get("branch-step", {}), **now["branch-step"]}
    except (ValueError, LookupError, TypeError, AttributeError):
        fail(f"{path} is damaged; remove this one file to go on with the finished runs, or give another --out")
    if shared:
        fail(f"two models would share the folder {shared[0]} in {plan.o.out}; give another --out")
    different = [f"{key}: {fixed.get(key)!r} there, {value!r} now" for key, value in now.items()
                 if fixed.get(key) != value and not (key in PER_CASE and value.items() >= fixed.get(key, {}).items())]
    refuse_other_settings(plan.o.out, different, steps)
    plan.order = plan.order if different else order
    return [] if different else others, different


def receipt(plan, runs, others):
    words = ["scripts/verdict.sh"] + sys.argv[1:]
    entries = [{"folder": r.name, "model": r.model, "recipe": r.precision, "seed": r.seed,
                "rounding_seed": r.seed if r.rounding is None else r.rounding, "num_steps": r.horizon,
                "trained_steps": r.steps} for r in runs]
    return {"command": shlex.join(words), "commit": output_of("git", "rev-parse", "--short", "HEAD"),
            "dirty": bool(output_of("git", "status", "--porcelain", "--untracked-files=no")),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "models": plan.models,
            "recipes": plan.recipes, "seeds": plan.order,
            "rounding_seeds": ["same" if r is None else r for r in plan.roundings],
            "num_steps": {case.name: case.steps for case in plan.cases}, "looks": plan.looks, "margin": plan.margin,
            "sequence_length": plan.length, "gpus": plan.gpus, "price": plan.price,
            "regime": "repeat" if plan.o.repeat else "fresh", "driver": "".join(nvidia_smi("driver_version")[:1]),
            "gpu_names": nvidia_smi("name"), "fixed": plan.fixed(), "runs": entries + others}


def time_steps(plan, pool):
    """Sets the expected seconds of each run, from a finished run of its case, or else from a trial of the trunk.

    They are 0 if a run of the case is known to be out of memory and none has finished, or if the trial fails.
    """
    for case in plan.cases:
        own = [run for run in pool.runs if run.case is case]
        finished = [run for run in own if run.kind == "done"]
        if finished:
            start, step, validation = 0.0, finished[0].summary()["seconds"]["wall"] / finished[0].steps, 0.0
        elif any(run.kind == "memory" for run in own) or not (trial := time_trial(plan, case, pool)):
            continue
        else:
            start, step, validation = (trial["seconds"]["start"], trial["median_ms"] / 1e3,
                                       trial["seconds"]["validation"])
        for run in own:
            validations = math.ceil(run.steps / case.val_every()) if run.horizon == case.steps else 1
            run.expected = start + run.steps * step + validations * validation


def time_trial(plan, case, pool):
    """The summary of TRIAL_STEPS steps and a validation of the trunk, or None if they fail."""
    recipe = plan.recipes[0]
    say(f"{case.title}: timing {TRIAL_STEPS} steps and a validation in {reword('BF16', recipe)}")
    folder = os.path.join(plan.o.out, "trial." + case.name)
    trial = Run(folder, case.command(recipe, plan.seeds[0], None, folder), "trial", case.model, recipe, plan.gpus,
                TRIAL_STEPS)
    pool.train([trial])
    return trial.summary() if trial.kind == "done" else None


def seen_by_pilot(out):
    """What the last report of the folder says of its null pairs: how small a cost its trunks see. "" without one."""
    try:
        with open(os.path.join(out, "report.json"), encoding="utf-8") as file:
            return "\n".join(json.load(file)["pilot"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def announce(plan, pool):
    left = [run for run in pool.runs if run.kind not in ANSWERS]
    for case in plan.cases:
        roundings = f" x {len(plan.roundings)} rounding seeds" if len(plan.roundings) > 1 else ""
        what = f"{len(plan.recipes)} precisions x {len(plan.seeds)} seeds{roundings}, each run"
        if not plan.whole:
            what = (f"{len(plan.seeds)} trunks, from which {len(plan.recipes)} arms branch after step {case.branch}, "
                    "each")
        say(f"{case.title}: {what} {case.steps} steps of {case.tokens} tokens")
    if pilot := seen_by_pilot(plan.o.out):
        say(pilot)
    seconds = sum(run.expected for run in left) / pool.parallel
    text = f"{len(left)} of {len(pool.runs)} runs to do, {pool.parallel} side by side"
    if seconds:
        text += f": about {seconds / 60:.0f} minutes at the speed of {reword('BF16', plan.recipes[0])}, until "
        text += time.strftime("%H:%M", time.localtime(time.time() + seconds))
        if plan.price is not None:
            hours = sum(run.expected for run in left) * plan.gpus / 3600
            text += f"; {hours:.2f} GPU hours cost {hours * plan.price:.2f} at {plan.price:g} an hour"
    say(text)


def main(words):
    o, models, extra = parse(words, __doc__, DEFAULTS, ("one-length", "whole", "repeat", "no-report", "dry-run"),
                             takes_words=True)
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
        write_file(os.path.join(o.out, "verdict.json"), text)
        branches.require_checkpoints(runs)
        time_steps(plan, pool)
        announce(plan, pool)
        pool.train()
    report = [sys.executable, "scripts/report.py", o.out] + (["--price", str(plan.price)] if o.price else [])
    no_page = not o.no_report and subprocess.run(report).returncode
    return 1 if no_page or any(run.kind == "failed" for run in runs) else 0


if __name__ == "__main__":
    end(main)
