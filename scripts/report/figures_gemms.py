"""Map of layers and GEMMs: which run in FP8, and what the audit saw."""
import matplotlib
import numpy as np

from report import style
from report.figures_step import EACH, first_of_each, limited, name_of
from report.page import Table
from report.words import number

BF16, FP8 = "#E3E3E3", "#BFD9EE"  # without an audit
SATURATED, FLUSHED = 1e-4, 1e-2   # a GEMM gets a mark if more of an operand is saturated or flushed to 0
WORST = 3                         # operands of a run in the table of the lowest SQNR


def last_audit(run):
    """{(layer, linear, gemm): records of its operands} of the last audit."""
    audits = {}
    for record in run.audits:
        key = record["layer"], record["linear"], record["gemm"]
        if key in audits and audits[key][0]["step"] != record["step"]:
            audits[key] = []
        audits.setdefault(key, []).append(record)
    return audits


def draw_map(run, names):
    gemms, audits = run.settings["gemms"], last_audit(run)
    rows = list(dict.fromkeys((gemm["linear"], gemm["gemm"]) for gemm in gemms))
    layers = 1 + max((layer for gemm in gemms for layer in gemm["layers"]), default=0)
    kinds = np.zeros((len(rows), layers))
    sqnr = np.full((len(rows), layers), np.nan)
    for gemm in gemms:
        operands = [gemm[role] for role in ("x", "w", "dy") if isinstance(gemm.get(role), dict)]
        if any(str(operand.get("dtype", "")).startswith(("e4m3", "e5m2")) for operand in operands):
            kinds[rows.index((gemm["linear"], gemm["gemm"])), gemm["layers"] or slice(None)] = 1
    for (layer, *row), records in audits.items():
        if tuple(row) in rows and layer < layers:
            known = [record["sqnr_db"] for record in records if record["sqnr_db"] is not None]
            sqnr[rows.index(tuple(row)), int(layer)] = min(known, default=np.nan)
    figure, axes = style.new(1.6 + 0.2 * len(rows))
    edges = np.arange(layers + 1) - 0.5, np.arange(len(rows) + 1) - 0.5
    axes.pcolormesh(*edges, kinds, cmap=matplotlib.colors.ListedColormap([BF16, FP8]), vmin=0, vmax=1, rasterized=True)
    if np.isfinite(sqnr).any():
        mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(sqnr), cmap="cividis", rasterized=True)
        figure.colorbar(mesh, ax=axes, label="lowest SQNR (dB)", shrink=0.8)
    mark(axes, rows, layers, audits)
    style.name_rows(axes, [f"{linear} {gemm}" for linear, gemm in rows], (0.5, 0.5))
    axes.set(xlim=(-0.5, layers - 0.5), xlabel="layer (lm_head is in none)")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.grid(visible=False)
    plain = {"BF16": (BF16, kinds == 0), "FP8, no SQNR": (FP8, (kinds == 1) & np.isnan(sqnr))}
    handles = {name: matplotlib.patches.Patch(color=colour) for name, (colour, has) in plain.items() if has.any()}
    handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    if handles:
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=2, fontsize=8)
    axes.set_title(style.two_lines(name_of(run, names)))
    caption = (f"{int(run.settings['fp8_gemms'])} GEMMs of a micro-step have FP8 operands. --fp8-filter is "
               f"{run.option('fp8-filter') or 'none'}, --fp8-lm-head {run.option('fp8-lm-head') or 'off'}.")
    if audits:
        step = max(records[0]["step"] for records in audits.values())
        caption += f" SQNR: signal to quantization noise of the worse operand, audited at step {step}."
    return style.finish(figure, "gemms", style.slug("gemms", run.name), name_of(run, names), caption)


def mark(axes, rows, layers, audits):
    """Marks GEMMs of which an operand has a share above SATURATED of saturated values, or above FLUSHED of zeros."""
    for key, least, symbol, label in (("saturated", SATURATED, "^", f"saturated > {100 * SATURATED:g}%"),
                                      ("flushed", FLUSHED, "o", f"flushed to 0 > {100 * FLUSHED:g}%")):
        points = [(layer, rows.index((linear, gemm))) for (layer, linear, gemm), records in audits.items()
                  if (linear, gemm) in rows and layer < layers and any((r.get(key) or 0) > least for r in records)]
        if points:
            axes.scatter(*zip(*points), marker=symbol, s=9, color=style.VERMILLION, label=label, linewidths=0,
                         rasterized=len(points) > 200)


def worst_table(runs, names):
    """A table of the WORST operands of each run, those with the lowest SQNR in its last audit."""
    rows = []
    for run in runs:
        worst = {}
        for r in (record for operands in last_audit(run).values() for record in operands):
            if r["sqnr_db"] is not None:  # one operand of two GEMMs counts once
                worst.setdefault((r["layer"], r["linear"], r["operand"], r["sqnr_db"]), r)
        for r in sorted(worst.values(), key=lambda record: record["sqnr_db"])[:WORST]:
            rows.append([name_of(run, names), f"layer {r['layer']:.0f} {r['linear']} {r['operand']} ({r['gemm']})",
                         number(r["sqnr_db"], 4), f"{100 * (r.get('flushed') or 0):.3f}%",
                         f"{100 * (r.get('saturated') or 0):.4f}%"])
    return Table(["run", "operand", "SQNR (dB)", "flushed to 0", "saturated"], rows, 2)


def draw(runs, names):
    """(drawings, {part: tables}, words on what is left out)."""
    fp8 = [run for run in runs if run.option("precision") == "fp8"]
    chosen = first_of_each(sorted(fp8, key=lambda run: not run.audits), names, lambda run: run.settings.get("gemms"))
    drawings, left_out = [], []
    limited(drawings, left_out, "Map of GEMMs", lambda run: draw_map(run, names), chosen)
    if fp8 and not chosen:
        left_out.append("Map of GEMMs: the settings records have no list of GEMMs (older logs).")
    audited = [run for run in chosen if run.audits]
    if chosen and not audited:
        left_out.append("SQNR, saturation and zeros: no run was audited (--fp8-audit N).")
    return drawings, {"gemms": [worst_table(audited[:EACH], names)]} if audited else {}, left_out
