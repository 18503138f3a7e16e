#!/usr/bin/env python3
"""usage: scripts/report.py FOLDER... [--out FILE.html] [--price X] [--margin P%] [--against RECIPE]

Makes one page from runs: what FP8 gives and what it costs in loss, with figures. FOLDER is the --out folder of
scripts/verdict.sh or scripts/sweep.sh, the --log-dir of a run, or a folder of such folders. A run need not have ended.

  --out FILE.html  the page (report.html in FOLDER; needed with several folders). Beside it are FILE.json with the
                   numbers of comparisons and runs, FILE.md, and FILE_figures with a PNG of each figure
  --price X        price of one GPU hour, for costs in money (the price in verdict.json, if it has one)
  --margin P%      the cost in loss that you can accept, as 0.5%: each recipe is then acceptable, not acceptable or
                   undecided (the margin in verdict.json, if it has one)
  --against RECIPE an arm of a verdict's folder, named as in its --recipes: compares the other arms with it instead of
                   with the trunks (the page is then report_against_RECIPE.html)

Needs the libraries that scripts/setup_report.sh installs. docs/REPORT.md says how to read the page.
"""
import datetime
import os
import sys
from pathlib import Path

from report import venv
from runs.options import fail, in_a_name, number, parse


def read_options(words):
    names = ("out", "price", "margin", "against")
    options, options.folders, _ = parse(words, __doc__, dict.fromkeys(names, ""), (), takes_words=True)
    if not options.folders:  # --help has ended in parse()
        fail("no folder is given\n\n" + __doc__.rstrip("\n"))
    if len(options.folders) > 1 and (options.against or not options.out):
        fail("with several folders, --out FILE.html must say where the page goes, and --against is refused")
    name = "report" + f"_against_{in_a_name(options.against)}" * bool(options.against) + ".html"
    options.out = Path(options.out or Path(options.folders[0]) / name)
    if options.out.suffix != ".html":
        fail(f"--out {options.out}: the page's name must end in .html")
    options.price = number("--price", options.price, float, 0.001) if options.price else None
    margin = options.margin.removesuffix("%")
    options.margin = number("--margin", margin, float, 0.001, "100") if options.margin else None
    return options


def make(options):
    from report import compare, figures, folders, numbers, page, pairs, words
    from sweep_folder import NUMBER, clean, is_a

    found = folders.read_folders(options.folders, options.against)
    names = pairs.name_recipes(found.runs + found.noise + [run for run, _ in found.failed])
    prices = [options.price] + [verdict.get("price") for verdict in found.verdicts]
    price = next((one for one in prices if is_a(NUMBER, one) and one > 0), None)
    plan = compare.plan_of(found.verdicts, options.margin)
    comparisons = compare.compare(found.runs, found.failed, names, plan, found.noise)
    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    data = numbers.everything(found, names, comparisons, price, plan.margin, options.folders, made)
    drawings, tables, data["left_out"] = figures.draw_all(found, names, comparisons, data, price)
    data["figures"] = [{"name": d.name, "title": d.title, "caption": d.caption} for d in drawings]
    singles = found.runs if not data["verdict"] else []
    data["singles"] = [{"name": run.name, "words": words.run_sentence(run, names[run.name])} for run in singles]
    models = dict.fromkeys(run.settings["model"] for run in found.runs)
    recipes = dict.fromkeys(names[run.name] for run in found.runs if not names[run.name].endswith(pairs.NULL)
                            and names[run.name] != options.against)
    title = f"{', '.join(models)}: {', '.join(recipes)}" + f" against {options.against}" * bool(options.against)
    parts = page.make_parts(data, found, comparisons, price, tables)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    page.write_all(options.out, data, parts, drawings, title)
    for line in data["verdict"] or data["singles"]:
        print(clean(line["words"]))
    for text in data["notes"]:
        print(f"note: {clean(text)}")
    for problem in found.problems:
        print(f"warning: {clean(problem)}", file=sys.stderr)
    print(f"{options.out}: {len(drawings)} figures, {options.out.stat().st_size / 1000:.0f} kB")


def main():
    options = read_options(sys.argv[1:])
    venv.need("run scripts/setup_report.sh, which installs the libraries of the reports", *venv.LIBRARIES)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        make(options)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
