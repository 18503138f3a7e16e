"""Puts words, tables and figures together: the page, its Markdown and its files."""
import dataclasses
import json
from pathlib import Path

import jinja2

from report import compare, pairs, words
from report.words import number
from runs.runner import write_file

LIMIT = 600_000  # bytes at which a page is too large
FIRST = 12        # figures outside of <details>
TAGS = {"same": "No difference seen.", "costs": "Higher loss.", "gains": "Lower loss.", "diverged": "Diverged.",
        "mixed": "Mixed.", "none": ""}
# Figures of each part in the first view.
SHOWN = {"verdict": 1, "tokens": 3, "cost": 2, "gemms": 1, "numerics": 2, "loss": 3}
# A page that is too large leaves out figures of these parts, in this order.
DROPPED = ("strip", "memory", "step", "speed", "gemms", "loss", "numerics", "cost", "tokens", "verdict")


@dataclasses.dataclass
class Table:
    head: list
    rows: list
    text: int = 1  # number of columns, from the left, that hold text


@dataclasses.dataclass
class Part:
    name: str
    title: str
    intro: str = ""
    tables: list = dataclasses.field(default_factory=list)
    open: list = dataclasses.field(default_factory=list)
    folded: list = dataclasses.field(default_factory=list)


def interval(d, form="{:+.2f}", scale=1.0):
    """A Difference in words; of one trunk the estimate alone."""
    if d is None:
        return "n/a"
    middle = form.format(scale * d.estimate)
    return middle if d.low is None else f"{middle} [{form.format(scale * d.low)}, {form.format(scale * d.high)}]"


def difference_table(comparisons):
    """All numbers of the differences in loss. Only the primary loss has simultaneous bounds and a tag."""
    rows = []
    for c in comparisons:
        for name in ("validation", "training") if c.pairs else ():
            d, primary = getattr(c, name), name == c.primary
            if d is None:
                continue
            where = f"step {c.validation_step}" if name == "validation" else f"last {c.last} of {c.steps} steps"
            tag = "noise" if c.null else TAGS[words.kind_of(c)] or c.undecided or "one pair cannot tell"
            bounds = interval(c.bounds, "{:+.2f}%", 100 / c.base) if primary and not c.null else ""
            scale = 100 / float(c.ends[name][0].mean())
            rows.append([c.name, f"{name}, {where}", interval(d, "{:+.5f}"), interval(d, "{:+.2f}%", scale), bounds,
                         len(c.seeds), tag if primary else ""])
    return Table(["comparison", "loss", "FP8 - BF16 [95%]", "of BF16's loss [95%]", "bounds for all recipes and looks",
                  "trunks", "reads"], rows, 2)


def token_tables(comparisons):
    """The gap after runs of each length, and its trends."""
    shown = [c for c in comparisons if c.pairs and not c.null]
    gaps = [[c.name, f"{h.horizon:,}", words.tokens(h.tokens), words.per_parameter(h), f"{h.batch:,}",
             words.tokens(h.tokens_since), interval(getattr(h, c.primary), "{:+.2f}%", 100 / h.base), len(h.seeds)]
            for c in shown for h in c.horizons]
    trends = [[c.name, interval(c.trend), interval(c.extrapolated), interval(c.batch_trend),
               "n/a" if c.deviation is None else f"{c.deviation[0]:.2f} (at most {c.deviation[1]:.2f})",
               "n/a" if c.smallest is None else f"{c.smallest:.2f} with {c.planned}"] for c in shown]
    tables = [Table(["comparison", "steps", "tokens", "per parameter", "tokens per step", "since they parted",
                     "gap [95%]", "trunks"], gaps)] if gaps else []
    if any(set(row[1:]) != {"n/a"} for row in trends):
        tables.append(Table(["comparison, % of BF16's loss", "trend per doubling of tokens [95%]",
                             f"extrapolated to {compare.FAR} tokens per parameter [95%]",
                             "trend per doubling of tokens per step [95%]", "deviation of a null pair (upper 90%)",
                             "smallest cost that the planned trunks see"], trends))
    return tables


def cost_table(comparisons, price):
    """Speed, energy and money of all comparisons."""
    rows = []
    for c in comparisons:
        if not c.pairs or c.null:
            continue
        matched = [f"{s.estimate:.3f}x [{s.low:.3f}, {s.high:.3f}]" if s and s.estimate is not None else
                   "not determined" for s in (c.speedup, c.energy_speedup)]
        kwh = [number(j * words.PER_GIGA / 3.6e6, 3) for j in c.joules_per_token] if c.joules_per_token else []
        money = [number(m, 3) for m in words.money_per_giga(c, price)] if price is not None else []
        speed = f"{c.speed:.3f}x" + (f" ({words.span(c.speed_range, '{:.2f}')})" if len(c.pairs) > 1 else "")
        rows.append([c.name, speed, *matched, " / ".join(kwh) or "n/a", " / ".join(money) or "n/a"])
    return Table(["comparison", "tok/s, FP8 / BF16", "speed-up at equal loss [95%]", "energy at equal loss [95%]",
                  "kWh a billion tokens, BF16 / FP8", "price of a billion tokens, BF16 / FP8"], rows)


def run_table(data):
    """One row a run."""
    rows = []
    for run in data["runs"]:
        gib = run["memory_bytes"] / 2**30 if run["memory_bytes"] is not None else None
        state = run["state"] + (f", {run['starts']} starts" if run["starts"] > 1 else "")
        state += f", {run['skipped']} skipped" if run["skipped"] else ""
        state += ", last line half-written" if run["half_written"] else ""
        state += f", {run['stalled']} stalled" if run["stalled"] else ""
        rows.append([run["name"], run["recipe"], state, number(run["last_loss"], 5), number(run["validation_loss"], 5),
                     number(run["tokens_per_second_per_gpu"], 4), number(run["tflops_per_gpu"], 4),
                     "n/a" if run["mfu"] is None else f"{100 * run['mfu']:.1f}%", number(gib, 3),
                     number(run["joules_per_token"], 3)])
    rows += [[run["name"], "", run["reason"]] + [""] * 7 for run in data["runs_without_numbers"]]
    return Table(["run", "precision", "state", "loss", "validation loss", "tok/s/GPU", "TFLOP/s/GPU", "MFU", "GiB",
                  "J/token"], rows, 3)


def make_parts(data, found, comparisons, price, tables):
    """The parts of the page in their order. `tables`: more tables, by the part's name."""
    differences = difference_table(comparisons)
    parts = [
        Part("verdict", "What FP8 costs in loss", "", [differences] if differences.rows else []),
        Part("tokens", "The gap over tokens and steps", "", token_tables(comparisons)),
        Part("cost", "Time, energy and money", "", [cost_table(comparisons, price)] if differences.rows else []),
        Part("gemms", "Which GEMM runs in FP8"), Part("numerics", "Numerics over time"),
        Part("loss", "Loss, gradient norm, rate and speed over steps"),
        Part("speed", "Speed"),
        Part("step", "One step, and where the time went"), Part("memory", "Memory of a GPU"),
        Part("strip", "Clock, power, temperature and events"),
        Part("runs", "All runs", "Loss: mean of the last 20 finite losses (of all, if fewer). Speeds: of the median "
             "step; the first 10 steps do not count (in runs below 20 steps, the first half).", [run_table(data)]),
    ]
    for part in parts[:3]:  # their tables are of comparisons
        part.title = pairs.reword(part.title, found.runs[0].against)
        for table in part.tables:
            table.head = [pairs.reword(word, found.runs[0].against) for word in table.head]
    if len({pairs.place(run) for run in found.runs}) > 1:  # several models, lengths or numbers of GPUs: speed first
        parts.sort(key=lambda part: part.name != "speed")
    for part in parts:
        part.tables += tables.get(part.name, [])
    return parts


def place_figures(parts, drawings):
    """Sets which figures of a part stand in the first view, FIRST of them on the page, and which in <details>."""
    left = FIRST
    for i, part in enumerate(parts):
        members = [drawing for drawing in drawings if drawing.part == part.name]
        most = min(left, max(SHOWN.get(part.name, 0), 3 * (i == 0)))
        part.open, part.folded = members[:most], members[most:]
        left -= len(part.open)


def verdict_lines(data):
    """[(kind, tag, beginning, the rest of the sentence)] of the first lines; of single runs if nothing is compared. No
    tag stands before a decision."""
    lines = data["verdict"] or [{"kind": "none", **single} for single in data["singles"]]
    return [(line["kind"], "" if data["margin_percent"] else TAGS[line["kind"]], line["name"],
             line["words"].removeprefix(line["name"])) for line in lines]


def render(data, parts, drawings, title):
    """The page as text."""
    place_figures(parts, drawings)
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
                                     undefined=jinja2.StrictUndefined, trim_blocks=True)
    shown = {**data["receipt"], "differing": differing_settings(data)}
    runs = [{key: value for key, value in run.items() if key != "curve"} for run in data["runs"]]
    return environment.get_template("page.html.j2").render(
        title=title, verdict=verdict_lines(data), problems=data["problems"], parts=parts, notes=data["notes"],
        lacking=len(data["runs_without_numbers"]), total=len(data["runs"]) + len(data["runs_without_numbers"]),
        left_out=data["left_out"], receipt=shown, made=data["made"], sources=data["sources"],
        numbers=json.dumps({**data, "runs": runs}, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def differing_settings(data):
    """[(option, [(value, its runs in words)])] of options that not all runs share."""
    def in_words(runs):
        return ", ".join(runs) if len(runs) <= 6 else f"{len(runs)} of {len(data['runs'])} runs"

    return [(name, [(value, in_words(runs)) for value, runs in values.items()])
            for name, values in data["receipt"]["differing"]]


def fit(data, parts, drawings, title):
    """The page; if it would be too large, without the last figures of the parts that are needed least."""
    drawings = list(drawings)
    while True:
        text = render(data, parts, drawings, title)
        if len(text.encode("utf-8")) < LIMIT or not drawings:
            return text
        dropped = min(reversed(drawings), key=lambda drawing: DROPPED.index(drawing.part))
        drawings.remove(dropped)
        data["left_out"].append(f"{dropped.title}: left out of the page, to keep it small; see {dropped.name}.png.")


def markdown_table(table):
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in [table.head, *table.rows]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    align = "".join("---|" if i < table.text else "---:|" for i in range(len(table.head)))
    return "\n".join([lines[0], "|" + align, *lines[1:]])


def markdown(data, parts, drawings, title, figures):
    """The main parts of the page as Markdown, with links to the PNG files in the folder `figures`."""
    blocks = [f"# {title}"] + [f"{tag} **{name}**{rest}".strip() for _, tag, name, rest in verdict_lines(data)]
    blocks += [f"Note: {note}" for note in data["notes"] + data["problems"]]
    for part in parts:
        members = [drawing for drawing in drawings if drawing.part == part.name]
        if not part.tables and not members:
            continue
        blocks += [f"## {part.title}"] + [part.intro] * bool(part.intro) + [markdown_table(t) for t in part.tables]
        blocks += [f"![{d.title}]({figures}/{d.name}.png)\n\n{d.caption}" for d in members]
    if data["left_out"]:
        blocks += ["## What is left out, and why", "\n".join(f"- {text}" for text in data["left_out"])]
    blocks += ["## Receipt", "\n".join(f"- {name}: {', '.join(values)}" for name, values in data["receipt"]["facts"])]
    blocks += ["\n".join(f"- {name}: " + "; ".join(f"{value} ({runs})" for value, runs in values)
                         for name, values in differing_settings(data))]
    # names from logs may hold markup, which viewers of Markdown would run
    return "\n\n".join(block for block in blocks if block).replace("<", "&lt;") + "\n"


def write_all(out, data, parts, drawings, title):
    """Writes the page, the JSON, the Markdown and a PNG of each figure, and removes PNGs of an earlier report."""
    figures = out.with_name(out.stem + "_figures")
    figures.mkdir(exist_ok=True)
    for drawing in drawings:
        write_file(figures / f"{drawing.name}.png", drawing.png)
    for old in set(figures.glob("*.png")) - {figures / f"{drawing.name}.png" for drawing in drawings}:
        old.unlink()
    page = fit(data, parts, drawings, title)
    write_file(out.with_suffix(".json"), json.dumps(data, allow_nan=False, indent=1) + "\n")
    for path, text in ((out.with_suffix(".md"), markdown(data, parts, drawings, title, figures.name)), (out, page)):
        write_file(path, text.encode("utf-8", "replace"))
