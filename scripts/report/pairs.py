"""Pairs FP8 runs with BF16 runs. The intervals and noise bands come from scripts/verdict_stats.py.

A pair has equal FACTS (program, device, model and others), sequence length, seed, rounding seed, data and settings. It
may differ in precision, fp8 options and the options in IGNORED. A pair that differs in more is refused, by name and
with the reason.
"""
import collections
import dataclasses
import math

import numpy as np

import verdict_stats as vs

# Options that change neither the training nor its speed.
IGNORED = {"log-every", "val-every", "sample-every", "sample-tokens", "log-dir", "on-output-lost", "profile",
           "peak-tflops", "check-links", "checkpoint-dir", "checkpoint-every", "keep-checkpoints", "resume",
           "on-save-error", "no-verify", "export-hf", "dry-run", "json", "list", "stall-timeout", "world-size",
           "ranks-per-host", "tokens-per-step", "network-gbps", "step-ms", "init-from", "init-timeout", "gpu"}
FACTS = ("program", "version", "versions", "device", "model", "parameters", "vocab_size", "world_size")
DATA = (("train-data", "training_fingerprint", ("training_tokens", "training_sequences")),
        ("val-data", "validation_fingerprint", ()))
NO_JOULES = "not every step has its joules (the trainer reads them by NVML)"
WATTS = (10, 3000)  # the mean power of a GPU lies between these; other joules are no measurement
LEAST_SHARE = 0.5  # if no pair is done, a pair counts if it has at least this share of the longest pair's steps


def recipe_of(run):
    """bf16, fp32, fp8:RECIPE or fp8:RECIPE:emulate."""
    if run.option("precision") != "fp8":
        return run.option("precision")
    return f"fp8:{run.option('fp8-recipe')}" + (":emulate" if run.option("fp8-emulate") == "on" else "")


def name_recipes(runs):
    """{run's name: recipe}. Runs of one recipe whose fp8 options differ have these options in the name."""
    groups = collections.defaultdict(list)
    for run in runs:
        groups[recipe_of(run)].append(run)
    names = {}
    for recipe, members in groups.items():
        options = [{k: v for k, v in run.settings["settings"].items() if k.startswith("fp8-")} for run in members]
        keys = sorted({key for of in options for key in of} - {"fp8-recipe", "fp8-emulate", "fp8-audit"})
        differing = [key for key in keys if len({str(of.get(key)) for of in options}) > 1]
        for run in members if recipe.startswith("fp8") else ():
            names[run.name] = " ".join([recipe] + [f"{key[4:]}={run.option(key) or 'none'}" for key in differing])
        for run in members if not recipe.startswith("fp8") else ():
            names[run.name] = recipe
    return names


def data_differences(a, b):
    """What the data of two runs differs in, as texts."""
    texts = []
    for option, fingerprint, counts in DATA:
        prints = [start.get(fingerprint) for start in (a, b)]
        if all(prints):
            if prints[0] != prints[1]:
                texts.append(f"the data of --{option} differs (fingerprints {prints[0]} and {prints[1]})")
            continue
        values = [start["settings"].get(option) for start in (a, b)]
        if values[0] != values[1]:
            texts.append(f"{option} is {values[0]} and {values[1]}")
        texts += [f"{key} is {a.get(key)} and {b.get(key)}" for key in counts if a.get(key) != b.get(key)]
    return texts


def start_differences(a, b, precision=False):
    """What two settings records differ in, as texts. Leaves out IGNORED and fp8-audit. Unless `precision` is
    true, leaves out precision and the other fp8 options too."""
    texts = [f"{key} is {a.get(key)} and {b.get(key)}" for key in FACTS if a.get(key) != b.get(key)]
    skip = IGNORED | {"precision", "train-data", "val-data"} if not precision else IGNORED | {"train-data", "val-data"}
    ours, theirs = a["settings"], b["settings"]
    for key in sorted(set(ours) | set(theirs)):
        if key in skip or (key.startswith("fp8-") and (not precision or key == "fp8-audit")):
            continue
        if ours.get(key) != theirs.get(key):
            texts.append(f"{key} is {ours.get(key)} and {theirs.get(key)}")
    return texts + data_differences(a, b)


def fault(run):
    """Why a run cannot be compared, or None."""
    for start in run.starts[1:]:
        texts = start_differences(run.starts[0], start, precision=True)
        if texts:
            return f"{run.name} was resumed with other settings: {texts[0]}"
    if run.missing:
        return f"{run.name}: its log lacks step {run.missing}"
    if run.diverged:
        return f"{run.name} diverged: its loss is not finite from step {run.diverged} on" if run.lost else \
            f"{run.name}: its loss is not finite at step {run.diverged}"
    if run.option("precision") == "fp8" and run.settings["fp8_gemms"] == 0:
        return f"{run.name}: nothing ran in FP8"
    return None


@dataclasses.dataclass
class Pair:
    bf16: object
    fp8: object

    @property
    def steps(self):
        return min(self.bf16.last_step, self.fp8.last_step)

    @property
    def complete(self):
        return self.bf16.complete and self.fp8.complete

    @property
    def diverged(self):
        return self.bf16.diverged or self.fp8.diverged


@dataclasses.dataclass
class Comparison:
    """A model, length, number of GPUs and FP8 recipe against BF16. `why` has reasons for missing results."""
    model: str
    length: int
    gpus: int
    recipe: str
    name: str  # all of these in words
    pairs: list
    refused: list = dataclasses.field(default_factory=list)      # texts
    notes: list = dataclasses.field(default_factory=list)
    diverged: list = dataclasses.field(default_factory=list)     # texts
    why: dict = dataclasses.field(default_factory=dict)          # name of a result: why it is missing
    steps: int = 0
    last: int = 0                    # steps of the training difference
    speed: float | None = None       # tokens per second, FP8 over BF16
    speed_range: tuple | None = None
    training: object = None
    validation: object = None
    validation_step: int | None = None
    training_noise: object = None    # NoiseBand of BF16 runs that differ in the rounding seed
    validation_noise: object = None
    curve: object = None
    curve_noise: object = None
    noise_of: str = ""               # what the runs of curve_noise differ in
    window: int = 0
    speedup: object = None           # at equal loss, in seconds
    energy_speedup: object = None    # at equal loss, in joules
    joules_per_token: tuple | None = None  # BF16, FP8
    seconds_per_token: tuple | None = None

    @property
    def seeds(self):
        return sorted({pair.fp8.seed for pair in self.pairs})


def place(run):
    """(model, sequence length, GPUs). Only runs for which these are equal are compared."""
    return run.settings["model"], run.length, run.gpus


def find_pair(run, candidates):
    """(BF16 run, None) that pairs with an FP8 run, or (None, the reason)."""
    same = [c for c in candidates if (c.seed, c.rounding_seed) == (run.seed, run.rounding_seed)]
    if not same:
        if not candidates:
            return None, f"{run.name}: there is no BF16 run of this model, T and number of GPUs"
        seeds = ", ".join(f"{c.seed}/{c.rounding_seed}" for c in candidates)
        return None, (f"{run.name}: no BF16 run has seed {run.seed} and rounding seed {run.rounding_seed} (there are "
                      f"{seeds})")
    scored = sorted(((start_differences(c.settings, run.settings), c) for c in same), key=lambda item: len(item[0]))
    texts, best = scored[0]
    if texts:
        return None, f"{best.name} and {run.name} are no pair (BF16 and FP8): " + "; ".join(texts[:3])
    others = [c.name for texts, c in scored if not texts and c.column("loss") != best.column("loss")]
    if others:
        return None, (f"{best.name} and {others[0]} are BF16 runs of equal settings and seed {run.seed} with different "
                      f"losses: which of them pairs with {run.name} would be chance; leave one in the folder")
    return best, None


def find_comparisons(runs, failed, names):
    """All comparisons of FP8 with BF16, without results."""
    found = {}

    def comparison(run):
        key = (*place(run), names[run.name])
        return found.setdefault(key, Comparison(*key, f"{run.place}, {key[-1]}", []))

    for run, reason in failed:
        if run.option("precision") == "fp8":
            one = comparison(run)
            one.refused.append(f"{run.name} ended after step {run.last_step} of {run.num_steps}, {reason}")
            if run.diverged:
                one.diverged.append(one.refused[-1])
    for run in runs:
        if run.option("precision") != "fp8":
            continue
        one = comparison(run)
        candidates = [c for c in runs if c.option("precision") == "bf16" and place(c) == place(run)]
        other, reason = find_pair(run, candidates)
        if any((p.fp8.seed, p.fp8.rounding_seed) == (run.seed, run.rounding_seed) for p in one.pairs):
            reason = f"{run.name} repeats the seed and rounding seed of another run; one of them is used"
        reason = reason or fault(other) or fault(run)
        if reason:
            one.refused.append(reason)
            if run.diverged or (other and other.diverged):
                one.diverged.append(reason)
        else:
            one.pairs.append(Pair(other, run))
    return list(found.values())


def choose_pairs(comparison):
    """Keeps the pairs that are done; if none is, those with LEAST_SHARE of the steps of the farthest pair. Sets the
    steps that all of the kept pairs have."""
    pairs = comparison.pairs
    done = [pair for pair in pairs if pair.complete]
    if done:
        kept = done
    else:
        far = max(pair.steps for pair in pairs)
        kept = [pair for pair in pairs if pair.steps >= LEAST_SHARE * far]
    comparison.steps = min(pair.steps for pair in kept)
    for pair in pairs:
        if pair not in kept:
            slow = min((pair.bf16, pair.fp8), key=lambda run: run.last_step)
            comparison.notes.append(f"the pair of {pair.fp8.name} is not used yet: {slow.name} is {slow.state()}")
    if not done:
        comparison.notes.append(f"so far, step {comparison.steps} of {kept[0].fp8.num_steps}")
    comparison.pairs = kept


def by_seed(comparison, values):
    """(BF16, FP8) of values(run), averaged over the rounding seeds of a seed: [seeds, n] each."""
    sides = []
    for side in ("bf16", "fp8"):
        rows = [[values(getattr(pair, side)) for pair in comparison.pairs if pair.fp8.seed == seed]
                for seed in comparison.seeds]
        sides.append(np.array([np.mean(np.asarray(row, dtype=np.float64), axis=0) for row in rows]))
    return sides


def steps_of(key, count):
    return lambda run: run.column(key, 0, count)


def last_steps(comparison):
    """Steps at the end over which the training difference is averaged: a quarter, but at least 100 (in runs below 200
    steps half of them, at least 40), and at least 300 if data repeats, because the noise of repeated data has a longer
    memory. Never more than all steps."""
    steps = comparison.steps
    last = max(steps // 4, min(100, steps // 2), 40)
    if comparison.pairs[0].fp8.repeats_data:
        last = max(last, 300)
    return min(last, steps)


def attempt(comparison, name, function, *arguments, **options):
    """Sets a result; where the statistics refuse, keeps their reason."""
    try:
        setattr(comparison, name, function(*arguments, **options))
    except ValueError as reason:
        comparison.why[name] = str(reason)


def noise_runs(comparison, runs):
    """(BF16 runs, groups, what they differ in) that show the noise of BF16; no runs if there are too few."""
    reference = comparison.pairs[0].bf16
    alike = [run for run in runs if run.option("precision") == "bf16" and place(run) == place(reference)
             and not fault(run) and run.last_step >= comparison.steps
             and all(text.startswith(("seed is", "rounding-seed is"))
                     for text in start_differences(reference.settings, run.settings))]
    alike = list({(run.seed, run.rounding_seed): run for run in reversed(alike)}.values())  # repetitions count once
    seeds = collections.Counter(run.seed for run in alike)
    repeated = [run for run in alike if seeds[run.seed] > 1]
    if repeated:
        return repeated, [run.seed for run in repeated], "rounding seed"
    return (alike, [0] * len(alike), "seed") if len(alike) > 1 else ([], [], "")


def validation_losses(comparison):
    """Sets the last validation that all pairs have, and returns a function for by_seed. ValueError if there is none,
    or if the losses of its sequences are missing, not finite or of different number."""
    members = [run for pair in comparison.pairs for run in (pair.bf16, pair.fp8)]
    records = [{v["step"]: v for v in run.validations if v["step"] <= comparison.steps} for run in members]
    common = set.intersection(*map(set, records))
    if not common:
        raise ValueError("no validation that all runs have")
    step = max(common)
    losses = [record[step].get("losses") for record in records]
    for run, values in zip(members, losses):
        if values is None:
            raise ValueError(f"{run.name} has no validation losses of single sequences; a newer trainer writes them")
        if any(value is None for value in values):
            raise ValueError(f"{run.name} has a validation loss that is not finite at step {step}")
    if len({len(values) for values in losses}) > 1:
        raise ValueError(f"the runs validate on different numbers of sequences at step {step}")
    comparison.validation_step = step
    return lambda run: next(v["losses"] for v in run.validations if v["step"] == step)


def compare_losses(comparison, runs):
    steps, last = comparison.steps, last_steps(comparison)
    bf16, fp8 = by_seed(comparison, steps_of("loss", steps))
    comparison.last = last
    attempt(comparison, "training", vs.training_difference, bf16, fp8, last)
    comparison.window = max(vs.MIN_STEPS, math.ceil(steps / 20))
    if steps >= 2 * comparison.window:
        attempt(comparison, "curve", vs.difference_over_steps, bf16, fp8, comparison.window)
    else:
        comparison.why["curve"] = f"{steps} steps are too few for a curve; it takes {2 * comparison.window}"
    try:
        losses = validation_losses(comparison)
        comparison.validation = vs.validation_difference(*by_seed(comparison, losses))
    except ValueError as reason:
        comparison.why["validation"] = str(reason)
        losses = None
    set_noise(comparison, runs, losses)
    for name in ("training", "validation"):
        difference, noise = getattr(comparison, name), getattr(comparison, f"{name}_noise")
        if difference and noise and difference.pairs == 1:
            setattr(comparison, name, vs.with_rounding(difference, noise))


def set_noise(comparison, runs, validation):
    """Sets the noise bands of BF16: over steps, and of the means if runs differ in the rounding seed alone."""
    members, groups, differ = noise_runs(comparison, runs)
    if not members:
        comparison.why["noise"] = "no two BF16 runs differ in the seed or the rounding seed alone"
        return
    comparison.noise_of = differ
    losses = np.array([steps_of("loss", comparison.steps)(run) for run in members])
    averaged = len(comparison.pairs) if differ == "rounding seed" else len(comparison.seeds)
    first = losses.shape[1] % comparison.window
    windows = losses[:, first:].reshape(len(losses), -1, comparison.window).mean(axis=2)
    if windows.shape[1]:
        comparison.curve_noise = vs.noise_band(windows, groups, averaged)
    if differ == "rounding seed":
        means = losses[:, comparison.steps - comparison.last:].mean(axis=1)
        comparison.training_noise = vs.noise_band(means, groups, averaged)
        if validation:
            try:
                means = [np.mean(validation(run)) for run in members]
                comparison.validation_noise = vs.noise_band(means, groups, averaged)
            except (StopIteration, KeyError, TypeError, ValueError):
                comparison.why["validation noise"] = "not every BF16 run has this validation"


def energy_fault(run):
    """Why a run's joules cannot be used, or None. One step may have 0 J: NVML's counter need not move in each step."""
    joules = run.values("joules")
    if joules is None:
        return NO_JOULES
    if min(joules) < 0:
        return f"{run.name} has a step of {min(joules):g} J"
    watts = sum(joules) / (sum(run.values("ms")) / 1000 * run.gpus)
    if not WATTS[0] <= watts <= WATTS[1]:
        return f"{run.name} has {watts:.3g} W for each GPU on average, outside {WATTS[0]} to {WATTS[1]} W"
    return None


def compare_costs(comparison):
    """Speed, loss-matched speed-up and energy."""
    def median(run):
        return float(np.median(run.after_warmup("ms")))

    ratios = [median(pair.bf16) / median(pair.fp8) for pair in comparison.pairs]
    comparison.speed = float(np.exp(np.mean(np.log(ratios))))
    comparison.speed_range = (min(ratios), max(ratios))
    steps = comparison.steps
    losses = by_seed(comparison, steps_of("loss", steps))
    seconds = [side / 1000 for side in by_seed(comparison, steps_of("ms", steps))]
    tokens = steps * comparison.pairs[0].fp8.tokens_per_step
    comparison.seconds_per_token = tuple(float(side.mean(axis=0).sum() / tokens) for side in seconds)
    attempt(comparison, "speedup", vs.loss_matched_speedup, *losses, *seconds)
    faults = [energy_fault(run) for pair in comparison.pairs for run in (pair.bf16, pair.fp8)]
    if any(faults):
        comparison.why["energy"] = next(filter(None, faults))
        if comparison.why["energy"] != NO_JOULES:
            comparison.notes.append(f"no energy: {comparison.why['energy']}")
        return
    joules = by_seed(comparison, steps_of("joules", steps))
    comparison.joules_per_token = tuple(float(side.mean(axis=0).sum() / tokens) for side in joules)
    attempt(comparison, "energy_speedup", vs.loss_matched_speedup, *losses, *joules)


def compare(runs, failed, names):
    """All comparisons with their results; none if no run is in BF16. A comparison without pairs has only refusals.

    failed: (run, reason) of runs that ended early; names: name_recipes of all of them.
    """
    if not any(run.option("precision") == "bf16" for run in runs):
        return []
    comparisons = find_comparisons(runs, failed, names)
    for comparison in comparisons:
        if comparison.pairs:
            choose_pairs(comparison)
            compare_losses(comparison, runs)
            compare_costs(comparison)
    return comparisons
