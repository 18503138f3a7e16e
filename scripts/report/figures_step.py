"""Figures of a step and of a run: where the time went, memory, clocks and events."""
import collections
import itertools

import numpy as np

from report import style
from report.page import Table
from report.pairs import place
from report.style import means_of_windows

EACH = 4           # figures of a kind
PARTS = 12         # bars of a waterfall
ROWS = 16          # bars of other figures
GROUPS = 7         # kinds of memory with a colour of their own
EVENTS = 300       # marks of a kind
KIND_COLOURS = {"gemm": style.BLUE, "memory": style.ORANGE, "wait": style.VERMILLION, "other": style.GREY}
TIMES = {"compute": style.BLUE, "optimizer": style.SKY, "communication": style.ORANGE, "data": style.VERMILLION,
         "validation": style.GREEN, "sampling": style.YELLOW, "saving": style.PURPLE, "start": style.GREY,
         "other": "#D0D0D0"}
STEP_TIMES = ("data_ms", "communication_ms", "optimizer_ms")


def name_of(run, names):
    return f"{run.place}, {names[run.name]}"


def first_of_each(runs, names, has):
    """The first run of each model, length, number of GPUs and recipe that `has` what a figure needs."""
    chosen = {}
    for run in runs:
        if has(run):
            chosen.setdefault((*place(run), names[run.name]), run)
    return list(chosen.values())


# ---- one step


def parts_of(run):
    """[(name, kind, ms, speed-of-light ms or None)] of the last profiled step, longest first. If there are more than
    PARTS, the shortest ones are added up in the last."""
    profile = run.profiles[-1]
    parts = sorted(((p["name"], p.get("kind", "other"), p["ms"], p["speed_of_light_ms"]) for p in profile["parts"]),
                   key=lambda part: -part[2])
    if len(parts) > PARTS:
        rest = parts[PARTS - 1:]
        light = [part[3] for part in rest if part[3] is not None]
        parts = parts[:PARTS - 1] + [(f"{len(rest)} other parts", "other", sum(p[2] for p in rest),
                                      sum(light) if light else None)]
    return parts


def draw_waterfall(run, names, longest):
    parts = parts_of(run)
    figure, axes = style.new(1.1 + 0.24 * (len(parts) + 1))
    left, shown = 0.0, set()
    for y, (_, kind, ms, light) in enumerate(parts):
        colour = KIND_COLOURS.get(kind, style.GREY)
        axes.barh(y, ms, left=left, height=0.78, color=colour, alpha=0.35,
                  label=kind.replace("gemm", "GEMM") if kind not in shown else None)
        axes.barh(y, min(light or 0, ms), left=left, height=0.78, color=colour)
        shown.add(kind)
        left += ms
    lights = [part[3] for part in parts if part[3] is not None]
    axes.barh(len(parts), left, height=0.78, color=style.GREY, alpha=0.35)
    axes.barh(len(parts), sum(lights), height=0.78, color=style.BLACK)
    style.name_rows(axes, [part[0] for part in parts] + ["all parts"], fontsize=9)
    axes.set(xlim=(0, 1.03 * longest), xlabel="ms")
    axes.set_title(style.two_lines(name_of(run, names)))
    axes.legend(loc="upper right")
    step = run.profiles[-1]["step"]
    return style.finish(figure, "step", style.slug("waterfall", run.name), f"Step {step} of {run.name} by parts",
                        f"Dark: the time that a part would take at the limit of the GPU, where the log has it, "
                        f"{sum(lights):.1f} of {left:.1f} ms. Light: the rest of its time.")


def times_of(run):
    """{kind: seconds} of a run: from its summaries if every start wrote one with times, or else from its records; None
    if the step records lack the fields."""
    seconds = collections.Counter()
    if run.ended and len(run.summaries) == len(run.starts) and all(s.get("seconds") for s in run.summaries):
        for one in run.summaries:
            seconds.update({kind: one["seconds"].get(kind) or 0.0 for kind in TIMES})
        return seconds
    fields = {key: run.costs(key) for key in STEP_TIMES}
    if any(values is None for values in fields.values()):
        return None
    for key, values in fields.items():
        seconds[key.removesuffix("_ms")] = sum(values) / 1000
    seconds["compute"] = max(sum(run.costs("ms")) / 1000 - sum(seconds.values()), 0.0)
    seconds["validation"] = sum(v.get("seconds") or 0.0 for v in run.validations)
    seconds["saving"] = sum(s.get("seconds") or 0.0 for s in run.saves)
    return seconds


def goodput_of(run, seconds):
    """The share of time in which weights were trained, as the summary of a run with one start has it, or else computed
    from `seconds`."""
    told = run.summaries[-1].get("goodput") if run.ended and len(run.starts) == 1 else None
    total = sum(seconds.values())
    return told if told is not None else (seconds["compute"] + seconds["optimizer"]) / total if total else None


def draw_times(runs, names):
    """(a drawing, a table of goodput) of where the time of the runs went; (None, None) without the fields."""
    groups = collections.defaultdict(list)
    for run in runs:
        seconds = times_of(run)
        if seconds is not None and sum(seconds.values()) > 0:
            groups[name_of(run, names)].append((run, seconds))
    if not groups:
        return None, None
    rows = list(groups.items())[:ROWS]
    kinds = [kind for kind in TIMES if any(s[kind] > 0 for _, members in rows for _, s in members)]
    figure, axes = style.new(1.3 + 0.5 * len(rows))
    table = []
    for y, (name, members) in enumerate(rows):
        total = sum(sum(seconds.values()) for _, seconds in members)
        left = 0.0
        for kind in kinds:
            share = 100 * sum(seconds[kind] for _, seconds in members) / total
            axes.barh(y, share, left=left, color=TIMES[kind], height=0.7, label=kind if y == 0 else None)
            left += share
        goodput = [goodput_of(run, seconds) for run, seconds in members]
        table.append([name, len(members), f"{total / len(members):.1f}", f"{100 * sum(goodput) / len(goodput):.1f}%"])
    style.name_rows(axes, [name.replace(", ", "\n", 1) for name, _ in rows], (0.5, 0.5))
    axes.set(xlim=(0, 100), xlabel="share of time (%)")
    figure.legend(loc="outside upper center", ncols=3)
    drawing = style.finish(figure, "step", "time", "Where the time of the runs went",
                           "Runs of which every start wrote its summary: all of their time. Other runs: steps, "
                           "validation and saving.")
    return drawing, Table(["runs", "number", "seconds each", "goodput"], table)


# ---- memory


def draw_memory(runs, names):
    """Memory plan of a rank by groups, and the largest memory_bytes of its steps."""
    chosen = first_of_each(runs, names, lambda run: run.settings.get("memory", {}).get("groups"))[:ROWS]
    if not chosen:
        return None
    totals, plans = collections.Counter(), []
    for run in chosen:
        memory = run.settings["memory"]
        plan = collections.Counter({group["name"]: group["bytes"] for group in memory["groups"]})
        plan["CUDA and libraries"] += memory.get("other_bytes") or 0
        plans.append(plan)
        totals.update(plan)
    named = [name for name, size in totals.most_common(GROUPS) if size > 0]
    largest = max(sum(plan.values()) for plan in plans)
    divisor, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    figure, axes = style.new(1.7 + 0.5 * len(chosen))
    for y, (run, plan) in enumerate(zip(chosen, plans)):
        left = 0.0
        sizes = [(name, plan[name], colour) for name, colour in zip(named, style.SEQUENCE)]
        sizes.append(("all others", sum(plan.values()) - sum(size for _, size, _ in sizes), "#D0D0D0"))
        for name, size, colour in sizes:
            axes.barh(y, size / divisor, left=left, color=colour, height=0.66, label=name if y == 0 else None)
            left += size / divisor
        peaks = [peak for peak in run.column("memory_bytes") if peak is not None]
        if peaks:
            axes.plot([max(peaks) / divisor], [y], "|", color=style.BLACK, markersize=13, markeredgewidth=2,
                      label="measured peak" if y == 0 else None)
    style.name_rows(axes, [name_of(run, names).replace(", ", "\n", 1) for run in chosen], (0.5, 0.5))
    axes.set_xlabel(f"memory of a GPU ({unit})")
    axes.set_xlim(left=0)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    return style.finish(figure, "memory", "memory", "Memory of a GPU",
                        "Bars: what the trainer planned for one rank. Black line: what was in use on rank 0's GPU, by "
                        "CUDA and other processes too (on the CPU: the peak of the largest process).")


# ---- clock, power, temperature, events


def throttle_shares(run):
    """{reason: for each step, the share of GPUs that were slowed down by it}."""
    texts = run.column("throttle")
    words = {text: [[word.strip() for word in gpu.split(",")] for gpu in text] for text in set(texts) - {None}}
    reasons = sorted({word for gpus in words.values() for gpu in gpus for word in gpu if word})
    shares = {text: {reason: np.mean([reason in gpu for gpu in gpus]) for reason in reasons}
              for text, gpus in words.items() if gpus}
    return {reason: [shares[text][reason] if text else 0.0 for text in texts] for reason in reasons}


def events_of(run):
    """{event: steps}."""
    events = {"resume": run.resumed_at, "skip": list(itertools.compress(run.column("step"), run.column("skipped"))),
              "failed save": [s["step"] for s in run.saves if "error" in s],
              "save": [s["step"] for s in run.saves if "error" not in s],
              "validation": [v["step"] for v in run.validations]}
    return {name: steps for name, steps in events.items() if steps}


def draw_strip(run, names):
    """Clock, power, temperature and throttling of each GPU over steps, with events below."""
    rows = [(key, label) for key, label in (("sm_mhz", "SM clock\n(MHz)"), ("watts", "power\n(W)"),
                                            ("celsius", "temp.\n(°C)")) if run.has((key, 0))]
    shares, events = throttle_shares(run), events_of(run)
    panels = rows + [("throttle", "slowed\n(%)")] * bool(shares) + [("events", "")] * bool(events)
    heights = [1.0] * (len(panels) - bool(events)) + [0.2 + 0.17 * len(events)] * bool(events)
    figure, grid = style.new(0.9 + 1.05 * sum(heights), len(panels), squeeze=False, sharex=True, height_ratios=heights)
    number = run.column("step")
    most = max(40, 160 // run.gpus)
    for axes, (key, label) in zip(grid[:, 0], panels):
        axes.set_ylabel(label, fontsize=9)
        if key == "events":
            marks = [style.thin(steps, most=EVENTS)[0] for steps in events.values()]
            axes.eventplot(marks, lineoffsets=range(len(events)), linelengths=0.7, colors=style.BLACK, linewidths=0.8)
            axes.set_yticks(range(len(events)), list(events), fontsize=8)
            axes.grid(visible=False)
            continue
        lines = shares if key == "throttle" else {f"GPU {gpu}": run.column((key, gpu)) for gpu in range(run.gpus)}
        for i, (name, values) in enumerate(lines.items()):
            x, y = means_of_windows(values, most)
            axes.plot(number[0] + x, 100 * y if key == "throttle" else y, color=style.SEQUENCE[i % 8], linewidth=1,
                      label=name)
        if key == "throttle" or (key == panels[0][0] and run.gpus > 1):
            axes.legend(loc="lower left", ncols=4, fontsize=8, bbox_to_anchor=(0, 0.98))
    figure.suptitle(run.name, fontsize=10.5)
    grid[-1, 0].set_xlabel("step")
    grid[-1, 0].set_xlim(number[0] - 1, number[-1] + 1)
    slow = ", ".join(f"{reason} in {100 * np.mean(values):.0f}%" for reason, values in shares.items())
    none = "No GPU was slowed down. " * run.has("throttle")
    caption = f"Slowed down, share of steps and GPUs: {slow}. " if slow else none
    return style.finish(figure, "strip", style.slug("strip", run.name), name_of(run, names) + f" ({run.name})",
                        caption + f"Lines: means of {max(1, -(-len(number) // most))} steps.")


# ---- all of them


def limited(drawings, left_out, what, draw, runs):
    """Draws the first EACH figures of a kind, and says how many are left out."""
    drawings += [draw(run) for run in runs[:EACH]]
    if len(runs) > EACH:
        left_out.append(f"{what}: {len(runs) - EACH} of {len(runs)} figures are left out. Give report.py fewer folders "
                        "to see them.")


def draw(runs, names):
    """(drawings, {part: tables}, words on what is left out)."""
    drawings, tables, left_out = [], {}, []
    profiled = first_of_each(runs, names, lambda run: run.profiles and run.profiles[-1]["parts"])
    longest = collections.defaultdict(float)
    for run in profiled:
        longest[place(run)] = max(longest[place(run)], sum(part["ms"] for part in run.profiles[-1]["parts"]))
    limited(drawings, left_out, "Waterfall", lambda run: draw_waterfall(run, names, longest[place(run)]), profiled)
    if not profiled:
        left_out.append("Waterfall of a step: no run has a profile record (--profile of the GPU trainer).")
    drawing, table = draw_times(runs, names)
    if drawing:
        drawings.append(drawing)
        tables["step"] = [table]
    else:
        left_out.append("Where the time went: the logs lack the fields data_ms, communication_ms and optimizer_ms.")
    drawings.append(draw_memory(runs, names))
    if drawings[-1] is None:
        left_out.append("Memory: the settings records have no memory plan (older logs).")
    strips = first_of_each(runs, names, lambda run: run.has(("sm_mhz", 0)) or run.has(("watts", 0)) or
                           set(events_of(run)) - {"validation"})
    limited(drawings, left_out, "Clock, power and temperature", lambda run: draw_strip(run, names), strips)
    if not any(run.has(("sm_mhz", 0)) for run in runs):
        left_out.append("Clock, power and temperature: the logs have none (the trainer reads them by NVML).")
    return [d for d in drawings if d is not None], tables, left_out
