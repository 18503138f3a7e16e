"""Numerics over time: gradient norms of FP8 over those of BF16, and what the audits saw."""
import collections

import numpy as np

from report import style
from report.figures_step import first_of_each, limited, name_of

WINDOWS = 60   # points of a curve
OPERANDS = {"x": style.BLUE, "w": style.ORANGE, "dy": style.VERMILLION}
PANELS = (("sqnr_db", "lowest\nSQNR (dB)", min, 1), ("saturated", "saturated\n(%)", max, 100),
          ("flushed", "flushed\n(%)", max, 100))


def norm_ratio(pair):
    """(steps, gradient norm of FP8 / BF16) as medians of windows; None if a log lacks norms."""
    steps = range(pair.first, pair.steps + 1)
    arm, base = (run.array("norm")[pair.first - run.first_step:pair.steps - run.first_step + 1]
                 for run in (pair.arm, pair.base))
    ratio = np.divide(arm, base, out=np.full(len(arm), np.nan), where=(base > 0) & (arm > 0))
    parts = [part for part in np.array_split(np.c_[steps, ratio], min(WINDOWS, len(ratio)))
             if np.isfinite(part[:, 1]).any()]
    return np.array([[part[:, 0].mean(), np.nanmedian(part[:, 1])] for part in parts]).T if parts else None


def draw_norms(members):
    """The ratio of gradient norms of each pair of one place, null pairs in grey."""
    figure, axes = style.new()
    styles, least = style.line_styles([c.recipe for c in members]), []
    for c in sorted(members, key=lambda c: not c.null):
        for i, ratio in enumerate(filter(lambda ratio: ratio is not None, map(norm_ratio, c.pairs))):
            colour = style.GREY if c.null else style.colour(c.recipe)
            axes.plot(*ratio, styles[c.recipe], color=colour, linewidth=1, label=None if i else c.recipe)
            least += ratio[1].tolist()
    if not least:
        return None
    axes.axhline(1, color=style.BLACK, linewidth=0.8)
    reach = 1.1 * max(np.quantile(np.abs(np.log(least)), 0.99), 0.01)
    axes.set(xlabel="step", ylabel=members[0].say("gradient norm, FP8 / BF16"), ylim=(np.exp(-reach), np.exp(reach)))
    axes.set_title(style.two_lines(members[0].name.split(", fp8")[0]))
    style.legend_above(figure, axes)
    skipped = sum(map(bool, sum((p.arm.column("skipped") for c in members for p in c.pairs), [])))
    steps = sum(len(p.arm.steps) for c in members for p in c.pairs)
    return style.finish(figure, "numerics", style.slug("norms", *members[0].place), "Ratio of gradient norms",
                        "A line for each pair, medians of neighbouring steps. A ratio that leaves 1 late in the runs "
                        f"is an early sign of a failure. {skipped} of {steps} steps of these FP8 runs were skipped.")


def draw_audits(run, names):
    """The worst operand of all audited GEMMs over audited steps: SQNR, and shares of saturated and flushed values."""
    worst = collections.defaultdict(dict)
    for record in run.audits:
        for key, _, extreme, _ in PANELS:
            value = record.get(key)
            if value is not None:
                of = worst[key, record["operand"]]
                of[record["step"]] = extreme(of.get(record["step"], value), value)
    figure, grid = style.new(4.2, len(PANELS), sharex=True)
    for axes, (key, label, _, scale) in zip(grid, PANELS):
        for operand, colour in OPERANDS.items():
            points = sorted(worst[key, operand].items())
            if points:
                axes.plot(*zip(*[(step, scale * value) for step, value in points]), marker=".", color=colour,
                          label=operand)
        axes.set_ylabel(label, fontsize=9)
    grid[-1].set_xlabel("audited step")
    grid[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    figure.suptitle(style.two_lines(name_of(run, names)), fontsize=10.5)
    return style.finish(figure, "numerics", style.slug("audit", run.name), f"Audits over time: {run.name}",
                        "Of each operand (activations x, weights w, gradients dy) the GEMM with the lowest SQNR, and "
                        "those with the most saturated values and the most values flushed to 0.")


def draw(runs, names, comparisons):
    """(drawings, words on what is left out)."""
    places = collections.defaultdict(list)
    for c in comparisons:
        if c.pairs:
            places[c.place].append(c)
    drawings, left_out = [draw_norms(members) for members in list(places.values())[:4]], []
    if len(places) > 4:
        left_out.append(f"Ratios of gradient norms: {len(places) - 4} of {len(places)} figures are left out.")
    audited = [run for run in runs if run.option("precision") == "fp8" and
               len({record["step"] for record in run.audits}) > 1]
    limited(drawings, left_out, "Audits over time", lambda run: draw_audits(run, names),
            first_of_each(audited, names, lambda run: True))
    if not audited:
        left_out.append("Audits over time: no run was audited at several steps (--fp8-audit N).")
    return [d for d in drawings if d is not None], left_out
