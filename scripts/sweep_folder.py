"""What scripts/sweep.sh leaves in a folder, for the programs that make tables of it: its runs, and a table's text and Markdown."""
import json
import os
import sys


def read_run(folder, line):
    """A run of runs.txt as a dictionary; `settings` and `summary` are the first and the last line of its log, if its kind is "done"."""
    name, length, gpus, precision, model = line.rstrip("\n").split(" ", 4)
    run = {"name": name, "model": model.rsplit("/", 1)[-1], "length": length, "gpus": gpus, "precision": precision, "kind": "not run", "seconds": "0", "message": "", "log": []}
    result = os.path.join(folder, name, "result")
    if os.path.exists(result):
        run["kind"], run["seconds"], run["message"] = (open(result).read().rstrip("\n").split("\t", 2) + ["", ""])[:3]
    if run["kind"] == "done":
        run["log"] = [json.loads(entry) for entry in open(os.path.join(folder, name, "log.jsonl"))]
        run["settings"], run["summary"] = run["log"][0], run["log"][-1]
    return run


def read_runs(folder):
    return [read_run(folder, line) for line in open(os.path.join(folder, "runs.txt"))]


def why_missing(run):
    """Why a run has no figures, in words; "" if it has."""
    kind = {"done": "", "memory": "out of memory"}.get(run["kind"], run["kind"])
    return kind + (": " + run["message"] if kind and run["message"] else "")


def ran_in_fp8(run):
    """Whether any product of a run whose precision is FP8 did run in FP8: sweep.sh notes where none could."""
    return not run["message"].startswith("nothing ran in FP8")


def ratio(a, b):
    """a / b; None where one is missing or b is 0."""
    return a / b if a is not None and b else None


def show(form, value):
    return "n/a" if value is None else form % value


def show_change(factor):
    """A ratio as the change from 1 that it is."""
    return show("%+.2f%%", factor and 100 * (factor - 1))


def write_table(path, head, rows, before, after):
    """Prints a table, and writes it to PATH.txt and PATH.md: columns as wide as need be, the first to the left, the last free text. `before` and `after`:
    paragraphs around it."""
    width = [max(len(row[j]) for row in [head] + rows) for j in range(len(head) - 1)]
    with open(path + ".txt", "w") as text, open(path + ".md", "w") as marked:
        text.write(before)
        marked.write(before + "\n")
        for i, row in enumerate([head] + rows):
            line = "  ".join([row[0].ljust(width[0])] + [cell.rjust(w) for cell, w in zip(row[1:-1], width[1:])] + [row[-1]])
            text.write(line.rstrip() + "\n")
            marked.write("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
            if i == 0:
                marked.write("|---|" + "---:|" * (len(head) - 2) + "---|\n")
        text.write("\n" + after)
        marked.write("\n" + after)
    print(open(path + ".txt").read(), end="")


def folder_argument(usage):
    """The one argument of a program: the folder of a sweep. Ends with `usage` if it is none."""
    arguments = sys.argv[1:]
    if len(arguments) == 1 and os.path.exists(os.path.join(arguments[0], "runs.txt")):
        return arguments[0]
    sys.exit(("error: %s is no folder of scripts/sweep.sh: it has no runs.txt\n\n" % arguments[0] if len(arguments) == 1 else "") + usage)
