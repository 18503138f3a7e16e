"""Figures of losses: differences, their change over tokens and steps, curves, and speed-ups at equal loss."""
import collections
import functools

import numpy as np
from scipy import stats

from report import style, words
from report.compare import FAR
from report.pairs import branch_of, place

CURVES = 4         # groups of loss curves on one page
DIFFERENCES = 8    # figures of differences over steps on one page
ROWS = 24          # rows of a figure of intervals


def label_rows(axes, rows):
    """Names the rows of a figure of intervals: (comparison, what) each."""
    many = len({c.place for c, _ in rows}) > 1
    labels = [(f"{c.model}, T {c.length}, x{c.gpus}, b {c.branch}\n" if many else "") +
              c.recipe.replace(", ", "\n") + (", " if many else "\n") * bool(what) + what for c, what in rows]
    style.name_rows(axes, labels, fontsize=8.5)


def draw_intervals(comparisons, margin):
    """Differences in loss in percent: the primary loss with both intervals, the other with its own, null pairs as
    points."""
    rows = [(c, name) for c in comparisons if c.pairs and not c.null for name in ("validation", "training")
            if getattr(c, name) is not None]
    rows = (rows + [(c, c.primary) for c in comparisons if c.null and c.pairs])[:ROWS]
    if not rows:
        return None
    figure, axes = style.new(1.1 + 0.45 * len(rows))
    for y, (c, name) in enumerate(rows):
        colour, primary = style.colour(c.recipe), name == c.primary
        base, arm = c.ends[name]
        scale = 100 / base.mean()
        if c.null or len(c.seeds) == 1:
            axes.plot(scale * (arm - base), [y] * len(base), "x", color=colour)
            continue
        d = getattr(c, name)
        if primary:
            axes.plot(np.multiply(scale, [c.bounds.low, c.bounds.high]), [y, y], color=colour, linewidth=1,
                      marker="|", markersize=9)
        axes.plot(np.multiply(scale, [d.low, d.high]), [y, y], color=colour, linewidth=4, solid_capstyle="butt",
                  alpha=1 if primary else 0.45)
        axes.plot([scale * d.estimate], [y], "o", color=colour, markersize=7, markerfacecolor="white")
    label_rows(axes, [(c, "" if c.null else name) for c, name in rows])
    axes.set_xlabel("cost, % of the loss")
    axes.axvline(0, color=style.BLACK, linewidth=0.8)
    if margin:
        axes.axvline(margin, color=style.VERMILLION, linewidth=1, linestyle="--", label=f"margin {margin:g}%")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return style.finish(figure, "verdict", "loss-intervals", "Cost in loss", rows[0][0].say(
        "Right of 0 FP8 costs loss. Thick: 95% interval over trunks. Thin: bounds that hold for all recipes and "
        "planned looks together; the decision is read from these. Pale: the loss that decides nothing. Crosses: single "
        "pairs, which tell nothing alone; of other rounding seeds, they show the noise."))


def with_bars(axes, x, d, colour, **options):
    """A point with its interval, if it has one."""
    error = None if d.low is None else np.maximum([[d.estimate - d.low], [d.high - d.estimate]], 0)
    axes.errorbar([x], [d.estimate], error, color=colour, capsize=3, **options)


def draw_gap(members, margin):
    """The gap over tokens since the pairs parted, of all recipes of a place, with its extrapolation."""
    figure, axes = style.new(3.2)
    shown, far = members[0].tokens_since, False
    styles = style.line_styles(c.recipe for c in members)
    for i, c in enumerate(members):
        colour, shift = style.colour(c.recipe), 1.03**(i - (len(members) - 1) / 2)
        x = [h.tokens_since * shift for h in c.horizons]
        gaps = [h.in_percent(getattr(h, c.primary)) for h in c.horizons]
        for at, gap in zip(x, gaps):
            with_bars(axes, at, gap, colour, marker="o")
        axes.plot(x, [gap.estimate for gap in gaps], styles[c.recipe], color=colour, label=c.recipe)
        shown = max(shown, c.tokens_since)
        if c.extrapolated is not None:
            at, far = FAR * c.parameters - (c.tokens - c.tokens_since), True
            with_bars(axes, at * shift, c.extrapolated, colour, marker="s", markerfacecolor="white", alpha=0.8)
            axes.plot([x[-1], at * shift], [gaps[-1].estimate, c.extrapolated.estimate], color=colour, linestyle=":")
    axes.axhline(0, color=style.BLACK, linewidth=0.8)
    if margin:
        axes.axhline(margin, color=style.VERMILLION, linewidth=1, linestyle="--", label=f"margin {margin:g}%")
    axes.set_xscale("log")
    axes.set(xlabel="tokens since the pairs parted", ylabel=members[0].say("FP8 minus BF16 (% of the loss)"))
    ticks = sorted({x for c in members for x in [h.tokens_since for h in c.horizons][-1:]} |
                   ({FAR * members[0].parameters} if far else set()) |
                   {min(h.tokens_since for h in members[0].horizons)})
    axes.set_xticks(ticks, [words.tokens(x).replace(" billion", " G") for x in ticks])
    axes.minorticks_off()
    style.legend_above(figure, axes)
    first = members[0]
    caption = (f"{first.primary.capitalize()} loss at the end of runs of each length, 95% intervals over trunks; "
               f"{first.batch:,} tokens per step.")
    if far:
        caption += (f" Squares: lines carried on to {FAR} tokens per parameter, {FAR * first.parameters / shown:.0f} "
                    "times as far as was measured. That is an extrapolation.")
    return style.finish(figure, "tokens", style.slug("gap", *first.place), f"Gap over tokens: {first.model}", caption)


def draw_batches(members):
    """The gap over tokens per step."""
    figure, axes = style.new()
    for recipe in dict.fromkeys(c.recipe for c in members):
        of = sorted((c for c in members if c.recipe == recipe), key=lambda c: c.batch)
        for c in of:
            with_bars(axes, c.batch, c.in_percent(getattr(c, c.primary)), style.colour(recipe), marker="o")
        axes.plot([c.batch for c in of], [c.percent(c.gaps.mean()) for c in of], color=style.colour(recipe),
                  label=recipe)
    axes.axhline(0, color=style.BLACK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens per step", ylabel=members[0].say("FP8 minus BF16 (% of the loss)"))
    axes.legend(loc="best")
    return style.finish(figure, "tokens", style.slug("batches", members[0].model), "Gap over tokens per step",
                        "95% intervals over trunks.")


def draw_difference(c):
    """The paired difference over steps with its band, beside that of null pairs."""
    figure, axes = style.new()
    curve, nulls, colour = c.curve, c.null_curves, style.colour(c.recipe)
    steps = np.asarray(curve.steps) + c.first
    caption = (f"Training loss of FP8 minus that of BF16, mean of {words.count(len(c.seeds), 'trunk')} and of "
               f"{c.window} steps at each point.")
    if curve.low is not None:
        caption += " Band: 95% interval over trunks, for each point by itself."
        axes.fill_between(steps, curve.low, curve.high, color=colour, alpha=0.3, linewidth=0, label="95%")
    if nulls is not None:
        count = len(nulls)
        caption += f" Grey lines: {words.count(count, 'pair')} of runs that differ in the rounding seed alone."
        if count > 1:
            half = stats.t.ppf(0.975, count) * np.sqrt((nulls**2).mean(axis=0) / len(c.seeds))
            axes.fill_between(steps, -half, half, color=style.GREY, alpha=0.25, linewidth=0, label="noise, 95%")
            caption += f" Grey band: 95% of the means of {len(c.seeds)} such pairs are within it."
        for i, row in enumerate(nulls):
            axes.plot(steps, row, color=style.GREY, linewidth=0.8, label=None if i else "null pairs")
    axes.plot(steps, curve.estimate, color=colour, marker=".", label=c.say("FP8 minus BF16"))
    inside = np.abs([curve.estimate, *(() if curve.low is None else (curve.low, curve.high)),
                     *(() if nulls is None else nulls)])
    reach = 1.2 * max(np.quantile(inside, 0.97), 1e-9)
    axes.axhline(0, color=style.BLACK, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss difference", ylim=(-reach, reach))
    axes.set_title(style.two_lines(c.name))
    style.legend_above(figure, axes)
    return style.finish(figure, "tokens", style.slug("difference", c.name, c.batch), f"Loss difference over steps: "
                        f"{c.name}", c.say(caption))


def draw_speedups(comparisons):
    """Speed-up over equal steps and at equal loss, in time and in energy."""
    rows = [(c, s, what) for c in comparisons for s, what in ((c.speedup, "time"), (c.energy_speedup, "energy"))
            if s is not None and s.estimate is not None][:ROWS]
    if not rows:
        return None
    figure, axes = style.new(1.0 + 0.42 * len(rows))
    for y, (c, s, _) in enumerate(rows):
        axes.plot([s.low, s.high], [y, y], color=style.colour(c.recipe), linewidth=2.5, solid_capstyle="butt")
        axes.plot([s.estimate], [y], "o", color=style.colour(c.recipe), label="at equal loss" if y == 0 else None)
        axes.plot([s.equal_steps], [y], "|", color=style.BLACK, markersize=13, markeredgewidth=1.5,
                  label="over equal steps" if y == 0 else None)
    label_rows(axes, [(c, what) for c, _, what in rows])
    axes.set_xlabel(rows[0][0].say("BF16 / FP8 (above 1: FP8 takes less)"))
    axes.axvline(1, color=style.BLACK, linewidth=0.8)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return style.finish(figure, "cost", "speedups", "Speed-up at equal loss, with 95% intervals", rows[0][0].say(
        "What BF16 takes over what FP8 takes to equal loss. The gap between the black mark and the dot is the cost in "
        "loss, priced by how much longer BF16 runs lower the loss."))


# ---- curves over steps, time, energy and money


def smooth(values, width):
    """The mean of each finite value and of the finite ones among the width - 1 values before it; nan for the others."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    first = np.maximum(np.arange(len(values)) + 1 - width, 0)
    last = np.arange(1, len(values) + 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, (sums[last] - sums[first]) / (counts[last] - counts[first]), np.nan)


def mean_curve(members, first, key=None, value="loss"):
    """(cost since step `first`, value) of the mean of runs, over the steps that all of them have. The cost is the field
    `key`, added up over steps, or the step's number without `key`. None if a step of a run lacks the field."""
    steps = {run.name: run.array("step").astype(np.int64) for run in members}
    common = functools.reduce(np.intersect1d, (of[of >= first] for of in steps.values()))
    if not len(common):
        return None
    kept = {name: np.isin(of, common) for name, of in steps.items()}
    values = np.mean([run.array(value)[kept[run.name]] for run in members], axis=0)
    if key is None:
        return common, values
    costs = [run.costs(key) for run in members]
    if any(cost is None for cost in costs):
        return None
    return np.mean([np.cumsum(np.array(cost)[kept[run.name]]) for run, cost in zip(members, costs)], axis=0), values


def scale_of(kind, longest, gpus, price):
    """(what the cost is divided by, label of the axis) of a kind of curve."""
    if kind == "time":
        divisor, unit = (1, "s") if longest < 3e5 else (60, "min") if longest < 18e6 else (3600, "h")
        return 1000 * divisor, f"time of steps ({unit})"
    if kind == "energy":
        divisor, unit = (3.6e6, "kWh") if longest > 3.6e5 else (1000, "kJ")
        return divisor, f"energy of all GPUs ({unit})"
    return (1000 * 3600 / (gpus * price), f"money at {price} a GPU hour") if kind == "money" else (1, "step")


VALUES = {"loss": ("loss", "training loss"), "norm": ("norm", "gradient norm"), "lr": ("rate", "learning rate"),
          "tokens_per_second": ("speed", "tokens per second")}  # over steps: the file's name and the axis


def draw_curve(group, recipes, kind, price, value="loss"):
    """Draws a value of each recipe over steps, or the loss over time, energy or money. Leaves out a recipe if the log
    of one run lacks the time or energy. Returns None if no recipe is left. recipes: {recipe: runs}."""
    key = {"steps": None, "time": "ms", "energy": "joules", "money": "ms"}[kind]
    members = [run for of in recipes.values() for run in of]
    first, name = max(run.first_step for run in members), members[0].place
    curves = {recipe: mean_curve(of, first, key, value) for recipe, of in recipes.items()}
    curves = {recipe: c for recipe, c in curves.items() if c is not None and np.isfinite(c[1]).any()}
    if not curves:
        return None
    scale, label = scale_of(kind, max(float(cost[-1]) for cost, _ in curves.values()), group[2], price)
    width = 1 if value == "lr" else max(1, min(len(cost) for cost, _ in curves.values()) // 50)
    figure, axes = style.new(3.3)
    styles, tails = style.line_styles(curves), []
    for recipe, (cost, values) in curves.items():
        mean = smooth(values, width)
        tails.append(mean if value == "lr" else mean[min(len(mean) // 10, len(mean) - 1):])
        axes.plot(*style.thin(cost / scale, mean, most=200), styles[recipe], color=style.colour(recipe), label=recipe)
    tail = np.concatenate(tails)
    tail = tail[np.isfinite(tail)]
    if value == "lr":
        axes.set_ylim(0, 1.1 * max(np.nanmax(tail), 1e-12))
    elif len(tail):
        margin = 0.05 * (tail.max() - tail.min()) + 1e-6
        axes.set_ylim(tail.min() - margin, tail.max() + margin)
    short, what = VALUES[value]
    axes.set(xlabel=label, ylabel=what, title=style.two_lines(name))
    style.legend_above(figure, axes)
    means = [words.count(n, noun) for n, noun in ((max(map(len, recipes.values())), "run"), (width, "step")) if n > 1]
    caption = f"Means of up to {' and '.join(means)}. " if means else ""
    caption += f"From step {first} on, where the runs part. " if first > 1 else ""
    caption += "The axis is scaled to the steps after the first tenth." if value != "lr" else ""
    part = "loss" if kind == "steps" else "cost"
    return style.finish(figure, part, style.slug(short, kind, name, group[3]),
                        f"{what.capitalize()} over {kind}: {name}", caption)


def draw_validations(group, recipes):
    """The validation loss of each recipe over steps, means of runs."""
    figure, axes = style.new()
    styles, name = style.line_styles(recipes), next(iter(recipes.values()))[0].place
    for recipe, members in recipes.items():
        losses = collections.defaultdict(list)
        for run in members:
            for record in run.validations:
                if record["loss"] is not None:
                    losses[record["step"]].append(record["loss"])
        points = sorted((step, np.mean(of)) for step, of in losses.items() if len(of) == len(members))
        if points:
            axes.plot(*zip(*points), styles[recipe], marker=".", color=style.colour(recipe), label=recipe)
    if not axes.lines:
        return None
    axes.set(xlabel="step", ylabel="validation loss", title=style.two_lines(name))
    style.legend_above(figure, axes)
    return style.finish(figure, "loss", style.slug("validation", name, group[3]), f"Validation loss over steps: {name}",
                        "Means of the runs of each recipe.")


def groups_of(runs, names):
    """{(model, length, GPUs, tokens per step): {recipe: the runs with the most steps}} with the base first."""
    groups, branches = collections.defaultdict(dict), {branch_of(run)[0] for run in runs} - {None}
    for run in sorted(runs, key=lambda run: (not run.is_base, run.option("precision") == "fp8")):
        branch = branch_of(run)[0]
        recipe = names[run.name] + (f" after step {branch}" if branch and len(branches) > 1 else "")
        groups[(*place(run), run.tokens_per_step)].setdefault(recipe, []).append(run)
    for recipes in groups.values():
        most = max(run.num_steps for of in recipes.values() for run in of)
        longest = {recipe: [run for run in of if run.num_steps == most] for recipe, of in recipes.items()}
        recipes.clear()
        recipes.update({recipe: of for recipe, of in longest.items() if of})
    return groups


def because(what, reasons):
    """Sentences that say what is left out. reasons: (name, reason); names with equal reasons share a sentence."""
    groups = collections.defaultdict(list)
    for name, reason in reasons:
        groups[reason].append(name)
    return [f"No {what} of {names[0] if len(names) == 1 else words.count(len(names), 'comparison')}: {reason}."
            for reason, names in groups.items()]


def draw_gaps(comparisons, margin):
    """(figures of gaps over tokens, batches and steps, words on what is left out)."""
    drawings, left_out, places = [], [], collections.defaultdict(list)
    shown = [c for c in comparisons if c.pairs and not c.null]
    for c in shown:
        if len(c.horizons) > 1:
            places[c.place].append(c)
    drawings += [draw_gap(members, margin) for members in list(places.values())[:CURVES]]
    batches = [c for c in shown if c.batch_trend is not None]
    drawings += [draw_batches(batches)] if batches else []
    with_curve = [c for c in shown if c.curve is not None]
    drawings += map(draw_difference, with_curve[:DIFFERENCES])
    if len(with_curve) > DIFFERENCES:
        left_out.append(f"Differences over steps: {len(with_curve) - DIFFERENCES} of {len(with_curve)} are left out, "
                        "to keep the page small; give report.py fewer folders to see them.")
    for name, what in (("validation", "difference in validation loss"), ("trend", "trend over tokens"),
                       ("curve", "difference over steps"), ("noise", "noise of null pairs")):
        left_out += because(what, [(c.name, c.why[name]) for c in shown if name in c.why])
    return drawings, left_out


def draw(runs, names, comparisons, price, margin):
    """(drawings, words on what is left out)."""
    drawings, left_out = draw_gaps(comparisons, margin)
    drawings.insert(0, draw_intervals(comparisons, margin))
    if 2 * len(comparisons) > ROWS:
        left_out.append(f"Figures of intervals have room for {ROWS} rows; the tables have all.")
    drawings.append(draw_speedups(comparisons))
    groups = groups_of(runs, names)
    for group, recipes in list(groups.items())[:CURVES]:
        drawings += [draw_curve(group, recipes, "steps", price), draw_validations(group, recipes)]
        drawings += [draw_curve(group, recipes, kind, price)
                     for kind in ["time", "energy"] + ["money"] * (price is not None)]
        drawings += [draw_curve(group, recipes, "steps", price, value) for value in VALUES if value != "loss"]
    if len(groups) > CURVES:
        left_out.append(f"Loss curves of {len(groups) - CURVES} of {len(groups)} groups of runs are left out, to keep "
                        "the page small.")
    if not any(run.values("joules") for run in runs):
        left_out.append("Loss over energy: no log has joules in every step (the trainer reads them by NVML).")
    if price is None:
        left_out.append("Loss over money: no price of a GPU hour is known (--price).")
    left_out += because("speed-up at equal loss", [(c.name, c.why["speedup"]) for c in comparisons
                                                   if c.pairs and "speedup" in c.why])
    return [d for d in drawings if d is not None], left_out
