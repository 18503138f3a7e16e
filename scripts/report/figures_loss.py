"""Figures of losses: differences, curves, and speed-ups at equal loss."""
import collections

import numpy as np

from report import style, words
from report.pairs import place

CURVES = 4         # groups of loss curves on one page
DIFFERENCES = 8    # figures of differences over steps on one page
ROWS = 24          # rows of a figure of intervals


def draw_difference(comparison):
    """The paired difference over steps with its band, beside the noise of BF16."""
    figure, axes = style.new()
    curve, noise = comparison.curve, comparison.curve_noise
    steps = np.asarray(curve.steps) + 1
    reach = 1.25 * max(np.abs(curve.low).max(), np.abs(curve.high).max(), 1e-9)
    caption = (f"Training loss of FP8 minus that of BF16, mean of {words.count(len(comparison.pairs), 'pair')} and of "
               f"{comparison.window} steps at each point. The band is a 95% interval (moving-block bootstrap over "
               "steps), which covers the noise of batches alone.")
    if noise is not None:
        widest = float(noise.half_width.max())
        reach = max(reach, min(1.1 * widest, 4 * reach))
        caption += (f" Grey: 95% of differences between means of BF16 runs with another {comparison.noise_of} are "
                    f"within it ({words.count(noise.degrees, 'degree')} of freedom).")
        if widest > reach:
            caption += f" The grey band is up to {widest:.4f} wide on either side, beyond the axis."
        axes.fill_between(steps, -noise.half_width, noise.half_width, color=style.GREY, alpha=0.3, linewidth=0,
                          label=f"BF16, other {comparison.noise_of}")
    colour = style.colour(comparison.recipe)
    axes.fill_between(steps, curve.low, curve.high, color=colour, alpha=0.3, linewidth=0, label="95%, batches")
    axes.plot(steps, curve.estimate, color=colour, marker=".", label="FP8 minus BF16")
    axes.axhline(0, color=style.BLACK, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss difference", ylim=(-reach, reach), title=style.two_lines(comparison.name))
    axes.legend(loc="best", ncols=1)
    return style.finish(figure, "difference", style.slug("difference", comparison.name),
                        f"Loss difference over steps: {comparison.name}", caption)


def label_rows(axes, rows):
    """Names the rows of a figure of intervals: (comparison, what) each."""
    many = len({(c.model, c.length, c.gpus) for c, _ in rows}) > 1
    labels = [f"{c.model}, T {c.length}, x{c.gpus}\n{c.recipe}, {what}" if many else f"{c.recipe}\n{what}"
              for c, what in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8.5 if many else 9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def draw_intervals(comparisons):
    """Differences in loss of the first ROWS rows, with intervals and the smallest detectable difference."""
    rows = [(c, name) for c in comparisons for name in ("validation", "training") if getattr(c, name) is not None]
    rows = rows[:ROWS]
    if not rows:
        return None
    figure, axes = style.new(1.0 + 0.42 * len(rows))
    for y, (c, name) in enumerate(rows):
        d = getattr(c, name)
        axes.barh(y, 2 * d.detectable, left=-d.detectable, height=0.62, color="#E8E8E8",
                  label="found in less than 80%" if y == 0 else None)
        axes.plot([d.low, d.high], [y, y], color=style.colour(c.recipe), linewidth=2.5, solid_capstyle="butt")
        axes.plot([d.estimate], [y], "o" if name == "validation" else "s", color=style.colour(c.recipe), markersize=6)
    label_rows(axes, rows)
    axes.set_xlabel("loss of FP8 minus loss of BF16")
    axes.axvline(0, color=style.BLACK, linewidth=0.8)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return style.finish(figure, "verdict", "loss-intervals", "Differences in loss with 95% intervals",
                        "Positive is a cost of FP8. The grey bar ends at the smallest true difference that would be "
                        "found in 80% of repetitions of these runs; smaller ones would be found less often.")


def draw_speedups(comparisons):
    """Speed-up over equal steps and at equal loss, in time and in energy."""
    rows = [(c, c.speedup, "time") for c in comparisons if c.speedup is not None]
    rows += [(c, c.energy_speedup, "energy") for c in comparisons if c.energy_speedup is not None]
    rows = [(c, s, what) for c, s, what in rows if s.estimate is not None][:ROWS]
    if not rows:
        return None
    figure, axes = style.new(1.0 + 0.42 * len(rows))
    for y, (c, s, _) in enumerate(rows):
        axes.plot([s.low, s.high], [y, y], color=style.colour(c.recipe), linewidth=2.5, solid_capstyle="butt")
        axes.plot([s.estimate], [y], "o", color=style.colour(c.recipe), label="at equal loss" if y == 0 else None)
        axes.plot([s.equal_steps], [y], "|", color=style.BLACK, markersize=13, markeredgewidth=1.5,
                  label="over equal steps" if y == 0 else None)
    label_rows(axes, [(c, what) for c, _, what in rows])
    axes.set_xlabel("BF16 / FP8 (above 1: FP8 takes less)")
    axes.axvline(1, color=style.BLACK, linewidth=0.8)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return style.finish(figure, "cost", "speedups", "Speed-up at equal loss, with 95% intervals",
                        "Time (or energy) until BF16 has its last loss, over the time until FP8 has the same loss; if "
                        "FP8 never has it, both are compared at FP8's last loss. "
                        "The gap between the black mark and the dot comes from the difference in loss.")


def smooth(values, width):
    """The mean of each finite value and of the finite ones among the width - 1 values before it; nan for the others."""
    values = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    first = np.maximum(np.arange(len(values)) + 1 - width, 0)
    last = np.arange(1, len(values) + 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, (sums[last] - sums[first]) / (counts[last] - counts[first]), np.nan)


def mean_curve(members, key=None):
    """(cost so far, loss) of the mean of runs, over the steps that all of them have. The cost is the field `key`, added
    up over steps, or the step's number without `key`. None if a step of a run lacks the field."""
    steps = min(len(run.steps) for run in members)
    losses = np.array([run.column("loss", 0, steps) for run in members], dtype=np.float64)
    if key is None:
        return np.array(members[0].column("step", 0, steps)), losses.mean(axis=0)
    values = [run.values(key) for run in members]
    if any(value is None for value in values):
        return None
    return np.mean([np.cumsum(value[:steps]) for value in values], axis=0), losses.mean(axis=0)


def unit_of(seconds):
    """(divisor, its name) that suits a time."""
    return (1, "s") if seconds < 300 else (60, "min") if seconds < 18000 else (3600, "h")


def draw_loss(group, name, recipes, kind, price):
    """Draws the loss of each recipe over steps, time, energy or money. Leaves out a recipe if the log of one run
    lacks the time or energy. Returns None if no recipe is left."""
    key = {"steps": None, "time": "ms", "energy": "joules", "money": "ms"}[kind]
    curves = {recipe: mean_curve(members, key) for recipe, members in recipes.items()}
    curves = {recipe: curve for recipe, curve in curves.items() if curve is not None}
    if not curves:
        return None
    longest, gpus = max(float(cost[-1]) for cost, _ in curves.values()), group[2]
    divisor, unit = {"time": lambda: unit_of(longest / 1000), "steps": lambda: (1, ""),
                     "energy": lambda: (3.6e6, "kWh") if longest > 3.6e5 else (1000, "kJ"),
                     "money": lambda: (3600 / (gpus * price), "")}[kind]()
    scale = 1000 * divisor if key == "ms" else divisor
    width = max(1, min(len(cost) for cost, _ in curves.values()) // 50)
    figure, axes = style.new()
    styles, tails = style.line_styles(curves), []
    for recipe, (cost, loss) in curves.items():
        mean = smooth(loss, width)
        tails.append(mean[min(len(mean) // 10, len(mean) - 1):])
        x, y = style.thin(cost / scale, mean, most=300)
        axes.plot(x, y, styles[recipe], color=style.colour(recipe), label=recipe)
    tail = np.concatenate(tails)
    tail = tail[np.isfinite(tail)]
    if len(tail):
        margin = 0.05 * (tail.max() - tail.min()) + 1e-6
        axes.set_ylim(tail.min() - margin, tail.max() + margin)
    label = {"steps": "step", "time": f"time of steps ({unit})", "energy": f"energy of all GPUs ({unit})",
             "money": f"money at {price} a GPU hour"}[kind]
    axes.set(xlabel=label, ylabel="training loss", title=name)
    axes.legend(loc="upper right")
    seeds = max(len(members) for members in recipes.values())
    means = [words.count(n, noun) for n, noun in ((seeds, "run"), (width, "step")) if n > 1]
    caption = f"Means of up to {' and '.join(means)}. " if means else ""
    caption += "The loss axis is scaled to the steps after the first tenth."
    return style.finish(figure, "loss", style.slug("loss", kind, name), f"Loss over {kind}: {name}", caption)


def groups_of(runs, names):
    """{place: {recipe: runs}} with BF16 first."""
    groups = collections.defaultdict(dict)
    for run in sorted(runs, key=lambda run: (run.option("precision") == "fp8", run.option("precision") != "bf16")):
        groups[place(run)].setdefault(names[run.name], []).append(run)
    return groups


def because(what, reasons):
    """Sentences that say what is left out. reasons: (name, reason); names with equal reasons share a sentence."""
    groups = collections.defaultdict(list)
    for name, reason in reasons:
        groups[reason].append(name)
    return [f"No {what} of {names[0] if len(names) == 1 else words.count(len(names), 'comparison')}: {reason}."
            for reason, names in groups.items()]


def draw(runs, names, comparisons, price):
    """(drawings, words on what is left out)."""
    drawings, left_out = [draw_intervals(comparisons)], []
    if 2 * len(comparisons) > ROWS:
        left_out.append(f"Figures of intervals have room for {ROWS} rows; the tables have all.")
    with_curve = [c for c in comparisons if c.curve is not None]
    drawings += map(draw_difference, with_curve[:DIFFERENCES])
    if len(with_curve) > DIFFERENCES:
        left_out.append(f"Differences over steps: {len(with_curve) - DIFFERENCES} of {len(with_curve)} are left out, "
                        "to keep the page small; give report.py fewer folders to see them.")
    for name, what in (("validation", "difference in validation loss"), ("curve", "difference over steps"),
                       ("noise", "noise band of BF16")):
        left_out += because(what, [(c.name, c.why[name]) for c in comparisons if name in c.why])
    groups = groups_of(runs, names)
    kinds = ["steps", "time", "energy"] + ["money"] * (price is not None)
    for group, recipes in list(groups.items())[:CURVES]:
        for kind in kinds:
            drawings.append(draw_loss(group, next(iter(recipes.values()))[0].place, recipes, kind, price))
    if len(groups) > CURVES:
        left_out.append(f"Loss curves of {len(groups) - CURVES} of {len(groups)} groups of runs are left out, to keep "
                        "the page small.")
    if not any(run.values("joules") for run in runs):
        left_out.append("Loss over energy: no log has joules in every step (the trainer reads them by NVML).")
    if price is None:
        left_out.append("Loss over money: no price of a GPU hour is known (--price).")
    drawings.append(draw_speedups(comparisons))
    left_out += because("speed-up at equal loss", [
        (c.name, c.speedup.reason if c.speedup else c.why["speedup"]) for c in comparisons
        if c.pairs and (c.speedup is None or c.speedup.estimate is None)])
    return [d for d in drawings if d is not None], left_out
