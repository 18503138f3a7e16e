"""The table of scripts/run_recipes.sh, from the logs of its runs: printed, and written to FOLDER/recipes.txt and FOLDER/recipes.md.

usage: recipes_table.py FOLDER. Status 0: every run has a row of numbers.
"""
import json
import os
import sys

GEMMS = ("fprop", "dgrad", "wgrad")
HEAD = ["recipe", "loss", "loss diff", "tok/s/GPU", "FP8/BF16", "GiB/GPU"] + [gemm + " dB" for gemm in GEMMS] + ["lowest at"]


def read_run(folder, name, precision):
    """One run as a dictionary: its settings and summary lines and its audit lines; `missing` says why there are none."""
    run = {"precision": precision, "recipe": (precision.split(":") + ["tensorwise"])[1] if precision.startswith("fp8") else precision,
           "emulated": precision.endswith(":emulate"), "missing": "not run", "audits": [], "no_fp8": False}
    result = os.path.join(folder, name, "result")
    if not os.path.exists(result):
        return run
    kind, _, message = (open(result).read().rstrip("\n").split("\t") + ["", ""])[:3]
    run["missing"] = "" if kind == "done" else {"memory": "out of memory"}.get(kind, kind) + ": " + message
    if kind == "done":
        lines = [json.loads(line) for line in open(os.path.join(folder, name, "log.jsonl"))]
        run["settings"], run["summary"] = lines[0], lines[-1]
        run["audits"] = [line for line in lines if line["type"] == "fp8_audit"]
        run["no_fp8"] = "no product runs in FP8" in open(os.path.join(folder, name, "stdout.txt"), errors="replace").read()
    return run


def read_runs(folder):
    """All runs in their order, without those that were refused and have an emulated run in their place."""
    runs = []
    for line in open(os.path.join(folder, "runs.txt")):
        name, _, _, precision, _ = line.split(maxsplit=4)
        runs.append(read_run(folder, name, precision))
    emulated = {run["precision"] for run in runs if run["emulated"]}
    return [run for run in runs if not (run["missing"] and run["precision"] + ":emulate" in emulated)]


def lowest(audits):
    """The audit line of the lowest SQNR; null, which is what an exact operand has, does not count. None if there is no other."""
    return min((line for line in audits if line["sqnr_db"] is not None), key=lambda line: line["sqnr_db"], default=None)


def ratio(run, bf16, key):
    """A figure of the summary over that of BF16; None where there is none."""
    a, b = run["summary"][key], bf16 and bf16["summary"][key]
    return a / b if a and b else None


def audit_cells(run):
    """The lowest SQNR of each product, and where the lowest of all is."""
    cells = []
    for gemm in GEMMS:
        line = lowest([line for line in run["audits"] if line["gemm"] == gemm])
        cells.append("%.1f" % line["sqnr_db"] if line else "bf16" if run["audits"] and not any(a["gemm"] == gemm for a in run["audits"]) else "")
    line = lowest(run["audits"])
    cells.append("nothing ran in FP8" if run["no_fp8"] else "layer %d %s %s, %s" % (line["layer"], line["linear"], line["operand"], line["gemm"]) if line else "")
    return cells


def cells(run, bf16):
    """The cells of one run's row."""
    name = run["recipe"] + (" (emulated)" if run["emulated"] else "")
    if run["missing"]:
        return [name] + [""] * (len(HEAD) - 2) + [run["missing"]]
    summary = run["summary"]
    loss, speed = (None, None) if run is bf16 else (ratio(run, bf16, "last_loss"), ratio(run, bf16, "tokens_per_second_per_gpu"))
    return [name, "n/a" if summary["last_loss"] is None else "%.4f" % summary["last_loss"],
            "" if run is bf16 else "n/a" if loss is None else "%+.2f%%" % (100 * (loss - 1)), "%.0f" % summary["tokens_per_second_per_gpu"],
            "" if run is bf16 or run["emulated"] or run["no_fp8"] else "n/a" if speed is None else "%.2fx" % speed, "%.2f" % (summary["memory_bytes"] / 2**30)] + audit_cells(run)


def describe(run):
    """What all runs share, from the settings of one."""
    s = run["settings"]
    o = s["settings"]
    sizes = (s["world_size"], o["grad-accumulation-steps"], o["batch-size"], o["sequence-length"])
    return "%s, %s: %s, %s steps of %s x %s x %s x %s tokens (ranks x micro-steps x sequences x T)\n" % ((s["program"], s["device"], s["model"], o["num-steps"]) + sizes)


def main(folder):
    runs = read_runs(folder)
    bf16 = next((run for run in runs if run["precision"] == "bf16" and not run["missing"]), None)
    rows = [HEAD] + [cells(run, bf16) for run in runs]
    width = [max(len(row[j]) for row in rows) for j in range(len(HEAD) - 1)]
    about = next((describe(run) for run in runs if not run["missing"]), "")
    notes = ("loss: mean of the last 20 steps (all, if fewer); loss diff: against BF16. tok/s: median step after warm-up. GiB: peak. dB: lowest signal to\n"
             "quantization noise of the product's FP8 operands in any layer and audit; lowest at: where the lowest of all is.\n")
    if any(run["emulated"] for run in runs):
        notes += "emulated: this GPU lacks the recipe's products; operands are quantized, then multiplied in BF16. The loss is the recipe's, the speed is not.\n"
    if any(run["no_fp8"] for run in runs):
        notes += "nothing ran in FP8: all linear layers are filtered out, or their sizes do not suit the recipe; the run's stdout.txt says why for each product.\n"
    with open(os.path.join(folder, "recipes.txt"), "w") as text, open(os.path.join(folder, "recipes.md"), "w") as marked:
        text.write(about + "\n")
        marked.write(about + "\n")
        for i, row in enumerate(rows):
            line = "  ".join([row[0].ljust(width[0])] + [cell.rjust(w) for cell, w in zip(row[1:-1], width[1:])] + [row[-1]])
            text.write(line.rstrip() + "\n")
            marked.write("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
            if i == 0:
                marked.write("|---|" + "---:|" * (len(HEAD) - 2) + "---|\n")
        text.write("\n" + notes)
        marked.write("\n" + notes)
    print(open(os.path.join(folder, "recipes.txt")).read(), end="")
    return 1 if any(run["missing"] for run in runs) else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or not os.path.exists(os.path.join(sys.argv[1], "runs.txt")):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
