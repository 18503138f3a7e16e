"""usage: scripts/recipes_table.py FOLDER

Prints the table of scripts/run_recipes.sh from the logs of its runs, and writes it to recipes.txt and recipes.md in
FOLDER. Exit status 0: every row of the table has results. Else 1.
"""
import os

from sweep_folder import ran_in_fp8, ratio, read_runs, run_program, show, show_change, why_missing, write_table

GEMMS = ("fprop", "dgrad", "wgrad")
HEAD = ["recipe", "loss", "loss diff", "tok/s/GPU", "FP8/BF16", "peak GiB"]
HEAD += [gemm + " SQNR" for gemm in GEMMS] + ["lowest SQNR at"]
NOTES = """\
loss: mean of the last 20 steps (of all steps, if fewer). loss diff: change of the loss from that of BF16, in percent.
tok/s/GPU: of the median step; the first 10 steps do not count (in runs below 20 steps, the first half). FP8/BF16:
tok/s/GPU divided by that of BF16. peak GiB: memory in use on rank 0's GPU (CPU: peak of the largest process). SQNR:
lowest signal to quantization noise ratio (dB) of the FP8 operands of these GEMMs over all layers and audits; bf16: they
have no FP8 operand.
"""
NOTE_EMULATED = """\
emulated: operands are quantized, then multiplied in BF16. So the speed is not that of the recipe.
"""
NOTE_NOT_FP8 = """\
nothing ran in FP8: all linear layers are filtered out, or their sizes do not suit the recipe. The run's command
with --dry-run marks the GEMMs whose sizes do not suit it.
"""


def is_emulated(run):
    return run["precision"].endswith(":emulate")


def runs_to_show(folder):
    """Returns the runs in order, without those that have no results but an emulated run."""
    runs = read_runs(folder)
    emulated = {run["precision"] for run in runs if is_emulated(run)}
    return [run for run in runs if not (why_missing(run) and run["precision"] + ":emulate" in emulated)]


def lowest(audits):
    """Returns the audit line with the lowest SQNR, or None. SQNR is null for an exact operand, which does not count."""
    return min((line for line in audits if line["sqnr_db"] is not None), key=lambda line: line["sqnr_db"], default=None)


def audit_cells(run):
    """Returns four cells: the lowest SQNR of each kind of GEMM ("bf16" if it reads no FP8), and where the lowest is."""
    audits = [line for line in run["log"] if line["type"] == "fp8_audit"]
    cells = []
    for gemm in GEMMS:
        of_gemm = [line for line in audits if line["gemm"] == gemm]
        line = lowest(of_gemm)
        cells.append("%.1f" % line["sqnr_db"] if line else "bf16" if audits and not of_gemm else "")
    line = lowest(audits)
    place = (line["layer"], line["linear"], line["operand"], line["gemm"]) if line else ()
    cells.append("layer %d %s %s, %s" % place if line else "")
    return cells if ran_in_fp8(run) else [""] * len(GEMMS) + ["nothing ran in FP8"]


def cells(run, bf16):
    """Returns the cells of one run's row."""
    precision, *recipe = run["precision"].split(":")
    name = (recipe or ["tensorwise"])[0] if precision.startswith("fp8") else run["precision"]
    name += " (emulated)" if is_emulated(run) else ""
    if why_missing(run):
        return [name] + [""] * (len(HEAD) - 2) + [why_missing(run)]
    s, loss, speed = run["summary"], "", ""
    if run is not bf16:
        bf16 = bf16 if bf16 and bf16["maker"] == run["maker"] else None
        base = bf16["summary"] if bf16 else {"last_loss": None, "tokens_per_second_per_gpu": None}
        loss = show_change(ratio(s["last_loss"], base["last_loss"]))
        if ran_in_fp8(run) and not is_emulated(run):
            speed = show("%.2fx", ratio(s["tokens_per_second_per_gpu"], base["tokens_per_second_per_gpu"]))
    return [name, show("%.4f", s["last_loss"]), loss, show("%.0f", s["tokens_per_second_per_gpu"]), speed,
            show("%.2f", ratio(s["memory_bytes"], 2**30))] + audit_cells(run)


def describe(run):
    """Returns a line with the program, device, model and sizes of a run."""
    s = run["settings"]
    o = s["settings"]
    sizes = "%s x %s x %s x %s" % (s["world_size"], o["grad-accumulation-steps"], o["batch-size"], o["sequence-length"])
    return "%s, %s: %s, %s steps of %s tokens (ranks x micro-steps x sequences x T)\n" % (
        s["program"], s["device"], s["model"], o["num-steps"], sizes)


def main(folder):
    runs = runs_to_show(folder)
    done = [run for run in runs if not why_missing(run)]
    bf16 = next((run for run in done if run["precision"] == "bf16"), None)
    notes = NOTES
    if any(is_emulated(run) for run in runs):
        notes += NOTE_EMULATED
    if not all(ran_in_fp8(run) for run in runs):
        notes += NOTE_NOT_FP8
    before = describe(done[0]) + "\n" if done else ""
    table = write_table(os.path.join(folder, "recipes"), HEAD, [cells(run, bf16) for run in runs], before, notes)
    return table, 0 if len(done) == len(runs) else 1


if __name__ == "__main__":
    run_program(main, __doc__)
