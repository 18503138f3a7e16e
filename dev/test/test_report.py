#!/usr/bin/env python3
"""Tests scripts/report.py on logs that this test makes: with known differences, damaged, and half-written.

The numbers of report.json are compared with computations in this file. If this Python lacks the libraries of the
report, build/report-venv (scripts/setup_report.sh) runs the test; without build/report-venv the test is skipped. Ends
with "N passed, N failed".
"""
import html
import html.parser
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from counted import ROOT, call, check, finish, go_on_with_report_libraries  # noqa: E402

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
try:
    import jinja2  # noqa: F401
    import matplotlib  # noqa: F401
    import numpy as np
    from scipy import stats
except ImportError as missing:
    go_on_with_report_libraries(missing, "the report")

from report_logs import (BRANCH, HORIZONS, STEPS, branch_losses, branches_folder, tokens_at,  # noqa: E402
                         make_losses, records_of, settings, step_record, sweep_folder, verdict_folder, write)

SIZE = 600_000


def close(got, expected, what, tolerance=1e-9):
    check(got is not None and np.allclose(got, expected, rtol=tolerance, atol=1e-12), f"{what}: {got}, not {expected}")


def load_program():
    """Returns scripts/report.py as a module. Its libraries take seconds to load, so most tests call it in-process."""
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("report_program", ROOT / "scripts" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAM = load_program()


def report(*arguments, status=0, rendered=0, parts=None, drawn=True):
    """Runs scripts/report.py and checks its exit status. Returns (stdout, stderr). Figures are drawn, unless `drawn` is
    false, but at most `rendered` of a kind are turned into SVG and PNG, of the `parts` of the page that no other test
    renders (ALL=1: all): that takes most of the time."""
    from report import figures, style
    finish, draw_all, seen = style.finish, figures.draw_all, {}

    def finish_some(figure, part, name, *about):
        kind = name if part == "speed" else name.split("-")[0]
        seen[kind] = seen.get(kind, 0) + 1
        if rendered and (os.environ.get("ALL") or seen[kind] <= rendered and (not parts or part in parts)):
            return finish(figure, part, name, *about)
        return style.Drawing(part, name, *about, "<svg></svg>", b"\x89PNG\r\n\x1a\n")

    style.finish = finish_some
    figures.draw_all = draw_all if drawn else lambda *about: ([], {}, [])
    try:
        code, out, error = call(PROGRAM.main, *arguments)
    finally:
        style.finish, figures.draw_all = finish, draw_all
    check(code == status and "Traceback" not in error, f"status {status} of report.py {arguments} expected: {error}")
    return out, error


def test_command_line(tmp):
    """The files of --out, and the errors of the program: a missing folder, and missing libraries. test_verdict.py
    starts the program with all that it needs.
    """
    folder = two_runs(tmp / "program")
    out, error = report(folder, "--out", tmp / "page.html")
    check("page.html: " in out and not error, f"--out page.html succeeds and prints its path: {out}{error}")
    check(all((tmp / f"page.{kind}").is_file() for kind in ("html", "json", "md")),
          "--out page.html also writes page.json and page.md")
    check(not (folder / "report.html").exists(), "--out writes no report.html in the folder")
    _, error = report(tmp / "absent", status=1)
    check(error.startswith("error: "), f"a missing folder is refused: {error}")
    bare = dict(os.environ, IN_REPORT_VENV="1", PYTHONPATH="")
    ended = subprocess.run([sys.executable, "-S", ROOT / "scripts" / "report.py", folder], capture_output=True,
                           text=True, env=bare)
    check(ended.returncode == 1 and "run scripts/setup_report.sh" in ended.stderr,
          f"without libraries the error names the script that installs them: {ended}")


def numbers(path):
    """Reads report.json and refuses NaN and infinities."""
    def refuse(word):
        raise ValueError(word)
    return json.loads(path.read_text(), parse_constant=refuse)


# ---- numbers


def t_interval(values, alpha=0.05):
    half = stats.t.ppf(1 - alpha / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return np.mean(values), np.mean(values) - half, np.mean(values) + half


def validation_interval(table):
    """The mean of [trunks, 4 blocks of sequences] and its interval: two crossed random factors, by sums over the table.
    The part of sequences counts 1.25 times, for documents that lie in two blocks."""
    table = table.reshape(len(table), 4, -1).mean(axis=2)
    seeds, sequences = table.shape
    mean, rows, columns = table.mean(), table.mean(axis=1), table.mean(axis=0)
    ms_rows = sequences * sum((row - mean)**2 for row in rows) / (seeds - 1)
    ms_columns = seeds * sum((column - mean)**2 for column in columns) / (sequences - 1)
    ms_rest = sum((table[i, j] - rows[i] - columns[j] + mean)**2 for i in range(seeds) for j in range(sequences))
    ms_rest /= (seeds - 1) * (sequences - 1)
    size = seeds * sequences
    of_rows, of_columns = ms_rows / size, 1.25 * max(ms_columns - ms_rest, 0) / size
    degrees = (of_rows + of_columns)**2 / (of_rows**2 / (seeds - 1) + of_columns**2 / (sequences - 1))
    half = max(math.sqrt(of_rows + of_columns) * stats.t.ppf(0.975, degrees),
               math.sqrt(of_rows) * stats.t.ppf(0.975, seeds - 1))
    return mean, mean - half, mean + half


def test_numbers(tmp):
    """3 seeds; FP8 has 0.03 more loss, is 1.3 times as fast and takes 0.8 of the energy."""
    folder = tmp / "numbers"
    table, last = [], STEPS // 4
    means = []
    for seed in (42, 43, 44):
        write(folder / f"tiny.bf16.s{seed}", records_of("bf16", seed, joules=5.0))
        write(folder / f"tiny.fp8.s{seed}", records_of("fp8", seed, difference=0.03, ms=10 / 1.3, joules=4.0))
        bf16, fp8 = make_losses(seed, seed, 0.0), make_losses(seed, seed, 0.03)
        means.append((fp8[0] - bf16[0])[-last:].mean())
        table.append(fp8[1] - bf16[1])
    out, _ = report(folder, "--price", "2.5", rendered=2)
    data = numbers(folder / "report.json")
    one = data["comparisons"][0]
    check(len(data["comparisons"]) == 1 and len(one["pairs"]) == 3 and not one["refused"] and one["design"] == "whole",
          f"three pairs are compared: {one['pairs']}")
    got = one["training"]
    check(one["training_last_steps"] == last, f"training_last_steps is {last}: {one['training_last_steps']}")
    close([got["estimate"], got["low"], got["high"]], t_interval(means), "training difference")
    got = one["validation"]
    close([got["estimate"], got["low"], got["high"]], validation_interval(np.array(table)), "validation difference")
    check(one["verdict"] == "costs" and out.startswith("FP8 tensorwise from step 0 costs between 0."),
          f"the verdict is that FP8 costs loss: {out}")
    check("measured at 51,200 tokens (0.36 per parameter), 128 tokens per step; saving not determined." in out and
          "24 validation sequences are too few" in out and "pre-training takes 100,000" in out,
          f"the sentence has its tokens, and notes warn: {out}")
    close(one["tokens_per_second_ratio"], 1.3, "speed")
    tokens = 128 * STEPS
    mean_joules = np.mean([1 + 0.01 * (step % 3) for step in range(1, STEPS + 1)])
    close(one["kwh_per_billion_tokens"], [j * mean_joules * STEPS / tokens * 1e9 / 3.6e6 for j in (5.0, 4.0)], "energy")
    seconds = sum(0.01 * (1 + 0.01 * (step % 5)) for step in range(1, STEPS + 1))
    close(one["money_per_billion_tokens"], [seconds / f / 3600 * 2.5 / tokens * 1e9 for f in (1, 1.3)], "money")
    check(one["speedup"] is None and "runs of another length" in one["missing"]["speedup"],
          f"one length gives no speed-up at equal loss: {one['missing']}")
    curve = one["difference_over_steps"]
    differences = np.array([make_losses(s, s, 0.03)[0] - make_losses(s, s, 0.0)[0] for s in (42, 43, 44)])
    first = STEPS % one["window"]
    close(curve["estimate"], differences.mean(axis=0)[first:].reshape(-1, one["window"]).mean(axis=1), "over steps")
    close([curve["low"][-1], curve["high"][-1]], t_interval(differences[:, -one["window"]:].mean(axis=1))[1:],
          "the last window")
    runs = {run["name"]: run for run in data["runs"]}
    close(runs["tiny.bf16.s42"]["last_loss"], make_losses(42, 42, 0.0)[0][-20:].mean(), "last loss")
    close(runs["tiny.bf16.s42"]["tokens_per_second"], 12800 / 1.02, "tokens per second")
    check_page(folder / "report.html", data, ("loss-intervals", "difference-", "loss-steps", "loss-time", "loss-energy",
                                              "loss-money", "validation-", "norm-", "speed-steps", "norms-"))


def test_same(tmp):
    """Runs that differ by 1e-6 show no difference. One pair tells nothing, whatever its steps say. A shorthand counts
    as the options that it sets."""
    folder = tmp / "same"
    for seed in (42, 43, 44):
        write(folder / f"bf16.{seed}", records_of("bf16", seed))
        write(folder / f"fp8.{seed}", records_of("fp8", seed, rounding=seed, difference=1e-6, fast="on"))
    report(folder)
    one = numbers(folder / "report.json")["comparisons"][0]
    check(one["verdict"] == "same", f"FP8 that differs by 1e-6 gets the verdict \"same\": {one['verdict']}")
    shutil.rmtree(folder / "fp8.43")
    shutil.rmtree(folder / "fp8.44")
    for margin in ([], ["--margin", "0.5"]):
        out, _ = report(folder, *margin, drawn=not margin)
        one = numbers(folder / "report.json")["comparisons"][0]
        check("FP8 tensorwise from step 0: one pair cannot tell what it costs in loss, measured at" in out and
              out.startswith("Undecided: ") == bool(margin), f"one pair cannot tell: {out}")
        check(one["verdict"] == "none" and one["training"]["low"] is None and one["validation"]["low"] is None,
              f"one pair has no interval and no tag: {one['verdict']}")


def test_rounding(tmp):
    """Rounding seeds are averaged within a seed. BF16 runs that differ in them alone are null pairs."""
    folder = tmp / "rounding"
    values = {"bf16": [], "fp8": []}
    for rounding in (1, 2, 3):
        for precision, difference in (("bf16", 0.0), ("fp8", 0.002)):
            write(folder / f"{precision}.r{rounding}", records_of(precision, 42, rounding, difference))
            values[precision].append(make_losses(42, rounding, difference))
    out, _ = report(folder)
    one, null = numbers(folder / "report.json")["comparisons"]
    check(len(one["pairs"]) == 3 and one["seeds"] == [42] and "one pair cannot tell" in out,
          f"three rounding seeds of one seed make three pairs of one trunk: {one['pairs']}")
    bf16, fp8 = (np.mean([v[1] for v in values[name]], axis=0) for name in ("bf16", "fp8"))
    close(one["validation"]["estimate"], (fp8 - bf16).mean(), "mean over rounding seeds")
    check(null["null"] and len(null["pairs"]) == 2 and null["verdict"] == "none" and "other rounding seed" not in
          out.splitlines()[0], f"two null pairs, without a verdict: {null}")
    out_twice, _ = report(folder, folder / "bf16.r1", "--out", tmp / "twice.html", drawn=False)
    shutil.copytree(folder / "bf16.r1", folder / "copy")
    again, _ = report(folder, drawn=False)
    check(out.splitlines()[0] == again.splitlines()[0] == out_twice.splitlines()[0],
          f"a run that is given twice counts once: {again}")


def branch_gaps(arm, horizon, seeds=(42, 43, 44)):
    """(gaps of trunks, validation losses of BF16) by the logs' own losses."""
    bf16 = np.array([branch_losses(seed, "bf16", horizon)[1].mean() for seed in seeds])
    return np.array([branch_losses(seed, arm, horizon)[1].mean() for seed in seeds]) - bf16, bf16


def test_branches(tmp):
    """Arms that leave a trunk, at three lengths: pairs, bounds, null pairs, trend and speed-up by own computations."""
    folder = branches_folder(tmp / "branches")
    out, error = report(folder, "--margin", "0.5%", rendered=2, parts=("verdict", "tokens", "loss", "cost"))
    data = numbers(folder / "report.json")
    by = {c["recipe"]: c for c in data["comparisons"]}
    check(list(by) == ["fp8:rowwise", "fp8:tensorwise", "bf16, other rounding seed"] and not error,
          f"two recipes and the null pairs are compared: {list(by)}")
    for recipe in ("fp8:tensorwise", "fp8:rowwise"):
        one = by[recipe]
        check([h["trunks"] for h in one["over_tokens"]] == [3, 3, 3] and one["branch_step"] == BRANCH and
              one["primary"] == "validation" and one["level"] == 0.025,
              f"{recipe} has its lengths: {one['over_tokens']}")
        percent = []
        for h, horizon in zip(one["over_tokens"], HORIZONS):
            gaps, bf16 = branch_gaps(recipe, horizon)
            percent.append(100 * gaps / bf16.mean())
            close([h["gap_percent"]["estimate"], h["tokens_since_branch"]],
                  [percent[-1].mean(), 128 * (horizon - BRANCH)], f"{recipe}, {horizon} steps")
        bounds = one["bounds"]
        check(bounds["high"] - bounds["estimate"] >= (t_interval(gaps, 0.025)[2] - gaps.mean()) * (1 - 1e-9),
              f"the bounds have the level of two recipes: {bounds}")
        x = np.log2([128 * (horizon - BRANCH) for horizon in HORIZONS])
        fits = np.polyfit(x, np.array(percent), 1)
        got, far = one["trend_percent"], one["extrapolated_percent"]
        close([got["estimate"], got["low"], got["high"]], t_interval(fits[0]), "trend", 1e-6)
        at = math.log2(20 * 143680 - tokens_at(BRANCH))
        close([far["estimate"], far["low"], far["high"]], t_interval(fits[1] + fits[0] * at), "extrapolation", 1e-6)
        ends = np.array([branch_gaps(recipe, horizon)[1] for horizon in HORIZONS])
        x = np.log([tokens_at(horizon) for horizon in HORIZONS])
        before, last = np.diff(ends, axis=0) / np.diff(x)[:, None]
        slope = (last * (last / before)**((x[2] - x[1]) / (x[2] - x[0]))).mean()
        close(one["speedup"]["estimate"], 1.25 * math.exp(gaps.mean() / slope), "speed-up at equal loss", 1e-3)
    null = by["bf16, other rounding seed"]
    gaps, bf16 = branch_gaps("null", 400)
    deviation = 100 * math.sqrt((gaps**2).mean()) / branch_gaps("bf16", 400)[1].mean()
    close(one["null_deviation_percent"], [deviation, deviation * math.sqrt(3 / stats.chi2.ppf(0.1, 3))], "null pairs")
    check(null["decision"] is None and len(null["pairs"]) == 3 and one["smallest_cost_percent"] > 0, "null pairs")
    lines = out.splitlines()
    check(re.fullmatch(r"Acceptable: FP8 tensorwise after step 40 costs at most 0\.\d\d% in loss \(97\.5%\), "
                       r"measured at 56,320 tokens \(0\.39 per parameter\), 128 tokens per step; it saves \d+ to "
                       r"\d+% of the time and the money at equal loss\.", lines[0]),
          f"the decision comes first: {lines[0]}")
    check(lines[1].startswith("Not acceptable: FP8 rowwise after step 40 costs at least 0."), f"then this: {lines[1]}")
    check_page(folder / "report.html", data, ("loss-intervals", "gap-", "difference-", "speedups", "norms-"))
    for null in folder.glob("tiny.null.*"):  # the losses of its trunk
        own, trunk = null / "log.jsonl", folder / null.name.replace("null", "bf16") / "log.jsonl"
        own.write_text(own.read_text().split("\n", 1)[0] + "\n" + trunk.read_text().split("\n", 1)[1])
    out, _ = report(folder)
    check("note: bf16, other rounding seed: its losses are the trunk's" in out, f"null pairs without noise: {out}")


def test_against(tmp):
    """A verdict against an FP8 recipe: the trunk and its null arm have this recipe, and an arm another option of it.
    The log's lineage does not tell the arm from its trunk."""
    arms = {"bf16": "fp8", "null": "fp8", "fp8:tensorwise": "fp8+fp8-lm-head=on"}
    folder = branches_folder(tmp / "against", arms=arms, recipes=["fp8", "fp8+fp8-lm-head=on"], margin=0.5)
    verdict = json.loads((folder / "verdict.json").read_text())
    for run, arm in zip(verdict["runs"], [arm for _ in range(3) for arm in arms for _ in HORIZONS]):
        run["recipe"], log = arms[arm], folder / run["folder"] / "log.jsonl"
        log.write_text(log.read_text().replace('"precision": "bf16"', '"precision": "fp8"').replace(
            '"fp8_recipe": null', '"fp8_recipe": "tensorwise"').replace('"fp8_gemms": 0', '"fp8_gemms": 24'))
    (folder / "verdict.json").write_text(json.dumps(verdict))
    out, _ = report(folder)
    one, null = numbers(folder / "report.json")["comparisons"]
    check(re.match(r"Acceptable: fp8\+fp8-lm-head=on after step 40 costs at most 0\.\d\d% in loss against fp8 ", out),
          f"the decision is against fp8: {out}")
    check(one["pairs"][0]["base"] == "tiny.bf16.s42.n400" and one["against"] == "fp8" and one["level"] == 0.05 and
          null["recipe"] == "fp8, other rounding seed", f"pairs with the trunk: {one['pairs']}")
    for h, horizon in zip(one["over_tokens"], HORIZONS, strict=True):
        gaps, base = branch_gaps("fp8:tensorwise", horizon)
        close(h["gap_percent"]["estimate"], (100 * gaps / base.mean()).mean(), f"against fp8, {horizon} steps")
    page = (folder / "report.md").read_text()
    check("the arm - fp8 [95%]" in page and "BF16" not in page, "the page names fp8 and not BF16")
    parts = [tmp / "one", tmp / "two"]  # trunks of several machines
    for part, mine in zip(parts, (lambda run: ".s42." in run["folder"], lambda run: ".s42." not in run["folder"])):
        runs = [run for run in verdict["runs"] if mine(run)]
        for run in runs:
            shutil.copytree(folder / run["folder"], part / run["folder"])
        (part / "verdict.json").write_text(json.dumps({**verdict, "runs": runs}))
    check(report(*parts, "--out", tmp / "parts.html")[0].split("\n")[0] == out.split("\n")[0], "trunks of two folders")
    check("folders compare with bf16, fp8: give report.py those of one recipe" in
          report(folder, two_runs(tmp / "beside"), "--out", tmp / "x.html", status=1)[1], "beside BF16 it is refused")
    log = parts[1] / runs[0]["folder"] / "log.jsonl"
    log.write_text(log.read_text().replace('"settings": {', '"settings": {"fp8-format": "e4m3", '))
    check("folders compare with fp8, fp8 format=" in report(*parts, "--out", tmp / "x.html", status=1)[1],
          "trunks of other options are refused")


def test_arms(tmp):
    """--against an arm of BF16 trunks: the other arm's pairs are with it; trunks and null arms only show the noise."""
    base, arm = "fp8:tensorwise", "fp8:rowwise"
    folder = branches_folder(tmp / "arms", recipes=["bf16", base, arm], looks=[3], seeds=[42, 43, 44], margin=0.5)
    out, _ = report(folder, "--against", base, rendered=1, parts=("verdict",))
    data = numbers(folder / "report_against_fp8-tensorwise.json")
    one, null = data["comparisons"]
    check(re.match(r"Not acceptable: fp8:rowwise after step 40 costs at least 0\.\d\d% in loss against fp8:tensorwise "
                   r".*measured at 56,320 tokens ", out), f"the decision is against the arm: {out}")
    check(one["pairs"][0] == {"base": "tiny.fp8-tensorwise.s42.n400", "arm": "tiny.fp8-rowwise.s42.n400", "seed": 42,
                              "rounding_seed": 42} and one["seeds"] == [42, 43, 44], f"pairs of arms: {one['pairs']}")
    check((one["level"], one["branch_step"], one["against"]) == (0.05, BRANCH, base) and not one["refused"],
          f"one arm is left, after the trunk's step: {one['level']}, {one['branch_step']}, {one['refused']}")
    for h, horizon in zip(one["over_tokens"], HORIZONS, strict=True):
        (other, bf16), gaps = branch_gaps(base, horizon), branch_gaps(arm, horizon)[0]
        close([h["gap_percent"]["estimate"], h["tokens_since_branch"]],
              [100 * (gaps - other).mean() / (other + bf16).mean(), 128 * (horizon - BRANCH)], f"arms, {horizon} steps")
    steps = [*range(BRANCH + 1, 401), *range(151, 201), *range(76, 101)]  # an arm's, then those of its shorter runs
    time = sum((2 / 1.25) * (1 + 0.01 * (step % 5)) for step in steps)
    time += sum(1 + 0.01 * (step % 5) for step in range(1, BRANCH + 1))
    nulls = math.sqrt((branch_gaps("null", 400)[0]**2).mean())
    close([one["gpu_hours_per_trunk"], one["tokens_per_second_ratio"], one["null_deviation_percent"][0]],
          [10 * time / 3.6e6, 1, 100 * nulls / (other + bf16).mean()], "hours, speed and noise")
    check(null["recipe"] == "bf16, other rounding seed" and len(null["pairs"]) == 3, f"BF16's null pairs: {null}")
    page = (folder / "report_against_fp8-tensorwise.md").read_text()
    check(page.startswith("# tiny: fp8:rowwise against fp8:tensorwise\n") and "an arm of trunks in bf16" in page and
          "BF16" not in page and not (folder / "report.html").exists(), f"a page of its own, against the arm: {page}")
    for wrong in ("bf16", "fp8:mxfp8"):
        check("trunks are in bf16, and the arms with runs that can be read are fp8:tensorwise, fp8:rowwise" in
              report(folder, "--against", wrong, status=1)[1], f"--against {wrong} is refused")
    check("takes the folder of a verdict" in report(folder / "tiny.bf16.s42.n400", "--against", base, status=1)[1] and
          "--against is refused" in report(folder, folder, "--out", "x.html", "--against", base, status=1)[1],
          "--against is refused for a run, and for several folders")
    verdict = json.loads((folder / "verdict.json").read_text())
    for run in (run for run in verdict["runs"] if run["recipe"].startswith("fp8")):
        run["recipe"] = "fp8:fast+fp8-format=e4m3" if run["recipe"] == base else "fp8:fast+fp8-recipe=rowwise"
        log = folder / run["folder"] / "log.jsonl"
        fast = '"fast": "on", "fp8-format": "e4m3", "fp8-recipe": "tensorwise_bounded"'
        log.write_text(log.read_text().replace('"fp8-recipe": "tensorwise"', fast))
    (folder / "verdict.json").write_text(json.dumps(verdict))
    said = report(folder, drawn=False)[0]
    check("FP8 fast format=e4m3 after" in said and "FP8 rowwise after" in said, f"--fast and options: {said}")


def test_looks(tmp):
    """Trunks count in the order of the plan, and only at its looks."""
    for looks, seeds, counted, text in (
            ([3, 5], (42, 43, 44, 45), [42, 43, 44], "1 of 4 trunks are not counted: the planned looks are at 3 and 5"),
            ([3], (42, 43), [42, 43], "Undecided: so far, 2 of 3 trunks: FP8 rowwise"), ([2], (42, 43), [42, 43], "")):
        folder = branches_folder(tmp / f"looks{len(looks)}{len(seeds)}{looks[0]}", seeds, ("bf16", "fp8:rowwise"),
                                 HORIZONS[1:], looks=looks, seeds=[42, 43, 44, 45], recipes=["bf16", "fp8:rowwise"],
                                 margin=0.5)
        out, _ = report(folder)
        (one,) = numbers(folder / "report.json")["comparisons"]
        check(one["seeds"] == counted and text in out and one["level"] == 0.05 / len(looks),
              f"looks at {looks}: {one['seeds']}, {one['level']}, {out}")
        check((one["verdict"] == "none") == ("so far" in text), f"looks at {looks}: {one['verdict']}")
    folder = branches_folder(tmp / "long", arms=("bf16", "fp8:rowwise"), lengths=HORIZONS[:1], seeds=[42, 43],
                             looks=[2], num_steps={"tiny": HORIZONS[-1]})
    check("So far, runs of 100 of 400 steps" in report(folder)[0], "a shorter length gives no verdict")


def test_stall(tmp):
    """A step that stood still for a minute changes neither speed, time, money nor energy, and is named."""
    folder, ratios = tmp / "stall", []
    for stalled in (False, True):
        shutil.rmtree(folder, ignore_errors=True)
        for precision in ("bf16", "fp8"):
            records = [dict(record) for record in records_of(precision, 42, joules=4.0)]
            for record in records[100:101] if stalled and precision == "bf16" else ():
                record.update(ms=60000.0, joules=20000.0)
            write(folder / precision, records)
        out, _ = report(folder, "--price", "1")
        (one,) = numbers(folder / "report.json")["comparisons"]
        ratios.append([one[key] for key in ("tokens_per_second_ratio", "kwh_per_billion_tokens",
                                            "money_per_billion_tokens")])
        said = "1 step of bf16 took 60 s, above 5 times the median; left out of time and energy" in out
        check(said == stalled, f"the stall is named: {out}")
    for before, after in zip(*ratios):
        close(after, before, "numbers with a stall", 1e-4)


# ---- the page


class Page(html.parser.HTMLParser):
    """Collects what a page would fetch, its figures and its JSON."""
    def __init__(self, text):
        super().__init__()
        self.fetches, self.figures, self.json, self.in_json, self.open = [], [], "", False, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            if name in attributes and not attributes[name].startswith(("#", "data:")):
                self.fetches.append((tag, attributes[name]))
        if tag == "script" and attributes.get("type") != "application/json" or tag in ("link", "iframe", "base"):
            self.fetches.append((tag, ""))
        self.in_json = tag == "script"
        if tag == "figure":
            self.open.append(attributes["id"])
        if tag == "svg" and self.open:
            self.figures.append(self.open.pop())

    def handle_data(self, data):
        if self.in_json:
            self.json += data

    def handle_endtag(self, tag):
        self.in_json = False


def check_page(path, data, figures):
    text = path.read_text()
    page = Page(text)
    check(not page.fetches and "http:" not in text and "https:" not in text, f"{path} fetches nothing: {page.fetches}")
    check(not re.search(r"@import|url\((?!['\"]?(#|data:))", text), f"no style of {path} fetches anything")
    check(json.loads(page.json)["comparisons"] == data["comparisons"],
          f"the page's JSON has the comparisons of report.json: {path}")
    check(len(text.encode()) < SIZE, f"{path} has fewer than {SIZE} bytes: {len(text.encode())}")
    check(sorted(page.figures) == sorted(figure["name"] for figure in data["figures"]),
          f"{path} has the figures of report.json: {page.figures}")
    first_view = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    check(first_view.count("<figure") <= 12, f"at most 12 figures in the first view: {first_view.count('<figure')}")
    check("stroke: #000000" not in text and "prefers-color-scheme: dark" in text, f"{path} follows a dark scheme")
    ids = re.findall(r'\sid="([^"]*)"', text)
    check(len(ids) == len(set(ids)), f"{path} has no id twice: {sorted(i for i in set(ids) if ids.count(i) > 1)[:3]}")
    for name in figures:
        check(any(figure.startswith(name) for figure in page.figures), f"{path} has a figure {name}")
    for name in page.figures:
        png = path.with_name(path.stem + "_figures") / f"{name}.png"
        check(png.is_file() and png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n", f"{png} is a PNG")
    marked = path.with_suffix(".md").read_text()
    check(data["verdict"][0]["words"] in marked.replace("**", "").replace("&lt;", "<") and
          "<" not in marked and "## Receipt" in marked,
          f"the Markdown file has the verdict and the receipt: {path}")


def test_gpu(tmp):
    """Logs like those of the GPU trainer: their figures, the receipt, and numbers of energy, memory and speed."""
    folder = verdict_folder(tmp / "gpu", seeds=(42, 43), steps=180)
    out, error = report(folder, rendered=1)
    data = numbers(folder / "report.json")
    check(not error and len(data["comparisons"]) == 3 and data["price_of_a_gpu_hour"] == 3.5,
          f"the report of a verdict has three comparisons and the price: {error}")
    check_page(folder / "report.html", data, (
        "loss-intervals", "difference-", "loss-money", "audit-", "loss-energy", "speed-tokens", "speed-tflops",
        "speed-mfu", "speed-aggregate", "waterfall-", "time", "memory", "gemms-", "strip-"))
    text = html.unescape((folder / "report.html").read_text())
    for word in ("abc1234", "580.65", "scripts/verdict.sh llama3.2-1b", "power cap in ", "fp8:mxfp8:emulate", "goodput",
                 "2 starts", "training fingerprint", "0123456789abcdef", "--fp8-filter is first"):
        check(word in text, f"the page has \"{word}\"")
    log = [json.loads(line) for line in (folder / "llama3.2-1b.bf16.s42" / "log.jsonl").read_text().splitlines()]
    steps = [record for record in log if record["type"] == "step"]
    run = [run for run in data["runs"] if run["name"] == "llama3.2-1b.bf16.s42"][0]
    close(run["joules_per_token"], sum(s["joules"] for s in steps) / (180 * 2 * 2048), "joules per token")
    close(run["memory_bytes"], max(s["memory_bytes"] for s in steps), "memory")
    rate = 2 * 2048 / sorted(s["ms"] for s in steps[10:])[85] * 1000
    check(abs(run["tokens_per_second"] / rate - 1) < 1e-3, f"tokens per second are {rate}: {run['tokens_per_second']}")
    close(run["mfu"], run["tokens_per_second"] / 2 * (7.8e9 + 1.5e5 * 2048) / 989.5e12, "MFU")
    log = folder / "llama3.2-1b.fp8-tensorwise.s43" / "log.jsonl"
    log.write_text(log.read_text()[:log.stat().st_size // 2])
    out, _ = report(folder, drawn=False)
    seeds = [one["seeds"] for one in numbers(folder / "report.json")["comparisons"]]
    check(seeds == [[42], [42, 43], [42, 43]], f"the run whose log was cut is left out: {seeds}")
    check("the pair of llama3.2-1b.fp8-tensorwise.s43 is not used yet" in out, f"the run that was cut is named: {out}")


def test_sweep(tmp):
    """A sweep's page begins with speed and names the runs out of memory. sweep_table.py needs no libraries."""
    folder = sweep_folder(tmp / "sweep", 60, ("llama3.2-1b", "qwen3-14b"), (2048,), (1, 2))
    out, error = report(folder, rendered=1, parts=("speed",))
    data = numbers(folder / "report.json")
    check_page(folder / "report.html", data, ("speed-tokens", "speed-tflops", "speed-mfu", "speed-aggregate",
                                              "speed-scaling"))
    check(len(data["runs"]) == 6 and len(data["runs_without_numbers"]) == 2 and not error,
          f"the report of a sweep has 6 runs, and 2 without numbers: {error}")
    text = (folder / "report.html").read_text()
    check("out of memory: out of GPU memory" in text and ">OOM<" in text, "the page names the runs out of memory")
    check(text.index('id="part-speed"') < text.index('id="part-verdict"'), "the page of a sweep begins with speed")
    ended = subprocess.run([sys.executable, "-S", ROOT / "scripts" / "sweep_table.py", folder], capture_output=True)
    check(ended.returncode == 0 and b"6 of 8 runs finished" in ended.stdout,
          f"sweep_table.py finds the 6 finished runs: {ended}")


def test_markup(tmp):
    """Markup in a model's name is text on the page; control and bidirectional characters reach no output. Logs with
    watts but without `throttle`, and a verdict.json whose names of GPUs are none, make a page that does not claim that
    no GPU was slowed down.
    """
    folder, name = tmp / "markup", "a</script><img src=x>&$b$"
    for precision in ("bf16", "fp8"):
        records = records_of(precision, 42, model=name, **{"fp8-recipe": "x\x1b[31m\u202ey"})
        write(folder / precision, [{**record, "watts": [300.0]} for record in records])
    (folder / "verdict.json").write_text(json.dumps({"command": "a\x1b\u202e", "gpu_names": 5,
                                                     "runs": [{"folder": "bf16"}, {"folder": "fp8"}]}))
    out, _ = report(folder, rendered=1)
    texts = [out, *[(folder / f"report.{kind}").read_text() for kind in ("html", "md", "json")]]
    check(not any(c in text for text in texts for c in "\x1b\u202e") and "x?[31m?y" in out, f"no control: {out}")
    data = numbers(folder / "report.json")
    check(data["comparisons"][0]["model"] == name,
          f"report.json has the name of the model: {data['comparisons'][0]['model']}")
    check_page(folder / "report.html", data, ("loss-steps", "strip-"))
    check("slowed down" not in texts[1], "the page does not say of logs without it that no GPU was slowed down")


def test_limit(tmp):
    """A page that would be too large loses figures, first those that matter least, and says which."""
    from report import page, style
    large = [style.Drawing(part, f"{part}-{i}", f"{part} {i}", "", "<svg>" + "x" * 180000 + "</svg>", b"")
             for part in ("speed", "strip", "loss") for i in (1, 2)]
    data = {"verdict": [], "singles": [], "notes": [], "runs_without_numbers": [], "problems": [], "runs": [],
            "left_out": [], "made": "", "sources": [],
            "receipt": {"facts": [], "common": {}, "differing": []}}
    text = page.fit(data, [page.Part(name, name) for name in ("speed", "strip", "loss")], large, "large")
    shown = [d.name for d in large if f'id="{d.name}"' in text]
    check(len(text) < SIZE and shown == ["speed-1", "loss-1", "loss-2"],
          f"speed-1, loss-1 and loss-2 are shown: {shown}")
    check("strip-2.png" in text and "speed-2.png" in text, "figures that are left out are named")


# ---- logs that cannot be compared, are damaged, or belong to an unfinished run


def two_runs(folder, seed=42, **changes):
    write(folder / "bf16", records_of("bf16", 42))
    write(folder / "fp8", records_of("fp8", seed, difference=0.01, **changes))
    return folder


def test_refused(tmp):
    """A BF16 run and an FP8 run that make no pair: the report gives the reason, and no number."""
    for name, changes, reason in (
            ("lr", {"learning-rate": 0.002}, "learning-rate is 0.001 and 0.002"),
            ("data", {"training_fingerprint": "ffffffffffffffff"}, "the data of --train-data differs"),
            ("gpu", {"device": "CPU, 2 threads"}, "device is CPU, 1 threads and CPU, 2 threads"),
            ("none", {"fp8_gemms": 0}, "nothing ran in FP8"),
            ("build", {"build": "0123456789ab"}, "build is None and 0123456789ab"),
            ("seed", {"seed": 43}, "no BF16 run has seed 43")):
        folder = two_runs(tmp / f"refused_{name}", **changes)
        out, _ = report(folder, drawn=name in ("lr", "gpu"))  # the others have the figures of "lr"
        one = numbers(folder / "report.json")["comparisons"][0]
        check(reason in out and "no verdict" in out, f"{name}: \"{reason}\" expected: {out}")
        check(one["pairs"] == [] and one["training"] is None and one["speedup"] is None,
              f"{name}: the comparison has no number: {one}")
    folder = two_runs(tmp / "refused_twice")
    write(folder / "bf16_again", records_of("bf16", 42, difference=0.001))
    out, _ = report(folder)
    check("are BF16 runs of equal settings and seed 42" in out and "no verdict" in out, f"two runs of a seed: {out}")
    folder = two_runs(tmp / "refused_double")
    write(folder / "again", records_of("fp8", 42, difference=0.001))
    out, _ = report(folder, drawn=False)
    check("again and fp8 have equal settings and seeds, but" in out and "no verdict" in out, f"two FP8 runs: {out}")


def test_energy(tmp):
    """Joules that no GPU can have taken: the report gives the reason, and no energy, but the speed."""
    for joules, reason in ((1e-4, "fp8 has 0.0099 W"), (-1.0, "fp8 has a step of -1.02 J"), (1e9, "fp8 has 9.9e+10 W")):
        folder = tmp / f"energy_{joules}"
        write(folder / "bf16", records_of("bf16", 42, joules=5.0))
        write(folder / "fp8", records_of("fp8", 42, difference=0.01, joules=joules))
        out, _ = report(folder)
        one = numbers(folder / "report.json")["comparisons"][0]
        check(reason in out and one["kwh_per_billion_tokens"] is None and one["tokens_per_second_ratio"] is not None,
              f"{joules} J: \"{reason}\" and no energy expected: {out}")


def test_broken(tmp):
    """Damaged and empty logs, logs that lack steps, and folders that are refused."""
    folder = two_runs(tmp / "broken")
    log = folder / "fp8" / "log.jsonl"
    sound = log.read_text().splitlines(keepends=True)
    for name, lines, word in (
            ("no JSON", sound[:9] + ["{\"type\": \"step\", \"st\n"] + sound[10:], "line 10: not JSON"),
            ("cut in the middle", sound[:9] + [sound[9][:40] + sound[10]] + sound[11:], "line 10: not JSON"),
            ("text as a loss", sound[:9] + [sound[9].replace('"loss": ', '"loss": "a", "x": ')] + sound[10:],
             "line 10: \"loss\" is not a number or null"),
            ("NaN", sound[:9] + [re.sub(r'"loss": [0-9.]+', '"loss": NaN', sound[9])] + sound[10:],
             "line 10: \"loss\" is not"),
            ("no settings", sound[1:], "line 1: the first record is not of type settings"),
            *[(f"{key} is {value}", [re.sub(rf'"{key}": [0-9]+', f'"{key}": {value}', sound[0])] + sound[1:],
               f"line 1: \"{key}\" is not a whole number above 0")
              for key, value in (("world_size", 0), ("sequence-length", 0), ("batch-size", 1.5), ("num-steps", -1))],
            ("no sequence length", [sound[0].replace('"sequence-length"', '"x"')] + sound[1:],
             "line 1: no \"sequence-length\""),
            ("too large a time", sound[:9] + [re.sub(r'"ms": [0-9.]+', '"ms": 1e308', sound[9])] + sound[10:],
             "line 10: \"ms\" is not a number"),
            ("too long a step", sound[:9] + [re.sub(r'"ms": [0-9.]+', '"ms": 1e12', sound[9])] + sound[10:],
             "line 10: \"ms\" is 1e+12, above 1e+09"),
            ("too large a loss", sound[:9] + [re.sub(r'"loss": [0-9.]+', '"loss": 1e20', sound[9])] + sound[10:],
             "line 10: \"loss\" is 1e+20, above 1e+06"),
            ("steps go back", sound[:30] + sound[20:], "step 20 follows step 29 without a settings record"),
            ("empty", [], "it has no whole line yet"), ("zeros", ["\0" * 50 + "\n"] + sound, "line 1: not JSON")):
        log.write_text("".join(lines))
        out, error = report(folder, drawn=name == "no JSON")  # each time those of the other run
        data = numbers(folder / "report.json")
        page = html.unescape((folder / "report.html").read_text())
        check(word in error and str(log) in error and word in page, f"{name}: \"{word}\" expected: {error}")
        check([run["name"] for run in data["runs"]] == ["bf16"] and not data["comparisons"],
              f"{name}: the damaged log is not used")
    log.write_text("".join(sound[:20] + sound[25:]))
    out, _ = report(folder)
    check("its log lacks step 20" in out and "no verdict" in out, f"a log that lacks steps gives no verdict: {out}")
    lost = tmp / "nothing"
    lost.mkdir()
    check("has no run" in report(lost, status=1)[1], "a folder without logs is refused")
    check("is not a folder" in report(tmp / "absent", status=1)[1], "a missing folder is refused")
    check("no folder is given" in report(status=1)[1], "a call without arguments is refused")
    check("--out" in report(folder, folder, status=1)[1], "two folders without --out are refused")
    shutil.rmtree(folder / "bf16")
    out, _ = report(folder)
    check(out.startswith("fp8: tiny, fp8:tensorwise, done, 400 steps, loss 3."), f"one run alone is described: {out}")
    log.write_text("".join(sound[:1]))
    check("no step is done yet" in report(folder, status=1)[1], "a run without steps is refused")


def outcome(log, in_columns):
    """What logs.read_run makes of a log: its steps and other records, or its error. in_columns: the rules for plain
    steps in columns are used, which must be those for single records."""
    from report import logs
    take_steps = logs.take_steps
    logs.take_steps = take_steps if in_columns else lambda run, lines: False
    try:
        run = logs.read_run(log.parent, "run")
        steps = {key: column.tobytes() for key, column in run.steps.numbers.items()}
        return steps, run.steps.texts, {**vars(run), "steps": None}
    except logs.Damaged as reason:
        return str(reason)
    finally:
        logs.take_steps = take_steps


def test_columns(tmp):
    """Values that no step has, in a few lines of a log: columns of steps take and refuse what single records do."""
    from report import logs
    folder = tmp / "columns"
    folder.mkdir()
    steps = [step_record(step, 3.0, 10.0, watts=[300.0, 301.0], throttle=["", "hot"]) for step in range(1, 6)]
    odd = (None, True, "x", "", -1, 0, 1.5, 1e7, 1e31, 10**400, math.nan, math.inf, [], [1], [None, 2], ["a", "b"],
           [[]], {}, {"a": 1}, "\u202e", "\x7f", "ü")
    wrong = 0
    for key in ("type", "step", "loss", "ms", "norm", "lr", "joules", "skipped", "watts", "throttle", "losses", "x"):
        for value in odd:
            for place in (0, 4):
                records = [settings("bf16", 42), *steps]
                records[1 + place] = {**steps[place], key: value}
                text = "".join(json.dumps(record, ensure_ascii=value != "ü") + "\n" for record in records)
                (folder / "log.jsonl").write_text(text)
                if outcome(folder / "log.jsonl", True) != outcome(folder / "log.jsonl", False):
                    wrong += 1
                    check(False, f"{key} {value!r} in step {place + 1}: columns and single records agree")
    check(not wrong, "columns and single records take and refuse equal values")
    run = logs.read_run(folder, "run")
    lines = "".join(json.dumps(steps[0] | {"step": step}) + "\n" for step in range(6, 2000)).encode()
    check(logs.take_steps(run, lines.splitlines(keepends=True)) and run.last_step == 1999,
          "plain steps are read in columns")


def test_fuzz(tmp):
    """Bytes changed, cut or doubled and values replaced at random: a run is read, or refused with the path of its log.
    No exception is raised.
    """
    from report import compare, folders, pairs
    folder = verdict_folder(tmp / "fuzz", seeds=(42,), steps=45)
    for log in sorted(folder.rglob("log.jsonl")):  # most lines are audits: takes a 30th of them
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for i, line in enumerate(lines) if "fp8_audit" not in line or i % 30 == 0))
    log = folder / "llama3.2-1b.fp8-tensorwise.s42" / "log.jsonl"
    sound, random = log.read_bytes(), np.random.default_rng(0)
    refused, trials = 0, 150 if os.environ.get("ALL") else 50
    for trial in range(trials):
        data, at = bytearray(sound), int(random.integers(len(sound)))
        size = int(random.integers(1, 60))
        kind = trial % 5
        if kind == 0:
            data[at] = int(random.integers(256))
        elif kind == 1:
            del data[at:at + size]
        elif kind == 2:
            data[at:at] = data[at // 2:at // 2 + size]
        elif kind == 3:
            del data[at:]
        else:
            word = random.choice([b"null", b"-1", b"[]", b"{}", b"1e999", b'"x"', b"true", b"0", b"1e30", b"1e308",
                                  b"[5]"])
            end = data.find(b",", at)
            start = data.rfind(b": ", 0, end) + 2
            data[start:end] = word
        log.write_bytes(data)
        check(outcome(log, True) == outcome(log, False), f"trial {trial}: columns and single records agree")
        try:
            found = folders.read_folders([folder])
            compare.compare(found.runs, found.failed, pairs.name_recipes(found.runs))
            refused += any(str(log) in problem for problem in found.problems)
        except Exception:
            check(False, f"trial {trial} raises no exception: {traceback.format_exc()}")
    check(0.4 * trials < refused < trials, f"over 40% of {trials} damaged logs are refused, and not all: {refused}")


def test_running(tmp):
    """A half-written last line, a run that is running, a killed one, and a resumed one that repeats steps."""
    folder = two_runs(tmp / "running")
    log = folder / "fp8" / "log.jsonl"
    sound = log.read_text().splitlines(keepends=True)
    log.write_text("".join(sound[:201]) + sound[201][:70])
    out, _ = report(folder)
    run = [run for run in numbers(folder / "report.json")["runs"] if run["name"] == "fp8"][0]
    check(run["half_written"] and run["steps"] == 200, f"a half-written last line is left out: {run}")
    check("ended without a summary after step 200 of 400" in run["state"],
          f"a killed run is reported as ended without a summary: {run['state']}")
    check("So far, step 200 of 400" in out, f"the verdict says that it holds so far: {out}")
    holder = subprocess.Popen([sys.executable, "-c", "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\n"
                               "fcntl.flock(fd, fcntl.LOCK_EX)\nprint(flush=True)\nsys.stdin.read()", folder / "fp8"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    report(folder)
    holder.communicate()
    run = [run for run in numbers(folder / "report.json")["runs"] if run["name"] == "fp8"][0]
    check("running, step 200 of 400" in run["state"], f"a running run is reported as running: {run['state']}")

    # The first start came to step 300; the second one began again at 251, with equal losses.
    again = [line.replace('"skipped": false', '"skipped": false, "again": true') for line in sound]
    log.write_text("".join(sound[:301] + sound[:1] + again[251:]))
    report(folder)
    data = numbers(folder / "report.json")
    run = [run for run in data["runs"] if run["name"] == "fp8"][0]
    check((run["starts"], run["repeated_steps"], run["complete"]) == (2, 50, True),
          f"a resumed run has two starts and 50 repeated steps: {run}")
    difference = make_losses(42, 42, 0.01)[0] - make_losses(42, 42, 0.0)[0]
    close(data["comparisons"][0]["training"]["estimate"], difference[-100:].mean(), "a resumed run")


def test_copies(tmp):
    """Copies of one trunk under other seeds are no trunks; an arm with its trunk's losses, and skips, are named."""
    for seed in (42, 43):
        write(tmp / f"copies/bf16.{seed}", [settings("bf16", seed), *list(records_of("bf16", 42))[1:]])
        write(tmp / f"copies/fp8.{seed}", [{**one, "skipped": True} if one.get("step", 9) < 4 else one for one in
                                           [settings("fp8", seed), *list(records_of("bf16", 42))[1:]]])
    out, _ = report(tmp / "copies", "--margin", "50", drawn=False)
    check(out.startswith("Undecided: trunks of several seeds have equal losses"), f"copies give no verdict: {out}")
    check("its losses are BF16's in every step" in out and "fp8.43 took no update from 3 of its steps" in out,
          f"notes tell of equal losses and of skipped steps: {out}")


def test_diverged(tmp):
    folder = two_runs(tmp / "diverged")
    log = folder / "fp8" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for record in lines:
        if record["type"] == "step" and record["step"] >= 123:
            record["loss"] = None
    log.write_text("".join(json.dumps(record) + "\n" for record in lines))
    out, _ = report(folder)
    one = numbers(folder / "report.json")["comparisons"][0]
    check("diverged: its loss is not finite from step 123 on" in out and one["verdict"] == "diverged",
          f"a run that diverged is reported as diverged: {out}")
    check(one["training"] is None, "a diverged run gives no difference")

    # A finite loss may have diverged too: the summary says so. If the BF16 run has, nothing is said of FP8.
    risen = [dict(record, diverged=True) for record in records_of("fp8", 42) if record["type"] == "summary"]
    for name, kind, text in (("bf16", "none", "no verdict; bf16 diverged"), ("fp8", "diverged", "DIVERGED in 1 of 1")):
        one = two_runs(tmp / f"risen-{name}")
        with open(one / name / "log.jsonl", "a") as file:
            file.write(json.dumps(risen[0]) + "\n")
        out, _ = report(one, "--margin", "50", drawn=False)
        check(numbers(one / "report.json")["comparisons"][0]["verdict"] == kind and text in out,
              f"the summary of {name} says that it diverged: {out}")

    # The run of one of two seeds fails: the verdict on the other seed says so. If it was not finite, it diverged.
    write(folder / "bf16.43", records_of("bf16", 43))
    write(folder / "fp8.43", records_of("fp8", 43, difference=0.01))
    log.write_text("".join(json.dumps(record) + "\n" for record in lines[:123]))
    (folder / "fp8" / "result").write_text("failed\t9\tthe gradient norm is not finite\n")
    out, _ = report(folder)
    one = numbers(folder / "report.json")["comparisons"][0]
    text = "(fp8 ended after step 122 of 400, failed: the gradient norm is not finite)"
    check(f"DIVERGED in 1 of 2 pairs {text}" in out and len(one["pairs"]) == 1, f"a run not finite diverged: {out}")
    (folder / "fp8" / "result").write_text("failed\t9\tkilled\n")
    check("1 of 2 pairs left out (fp8 ended after step 122 of 400, failed: killed)" in report(folder, drawn=False)[0],
          "a failed run leaves one pair, and the report says so")


def main():
    with tempfile.TemporaryDirectory() as scratch:
        for test in (test_command_line, test_numbers, test_same, test_rounding, test_branches, test_against, test_arms,
                     test_looks, test_stall, test_gpu, test_sweep, test_markup, test_limit, test_refused, test_energy,
                     test_broken, test_columns, test_fuzz, test_running, test_diverged,
                     test_copies):
            test(pathlib.Path(scratch))
    finish()


if __name__ == "__main__":
    main()
