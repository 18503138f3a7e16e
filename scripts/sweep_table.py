#!/usr/bin/env python3
"""usage: scripts/sweep_table.py FOLDER

Prints the table of a sweep, and writes it to table.txt, table.md and table.csv (all digits and more columns) in FOLDER,
the --out folder of scripts/sweep.sh. Speeds, memory and losses come from the summary at the end of each run's
log.jsonl. scripts/sweep.sh calls this at its end.
"""
import csv
import os

from sweep_folder import (open_to_write, ran_in_fp8, ratio, read_runs, run_program, show, show_change, why_missing,
                          write_table)

HEAD = ["model", "T", "GPUs", "precision", "tok/s/GPU", "tok/s", "steps/s", "TFLOP/s/GPU", "MFU", "peak GiB", "loss",
        "FP8/BF16", "loss diff", "scaling", "note"]
CSV_HEAD = ["model", "sequence_length", "gpus", "precision", "result", "steps", "tokens_per_second_per_gpu",
            "tokens_per_second", "steps_per_second", "median_ms", "tflops_per_gpu", "mfu", "sol",
            "memory_bytes", "first_loss", "last_loss", "fp8_over_bf16_speed", "fp8_over_bf16_loss",
            "scaling_efficiency", "skipped_steps", "parameters", "device", "seconds", "message"]
ABOUT = """T: tokens in a sequence. Speeds: of the median step; the first 10 steps do not count (in runs below 20 steps,
the first half). MFU: share of the dense BF16 peak. peak GiB: memory in use on rank 0's GPU (CPU: peak of the largest
process). loss: mean of the last 20 steps (of all steps, if fewer). FP8/BF16: tok/s/GPU divided by that of the BF16 run
with equal model, T, GPUs, device and build. loss diff: change of the loss from it, in percent. scaling: tok/s/GPU
divided by that of the run on one GPU with equal model, T and precision.
"""
ABOUT_DAMAGED = "damaged: a file of the run was changed or cut; remove the run's folder and start the sweep again.\n"


def figure(run, key):
    """A number of a run's summary. None if the run is not done."""
    return run["summary"][key] if run and run["kind"] == "done" else None


def is_fp8(run):
    return run["precision"].startswith("fp8")


def compare(run, runs):
    """Adds the run's ratios, None where a run is missing: FP8 to BF16 on equal GPUs, and this number of GPUs to one."""
    def other(precision, gpus):
        return runs.get((run["model"], run["length"], precision, gpus))

    bf16 = other("bf16", run["gpus"]) if is_fp8(run) and ran_in_fp8(run) else None
    bf16 = bf16 if bf16 and bf16["maker"] == run["maker"] else None
    run["speedup"] = ratio(figure(run, "tokens_per_second_per_gpu"), figure(bf16, "tokens_per_second_per_gpu"))
    run["loss_ratio"] = ratio(figure(run, "last_loss"), figure(bf16, "last_loss"))
    run["scaling"] = ratio(figure(run, "tokens_per_second_per_gpu"),
                           figure(other(run["precision"], "1"), "tokens_per_second_per_gpu"))


def cells(run):
    """A run's row of the table."""
    row, note = [run["model"], run["length"], run["gpus"], run["precision"]], run["message"]
    if len(note) > 160:  # table.csv has the whole message
        note = note[:157] + "..."
    if run["kind"] != "done":
        return row + [""] * (len(HEAD) - 5) + [why_missing(dict(run, message=note))]
    s, fp8 = run["summary"], is_fp8(run)
    row += [show("%.0f", s["tokens_per_second_per_gpu"]), show("%.0f", s["tokens_per_second"]),
            show("%.3f", ratio(1000, s["median_ms"])),
            show("%.4f" if (s["tflops_per_gpu"] or 0) < 1 else "%.1f", s["tflops_per_gpu"]),
            show("%.1f%%", s["mfu"] and 100 * s["mfu"]),
            show("%.3f" if (s["memory_bytes"] or 0) < 2**30 else "%.1f", ratio(s["memory_bytes"], 2**30)),
            show("%.4f", s["last_loss"]), show("%.2fx", run["speedup"]) if fp8 else "",
            show_change(run["loss_ratio"]) if fp8 else "", show("%.1f%%", run["scaling"] and 100 * run["scaling"])]
    note = "diverged; " * (s.get("diverged") is True) + note
    return row + [("%d steps skipped (bad gradient norm); " % s["skipped"] if s["skipped"] else "") + note]


def csv_cells(run):
    def get(key):
        return figure(run, key)

    of = run.get("settings", {}).get
    return [run["model"], run["length"], run["gpus"], run["precision"], run["kind"], get("steps"),
            get("tokens_per_second_per_gpu"), get("tokens_per_second"), ratio(1000, get("median_ms")),
            get("median_ms"), get("tflops_per_gpu"), get("mfu"), get("sol"), get("memory_bytes"), get("first_loss"),
            get("last_loss"), run["speedup"], run["loss_ratio"], run["scaling"],
            get("skipped"), of("parameters"), of("device"), run["seconds"], run["message"]]


def main(folder):
    runs = read_runs(folder)
    at = {(run["model"], run["length"], run["precision"], run["gpus"]): run for run in runs}
    for run in runs:
        compare(run, at)
    done = [run["settings"] for run in runs if run["kind"] == "done"]
    setups = dict.fromkeys("%s %s, %s, %s\n" % (s["program"], s["version"], s["device"], s["versions"]) for s in done)
    path = os.path.join(folder, "table")
    about = ABOUT + (ABOUT_DAMAGED if any(run["kind"] == "damaged" for run in runs) else "")
    about += "%d of %d runs finished\n" % (len(done), len(runs))
    table = write_table(path, HEAD, [cells(run) for run in runs], "".join(setups), about)
    with open_to_write(path + ".csv") as file:
        csv.writer(file, lineterminator="\n").writerows([CSV_HEAD] + [csv_cells(run) for run in runs])
    return table, 0


if __name__ == "__main__":
    run_program(main, __doc__)
