"""Reads the folder of a sweep (scripts/sweep.sh) and writes tables as text and Markdown.

A file of the folder may be damaged: cut by a full disk, not UTF-8, or with values that the trainer never writes. The
kind of its run is "damaged" then, and the message gives the file and the reason.
"""
import json
import os

from runs.options import end, fail, parse, say

# Fields that the tables use from each type of log line, with the types of their values. A number that the trainer could
# not compute is null in the log and None here.
TEXT, NUMBER, NUMBER_OR_NULL, OBJECT = "text", "a number", "a number or null", "an object"
LARGEST = 1e30  # no number of a log is larger, so sums and products of a few stay finite
FIELDS = {
    "settings": {"program": TEXT, "version": TEXT, "versions": TEXT, "device": TEXT, "model": TEXT,
                 "world_size": NUMBER, "parameters": NUMBER, "fp8_gemms": NUMBER, "settings": OBJECT},
    "summary": dict.fromkeys(("steps", "skipped"), NUMBER) | dict.fromkeys(
        ("first_loss", "last_loss", "median_ms", "tokens_per_second_per_gpu", "tokens_per_second", "tflops_per_gpu",
         "mfu", "sol", "memory_bytes"), NUMBER_OR_NULL),
    "fp8_audit": {"layer": NUMBER, "linear": TEXT, "operand": TEXT, "gemm": TEXT, "sqnr_db": NUMBER_OR_NULL}}
OPTIONS = dict.fromkeys(("num-steps", "grad-accumulation-steps", "batch-size", "sequence-length"), NUMBER)

# The kinds of a run. Its file `result` begins with one of them.
KINDS = ("done", "memory", "unsupported", "failed", "skipped")


class Damaged(Exception):
    pass


def clean(text):
    """The text with "?" for every character that would break a table's line or that UTF-8 cannot encode."""
    return "".join(c if c.isprintable() else "?" for c in text)


def is_a(kind, value):
    if kind in (TEXT, OBJECT):
        return isinstance(value, str if kind == TEXT else dict)
    if value is None:
        return kind == NUMBER_OR_NULL
    try:
        return not isinstance(value, (bool, str)) and abs(value) <= LARGEST
    except (TypeError, OverflowError):  # not a number, or an integer too large for a float
        return False


def check_fields(record, fields):
    for key, kind in fields.items():
        if key not in record:
            raise Damaged("no \"%s\"" % key)
        if not is_a(kind, record[key]):
            raise Damaged("\"%s\" is not %s" % (key, kind))
        if kind == TEXT:
            record[key] = clean(record[key])


def read_line(line):
    """Parses a line of a log and checks the fields that the tables use. Returns a dictionary."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise Damaged("not UTF-8")
    except (ValueError, RecursionError):
        raise Damaged("not JSON")
    if not isinstance(record, dict) or not is_a(TEXT, record.get("type")):
        raise Damaged("no object with a \"type\"")
    if record["type"] == "settings":
        record.setdefault("fp8_gemms", 1)  # logs of version 0.1 up to 2026-11-22 lack it
    check_fields(record, FIELDS.get(record["type"], {}))
    if record["type"] == "settings":
        check_fields(record["settings"], OPTIONS)
    return record


def read_log(path):
    """Returns all lines of a finished run's log as dictionaries. The first has the settings, the last the summary.

    Raises Damaged if a line is damaged or these two are not there.
    """
    log = []
    if not os.path.isfile(path):
        raise Damaged("there is no such file")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                log.append(read_line(line))
            except Damaged as reason:
                raise Damaged("line %d: %s" % (number, reason))
    if not log or log[0]["type"] != "settings" or log[-1]["type"] != "summary":
        raise Damaged("the first line is not of type settings, or the last not of type summary" if log
                      else "it is empty")
    return log


def read_text(path):
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return file.read()


def lines_of(path):
    """The lines of a text, without empty ones; [] if there is no such file."""
    return [line for line in read_text(path).split("\n") if line] if os.path.exists(path) else []


def read_result(folder):
    """(kind, seconds, message) from the file `result` of a run, "" for what it lacks; None if there is no such file."""
    path = os.path.join(folder, "result")
    if not os.path.exists(path):
        return None
    return (list(map(clean, read_text(path).rstrip("\n").split("\t", 2))) + ["", ""])[:3]


def read_run(folder, line):
    """Returns a run of runs.txt as a dictionary.

    If its kind is "done", `settings` and `summary` are the first and the last line of its log.
    """
    words = line.split(" ", 4)
    name, length, gpus, precision, model = words if len(words) == 5 else ["", "", "", "", line]
    run = {"name": name, "model": clean(model.rsplit("/", 1)[-1]), "length": clean(length), "gpus": clean(gpus),
           "precision": clean(precision), "kind": "not run", "seconds": "0", "message": "", "log": [], "maker": None}
    path = os.path.join(folder, "runs.txt")
    try:
        if len(words) != 5:
            raise Damaged("a line is not the name, length, GPUs, precision and model of a run")
        path = os.path.join(folder, name, "result")
        if result := read_result(os.path.join(folder, name)):
            run["kind"], run["seconds"], run["message"] = result
            if run["kind"] not in KINDS:
                raise Damaged("it does not begin with %s" % " or ".join(KINDS))
        path = os.path.join(folder, name, "log.jsonl")
        if run["kind"] == "done":
            run["log"] = read_log(path)
            run["settings"], run["summary"] = run["log"][0], run["log"][-1]
            run["maker"] = [run["settings"].get(key) for key in ("program", "build", "version", "versions", "device")]
    except (Damaged, OSError) as reason:
        run["kind"], run["log"] = "damaged", []
        run["message"] = clean("%s: %s" % (path, getattr(reason, "strerror", None) or reason))
    return run


def read_runs(folder):
    return [read_run(folder, line) for line in lines_of(os.path.join(folder, "runs.txt"))]


def why_missing(run):
    """Why a run has no results, as text. "" if it has results."""
    kind = {"done": "", "memory": "out of memory", "unsupported": "unsupported here"}.get(run["kind"], run["kind"])
    return kind + (": " + run["message"] if kind and run["message"] else "")


def ran_in_fp8(run):
    """False for a finished FP8 run without any GEMM in FP8."""
    return run["kind"] != "done" or not run["precision"].startswith("fp8") or run["settings"]["fp8_gemms"] > 0


def ratio(a, b):
    """a / b. None if one is missing or b is 0."""
    return a / b if a is not None and b else None


def show(form, value):
    return "n/a" if value is None else form % value


def show_change(factor):
    """A ratio as a change in percent: 1.02 is +2.00%."""
    return show("%+.2f%%", factor and 100 * (factor - 1))


def open_to_write(path):
    return open(path, "w", encoding="utf-8", newline="")


def write_table(path, head, rows, before, after):
    """Writes a table to PATH.txt and PATH.md, between the paragraphs `before` and `after`. Returns the first's text.

    The first column is aligned left, the last is free text, the others are aligned right.
    """
    width = [max(len(row[j]) for row in [head] + rows) for j in range(len(head) - 1)]
    with open_to_write(path + ".txt") as text, open_to_write(path + ".md") as marked:
        text.write(before)
        marked.write(before + "\n")
        for i, row in enumerate([head] + rows):
            middle = [cell.rjust(w) for cell, w in zip(row[1:-1], width[1:])]
            line = "  ".join([row[0].ljust(width[0])] + middle + [row[-1]])
            text.write(line.rstrip() + "\n")
            marked.write("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
            if i == 0:
                marked.write("|---|" + "---:|" * (len(head) - 2) + "---|\n")
        text.write("\n" + after)
        marked.write("\n" + after)
    return read_text(path + ".txt")


def run_program(main, usage):
    """Runs main(FOLDER) with the only argument, a sweep's folder, prints the table that it returns, and exits with the
    status that it returns. With --help prints `usage`.
    """
    def print_table(words):
        _, folders, _ = parse(words, usage, {}, (), takes_words=True)
        if len(folders) != 1:
            fail("give one FOLDER; --help prints the usage")
        if not os.path.exists(os.path.join(folders[0], "runs.txt")):
            fail(f"{clean(folders[0])} is not a folder of scripts/sweep.sh: it has no runs.txt")
        table, status = main(folders[0])
        say(table.rstrip("\n"))
        return status

    end(print_table)
