"""Finds the runs of a verdict's, a sweep's or any other folder, and reads them."""
import contextlib
import dataclasses
import json
from pathlib import Path

import sweep_folder
from report import logs
from sweep_folder import clean

DEPTH = 3  # levels below a given folder in which runs are looked for


@dataclasses.dataclass
class Found:
    """What folders hold. `without`: (name, reason) of runs without numbers; `problems`: what a reader must know."""
    runs: list = dataclasses.field(default_factory=list)
    without: list = dataclasses.field(default_factory=list)
    failed: list = dataclasses.field(default_factory=list)       # (run, reason): ended early, with some steps
    problems: list = dataclasses.field(default_factory=list)
    verdicts: list = dataclasses.field(default_factory=list)   # verdict.json of each folder
    commands: list = dataclasses.field(default_factory=list)   # commands of sweeps
    noise: list = dataclasses.field(default_factory=list)      # runs of trunks' recipe if set_base took another base
    notes: list = dataclasses.field(default_factory=list)
    lost_places: dict = dataclasses.field(default_factory=dict)  # (model, T, GPUs, recipe): why there are no numbers


def read_verdict(path, found):
    """Adds FOLDER/verdict.json. Returns the folders of its runs; none if it is damaged."""
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
        folders = [run["folder"] for run in verdict["runs"]]  # as the file system has them
        verdict = logs.clean_all(verdict)
        if not all(isinstance(name, str) and name and not Path(name).is_absolute() for name in folders):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        found.problems.append(f"{path} is damaged: it is not the JSON that scripts/verdict.sh writes. The runs are "
                              "read from their folders.")
        return []
    found.verdicts.append(verdict)
    return folders


def add_run(folder, name, found):
    """Reads one run, unless it has been read already. A run that has no numbers is added to `without`, and also to
    `failed`, so that the verdict names it, if it failed and its log has steps."""
    if any(run.folder.samefile(folder) for run in found.runs if folder.is_dir()):
        return
    try:
        result = sweep_folder.read_result(folder)
        if result and result[0] != "done":
            reason = sweep_folder.why_missing({"kind": result[0], "message": result[2]})
            found.without.append((clean(name), reason))
            with contextlib.suppress(logs.Damaged, OSError):
                run = logs.read_run(folder, name)
                found.failed += [(run, reason)] if run.steps else []
        elif not (folder / "log.jsonl").is_file():
            found.without.append((clean(name), "damaged: it is done but has no log.jsonl" if result else "not started"))
        else:
            run = logs.read_run(folder, name)
            if run.steps:
                found.runs.append(run)
            else:
                found.without.append((run.name, "no step is done yet"))
    except (logs.Damaged, OSError) as reason:
        reason = clean(str(reason))
        found.without.append((clean(name), f"damaged: {reason}"))
        found.problems.append(f"The run {clean(name)} is left out, because its log is damaged. {reason}")


def log_folders(folder, depth):
    """The given folder if it has a log.jsonl; else the folders up to `depth` levels below it that have one."""
    if (folder / "log.jsonl").is_file():
        return [folder]
    if depth == 0:
        return []
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return [found for path in below for found in log_folders(path, depth - 1)]


def read_folder(folder, found):
    """Reads all runs of a folder: those that its runs.txt or verdict.json lists, or else all folders in it that have a
    log.jsonl. Returns their number."""
    rows, names, before = [], [], (len(found.runs), len(found.failed))
    if (folder / "runs.txt").is_file():
        rows = sweep_folder.read_runs(folder)
        found.problems += [row["message"] for row in rows if not row["name"]]
        rows = [row for row in rows if row["name"] and row["length"].isdigit() and row["gpus"].isdigit()]
        names = [row["name"] for row in rows]
        settings = map(clean, sweep_folder.lines_of(folder / "settings.txt"))
        found.commands.append(", ".join(["scripts/sweep.sh", *settings]))
    elif (folder / "verdict.json").is_file():
        names = read_verdict(folder / "verdict.json", found)
    folders = [folder / name for name in names] or log_folders(folder, DEPTH)
    for path in folders:
        name = path.relative_to(folder).as_posix() if path != folder else path.resolve().name
        add_run(path, name, found)
    if names and not rows:
        set_recipes(found.verdicts[-1], found.runs[before[0]:] + [run for run, _ in found.failed[before[1]:]])
    reasons = dict(found.without)
    for run in rows:
        if clean(run["name"]) in reasons:
            recipe = run["precision"] if run["precision"] != "fp8" else "fp8:tensorwise"
            found.lost_places[run["model"], int(run["length"]), int(run["gpus"]), recipe] = reasons[clean(run["name"])]
    return len(folders)


def set_recipes(verdict, runs, against=""):
    """Sets `planned` of the runs of a verdict, and `against` and `recipe` if it is against an FP8 recipe, or is to
    compare arms with `against`, one of them. Returns the recipe of trunks and those of arms."""
    recipes = verdict.get("recipes")
    base, *arms = map(str, recipes if isinstance(recipes, list) and recipes else ["bf16"])
    names = {run["folder"]: str(run.get("recipe", "")) for run in verdict["runs"]}
    for run in (run for run in runs if run.name in names):
        run.planned = names[run.name]
        if against or base.startswith("fp8"):
            run.recipe = run.planned
            run.against = base if run.recipe == base else against or base
    return base, arms


def set_base(found, against):
    """Makes an arm of the only verdict the base of the others. Trunks and null arms become `noise`: they pair with each
    other alone. Raises ValueError if no run of this arm can be read."""
    if not found.verdicts:
        raise ValueError(f"--against {against} takes the folder of a verdict; here is no verdict.json that can be read")
    base, planned = set_recipes(found.verdicts[0], found.runs + [run for run, _ in found.failed], against)
    found.noise = [run for run in found.runs if run.recipe == base]
    found.runs = [run for run in found.runs if run.recipe != base]
    arms = dict.fromkeys(run.recipe for run in found.runs)
    if against not in arms:
        raise ValueError(f"--against {against}: trunks are in {base}, and the arms with runs that can be read are "
                         f"{', '.join(arms) or 'none'}; name one of these arms")
    found.verdicts[0]["recipes"] = [against] + [recipe for recipe in planned if recipe != against]
    found.notes.append(f"arms are compared with {against}, an arm of trunks in {base}; runs of {base} count in null "
                       "pairs alone, which show the noise")


def read_folders(folders, against=""):
    """Reads folders. Raises ValueError with the reason if one is no folder or has no run, or if no run can be read.
    against: an arm of a verdict's folder, with which its other arms are to be compared, instead of with trunks."""
    found = Found()
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the --log-dir of a run, or a sweep's or verdict's folder")
        if read_folder(folder, found) == 0:
            raise ValueError(f"{folder} has no run: there is no log.jsonl in it or up to {DEPTH} levels below. The "
                             "trainer writes one with --log-dir")
    if against:
        set_base(found, against)
    if not found.runs:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in found.without)
        raise ValueError(f"no run can be read:\n{reasons}")
    names = [run.name for run in found.runs]
    for run in found.runs:
        if names.count(run.name) > 1:  # runs of several folders
            run.name = run.folder.as_posix()
    return found
