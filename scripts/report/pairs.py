"""Pairs FP8 runs with BF16 runs. In a verdict against another recipe, BF16 stands for that one here.

A pair has equal FACTS (program, build, device, model and others), sequence length, tokens per step, number of steps,
seed, data and settings. It may differ in precision, fp8 options and the options in IGNORED. A pair that differs in more
is refused, by name and with the reason. An FP8 run from step 0 pairs with the BF16 run of its rounding seed; one that
branched from a BF16 trunk pairs with the run that stayed on it. A null pair is a trunk and a BF16 run that left it for
another rounding seed: it shows the noise.
"""
import collections
import dataclasses

# Options that change neither the training nor its speed, that only tell where a run began, or that stand for others.
IGNORED = {"log-every", "val-every", "sample-every", "max-tokens", "sample-tokens", "log-dir", "on-output-lost",
           "profile", "peak-tflops", "check-links", "checkpoint-dir", "checkpoint-every", "keep-checkpoints", "resume",
           "on-save-error", "no-verify", "export-hf", "dry-run", "json", "list", "stall-timeout", "world-size",
           "ranks-per-host", "tokens-per-step", "network-gbps", "step-ms", "init-from", "init-timeout", "gpu",
           "branch", "fast", "msamp"}
OF_LENGTH = {"num-steps", "warmup-steps", "decay-steps"}  # options that follow the number of steps
FACTS = ("program", "build", "version", "versions", "device", "model", "parameters", "vocab_size", "world_size")
DATA = (("train-data", "training_fingerprint", ("training_tokens", "training_sequences")),
        ("val-data", "validation_fingerprint", ()))
NULL = ", other rounding seed"  # after the recipe of the trunk


def reword(text, against):
    """A text on FP8 and BF16 as one on an arm and the recipe that it is compared with."""
    return text if against == "bf16" else text.replace("BF16", against).replace("FP8", "the arm")


def branch_of(run):
    """(b, rounding seed of the trunk): the last step that the run has from its trunk, 0 if it is from step 0; None
    instead of b if the run never left the trunk."""
    trunk = (run.against, run.stretches[0][2])
    left = next((i for i, stretch in enumerate(run.stretches) if stretch[1:] != trunk), None)
    return None if left is None else run.stretches[left - 1][0] if left else 0, trunk[1]


def recipe_of(run):
    """bf16, fp32, fp8:RECIPE, fp8:RECIPE:emulate or fp8:fast, or Run.recipe; with NULL after it for a null arm."""
    if run.is_base and branch_of(run)[0] is not None:
        return run.against + NULL
    if run.recipe or run.option("precision") != "fp8":
        return run.recipe or run.option("precision")
    fast = (run.option("fast"), run.option("fp8-recipe")) == ("on", "tensorwise_bounded")
    return f"fp8:{'fast' if fast else run.option('fp8-recipe')}" + ":emulate" * (run.option("fp8-emulate") == "on")


def name_recipes(runs):
    """{run's name: recipe}. The name has the values of the fp8 options that the verdict's --recipes gives, and of those
    in which the run differs from most runs of the recipe."""
    groups = collections.defaultdict(list)
    for run in runs:
        groups[recipe_of(run)].append(run)
    names = {}
    for recipe, members in groups.items():
        options = [{k: v for k, v in run.settings["settings"].items() if k.startswith("fp8-")} for run in members]
        keys = sorted({key for of in options for key in of} - {"fp8-recipe", "fp8-emulate", "fp8-audit"})
        keys *= recipe.startswith("fp8")
        usual = {key: collections.Counter(str(of.get(key)) for of in options).most_common(1)[0] for key in keys}
        for run in members:
            own = [key for key in keys if f"+{key}=" in run.planned.removeprefix(recipe)
                   or str(run.option(key)) != usual[key][0] or 2 * usual[key][1] <= len(members)]
            names[run.name] = " ".join([recipe] + [f"{key[4:]}={run.option(key) or 'none'}" for key in own])
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


def start_differences(a, b, precision=False, skip=()):
    """What two settings records differ in, as texts. Leaves out IGNORED, `skip` and fp8-audit. Unless `precision` is
    true, leaves out precision and the other fp8 options too."""
    texts = [f"{key} is {a.get(key)} and {b.get(key)}" for key in FACTS if a.get(key) != b.get(key)]
    skip = {*IGNORED, *skip, "train-data", "val-data", *["precision"] * (not precision)}
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
    branch = branch_of(run)[0]
    changed = [step for step, *of in run.stretches[:-1] if branch is not None and step > branch
               and of != list(run.stretches[-1][1:])]
    if changed:
        return f"{run.name}: it changed its precision after step {changed[-1]} again"
    if run.diverged:
        lost = run.column("loss")[-1] is None
        return f"{run.name} diverged: its loss is not finite from step {run.diverged} on" if lost else \
            f"{run.name}: its loss is not finite at step {run.diverged}"
    if run.risen:
        return f"{run.name} diverged: its last loss is far above its lowest, or above a uniform guess's"
    if run.option("precision") == "fp8" and run.settings["fp8_gemms"] == 0:
        return f"{run.name}: nothing ran in FP8"
    return None


@dataclasses.dataclass
class Pair:
    base: object
    arm: object  # in a null pair the base's recipe with another rounding seed

    @property
    def first(self):
        return max(self.base.first_step, self.arm.first_step)

    @property
    def steps(self):
        return min(self.base.last_step, self.arm.last_step)

    @property
    def complete(self):
        return self.base.complete and self.arm.complete


@dataclasses.dataclass
class Comparison:
    """A recipe against another: a model, length, number of GPUs, tokens per step, branch step (0: pairs from step 0)
    and number of steps. `why` has reasons for missing results. The fields from `speed` on are set by report/compare.py;
    those from `horizons` on in the comparison with the most steps alone, which speaks for the others."""
    model: str
    length: int
    gpus: int
    batch: int     # tokens per step
    branch: int
    horizon: int   # --num-steps
    recipe: str
    against: str = "bf16"
    name: str = ""  # all of these but `horizon` and `against` in words
    pairs: list = dataclasses.field(default_factory=list)
    refused: list = dataclasses.field(default_factory=list)      # texts
    lost_seeds: set = dataclasses.field(default_factory=set)     # seeds of refused pairs
    notes: list = dataclasses.field(default_factory=list)
    diverged: list = dataclasses.field(default_factory=list)     # texts
    why: dict = dataclasses.field(default_factory=dict)          # name of a result: why it is missing
    first: int = 1                   # first and last step that all pairs have
    steps: int = 0
    last: int = 0                    # steps of the training difference
    undecided: str = ""              # why no verdict is read yet
    speed: float | None = None       # tokens per second, FP8 over BF16
    speed_range: tuple | None = None
    training: object = None          # Difference with a single interval
    validation: object = None
    validation_step: int | None = None
    joules_per_token: tuple | None = None  # BF16, FP8
    seconds_per_token: tuple | None = None
    horizons: list = dataclasses.field(default_factory=list)  # comparisons of this recipe, by number of steps
    planned: int = 0                 # trunks of the look that is read, or of the next one
    alpha: float = 0.05              # level of the simultaneous bounds
    ends: dict = dataclasses.field(default_factory=dict)    # loss: its value in each trunk, (BF16, FP8)
    costs: dict = dataclasses.field(default_factory=dict)   # time or energy: that of each trunk, (BF16, FP8)
    sequences: tuple = ()            # validation losses of trunks and sequences, (BF16, FP8)
    gaps: object = None              # each trunk's, in the primary loss
    base: float = 0.0                # mean primary loss of BF16
    bounds: object = None            # Difference of the primary loss with simultaneous bounds
    primary: str = ""                # validation or training
    curve: object = None             # over steps
    window: int = 0
    nulls: list = dataclasses.field(default_factory=list)  # null comparisons of this place, with the most steps first
    null_curves: object = None       # differences over steps of null pairs
    deviation: tuple | None = None   # a null pair's gap in percent, and its upper limit
    smallest: float | None = None    # the smallest cost in percent that the planned trunks see
    trend: object = None             # the gap's, in percent, for each doubling of tokens since b
    extrapolated: object = None      # the gap in percent at 20 tokens per parameter
    batch_trend: object = None       # the gap's, in percent, for each doubling of tokens per step
    speedup: object = None           # at equal loss, in seconds
    energy_speedup: object = None    # at equal loss, in joules
    hours: float = 0.0               # GPU hours of a trunk with this recipe
    parameters: int = 0

    @property
    def seeds(self):
        return sorted({pair.arm.seed for pair in self.pairs})

    @property
    def runs(self):
        return [run for pair in self.pairs for run in (pair.base, pair.arm)]

    @property
    def place(self):
        """What recipes that stand beside each other have in common."""
        return self.model, self.length, self.gpus, self.batch, self.branch

    @property
    def null(self):
        return self.recipe.endswith(NULL)

    @property
    def versus(self):
        return "" if self.against == "bf16" else f" against {self.against}"

    @property
    def emulated(self):
        """True if FP8 has no speed of its own: it is emulated, or the CPU trainer computes it."""
        on_cpu = any(pair.arm.settings["program"] == "train_fp8" for pair in self.pairs)
        return on_cpu or ":emulate" in self.recipe + self.against

    @property
    def tokens(self):
        return self.pairs[0].arm.tokens_at(self.steps) if self.pairs else 0

    @property
    def tokens_since(self):
        return (self.steps - self.branch) * self.batch

    def percent(self, value):
        """A difference of the primary loss in percent of BF16's."""
        return 100 * value / self.base

    def in_percent(self, difference):
        """A Difference of the primary loss with its estimate and limits in percent of BF16's."""
        numbers = {name: getattr(difference, name) for name in ("estimate", "low", "high")}
        return dataclasses.replace(difference, **{name: n and self.percent(n) for name, n in numbers.items()})

    def say(self, text):
        return reword(text, self.against)


def place(run):
    """(model, sequence length, GPUs). Only runs for which these are equal are compared."""
    return run.settings["model"], run.length, run.gpus


def key_of(run):
    """What a run and its BF16 run have in common, and the step at which they part."""
    return (*place(run), run.tokens_per_step, branch_of(run)[0] or 0, run.num_steps)


def find_pair(run, candidates, runs):
    """(BF16 run, None) that pairs with a run, or (None, the reason). candidates: BF16 runs of its model, T, GPUs,
    tokens per step and number of steps that never left their trunk; runs: all, of which one may double it."""
    twins = [one.name for one in runs if key_of(one) == key_of(run) and one.seed == run.seed
             and not start_differences(one.settings, run.settings, precision=True)
             and one.column("loss") != run.column("loss")]
    if twins:
        return None, f"{run.name} and {twins[0]} have equal settings and seeds, but different losses; leave out one"
    base, (branch, rounding) = reword("BF16", run.against), branch_of(run)
    same = [c for c in candidates if (c.seed, c.rounding_seed) == (run.seed, rounding)]
    if not same:
        if not candidates:
            return None, f"{run.name}: there is no {base} run of this model, T, number of GPUs and of steps"
        seeds = ", ".join(f"{c.seed}/{c.rounding_seed}" for c in candidates)
        return None, f"{run.name}: no {base} run has seed {run.seed} and rounding seed {rounding} (there are {seeds})"
    skip = ["rounding-seed"] if branch or run.is_base else []
    scored = sorted(((start_differences(c.settings, run.settings, skip=skip), c) for c in same),
                    key=lambda item: len(item[0]))
    texts, best = scored[0]
    if texts:
        return None, f"{best.name} and {run.name} are no pair: " + "; ".join(texts[:3])
    others = [c.name for texts, c in scored if not texts and c.column("loss") != best.column("loss")]
    if others:
        return None, (f"{best.name} and {others[0]} are {base} runs of equal settings and seed {run.seed} with "
                      f"different losses: which of them pairs with {run.name} would be chance; leave one in the folder")
    return best, None


def null_arms(trunks):
    """BF16 runs from step 0 that differ from another one in the rounding seed alone: [(run, that other run)]. The other
    one has the run's seed for its rounding seed, or else the smallest."""
    groups = collections.defaultdict(list)
    for run in trunks:
        groups[(*key_of(run), run.seed)].append(run)
    found = []
    for members in groups.values():
        first, *others = sorted(members, key=lambda run: (run.rounding_seed != run.seed, run.rounding_seed))
        seen = {first.rounding_seed}
        for run in others:
            if run.rounding_seed not in seen and not start_differences(first.settings, run.settings,
                                                                       skip=["rounding-seed"]):
                found.append((run, first))
                seen.add(run.rounding_seed)
    return found


class Finder:
    """Collects comparisons, by what their runs have in common."""

    def __init__(self, runs, failed, names):
        self.found, self.names = {}, names
        self.trunks = [run for run in runs if run.is_base and branch_of(run)[0] is None]
        # The trainer says "not finite" where a loss or gradient norm ends a run.
        broke = {(*place(run), run.seed) for run, reason in failed if run.is_base and "not finite" in reason}
        for run, reason in failed:
            if run.option("precision") == "fp8" and not run.is_base:
                one = self.comparison(run, names[run.name])
                self.refuse(one, run, f"{run.name} ended after step {run.last_step} of {run.num_steps}, {reason}",
                            run.diverged or "not finite" in reason and (*place(run), run.seed) not in broke)
        for run in runs:
            if run.option("precision") == "fp8" and not run.is_base or names[run.name].endswith(NULL):
                same = [c for c in self.trunks if (*key_of(c)[:4], c.num_steps) == (*key_of(run)[:4], run.num_steps)]
                self.add(self.comparison(run, names[run.name]), run, *find_pair(run, same, runs))
        for run, other in null_arms(self.trunks):
            self.add(self.comparison(run, run.against + NULL), run, other, None)

    def comparison(self, run, recipe):
        key = (*key_of(run), recipe)
        one = self.found.setdefault(key, Comparison(*key, run.against, parameters=int(run.settings["parameters"])))
        one.name = f"{run.place}, {recipe}" + (f", after step {one.branch}" if one.branch else "")
        return one

    def refuse(self, one, run, reason, diverged):
        one.refused.append(reason)
        one.lost_seeds.add(run.seed)
        one.diverged += [reason] if diverged else []

    def add(self, one, run, other, reason):
        if any((p.arm.seed, p.arm.rounding_seed) == (run.seed, run.rounding_seed) for p in one.pairs):
            one.refused.append(f"{run.name} repeats the seed and rounding seed of another run; one of them is used")
            return
        reason = reason or fault(other) or fault(run)
        if reason:
            lost = [bool(side and (side.diverged or side.risen)) for side in (run, other)]
            self.refuse(one, run, reason, lost == [True, False])
        else:
            one.pairs.append(Pair(other, run))


def find_comparisons(runs, failed, names):
    """All comparisons, without results. A comparison without pairs has only refusals."""
    found = list(Finder(runs, failed, names).found.values())
    if len({one.batch for one in found}) > 1:
        for one in found:
            one.name += f", {one.batch:,} tokens per step"
    return found
