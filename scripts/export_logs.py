#!/usr/bin/env python3
"""usage: scripts/export_logs.py FOLDER... [--out OUT] [--follow] [--wandb]

Writes the steps and validation losses of each run's log.jsonl as TensorBoard event files. Leaves out runs that a sweep
or verdict lists as failed, with a warning. FOLDER is the --log-dir of a run, the --out folder of scripts/verdict.sh or
scripts/sweep.sh, or a folder of such folders.

  --out OUT  gets a subfolder for each run (log/tensorboard); `tensorboard --logdir OUT` shows them
  --follow   stay, and add new steps and runs every 10 seconds, until Ctrl-C
  --wandb    also make an offline W&B run of each, below OUT/wandb, for `wandb sync`; wandb must be installed

Needs the libraries that scripts/setup_report.sh installs.
"""
import sys
import time
from pathlib import Path

from report import venv
from runs.options import fail, parse

# Scalars of step records, and their names in TensorBoard.
STEP_SCALARS = {"loss": "loss/training", "norm": "optimizer/gradient_norm", "lr": "optimizer/learning_rate",
                "ms": "time/step_ms", "data_ms": "time/data_ms", "communication_ms": "time/communication_ms",
                "optimizer_ms": "time/optimizer_ms", "tokens_per_second": "speed/tokens_per_second",
                "tflops_per_gpu": "speed/tflops_per_gpu", "mfu": "speed/mfu", "sol": "speed/sol",
                "memory_bytes": "gpu/memory_bytes", "joules": "gpu/joules"}
FOLLOW_SECONDS = 10
GPU_SCALARS = {"watts": "gpu/watts", "sm_mhz": "gpu/sm_mhz", "celsius": "gpu/celsius"}


def scalars(run):
    """Yields (step, seconds since 1970, {name: value}) for each step of a run, in order. The log has no time of day:
    times are counted back from the last write of the log, as if the steps had followed each other without pauses."""
    now = (run.folder / "log.jsonl").stat().st_mtime - sum(run.column("ms")) / 1e3
    validations = {record["step"]: record["loss"] for record in run.validations}
    columns = {name: run.column(key) for key, name in STEP_SCALARS.items()}
    columns |= {f"{name}_{i}": run.column((key, i)) for key, name in GPU_SCALARS.items() for i in range(run.gpus)}
    for step, ms, *row in zip(run.column("step"), run.column("ms"), *columns.values()):
        now += ms / 1e3
        values = dict(zip(columns, row)) | {"loss/validation": validations.get(step)}
        yield step, now, {name: value for name, value in values.items() if value is not None}


def open_writer(folder, tensorboard):
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("events.out.tfevents.*"):  # from an earlier export
        path.unlink()
    return tensorboard.FileWriter(str(folder), flush_secs=3600)


def write_tensorboard(run, writer, after, waits, tensorboard):
    """Writes one event for each step after step `after`, with all values of the step. If it waits, the last step of a
    run that goes on is left for later: its validation may follow. Returns the last step written."""
    summary = tensorboard.proto.summary_pb2.Summary
    open_step = run.column("step")[-1] if waits and not run.ended else None
    for step, now, values in scalars(run):
        if step > after and step != open_step:
            writer.add_summary(summary(value=[summary.Value(tag=name, simple_value=value)
                                              for name, value in values.items()]), step, walltime=now)
            after = step
    writer.flush()
    return after


def write_wandb(run, folder, wandb):
    folder.mkdir(parents=True, exist_ok=True)
    made = wandb.init(mode="offline", dir=str(folder), project="train_fp8", name=run.name, config=run.settings)
    for step, _, values in scalars(run):
        made.log(values, step=step)
    made.finish()


def export(folders, out, writers, waits, tensorboard, wandb):
    """Exports what the logs have. writers: {run's name: (its writer, the last step written)}, empty at first."""
    from report.folders import read_folders
    try:
        found = read_folders(folders)
    except ValueError as error:
        fail(error)
    for problem in [*found.problems, *(f"{name}: {reason}" for name, reason in found.without)]:
        if not writers:
            print(f"warning: {problem}", file=sys.stderr)
    for run in found.runs:
        folder = out / run.name.replace("/", "_")  # a run's name may be a path, which must not lead out of `out`
        writer, after = writers.get(run.name) or (open_writer(folder, tensorboard), 0)
        writers[run.name] = writer, write_tensorboard(run, writer, after, waits, tensorboard)
        if wandb:
            write_wandb(run, out / "wandb", wandb)
        if writers[run.name][1] > after:
            print(f"{run.name}: {len(run.steps)} steps in {folder}", flush=True)


def main():
    o, folders, _ = parse(sys.argv[1:], __doc__, {"out": "log/tensorboard"}, ("follow", "wandb"), takes_words=True)
    if not folders:
        fail("no folder is given; --help says which folders can be given")
    if o.follow and o.wandb:
        fail("--wandb goes without --follow: its offline runs are made once")
    out = Path(o.out)
    tensorboard = venv.need("run scripts/setup_report.sh, which installs it", "tensorboardX")
    wandb = venv.need("--wandb needs it: build/report-venv/bin/pip install wandb", "wandb") if o.wandb else None
    writers = {}
    try:
        while o.follow:
            export(folders, out, writers, True, tensorboard, None)
            time.sleep(FOLLOW_SECONDS)
    except KeyboardInterrupt:
        print()
    export(folders, out, writers, False, tensorboard, wandb)
    for writer, _ in writers.values():
        writer.close()


if __name__ == "__main__":
    main()
