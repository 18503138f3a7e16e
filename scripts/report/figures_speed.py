"""Figures of speed: every model, sequence length, number of GPUs and precision, as bars."""
import collections

from report import style, words
from report.pairs import NULL

MODELS = 8  # panels of one figure
METRICS = (  # name, field of a run in report.json, title, axis, caption
    ("tokens", "tokens_per_second_per_gpu", "Throughput of a GPU", "tokens/s/GPU",
     "Tokens per second of one GPU, of the median step."),
    ("tflops", "tflops_per_gpu", "Model FLOP/s of a GPU", "TFLOP/s/GPU", "Model FLOPs as docs/METRICS.md counts them."),
    ("mfu", "mfu", "Model FLOPs utilization", "MFU (%)",
     "Share of the dense BF16 peak, for FP8 too: FP8 may pass 100%."),
    ("aggregate", "tokens_per_second", "Throughput of all GPUs", "tokens/s", "Tokens per second of all GPUs together."),
    ("scaling", "tokens_per_second_per_gpu", "Scaling efficiency", "of 1 GPU (%)",
     "Tokens/s/GPU divided by that of the run on one GPU with equal model, T and precision."))


def values_of(metric, key, cells):
    """Returns {place: {recipe: value}} of one metric. cells: {place: {recipe: runs, as report.json has them}}."""
    def mean(runs):
        numbers = [run[key] for run in runs if run[key] is not None]
        return sum(numbers) / len(numbers) if numbers else None

    table = collections.defaultdict(dict)
    for place, recipes in cells.items():
        for recipe, runs in recipes.items():
            value = mean(runs)
            if metric == "scaling":
                one = mean(cells.get((*place[:2], 1), {}).get(recipe, []))
                value = 100 * value / one if place[2] > 1 and value and one else None
            elif metric == "mfu" and value is not None:
                value *= 100
            if value is not None:
                table[place][recipe] = value
    return table


def bars_of_one(axes, recipes, values, label):
    """Horizontal bars of one model, length and number of GPUs."""
    for y, recipe in enumerate(recipes):
        axes.barh(y, values.get(recipe, 0), color=style.colour(recipe), height=0.66)
        axes.annotate(f" {words.number(values.get(recipe), 4)}", (values.get(recipe, 0), y), va="center", fontsize=9)
    style.name_rows(axes, recipes, fontsize=10)
    axes.set(xlim=(0, 1.2 * max(values.values())), xlabel=label)


def bars_of_many(axes, places, recipes, table, missing):
    """Groups of bars: one group for each length and number of GPUs of a model, one bar for each recipe."""
    width = 0.84 / len(recipes)
    for i, recipe in enumerate(recipes):
        x = [g - 0.42 + width * (i + 0.5) for g in range(len(places))]
        axes.bar(x, [table.get(place, {}).get(recipe, 0) for place in places], 0.92 * width,
                 color=style.colour(recipe), hatch="" if ":emulate" not in recipe else "///",
                 edgecolor="white", linewidth=0, label=recipe)
        for at, place in zip(x, places):
            word = missing.get((*place, recipe))
            if word and recipe not in table.get(place, {}):
                axes.annotate(word, (at, 0), xytext=(0, 2), textcoords="offset points", rotation=90, ha="center",
                              va="bottom", fontsize=8, color=style.VERMILLION)
    axes.set_xticks(range(len(places)), [f"{length}\nx{gpus}" for _, length, gpus in places])
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.grid(axis="x", visible=False)


def draw_metric(metric, cells, recipes, missing):
    name, key, title, label, caption = metric
    table = values_of(name, key, cells)
    if not table:
        return None
    order = list(dict.fromkeys(place[0] for place in [*cells, *missing]))
    places = sorted((place for place in {*cells, *(key[:3] for key in missing)}
                     if name != "scaling" or (place[2] > 1 and any(p[0] == place[0] for p in table))),
                    key=lambda place: (order.index(place[0]), *place[1:]))
    if len(places) == 1:
        shown = [recipe for recipe in recipes if recipe in table[places[0]]]
        figure, axes = style.new(0.9 + 0.3 * len(shown))
        bars_of_one(axes, shown, table[places[0]], label)
        axes.set_title(next(run["place"] for runs in cells[places[0]].values() for run in runs))
        return style.finish(figure, "speed", f"speed-{name}", title, caption)
    models = list(dict.fromkeys(place[0] for place in places))[:MODELS]
    figure, panels = style.new(1.1 + 1.75 * len(models), len(models), squeeze=False)
    for axes, model in zip(panels[:, 0], models):
        bars_of_many(axes, [place for place in places if place[0] == model], recipes, table, missing)
        axes.set(ylabel=label)
        axes.set_title(model)
        if name == "scaling":
            axes.axhline(100, color=style.BLACK, linewidth=0.8)
    panels[-1, 0].set_xlabel("sequence length T, and x GPUs")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return style.finish(figure, "speed", f"speed-{name}", title, caption)


def draw(data, found):
    """Returns (drawings, words on what is left out). data: the numbers of report.json."""
    cells, places = collections.defaultdict(lambda: collections.defaultdict(list)), collections.defaultdict(list)
    for run in data["runs"]:
        places[run["model"], run["sequence_length"], run["gpus"]].append(run)
    for place, runs in places.items():
        most = max(run["tokens_per_step"] for run in runs)  # with other numbers of them the speed is another
        for run in runs:
            if not run["recipe"].endswith(NULL) and run["tokens_per_step"] == most:
                cells[place][run["recipe"]].append(run)
    order = {recipe: i for i, recipe in enumerate(["bf16", "fp32", *style.COLOURS])}
    recipes = sorted({recipe for of in cells.values() for recipe in of}, key=lambda r: (order.get(r, 99), r))
    missing = {place: "OOM" if reason.startswith("out of memory") else reason.split(":")[0]
               for place, reason in found.lost_places.items()}
    drawings, left_out = [], []
    for metric in METRICS:
        if metric[0] == "aggregate" and all(place[2] == 1 for place in cells):
            continue  # on one GPU this is the throughput of a GPU
        drawing = draw_metric(metric, cells, recipes, missing)
        if drawing:
            drawings.append(drawing)
        elif metric[0] == "mfu":
            left_out.append("MFU: the logs have no peak of the device (--peak-tflops of the trainer sets it).")
        elif metric[0] == "scaling" and len({place[2] for place in cells}) > 1:
            left_out.append("Scaling efficiency: no run on one GPU with equal model, T and precision.")
    models = {place[0] for place in cells}
    if len(models) > MODELS:
        left_out.append(f"Speed of {len(models) - MODELS} models: the figures have room for {MODELS}; see All runs.")
    return drawings, left_out
