"""Colours, sizes and saving of the figures."""
import collections
import dataclasses
import io
import re

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C")
COLOURS = {"bf16": BLACK, "fp32": GREY, "fp8": BLUE, "fp8:tensorwise": BLUE, "fp8:rowwise": ORANGE,
           "fp8:blockwise": GREEN, "fp8:delayed": VERMILLION, "fp8:rowwise_with_gw_hp": SKY, "fp8:mxfp8": PURPLE}
STYLES = ("-", "--", ":", "-.")
SEQUENCE = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, GREY)
# Styles of which a page has hundreds, and their classes in page.html.j2.
CLASSES = (("fill: none; stroke: var(--grid); stroke-width: 0.6; stroke-linecap: square", "g"),
           ("stroke: currentColor; stroke-width: 0.8", "t"), ("font-size: 10px; text-anchor: middle", "m"),
           ("fill: none; stroke: currentColor; stroke-width: 0.8; stroke-linejoin: miter; stroke-linecap: square", "s"),
           ("font-size: 10px; text-anchor: end", "e"))
WIDTH = 4.5           # inches: text of 9 points stays readable where the figure is 360 pixels wide
PNG_DPI = 160

matplotlib.rcParams.update({"font.size": 10, "axes.titlesize": 10.5, "legend.fontsize": 9, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"], "svg.fonttype": "none",
    "svg.hashsalt": "report", "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "legend.frameon": False, "lines.linewidth": 1.4, "axes.formatter.useoffset": False, "hatch.linewidth": 0.6})


@dataclasses.dataclass
class Drawing:
    """A figure that is done. `part`: the part of the page that shows it."""
    part: str
    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def new(height=3.0, rows=1, **options):
    """A figure and its axes, in one column."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, 1, **options)


def legend_above(figure, axes):
    """A legend above the figure, in one column if a name is long."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=2 if max(map(len, labels)) <= 24 else 1)


def name_rows(axes, names, room=(0.6, 0.6), fontsize=8):
    """Names the rows of a figure, with the first on top. room: above the first row and below the last."""
    axes.set_yticks(range(len(names)), names, fontsize=fontsize)
    axes.set_ylim(len(names) - 1 + room[1], -room[0])
    axes.grid(axis="y", visible=False)


def colour(recipe):
    """The colour of a recipe, also of its emulated form and with other options. line_styles() tells these apart."""
    base = re.split("[ +]", recipe)[0].removesuffix(":emulate")
    return GREY if "rounding seed" in recipe else COLOURS.get(base, YELLOW)


def line_styles(recipes):
    """{recipe: line style}: up to four recipes of one colour have different styles."""
    used, styles = collections.Counter(), {}
    for recipe in recipes:
        styles[recipe] = STYLES[used[colour(recipe)] % len(STYLES)]
        used[colour(recipe)] += 1
    return styles


def thin(*columns, most):
    """Columns of equal length with at most `most` values: every k-th, and the last."""
    size = len(columns[0])
    if size <= most:
        return columns
    step = -(-size // (most - 1))
    keep = [*range(0, size - 1, step), size - 1]
    return tuple([column[i] for i in keep] for column in columns)


def means_of_windows(values, most):
    """(middles, means) of at most `most` windows of equal length (the last may be shorter). None counts as missing."""
    values = np.array(values, dtype=np.float64)
    size = max(1, -(-len(values) // most))
    starts = range(0, len(values), size)
    with np.errstate(invalid="ignore"):
        means = [np.nanmean(values[i:i + size]) if np.isfinite(values[i:i + size]).any() else np.nan for i in starts]
    return np.array([(i + min(i + size, len(values)) - 1) / 2 for i in starts]), np.array(means)


def without_plain_groups(svg):
    """The SVG without <g> elements that have no attributes."""
    kept = []

    def visit(match):
        if match[0] != "</g>":
            kept.append(match[0] != "<g>")
            return match[0] if kept[-1] else ""
        return match[0] if kept.pop() else ""

    return re.sub(r"<g(?: [^>]*)?>|</g>", visit, svg)


def shorten(svg, name):
    """The SVG element alone, with few digits, no namespace, and ids that no other figure of a page has."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg"):], flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = without_plain_groups(re.sub(r'<g id="[^"]*"', "<g", svg))
    svg = re.sub(r"; font-family: [^;\"]*", "", svg)  # the page's style has it
    svg = re.sub(r' (d|x|y|points)="([^"]*)"',
                 lambda m: f' {m[1]}="' + re.sub(r"(\.\d)\d+", r"\1", m[2]).replace("\n", "") + '"', svg)
    svg = re.sub(r"translate\([^)]*\)", lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"\n\s*", "\n", svg).replace("\n\n", "\n")
    for colour, of_page in (("#000000", "currentColor"), ("#dddddd", "var(--grid)"), ("#ffffff", "var(--page)")):
        svg = re.sub(colour, of_page, svg, flags=re.I)  # so that the figure follows the page into the dark
    for style, name in CLASSES:
        svg = svg.replace(f'style="{style}"', f'class="{name}"')
    svg = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", svg)
    return re.sub(r'<svg width="[^"]*" height="[^"]*"', "<svg", svg, count=1)


def finish(figure, part, name, title, caption):
    """Saves a figure as SVG and PNG. `name` is a file's name and unique on the page."""
    files = {}
    FigureCanvasSVG(figure).figure.set_dpi(72)  # as savefig does for SVG
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine(None)  # with one, savefig would draw the figure once more
    for kind in ("svg", "png"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, transparent=kind == "svg",
                       metadata={"Date": None} if kind == "svg" else None)
        files[kind] = buffer.getvalue()
    return Drawing(part, name, title, caption, shorten(files["svg"].decode("utf-8"), name), files["png"])


def two_lines(title):
    """A long title in two lines."""
    return title if len(title) <= 40 else "\n".join(title.rsplit(", ", 1))


def slug(*words):
    """A file's name from words."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(str(word) for word in words).lower()).strip("-")
