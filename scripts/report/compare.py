"""The numbers of comparisons: differences in loss, over steps, tokens and batches; speed, energy, and speed-up at equal
loss. The intervals come from scripts/verdict_stats.py."""
import collections
import dataclasses
import math

import numpy as np

import verdict_stats as vs
from report import pairs

NO_JOULES = "not every step has its joules (the trainer reads them by NVML)"
WATTS = (10, 3000)  # the mean power of a GPU lies between these; other joules are no measurement
LEAST_SHARE = 0.5   # if no pair is done, a pair counts if it has at least this share of the longest pair's steps
FAR = 20            # tokens per parameter of the extrapolation
MOST_WINDOWS = 30   # windows of a difference over steps


@dataclasses.dataclass
class Plan:
    """What was planned before the runs, as far as verdict.json says it. seeds: in the order of trunks."""
    looks: list = dataclasses.field(default_factory=list)
    seeds: list = dataclasses.field(default_factory=list)
    recipes: int = 0
    ends: list = dataclasses.field(default_factory=list)  # the last steps of the longest runs
    margin: float | None = None  # percent


def whole_numbers(value):
    """The whole numbers of a list, or of the lists and numbers of an object; [] of anything else."""
    if isinstance(value, dict):
        lists = [item if isinstance(item, list) else [item] for item in value.values()]
        return [number for numbers in lists for number in whole_numbers(numbers)]
    return [n for n in value if type(n) is int and 0 <= n < 2**63] if isinstance(value, list) else []


def plan_of(verdicts, margin=None):
    """The Plan of the verdict.json of all folders; what they do not say is left empty."""
    plan = Plan(margin=margin)
    for verdict in verdicts:
        plan.looks = plan.looks or sorted({look for look in whole_numbers(verdict.get("looks")) if look > 0})
        plan.seeds += [seed for seed in whole_numbers(verdict.get("seeds")) if seed not in plan.seeds]
        recipes = verdict.get("recipes") if isinstance(verdict.get("recipes"), list) else []
        plan.recipes = max(plan.recipes, len({str(recipe) for recipe in recipes[1:]}))
        plan.ends += whole_numbers(verdict.get("num_steps"))
        given = verdict.get("margin")
        if plan.margin is None and isinstance(given, (int, float)) and given is not True and 0 < given < 100:
            plan.margin = float(given)
    plan.looks = plan.looks or [len(plan.seeds)] * bool(plan.seeds)
    return plan


# ---- which pairs count


def first_trunks(c, plan):
    """(seeds of the trunks that count, the number planned, why no verdict is read yet or ""). Trunks count in the order
    of the plan. Those of refused pairs are left out, which the page says."""
    of_seed = collections.defaultdict(list)
    for pair in c.pairs:
        of_seed[pair.arm.seed].append(pair)
    planned = [seed for seed in plan.seeds if seed not in c.lost_seeds]
    order = planned + [seed for seed in sorted(of_seed) if seed not in planned]
    done = [seed for seed in order if seed in of_seed and all(pair.complete for pair in of_seed[seed])]
    ready = next((i for i, seed in enumerate(order) if seed not in done), len(order))
    looks = plan.looks or [len(order)]
    reached = [look for look in looks if look <= ready]
    if reached:
        if len(done) > reached[-1]:
            c.notes.append(f"{len(done) - reached[-1]} of {len(done)} trunks are not counted: the planned looks are at "
                           f"{' and '.join(map(str, looks))} trunks, the first in the order of seeds")
        return order[:reached[-1]], reached[-1], ""
    return done or list(of_seed), looks[0], f"so far, {len(done)} of {looks[0]} trunks"


def choose_pairs(c, plan):
    """Keeps the pairs of the trunks that count. If none is done: those with LEAST_SHARE of the steps of the farthest.
    Sets the steps that all of the kept pairs have."""
    seeds, c.planned, c.undecided = first_trunks(c, plan)
    done = [pair for pair in c.pairs if pair.complete and pair.arm.seed in seeds]
    far = max(pair.steps for pair in c.pairs)
    kept = done or [pair for pair in c.pairs if pair.steps >= LEAST_SHARE * far]
    c.first, c.steps = max(pair.first for pair in kept), min(pair.steps for pair in kept)
    if c.steps < c.first:
        kept = []
    for pair in c.pairs:
        if pair not in kept and not pair.complete:
            slow = min((pair.base, pair.arm), key=lambda run: run.last_step)
            c.notes.append(f"the pair of {pair.arm.name} is not used yet: {slow.name} is {slow.state()}")
    if kept and not done:
        c.undecided = f"so far, step {c.steps} of {c.horizon}"
    longer = [end for end in plan.ends if end > c.horizon]
    if longer and c.horizon not in plan.ends:
        c.undecided = c.undecided or f"so far, runs of {c.horizon} of {min(longer)} steps"
    c.pairs = kept


def of_trunks(c, values):
    """values(run) of both sides, averaged over the rounding seeds of a trunk: [trunks, ...] each."""
    return [np.array([np.mean([np.asarray(values(getattr(pair, side)), dtype=np.float64)
                               for pair in c.pairs if pair.arm.seed == seed], axis=0) for seed in c.seeds])
            for side in ("base", "arm")]


def steps_of(key, c):
    """A function that returns the values of a field in the steps that all pairs of a comparison have."""
    def values(run):
        column = run.column("loss") if key == "loss" else run.costs(key)
        return column[c.first - run.first_step:c.steps - run.first_step + 1]
    return values


# ---- differences in loss


def last_steps(c):
    """Steps at the end over which the training difference is averaged: a quarter, but at least 100 (in runs below 200
    steps half of them, at least 40), and at least 300 if data repeats, because the noise of repeated data has a longer
    memory. Never more than the pairs have since they parted."""
    last = max(c.steps // 4, min(100, c.steps // 2), 40)
    if c.pairs[0].arm.repeats_data:
        last = max(last, 300)
    return min(last, c.steps - c.first + 1)


def validation_losses(c):
    """Sets the step of the last validation, and returns a function for of_trunks. ValueError if a run lacks it, or if
    the losses of its sequences are missing, not finite or of different number. Of unfinished runs it is the last that
    all have."""
    records = [{v["step"]: v for v in run.validations if v["step"] <= c.steps} for run in c.runs]
    common = set.intersection(*map(set, records))
    step = c.steps if c.steps == c.horizon else max(common, default=0)
    for run, record in zip(c.runs, records):
        if step not in record:
            raise ValueError(f"{run.name} has no validation after step {step or c.steps}")
        values = record[step].get("losses")
        if not values:
            raise ValueError(f"{run.name} has no validation losses of single sequences; a newer trainer writes them")
        if any(value is None for value in values):
            raise ValueError(f"{run.name} has a validation loss that is not finite at step {step}")
    if len({len(record[step]["losses"]) for record in records}) > 1:
        raise ValueError(f"the runs validate on different numbers of sequences at step {step}")
    c.validation_step = step
    return lambda run: next(v["losses"] for v in reversed(run.validations) if v["step"] == step)


def compare_losses(c):
    """Sets both differences with single intervals, and what `use` needs of either loss."""
    c.last = last_steps(c)
    losses = of_trunks(c, steps_of("loss", c))
    if len(np.unique(losses[0], axis=0)) < len(c.seeds):
        c.undecided = "trunks of several seeds have equal losses, so they are copies"
    c.notes += [c.say("its losses are BF16's in every step")] * (not c.null and np.array_equal(*losses))
    ends = [side[:, -c.last:].mean(axis=1) for side in losses]
    c.ends = {"training": ends}
    c.training = vs.trunk_interval(ends[1] - ends[0])
    try:
        c.sequences = of_trunks(c, validation_losses(c))
        c.validation = vs.validation_difference(*c.sequences)
        c.ends["validation"] = [side.mean(axis=1) for side in c.sequences]
        if c.sequences[0].shape[1] < vs.LEAST_SEQUENCES:
            c.notes.append(f"{c.sequences[0].shape[1]} validation sequences are too few to allow for neighbours of one "
                           f"document; that takes {vs.LEAST_SEQUENCES}")
    except ValueError as reason:
        c.why["validation"] = str(reason)


def use(c, primary, alpha):
    """Reads the verdict from one of the losses: gaps of trunks, and simultaneous bounds."""
    c.primary, c.alpha = primary, alpha
    base, arm = c.ends[primary]
    c.gaps, c.base = arm - base, float(base.mean())
    c.bounds = vs.validation_difference(*c.sequences, alpha) if primary == "validation" else \
        vs.trunk_interval(c.gaps, alpha)
    null = next((n for null in c.nulls for n in null.horizons if n.horizon == c.horizon and primary in n.ends), None)
    if null and not c.null:
        c.bounds = vs.no_quieter(c.bounds, np.subtract(*null.ends[primary][::-1]), alpha)


def compare_over_steps(c):
    """The difference over steps, beside that of null pairs."""
    count = c.steps - c.first + 1
    c.window = max(5, math.ceil(count / MOST_WINDOWS))
    if count < 2 * c.window:
        c.why["curve"] = f"{count} steps are too few for a curve; it takes {2 * c.window}"
        return
    c.curve = vs.difference_over_steps(*of_trunks(c, steps_of("loss", c)), c.window)
    for null in c.nulls[:1]:
        rows = [np.subtract(*(steps_of("loss", c)(run) for run in (pair.arm, pair.base))) for pair in null.pairs
                if pair.first <= c.first and pair.steps >= c.steps]
        c.null_curves = vs.window_means(np.array(rows), c.window) if rows else None
    if c.null_curves is None:
        c.why["noise"] = c.say("no two BF16 runs of these steps differ in the rounding seed alone")


# ---- speed and energy


def energy_fault(run):
    """Why a run's joules cannot be used, or None. One step may have 0 J: NVML's counter need not move in each step."""
    joules = run.costs("joules")
    if joules is None:
        return NO_JOULES
    if min(joules) < 0:
        return f"{run.name} has a step of {min(joules):g} J"
    watts = sum(joules) / (sum(run.costs("ms")) / 1000 * run.gpus)
    if not WATTS[0] <= watts <= WATTS[1]:
        return f"{run.name} has {watts:.3g} W for each GPU on average, outside {WATTS[0]} to {WATTS[1]} W"
    return None


def compare_costs(c):
    """Speed, time and energy."""
    ratios = [pair.base.median_ms / pair.arm.median_ms for pair in c.pairs]
    c.speed, c.speed_range = float(np.exp(np.mean(np.log(ratios)))), (min(ratios), max(ratios))
    tokens = (c.steps - c.first + 1) * c.batch
    c.costs = {"time": of_trunks(c, lambda run: np.sum(steps_of("ms", c)(run)) / 1000)}
    c.seconds_per_token = tuple(float(side.mean() / tokens) for side in c.costs["time"])
    fault = next(filter(None, map(energy_fault, c.runs)), None)
    if fault is None:
        c.costs["energy"] = of_trunks(c, lambda run: np.sum(steps_of("joules", c)(run)))
        c.joules_per_token = tuple(float(side.mean() / tokens) for side in c.costs["energy"])
        return
    c.why["energy"] = fault
    if fault != NO_JOULES:
        c.notes.append(f"no energy: {fault}")


# ---- over lengths and batches


def compare_at_equal_loss(c):
    """Speed-ups at equal loss, by the slope of BF16's last loss over lengths."""
    longer = [h for h in c.horizons[-3:] if set(h.seeds) >= set(c.seeds)]
    if c.emulated:
        c.why["speedup"] = "emulated FP8 is slower than FP8"
    elif len(c.seeds) == 1:
        c.why["speedup"] = "it takes several trunks"
    elif len(longer) < 2 or c.undecided.startswith("so far, step"):
        c.why["speedup"] = "it takes runs of another length too, from the same seeds"
    if "speedup" in c.why:
        return
    ends = np.stack([h.ends[c.primary][0][[h.seeds.index(seed) for seed in c.seeds]] for h in longer], axis=1)
    slope = vs.last_slope([h.tokens for h in longer], ends)
    for name, field in (("time", "speedup"), ("energy", "energy_speedup")):
        if name in c.costs:
            ratio = np.log(c.costs[name][0] / c.costs[name][1])
            setattr(c, field, vs.equal_loss_speedup(ratio, c.gaps, slope, c.bounds.sequence_variance))
    if c.speedup.reason:
        c.why["speedup"] = c.say(c.speedup.reason)


def compare_over_tokens(c):
    """The trend of the gap over tokens since the pairs parted, and its value at FAR tokens per parameter."""
    seeds = sorted(set.intersection(*(set(h.seeds) for h in c.horizons)))
    if len(c.horizons) < 2 or len(seeds) < 2:
        c.why["trend"] = "it takes several trunks, with runs of several lengths"
        return
    x = np.log2([h.tokens_since for h in c.horizons])
    gaps = np.stack([h.percent(h.gaps)[[h.seeds.index(seed) for seed in seeds]] for h in c.horizons], axis=1)
    c.trend = vs.trend(x, gaps)
    far = FAR * c.parameters - (c.tokens - c.tokens_since)
    if far > c.tokens_since:
        c.extrapolated = vs.trend(x, gaps, math.log2(far))


def compare_over_batches(found):
    """The slope of the gap over tokens per step, where runs of one model and recipe have several of these."""
    groups = collections.defaultdict(list)
    for c in found:
        groups[c.model, c.length, c.recipe, c.branch > 0].append(c)
    for members in groups.values():
        members = list({c.batch: c for c in members if c.pairs}.values())
        seeds = sorted(set.intersection(*(set(c.seeds) for c in members))) if members else []
        if len(members) > 1 and len(seeds) > 1:
            gaps = np.stack([c.percent(c.gaps)[[c.seeds.index(seed) for seed in seeds]] for c in members], axis=1)
            for c in members:
                c.batch_trend = vs.trend(np.log2([c.batch for c in members]), gaps)


def look_at_nulls(c):
    """The noise of a pair, and the smallest cost that the planned trunks see."""
    for null in [c] if c.null else c.nulls[:1]:
        ends = null.ends.get(c.primary)
        if ends is not None and null.horizon == c.horizon:
            c.deviation = vs.null_deviation(c.percent(ends[1] - ends[0]))
            c.smallest = vs.smallest_cost(c.deviation[1], c.planned, c.alpha)


def compare_one(c, alpha):
    """All numbers of a comparison and of its other lengths."""
    skip, base = {*pairs.OF_LENGTH, "seed", "rounding-seed"}, c.pairs[0].base.settings
    lengths = [h for h in c.horizons
               if h is c or not pairs.start_differences(base, h.pairs[0].base.settings, skip=skip)]
    c.notes += [f"runs of {h.horizon} steps are left out: they differ in more than their length" for h in c.horizons
                if h not in lengths]
    c.horizons = lengths
    primary = "validation" if all("validation" in h.ends for h in lengths) else "training"
    for h in lengths:
        h.nulls = c.nulls
        use(h, primary, alpha)
    runs = {run.name: run for h in lengths for run in h.runs}.values()
    trunks = [pair.base for null in c.nulls[:1] for pair in null.pairs if pair.base.seed in c.seeds]
    # without the time in which runs stood still; a trunk that is no base counts up to the branch
    times = [run.costs("ms") for run in runs]
    times += [run.costs("ms")[:c.branch] for run in trunks if run not in runs and run.first_step == 1]
    c.hours = sum(map(sum, times)) * c.gpus / 3.6e6 / len(c.seeds)
    compare_over_steps(c)
    compare_costs(c)
    look_at_nulls(c)
    if not c.null:
        compare_over_tokens(c)
        compare_at_equal_loss(c)
    c.notes += filter(None, (run.stall_words() for run in runs))
    skips = [(run.name, np.count_nonzero(run.array("skipped"))) for run in runs]
    c.notes += [f"{name} took no update from {count} of its steps: they were skipped" for name, count in skips if count]


def check_bases(runs, names):
    """Raises ValueError if the runs are of verdicts against several recipes, or their trunks differ in FP8 options."""
    bases = {run.against for run in runs}
    if bases != {"bf16"}:
        bases |= {names[run.name] for run in runs if run.is_base and pairs.branch_of(run)[0] is None}
    if len(bases) > 1:
        raise ValueError(f"folders compare with {', '.join(sorted(bases))}: give report.py those of one recipe")


def compare(runs, failed, names, plan=None, noise=()):
    """All comparisons with their results, one for each recipe and place; none if no run is a base. Null comparisons
    come last. One without pairs has only refusals.

    failed: (run, reason) of runs that ended early; names: pairs.name_recipes of all of them; noise: runs of another
    base, for null comparisons."""
    check_bases(runs, names)
    if not any(run.is_base for run in runs):
        return []
    plan, found = plan or Plan(), []
    groups = collections.defaultdict(list)  # lengths of one recipe and place
    for c in pairs.find_comparisons(runs, failed, names) + pairs.find_comparisons(noise, [], names):
        groups[(*c.place, c.recipe)].append(c)
    for members in groups.values():
        members.sort(key=lambda c: c.horizon)
        for c in members:
            if c.pairs:
                choose_pairs(c, Plan() if c.null else plan)
            if c.pairs:
                compare_losses(c)
        with_pairs = [c for c in members if c.pairs]
        main = (with_pairs or members)[-1]
        main.horizons = with_pairs
        for c in members:
            if c is not main:
                main.refused += c.refused
                main.diverged += c.diverged
                main.notes += [note for note in c.notes if note not in main.notes]
        found.append(main)
    found.sort(key=lambda c: c.null)
    for c in reversed(found):
        same = [other for other in found if other.place == c.place]
        c.nulls = sorted((o for o in same if o.null and o.pairs), key=lambda o: -o.horizon)
        recipes = max(sum(not other.null for other in same), plan.recipes)
        if c.pairs:
            compare_one(c, vs.level(recipes, len(plan.looks)))
    compare_over_batches(found)
    return found
