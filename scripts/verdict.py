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
  --dry-run               print the command of each run and exit
  --                      all options after this one are passed to the trainer; those that begin with --fp8 are passed
                          to FP8 runs only; --msamp is refused, because it sets --precision

Start it again to continue: finished runs are kept, and so are runs that the GPU cannot do (out of memory, no GEMMs for
the recipe). Models, recipes and seeds may be added, --parallel and --price may change; once a run has finished, other
settings may not. Ctrl-C or SIGTERM stops the current runs, which start from the beginning next time. Exit status 0:
every run finished, or the GPU cannot do it. 1: a run failed, there is no report, the command is wrong, or FOLDER cannot
be used. 128 plus the signal's number: a signal stopped the verdict.
"""
import datetime
import glob
import itertools
import json
import math
import os
import re
import shlex
import struct
import subprocess
import sys
import time

from verdict_runs import Pool, Run, fail, finished_summary, say, write_text

SET_HERE = ("train-data", "val-data", "sequence-length", "num-steps", "precision", "fp8-recipe", "fp8-emulate", "seed",
            "rounding-seed", "learning-rate", "lr-schedule", "warmup-steps", "log-dir")
NOT_HERE = ("checkpoint-dir", "resume", "export-hf", "dry-run", "help", "world-size", "list", "json")
VALUES = ("recipes", "seeds", "rounding-seeds", "train-data", "val-data", "sequence-length", "num-steps", "lr", "gpus",
          "parallel", "price", "trainer", "out")
VALIDATION_SEQUENCES = 256  # enough for an interval
TRIAL_STEPS = 4
SHARD_MAGICS = (20240520, 20240801)  # tokens of 2 and of 4 bytes


def parse(words):
    """Returns (models, options, the trainer's options). With --help prints the help and exits. Dies if an option is not
    known or lacks its value."""
    o = {"recipes": "fp8,fp8:rowwise", "seeds": "42,43,44", "rounding-seeds": "", "train-data": "", "val-data": "",
         "sequence-length": "2048", "num-steps": "", "lr": "", "gpus": "1", "parallel": "", "price": "",
         "trainer": "./train_fp8cu", "out": "log/verdict", "repeat": False, "dry-run": False}
    end = words.index("--") if "--" in words else len(words)
    models, extra, words = [], words[end + 1:], words[:end]
    while words:
        word = words.pop(0)
        name, equals, value = word[2:].partition("=")
        if word == "--help":
            print(__doc__, end="")
            sys.exit(0)
        if not word.startswith("--"):
            models.append(word.rstrip("/"))
        elif name in ("repeat", "dry-run") and not equals:
            o[name] = True
        elif name in VALUES:
            if not equals and (not words or words[0].startswith("--")):
                fail(f"{word} needs a value")
            o[name] = value if equals else words.pop(0)
        else:
            fail(f"unknown option {word}; --help lists all options; put options of the trainer after --")
    return models, o, extra


def number(option, text, kind=int, low=1):
    """Returns the option's number. Dies if the text is not a number from `low` on and below 1e15."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value < 1e15:
        fail(f"{option}: \"{text}\" is not a {'whole ' if kind is int else ''}number from {low} on and below 1e15")
    return value


def number_list(option, text):
    values = [number(option, word, low=0) for word in text.replace(",", " ").split()]
    if not values or len(set(values)) < len(values):
        fail(f"{option}: \"{text}\" must name different numbers, with commas between")
    return values


def trainer_lines(trainer, what):
    result = subprocess.run([trainer, "--list", what], capture_output=True, text=True)
    return result.stdout.split()


def check_recipes(trainer, text):
    known = trainer_lines(trainer, "recipes")
    recipes = text.replace(",", " ").split()
    for word in recipes:
        match = re.fullmatch(r"fp8(:([a-z0-9_]+)(:emulate)?)?", word)
        if not match:
            fail(f"--recipes takes fp8, fp8:RECIPE and fp8:RECIPE:emulate, not \"{word}\"; BF16 is always run")
        if match[2] and match[2] not in known:
            fail(f"--recipes {word}: {trainer} has no such recipe; it has {' '.join(known)}")
    if not recipes or len(set(recipes)) < len(recipes):
        fail(f"--recipes: \"{text}\" must name different recipes, with commas between")
    return recipes


def check_extra(extra):
    for word in extra:
        name = word[2:].split("=")[0] if word.startswith("--") else ""
        if name in SET_HERE:
            fail(f"--{name} is set by the verdict; see --help")
        if name in NOT_HERE:
            fail(f"--{name} makes no sense in a run of a verdict; leave it out")
        if name == "msamp":
            fail("--msamp sets --precision, also of BF16 runs; give the other options of its level instead")


def data_of(model, given):
    name = os.path.basename(model).lower()
    shards = given or ("data/tinystories_llama3_train.bin" if name.startswith("llama") else
                       "data/tinystories_qwen_train.bin" if name.startswith("qwen") else "")
    if not shards:
        fail(f"no data known for model {model}; name its training shards with --train-data")
    if not glob.glob(shards):
        fail(f"no training shards {shards} for model {model}; data/README.md shows how to make them")
    return shards


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
    if o["repeat"]:
        return ["--learning-rate", o["lr"] or "1e-5", "--lr-schedule", "constant", "--warmup-steps", "0"]
    return ["--learning-rate", o["lr"] or "3e-4", "--lr-schedule", "cosine", "--warmup-steps",
            str(max(1, steps // 20)), "--grad-clip", "1"]


def precision_words(recipe):
    parts = recipe.split(":")
    return (["--precision", parts[0]] + (["--fp8-recipe", parts[1]] if len(parts) > 1 else []) +
            (["--fp8-emulate"] if len(parts) > 2 else []))


def extra_words(recipe, extra):
    """The trainer's options that apply to the recipe: --fp8 options are for FP8 runs only."""
    words, skips_value = [], False
    for word in extra if recipe == "bf16" else []:
        skip = skips_value and not word.startswith("--")
        skips_value = word.startswith("--fp8") and "=" not in word
        if not skip and not word.startswith("--fp8"):
            words.append(word)
    return words if recipe == "bf16" else list(extra)


class Plan:
    """The checked options, and what follows from them for each model."""

    def __init__(self, models, o, extra):
        self.models, self.o, self.extra = models, o, extra
        if not models:
            fail("no MODEL given; for example: scripts/verdict.sh llama3.2-1b")
        self.trainer = o["trainer"]
        if not os.access(self.trainer, os.X_OK):
            fail(f"there is no program {self.trainer}; build it with: make {os.path.basename(self.trainer)}")
        self.cpu = os.path.basename(self.trainer) == "train_fp8"
        self.length = number("--sequence-length", o["sequence-length"])
        self.gpus = number("--gpus", o["gpus"])
        self.price = number("--price", o["price"], float, 0.001) if o["price"] else None
        self.seeds = number_list("--seeds", o["seeds"])
        self.roundings = number_list("--rounding-seeds", o["rounding-seeds"]) if o["rounding-seeds"] else [None]
        self.recipes = ["bf16"] + check_recipes(self.trainer, o["recipes"])
        check_extra(extra)
        if o["lr"]:
            number("--lr", o["lr"], float, 0)
        self.train = {m: data_of(m, o["train-data"]) for m in models}
        self.val = {m: validation_of(self.train[m], o["val-data"]) for m in models}
        if len({os.path.basename(m) for m in models}) < len(models):
            fail("two models would share a folder; start one of them with another --out")
        self.described = {m: self.describe(m) for m in models}
        self.steps = {m: self.steps_of(m) for m in models}

    def describe(self, model):
        """Returns the trainer's --dry-run --json of the BF16 run. Dies if that of BF16 or of a recipe is an error."""
        described = None
        for recipe in reversed(self.recipes):
            command = ([self.trainer, model, "--train-data", self.train[model], "--val-data", self.val[model],
                        "--sequence-length", str(self.length), "--world-size", str(self.gpus), "--dry-run", "--json"] +
                       precision_words(recipe) + extra_words(recipe, self.extra))
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                fail(f"{model}, {recipe}: " + result.stderr.strip().removeprefix("error: "))
            described = json.loads(result.stdout)
        return described

    def steps_of(self, model):
        settings, sequences = self.described[model]["settings"], count_sequences(self.train[model], self.length)
        per_step = self.gpus * settings["batch-size"] * settings["grad-accumulation-steps"]
        one_pass = sequences // per_step
        if self.o["num-steps"]:
            steps = number("--num-steps", self.o["num-steps"])
        else:
            steps = 1000 if self.o["repeat"] else min(2000, one_pass)
        if not self.o["repeat"] and steps > one_pass:
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
        launch = []
        if self.gpus > 1:
            launch = ["mpirun", "-np", str(self.gpus), "--bind-to", "none"]
            launch += ["--allow-run-as-root"] if os.getuid() == 0 else []
            launch += ["--oversubscribe"] if self.cpu else []
        words = [self.trainer, model, "--train-data", self.train[model], "--val-data", self.val[model],
                 "--sequence-length", str(self.length), "--num-steps", str(steps or self.steps[model]), "--seed",
                 str(seed)]
        words += ["--rounding-seed", str(rounding)] if rounding is not None else []
        words += schedule(self.o, steps or self.steps[model]) + ["--val-steps", str(VALIDATION_SEQUENCES)]
        words += ["--val-every", str(self.val_every(model))] if steps is None else []
        return (launch + words + ["--log-every", "100", "--log-dir", folder] + precision_words(recipe) +
                extra_words(recipe, self.extra))

    def runs(self):
        """All runs; the runs of one seed stand together, BF16 first, so that pairs are complete early."""
        runs = []
        for model, seed, rounding, recipe in itertools.product(self.models, self.seeds, self.roundings, self.recipes):
            name = f"{os.path.basename(model)}.{recipe.replace(':', '-')}.s{seed}"
            name += f".r{rounding}" if rounding is not None else ""
            folder = os.path.join(self.o["out"], name)
            command = self.command(model, recipe, seed, rounding, folder)
            runs.append(Run(name, folder, command, model, recipe, seed, rounding, self.steps[model], self.gpus))
        return runs

    def fixed(self):
        """The settings that runs of one folder share."""
        keys = ("train-data", "val-data", "lr", "repeat")
        return {**{key: self.o[key] for key in keys}, "trainer": self.trainer, "sequence-length": self.length,
                "gpus": self.gpus, "num-steps": {os.path.basename(m): n for m, n in self.steps.items()},
                "trainer options": " ".join(self.extra)}


def nvidia_smi(field):
    try:
        result = subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True,
                                text=True)
        return [line.strip() for line in result.stdout.splitlines()] if result.returncode == 0 else []
    except OSError:
        return []


def git(*words):
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def visible_gpus():
    """The GPUs that CUDA_VISIBLE_DEVICES names, or if it is not set, the numbers of all GPUs.

    As CUDA does, takes words up to the first that names none, such as -1 or NoDevFiles, and none if one comes twice.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return nvidia_smi("index")
    words = [word.strip() for word in given.split(",")]
    named = list(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, words))
    return named if len(set(named)) == len(named) else []


def slots_of(plan):
    """One entry for each run that goes on at one time: the environment variables that give it its GPUs."""
    wanted = number("--parallel", plan.o["parallel"]) if plan.o["parallel"] else None
    if plan.cpu:
        return [{}] * (wanted or 1)
    gpus = visible_gpus()
    if len(gpus) < plan.gpus * (wanted or 1):
        fail(f"{plan.gpus * (wanted or 1)} GPUs are needed and {len(gpus)} are here (nvidia-smi, "
             "CUDA_VISIBLE_DEVICES); --trainer ./train_fp8 runs on the CPU")
    count = wanted or len(gpus) // plan.gpus
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * plan.gpus:(i + 1) * plan.gpus])} for i in range(count)]


def check_folder(plan, runs):
    """Returns (the entries of verdict.json for runs that this start does not have, the settings that differ, as texts).

    If settings differ, there are no entries. Dies if verdict.json is damaged, if a run of another model has the
    folder of one of these runs, or if settings differ and a run of the folder is finished.
    """
    path = os.path.join(plan.o["out"], "verdict.json")
    if not os.path.exists(path):
        return [], []
    models, now = {run.name: run.model for run in runs}, plan.fixed()
    try:
        before = json.load(open(path))
        fixed, entries = before["fixed"], before["runs"]
        others = [entry for entry in entries if entry["folder"] not in models]
        shared = [entry["folder"] for entry in entries
                  if models.get(entry["folder"], entry["model"]) != entry["model"]]
        steps = [(entry["folder"], entry["num_steps"]) for entry in entries]
        now["num-steps"] = {**fixed["num-steps"], **now["num-steps"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        fail(f"{path} is damaged; remove this one file to go on with the finished runs, or give another --out")
    if shared:
        fail(f"two models would share the folder {shared[0]} in {plan.o['out']}; give another --out")
    different = [f"{key}: {fixed.get(key)!r} there, {value!r} now" for key, value in now.items()
                 if fixed.get(key) != value and not (key == "num-steps" and value.items() >= fixed[key].items())]
    if different and any(finished_summary(os.path.join(plan.o["out"], name), number) for name, number in steps):
        fail(f"{plan.o['out']} holds runs of other settings ({'; '.join(different)}); give another --out")
    return [] if different else others, different


def forget_results(plan, runs, different):
    """Removes the results of runs of other settings, none of which has finished, so that all runs start again."""
    say(f"no run in {plan.o['out']} has finished, so its settings are replaced ({'; '.join(different)})")
    for path in glob.glob(os.path.join(glob.escape(plan.o["out"]), "*", "result")):
        os.remove(path)
    for run in runs:
        run.recall()


def receipt(plan, runs, others):
    words = ["scripts/verdict.sh"] + sys.argv[1:]
    entries = [{"folder": r.name, "model": r.model, "recipe": r.recipe, "seed": r.seed,
                "rounding_seed": r.seed if r.rounding is None else r.rounding, "num_steps": r.steps} for r in runs]
    return {"command": shlex.join(words), "commit": git("rev-parse", "--short", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "models": plan.models,
            "recipes": plan.recipes, "seeds": plan.seeds,
            "rounding_seeds": ["same" if r is None else r for r in plan.roundings], "num_steps": plan.steps,
            "sequence_length": plan.length, "gpus": plan.gpus, "price": plan.price,
            "regime": "repeat" if plan.o["repeat"] else "fresh", "driver": "".join(nvidia_smi("driver_version")[:1]),
            "gpu_names": nvidia_smi("name"), "fixed": plan.fixed(), "runs": entries + others}


def time_steps(plan, runs, slots):
    """Sets the expected seconds of each run, from a finished run of its model, or else from a trial in BF16.

    They are 0 if a run of the model is known to be out of memory and none has finished, or if the trial fails.
    """
    for model in plan.models:
        own = [run for run in runs if run.model == model]
        known = [run.seconds_known() for run in own if run.seconds_known()]
        if not known and not any(run.kind == "memory" for run in own):
            folder = os.path.join(plan.o["out"], "trial." + os.path.basename(model))
            say(f"{model}: timing {TRIAL_STEPS} steps and a validation in BF16")
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, "stdout.txt"), "w") as out:
                command = plan.command(model, "bf16", plan.seeds[0], None, folder, TRIAL_STEPS)
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                               env={**os.environ, **slots[0]})
            summary = finished_summary(folder, TRIAL_STEPS)
            validations = math.ceil(plan.steps[model] / plan.val_every(model))
            known = [summary["seconds"]["start"] + plan.steps[model] * summary["median_ms"] / 1e3 +
                     validations * summary["seconds"]["validation"]] if summary else []
        for run in own:
            run.expected = known[0] if known else 0.0


def announce(plan, runs, slots):
    left = [run for run in runs if not run.is_kept()]
    for model in plan.models:
        roundings = f" x {len(plan.roundings)} rounding seeds" if len(plan.roundings) > 1 else ""
        say(f"{model}: {len(plan.recipes)} precisions x {len(plan.seeds)} seeds{roundings}, each run "
            f"{plan.steps[model]} steps of {plan.tokens(model) // plan.steps[model]} tokens")
    seconds = sum(run.expected for run in left) / len(slots)
    text = f"{len(left)} of {len(runs)} runs to do, {len(slots)} side by side"
    if seconds:
        text += f": about {seconds / 60:.0f} minutes at the speed of BF16, until "
        text += time.strftime("%H:%M", time.localtime(time.time() + seconds))
        if plan.price is not None:
            hours = sum(run.expected for run in left) * plan.gpus / 3600
            text += f"; {hours:.2f} GPU hours cost {hours * plan.price:.2f} at {plan.price:g} an hour"
    say(text)


def make_report(plan):
    words = [sys.executable, "scripts/report.py", plan.o["out"]]
    return subprocess.run(words + (["--price", str(plan.price)] if plan.price is not None else [])).returncode


def main():
    plan = Plan(*parse(sys.argv[1:]))
    runs = plan.runs()
    if plan.o["dry-run"]:
        for run in runs:
            print(shlex.join(run.command))
        return 0
    slots = slots_of(plan)
    others, different = check_folder(plan, runs)
    with Pool(plan.o["out"], runs, slots) as pool:
        if different:
            forget_results(plan, runs, different)
        text = json.dumps(receipt(plan, runs, others), indent=1) + "\n"
        write_text(os.path.join(plan.o["out"], "verdict.json"), text)
        time_steps(plan, runs, slots)
        announce(plan, runs, slots)
        pool.train()
    report = make_report(plan)
    return 1 if report or any(run.kind == "failed" for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
