#!/usr/bin/env python3
"""Tests scripts/verdict.sh with the CPU trainer: pairs of runs, a restart after SIGTERM, bad options, and the report.

The numbers of report.json are compared with computations in this file from the runs' logs. The report needs
build/report-venv, which this test makes (scripts/setup_report.sh); where that fails it skips the report and says so.
Ends with "N passed, N failed".
"""
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from counted import ROOT, call, check, finish  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))
import verdict as program  # noqa: E402

STEPS, LENGTH = 60, 32
SEEDS, RECIPES = (42, 43, 44), ("fp8", "fp8:rowwise")


def options(folder, *more):
    return ["tiny", "--trainer", "./train_fp8", "--train-data", f"{folder}/s_train.bin", "--sequence-length",
            str(LENGTH), "--num-steps", str(STEPS), "--whole", "--out", f"{folder}/verdict", *more]


def verdict(*words):
    return subprocess.run(["scripts/verdict.sh", *words], cwd=ROOT, capture_output=True, text=True)


def called(*words):
    """verdict() of words with which no run starts, without a process of its own."""
    return subprocess.CompletedProcess(words, *call(lambda: program.main(list(words))))


def refuses(folder, message, *words):
    """Checks that the verdict ends before any run, with status 1 and one error line that contains `message`."""
    result = called(*words)
    lines = result.stderr.strip().splitlines()
    check(result.returncode == 1 and len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0],
          f"status 1 and one error \"{message}\" are expected: status {result.returncode}, {result.stderr[:500]}")
    check(not (pathlib.Path(folder) / "verdict").exists(), f"{message}: no folder is made")


def test_bad_options(folder):
    shards = ["--train-data", f"{folder}/s_train.bin", "--trainer", "./train_fp8", "--sequence-length", str(LENGTH),
              "--out", f"{folder}/verdict"]
    for message, words in (("no MODEL given", []), ("unknown option --bogus", ["tiny", "--bogus", "1"]),
                           ("--seeds needs a value", ["tiny", "--seeds"]),
                           ('--margin: "100" is not a number', ["tiny", *shards, "--margin", "100%"]),
                           ('"1,1" must name different', ["tiny", *shards, "--seeds", "1,1"]),
                           ('"x" is not a whole number', ["tiny", *shards, "--seeds", "x"]),
                           ('not "fp9"', ["tiny", *shards, "--recipes", "fp9"]),
                           ("has no such recipe", ["tiny", *shards, "--recipes", "fp8:bogus"]),
                           ("neither a folder nor one of", ["bogus", *shards]),
                           ("no data known for model tiny", ["tiny", "--trainer", "./train_fp8"]),
                           ("there is no program ./bogus", ["tiny", *shards, "--trainer", "./bogus"]),
                           ("no training shards", ["tiny", *shards, "--train-data", "/bogus.bin"]),
                           ("no validation shards", ["tiny", *shards, "--val-data", "/bogus.bin"]),
                           ("not a token shard", ["tiny", *shards, "--train-data", "README.md", "--val-data",
                                                  f"{folder}/s_val.bin"]),
                           ("or let data repeat with --repeat", ["tiny", *shards, "--num-steps", "999999"]),
                           ("39 steps are too few", ["tiny", *shards, "--whole", "--num-steps", "39"]),
                           ("79 steps are too few", ["tiny", *shards, "--num-steps", "79"]),
                           ("take 4 (warm-up) to", ["tiny", *shards, "--num-steps", "80", "--branch-step", "3"]),
                           ("to 39 (the", ["tiny", *shards, "--num-steps", "80", "--branch-step", "40"]),
                           ("to 63 (", ["tiny", *shards, "--num-steps", "80", "--one-length", "--branch-step", "64"]),
                           ("--rounding-seeds is for --whole", ["tiny", *shards, "--rounding-seeds", "1"]),
                           ("are for branches", ["tiny", *shards, "--whole", "--branch-step", "9"]),
                           ("are for branches", ["tiny", *shards, "--repeat", "--one-length"]),
                           ("is a pilot of branches", ["tiny", *shards, "--whole", "--recipes", "none"]),
                           ("fp8, which --against compares with", ["tiny", *shards, "--against", "fp8"]),
                           ('not "fp8+lr=1"', ["tiny", *shards, "--recipes", "fp8+lr=1"]),
                           ("--seed is set by the verdict", ["tiny", *shards, "--", "--seed", "3"]),
                           ("--msamp sets --precision", ["tiny", *shards, "--", "--msamp", "O1"]),
                           ("--resume makes no sense", ["tiny", *shards, "--", "--resume"])):
        refuses(folder, message, *words)


def test_commands(folder):
    result = verdict(*options(folder, "--dry-run", "--seeds", "7", "--rounding-seeds", "1,2", "--", "--fp8-fast-accum",
                              "none", "--batch-size", "2"))
    lines = result.stdout.splitlines()
    check(result.returncode == 0 and len(lines) == 6,
          f"--dry-run prints 6 commands: 2 rounding seeds, each with BF16 and 2 FP8 recipes: {lines}")
    check(all("--seed 7" in line and "--batch-size 2" in line for line in lines),
          f"every command has --seed 7 and --batch-size 2: {lines}")
    check([("--fp8-fast-accum none" in line) for line in lines] == [False, True, True] * 2,
          f"only FP8 commands have FP8 options: {lines}")
    check([line.split("--rounding-seed ")[1][0] for line in lines] == ["1"] * 3 + ["2"] * 3,
          f"three commands for each rounding seed: {lines}")
    check("--lr-schedule cosine" in lines[0] and "--grad-clip 1" in lines[0],
          f"a command has a cosine schedule and --grad-clip 1: {lines[0]}")
    fast = called(*options(folder, "--dry-run", "--recipes", "fp8:fast:emulate+fp8-lm-head=on", "--seeds", "7")).stdout
    check("--fast --fp8-emulate --fp8-lm-head on\n" in fast and "--precision fp8" not in fast, f"--fast: {fast}")
    repeated = called(*options(folder, "--dry-run", "--repeat")).stdout.splitlines()
    check("--learning-rate 1e-5 --lr-schedule constant" in repeated[0],
          f"with --repeat the learning rate is constant: {repeated[0]}")
    check("--grad-clip" not in repeated[0], f"with --repeat gradients are not clipped: {repeated[0]}")
    words = ["tiny", "--trainer", "./train_fp8", "--train-data", f"{folder}/s_train.bin", "--sequence-length",
             str(LENGTH), "--num-steps", "160", "--seeds", "7", "--recipes", "none", "--tokens-per-step",
             f"{2 * LENGTH},{LENGTH}", "--lr", "1e-3", "--dry-run"]
    batches = called(*words).stdout.splitlines()
    small = [line for line in batches if f"--tokens-per-step {LENGTH} " in line]
    check(len(small) == len(batches) // 2 == 6 and "--num-steps 304 " in small[0] and "e 0.000707107 " in small[0] and
          "--decay-steps 64 " in small[0] and f"tiny.b{2 * LENGTH}.bf16.s7/checkpoints/step-00000016" in small[0],
          f"smaller steps branch from the trunk, BF16 too, for as many tokens: {small}")
    refuses(folder, f"put {2 * LENGTH} first", *words[:-4], f"{LENGTH},{2 * LENGTH}", *words[-3:])
    trunk, null, arm = called("tiny", "--trainer", "./train_fp8", "--train-data", f"{folder}/s_train.bin", "--out",
                               "X", "--sequence-length", str(LENGTH), "--num-steps", "80", "--seeds", "7", "--dry-run",
                               "--against", "fp8:rowwise", "--recipes", "fp8", "--", "--fp8-filter", "last"
                               ).stdout.splitlines()[:3]
    check(all(line.endswith(" --precision fp8 --fp8-recipe rowwise --fp8-filter last") for line in (trunk, null)) and
          "--branch" not in trunk and "--rounding-seed 1007" in null and
          arm.endswith("--precision fp8 --fp8-filter last") and
          all("--branch X/tiny.fp8-rowwise.s7/checkpoints/step-00000008" in line for line in (null, arm)),
          f"--against names the recipe of the trunk and the null arm: {trunk}, {null}, {arm}")
    audits = [[line.count("--fp8-audit") for line in called(*options(folder, "--dry-run", *more)).stdout.splitlines()]
              for more in ([], ["--", "--fp8-audit=5"])]
    check(sum(audits[0]) == 2 and max(audits[0]) == 1 and max(audits[1]) == 1 and sum(audits[1]) > 2,
          f"the first seed's FP8 runs are audited, unless --fp8-audit is given: {audits}")
    check(not (pathlib.Path(folder) / "verdict").exists(), "--dry-run writes nothing")


def test_branches(folder):
    """Arms branch from the trunk's checkpoint, shorter runs from their arm's; what no run needs is removed."""
    out = pathlib.Path(folder) / "branches"
    words = ["tiny", "--trainer", "./train_fp8", "--train-data", f"{folder}/s_train.bin", "--sequence-length",
             str(LENGTH), "--num-steps", "80", "--out", str(out), "--seeds", "7", "--looks", "1", "--no-report"]
    few = ["--", "--val-steps", "6"]
    pilot = verdict(*words, "--recipes", "none", *few)
    check(pilot.returncode == 0 and pilot.stdout.count(": done in") == 6,
          f"a pilot has a trunk and a null arm, each to 26, 44 and 80 steps: {pilot.stdout}{pilot.stderr}")
    kept = sorted(path.name for path in out.glob("tiny.bf16.s7/checkpoints/step-*"))
    check(kept == ["step-00000008"], f"the trunk keeps its checkpoint of step 8, from which recipes branch: {kept}")
    one = verdict(*words, "--recipes", "none", "--one-length", "--out", f"{out}1", *few)
    check(one.returncode == 0 and one.stdout.count(": done in") == 2,
          f"with --one-length both train to 80 steps alone: {one.stdout}{one.stderr}")
    verdict(*words, "--recipes", "none", "--one-length", "--out", f"{out}1", "--seeds", "6", *few)
    order = json.loads(pathlib.Path(f"{out}1/verdict.json").read_text())["seeds"]
    check(order == [7, 6], f"seeds of a later start follow those of earlier ones, so looks count those first: {order}")
    (out / "report.json").write_text('{"pilot": ["pairs that differ in chance alone are 1% apart"]}')
    result = verdict(*words, "--recipes", "fp8+fp8-filter=first/last", *few)
    check("\npairs that differ in chance alone" in result.stdout, f"it says what the pilot saw: {result.stdout[:300]}")
    check(result.returncode == 0 and result.stdout.count("from before") == 6 and result.stdout.count(": done in") == 9,
          f"a recipe is added to the pilot: {result.stdout}{result.stderr}")
    check(sorted(out.glob("*/checkpoints/step-*")) == [out / "tiny.bf16.s7/checkpoints/step-00000008"],
          f"no arm keeps a checkpoint: {sorted(out.glob('*/checkpoints/*'))}")
    for name, first, last, filters in (("bf16.s7", 1, 80, ""), ("bf16.s7.to26", 22, 26, ""),
                                       ("bf16.s7.r1007", 9, 80, ""), ("bf16.s7.r1007.to44", 37, 44, ""),
                                       ("fp8-fp8-filter-first-last.s7", 9, 80, "first,last"),
                                       ("fp8-fp8-filter-first-last.s7.to44", 37, 44, "first,last")):
        log = [json.loads(line) for line in (out / f"tiny.{name}" / "log.jsonl").open()]
        steps = [record["step"] for record in log if record["type"] == "step"]
        check(steps == list(range(first, last + 1)) and log[0]["settings"]["fp8-filter"] == filters,
              f"{name} has the steps {first} to {last} and --fp8-filter {filters!r}: {steps[:1]} to {steps[-1:]}")
    trunk, null = ([json.loads(line) for line in (out / f"tiny.bf16.s7{end}" / "log.jsonl").open()]
                   for end in ("", ".r1007"))
    check(null[0]["branches"][0]["step"] == 8 and not trunk[0].get("branches"),
          f"the null arm's log says where it branched: {null[0].get('branches')}")
    shutil.rmtree(out / "tiny.bf16.s7" / "checkpoints")
    gone = verdict(*words, "--recipes", "fp8", *few)
    check(gone.returncode == 1 and "which is gone; remove the folders of this seed" in gone.stderr,
          f"without the trunk's checkpoint a new arm is refused: {gone.stdout}{gone.stderr}")
    base = verdict(*words, "--against", "fp8", "--recipes", "none", *few)
    check(base.returncode == 1 and "against: 'bf16' there, 'fp8' now" in base.stderr,
          f"a trunk of another recipe is refused: {base.stdout}{base.stderr}")
    looks = verdict(*words[:-3], "--seeds", "7,8", "--no-report", *few)
    check(looks.returncode == 1 and "looks: [1] there, [2] now" in looks.stderr,
          f"other looks than planned are refused: {looks.stdout}{looks.stderr}")


def finished(folder):
    """Names of the runs whose log ends with a summary of all steps."""
    names = []
    for path in pathlib.Path(folder).glob("verdict/tiny.*/log.jsonl"):
        last = path.read_text().splitlines()[-1:]
        if last and f'"type": "summary", "steps": {STEPS},' in last[0]:
            names.append(path.parent.name)
    return sorted(names)


def test_killed(folder, words):
    """Stops a verdict with SIGTERM. Returns {name: time of the log} of finished runs, which the next start keeps."""
    process = subprocess.Popen(["scripts/verdict.sh", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while len(finished(folder)) < 2 and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out = process.communicate()[0]
    kept = finished(folder)
    check("9 of 9 runs to do" in out and "minutes at the speed of BF16, until" in out and "GPU hours cost" in out,
          f"the verdict prints how long it will take: {out[:500]}")
    check(process.returncode == 128 + signal.SIGTERM and "start the verdict again to continue" in out,
          f"a stopped verdict says how to continue: status {process.returncode}, {out[-300:]}")
    check(2 <= len(kept) < 9, f"2 to 8 of 9 runs are finished when the verdict stops: {kept}")
    times = {name: (pathlib.Path(folder) / "verdict" / name / "log.jsonl").stat().st_mtime_ns for name in kept}
    refused = verdict(*options(folder, "--lr", "1e-3"))
    check(refused.returncode == 1 and "holds runs of other settings" in refused.stderr and "lr: " in refused.stderr,
          f"other settings are refused: {refused.stderr}")
    return times


def read(folder, recipe, seed):
    name = f"tiny.{recipe.replace(':', '-')}.s{seed}"
    return [json.loads(line) for line in (pathlib.Path(folder) / "verdict" / name / "log.jsonl").open()]


def tail_losses(folder, recipe, seed, last):
    return [r["loss"] for r in read(folder, recipe, seed) if r["type"] == "step"][-last:]


def test_report(folder):
    """report.json's differences are those of a computation with plain sums and a t factor from a table."""
    report = json.loads((pathlib.Path(folder) / "verdict" / "report.json").read_text())
    t_factor = 4.302652729911275  # 97.5% of Student's t with 2 degrees of freedom
    check(len(report["comparisons"]) == len(RECIPES),
          f"report.json has a comparison of each recipe: {len(report['comparisons'])}")
    for comparison, recipe in zip(report["comparisons"], RECIPES):
        training = comparison["training"]
        last = comparison["training_last_steps"]
        means = []
        for seed in SEEDS:
            bf16, fp8 = (tail_losses(folder, r, seed, last) for r in ("bf16", recipe))
            check(bf16 != fp8, f"{recipe}, seed {seed}: FP8 has other losses than BF16")
            means.append(sum(b - a for a, b in zip(bf16, fp8)) / last)
        mean = sum(means) / 3
        half = t_factor * math.sqrt(sum((m - mean)**2 for m in means) / 2 / 3)
        for key, want in (("estimate", mean), ("low", mean - half), ("high", mean + half)):
            check(abs(training[key] - want) < 1e-9, f"{recipe}: {key} is {want}: {training[key]}")
        values = []
        for seed in SEEDS:
            pair = [[r for r in read(folder, r_, seed) if r["type"] == "validation"][-1] for r_ in ("bf16", recipe)]
            check(pair[0]["step"] == STEPS and len(pair[0]["losses"]) == len(pair[1]["losses"]) > 2,
                  f"both runs have the losses of equally many sequences after the last step: {pair}")
            values.append(pair[1]["loss"] - pair[0]["loss"])
        check(abs(comparison["validation"]["estimate"] - sum(values) / 3) < 1e-9,
              f"{recipe}: the validation estimate is {sum(values) / 3}: {comparison['validation']['estimate']}")
    page = (pathlib.Path(folder) / "verdict" / "report.html").read_text()
    check(len(page) < 1_000_000 and "<svg" in page and "src=\"http" not in page,
          "report.html has fewer than 1,000,000 characters, has a figure and loads no image of another host")


def stand_in(folder, name, log, cases):
    """Makes a stand-in for the CPU trainer, which takes `log` for its own. `cases` are of a shell's case on its
    options. Returns its path."""
    program = pathlib.Path(folder) / name / "train_fp8"
    program.parent.mkdir()
    (program.parent / "log").write_text("\n".join(map(json.dumps, log)))
    program.write_text(f"""#!/bin/sh
options="$*"
log() {{
    while [ "$1" != --log-dir ]; do shift; done
    cp {program.parent}/log "$2/log.jsonl"
}}
case "$*" in
    *--list*|*--dry-run*) exec ./train_fp8 "$@" ;;
    {cases}
esac
log "$@"
""")
    program.chmod(0o755)
    return str(program)


def test_failing_trainer(folder, log):
    """A run out of memory is an answer, a crash is a failure; the verdict goes on with the other runs.

    A run that fails after it has written its summary is a failure, too, and the next start repeats it.
    """
    program = stand_in(folder, "failing", log, """
    *"--seed 8 "*"--precision fp8"*) echo "error: needs 999 GiB" >&2; exit 3 ;;
    *"--seed 9 "*"--precision fp8"*) kill -9 $$ ;;
    *"--seed 10 "*"--precision fp8"*) log "$@"; exit 1 ;;""")
    words = options(folder, "--trainer", program, "--out", f"{folder}/failing/out", "--seeds", "8,9,10,11,12",
                    "--recipes", "fp8", "--no-report")
    result, again = verdict(*words), verdict(*words)
    check(result.returncode == 1, f"a failed run gives status 1, not {result.returncode}: {result.stderr}")
    check("seed 8: out of memory: needs 999 GiB" in result.stdout and "seed 9: failed: ended with signal 9" in
          result.stdout, f"the verdict prints why two runs ended: {result.stdout}")
    check(all(f"fp8, seed {seed}: done in" in result.stdout for seed in (11, 12)),
          f"the other runs end with a loss: {result.stdout}")
    for count, start in enumerate((result, again), 1):
        check("seed 10: failed: ended with status 1 after its summary" in start.stdout,
              f"start {count}: a run that ends with status 1 after its summary has failed: {start.stdout}")
    check(again.returncode == 1 and again.stdout.count("from before") == 8,
          f"the second start keeps 8 of 10 runs: {again.stdout}")


def test_other_settings(folder, log):
    """If no run has finished, settings may change, and runs that were out of memory start again.

    The expected time has all steps and validations: a trial of 1 s a step and 60 s for a validation, and 60 steps with
    a validation after each 10 of them, make 60 + 6 x 60 = 420 s.
    """
    summary = {**log[-1], "steps": 4, "median_ms": 1000, "seconds": {"start": 0, "validation": 60}}
    program = stand_in(folder, "full", [log[0], summary], """
    *"--num-steps 4 "*) ;;
    *) echo "error: needs 999 GiB" >&2; exit 3 ;;""")
    words = options(folder, "--trainer", program, "--out", f"{folder}/full/out", "--seeds", "8", "--recipes", "fp8",
                    "--no-report")
    first, again, other = verdict(*words), verdict(*words), verdict(*words, "--lr", "1e-3")
    check("2 of 2 runs to do, 1 side by side: about 14 minutes" in first.stdout,
          f"2 runs of 420 s are expected to take 14 minutes: {first.stdout}")
    check(again.stdout.count("out of memory: needs 999 GiB, from before") == 2,
          f"with equal settings, runs out of memory are kept: {again.stdout}")
    check("so its settings are replaced (lr: '' there, '1e-3' now)" in other.stdout and "from before" not in
          other.stdout and "2 of 2 runs to do" in other.stdout,
          f"with other settings, runs out of memory start again: {other.stdout}{other.stderr}")


def test_reader_gone(folder, log):
    """If the reader of the output goes away, the runs go on. After that, another model of the same name and
    a damaged verdict.json are refused.
    """
    program = stand_in(folder, "unread", log, "")
    words = options(folder, "--trainer", program, "--out", f"{folder}/unread/out", "--seeds", "8", "--recipes", "fp8",
                    "--no-report")
    with subprocess.Popen(["scripts/verdict.sh", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        process.wait()
    for name in ("tiny.bf16.s8", "tiny.fp8.s8"):
        last = (pathlib.Path(folder) / "unread" / "out" / name / "log.jsonl").read_text().splitlines()[-1]
        check(json.loads(last)["type"] == "summary", f"{name} is finished: {last[:200]}")
    config = pathlib.Path(folder) / "namesake" / "tiny" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({
        "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0}))
    result = verdict(str(config.parent), *words[1:])
    check(result.returncode == 1 and "two models would share the folder tiny.bf16.s8" in result.stderr,
          f"another model of the same name is refused: {result.stdout}{result.stderr}")
    path = pathlib.Path(folder) / "unread" / "out" / "verdict.json"
    settings = json.loads(path.read_text())
    for damage in ({**settings, "runs": [{}]}, {**settings, "fixed": {}}, {"fixed": 3, "runs": 4}, []):
        path.write_text(json.dumps(damage))
        result = verdict(*words)
        lines = result.stderr.splitlines()
        check(result.returncode == 1 and len(lines) == 1 and "verdict.json is damaged" in lines[0]
              and "remove this one file" in lines[0],
              f"a damaged verdict.json is refused: {result.stderr[-500:]}")


def test_libraries(folder):
    """Without the report's libraries no run starts, and one line names the script that installs them."""
    scripts = pathlib.Path(folder) / "bare"
    shutil.copytree(ROOT / "scripts", scripts / "scripts")
    (scripts / "train_fp8").symlink_to(ROOT / "train_fp8")
    words = options(folder, "--out", f"{folder}/bare/out")
    result = subprocess.run([sys.executable, "-S", "scripts/verdict.py", *words], cwd=scripts, capture_output=True,
                            text=True)
    check(result.returncode == 1 and result.stderr.count("\n") == 1 and "run scripts/setup_report.sh" in result.stderr
          and not result.stdout and not (scripts / "out").exists(),
          f"without the report's libraries no run starts: {result.stdout}{result.stderr}")


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    folder = tempfile.mkdtemp()
    try:
        subprocess.run(["build/synth_stories", "--out", f"{folder}/s", "--bytes", "400000", "--seed", "3"], cwd=ROOT,
                       check=True, stdout=subprocess.DEVNULL)
        test_bad_options(folder)
        test_commands(folder)
        test_branches(folder)
        libraries = subprocess.run(["scripts/setup_report.sh"], cwd=ROOT, capture_output=True, text=True)
        words = options(folder, "--recipes", ",".join(RECIPES), "--price", "3",
                        *["--no-report"] * bool(libraries.returncode), "--", "--val-steps", "6")
        times = test_killed(folder, words)
        result = verdict(*words)
        check(len(finished(folder)) == len(SEEDS) * (1 + len(RECIPES)),
              f"all runs finish: {result.stdout}{result.stderr}")
        check(result.stdout.count("from before") == len(times),
              f"the second start keeps the finished runs: {result.stdout}")
        for name, when in times.items():
            now = (pathlib.Path(folder) / "verdict" / name / "log.jsonl").stat().st_mtime_ns
            check(now == when, f"{name}, which was finished, does not run again")
        log = read(folder, "bf16", SEEDS[0])
        test_failing_trainer(folder, log)
        test_other_settings(folder, log)
        test_reader_gone(folder, log)
        test_libraries(folder)
        if libraries.returncode:
            print(f"skipped: the report of the verdict: {libraries.stderr.strip()[-200:]}")
        else:
            check(result.returncode == 0, f"the verdict ends with status 0, not {result.returncode}: {result.stderr}")
            test_report(folder)
    finally:
        shutil.rmtree(folder)
    finish()


if __name__ == "__main__":
    main()
