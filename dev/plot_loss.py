#!/usr/bin/env python3
"""Draws the loss of runs and their distance from the first run: docs/loss.svg, from docs/loss.csv. Needs matplotlib.

    dev/plot_loss.py --log-dir BF16=log/bf16 --log-dir FP8=log/fp8 --title "llama3.2-1b, one H200"
    dev/plot_loss.py                                    # draws docs/loss.csv again
    dev/plot_loss.py --out docs/lost_updates.svg        # draws docs/lost_updates.csv again

With --log-dir NAME=FOLDER, given twice or more, it first reads the `step` records of FOLDER/log.jsonl and writes the
.csv: a line with the title, a head, and a row for each step that all runs made. Curves are means over the latest --mean
steps. The distance is a run's mean minus that of the first run, in percent of the first one's.
"""

import argparse
import csv
import itertools
import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
STYLES = "-", "--", "-.", ":", (0, (2, 6))  # curves that lie on each other stay visible


def read_log(folder):
    """Returns {step: loss} of a run. Where a resumed run made a step again, the later loss counts."""
    with open(Path(folder) / "log.jsonl") as file:
        records = [json.loads(line) for line in file]
    losses = {r["step"]: r["loss"] for r in records if r["type"] == "step"}
    if not losses:
        raise SystemExit(f"error: {folder}/log.jsonl has no step")
    return losses


def write_csv(path, title, runs):
    """Writes the title, a header and the losses of the steps that all runs made. runs: {name: folder}."""
    losses = [read_log(folder) for folder in runs.values()]
    steps = sorted(set.intersection(*map(set, losses)))
    if not steps:
        raise SystemExit("error: the runs have no step in common")
    with open(path, "w", newline="") as file:
        file.write(f"# {title}\n")
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", *runs])
        rows.writerows([step, *(f"{run[step]:.6f}" for run in losses)] for step in steps)


def running_mean(values, width):
    """Returns for each value the mean of it and up to width - 1 values before it."""
    parts = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def draw(path, svg, width):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "loss", "font.size": 10})
    import matplotlib.pyplot as plt

    with open(path, newline="") as file:
        title = file.readline().lstrip("# ").strip()
        (_, *names), *rows = csv.reader(file)
    steps, *curves = ([float(cell) for cell in column] for column in zip(*rows))
    means = [running_mean(curve, width) for curve in curves]

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(8, 4.5), height_ratios=[3, 1.2], layout="constrained")
    for name, curve, style in zip(names, means, itertools.cycle(STYLES)):
        top.plot(steps, curve, linestyle=style, label=name, linewidth=1.5)
    top.set(title=title, ylabel=f"loss, mean of {width} steps")
    top.legend(frameon=False)
    for i, curve in enumerate(means[1:], 1):
        distance = [100 * (b - a) / a for a, b in zip(means[0], curve)]
        bottom.plot(steps, distance, color="black" if len(means) == 2 else f"C{i}", linewidth=1)
    bottom.axhline(0, color="gray", linewidth=0.5)
    bottom.set(xlabel="step", ylabel=f"{names[1] if len(names) == 2 else 'others'} over\n{names[0]}, %")
    figure.savefig(svg, metadata={"Date": None})
    print(f"{svg}: {len(steps)} steps; last mean " + ", ".join(f"{n} {m[-1]:.4f}" for n, m in zip(names, means)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log-dir", action="append", metavar="NAME=FOLDER", default=[])
    parser.add_argument("--title", help="with --log-dir: model, data, GPU")
    parser.add_argument("--mean", type=int, default=20, help="steps of the running mean (20)")
    parser.add_argument("--out", type=Path, default=DOCS / "loss.svg", help="the figure; its .csv lies beside it")
    arguments = parser.parse_args()
    table = arguments.out.with_suffix(".csv")
    if arguments.log_dir:
        runs = dict(word.partition("=")[::2] for word in arguments.log_dir)
        if len(runs) < 2 or not all(runs.values()) or not arguments.title:
            parser.error("give --log-dir NAME=FOLDER twice or more, each with another NAME, and --title")
        write_csv(table, arguments.title, runs)
    draw(table, arguments.out, arguments.mean)


if __name__ == "__main__":
    main()
