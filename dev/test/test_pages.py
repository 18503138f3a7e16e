#!/usr/bin/env python3
"""Tests the pages (*.md): links, anchors, the files and commands that they name, and their lengths.

Every relative link leads to a file, and to a heading of it. Every program of the tree, make target and source file in a
code block or between backticks exists, and its options are in the program's --help. A trainer's command is also run
with --dry-run, with values for what it leaves open, and must not end with status 2 (a wrong command line). Pages that
comments name exist. Both trainers have the options of ./train_fp8, so no GPU trainer is needed. Then plants faults in a
page, and must find them. Ends with "N passed, N failed".
"""
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from test_sizes import BUDGETS

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = {"README.md": 110, "docs/RESULTS.md": 200, "docs/FP8.md": 250}
ALL_LINES = BUDGETS["README.md and docs"][0]  # README.md and docs/*.md together
COLUMNS = 120     # the widest line of prose; tables and code may be wider
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "dev", "data", "llmc"]
SOURCES = r"\.(c|h|cu|cuh|py|sh|md|yaml|sbatch|svg|csv|png)"
PROGRAM = re.compile(r"(?:\./)?((?<=\./)train_fp8(?:cu)?|(?:scripts|dev|data)/\S+\.(?:sh|py|sbatch)"
                     r"|build/(?:synth_stories|compare_checkpoints|bench_\w+|(?:asan/|fault/)?\w+_\w+|fault/replay))")
SETTING = re.compile(r"[A-Z_0-9]+=\S*")  # a word such as OMP_NUM_THREADS=1
PLACEHOLDER = re.compile(r"[A-Z][A-Z_0-9]*")
# What stands for a placeholder, or the preset that CONTRIBUTING.md adds, in a trainer's command. For any other
# placeholder it is the number 1.
VALUES = {"MODEL": "llama3.2-1b", "T": "2048", "R": "rowwise", "STATE": "coat", "BETA2": "0.95", "SHARD": "no.bin",
          "GLOB": "no.bin", "DIR": "build/no", "NAME": "rowwise", "qwen2.5-3b": "qwen2.5-7b", "models/my": "tiny",
          "models/lm": "tiny"}
# Options of mpirun and sbatch that stand between backticks, and the one that CONTRIBUTING.md adds.
OTHERS = {"--allow-run-as-root", "--bind-to", "--mca", "--requeue", "--signal", "--greeting"}
# Records of the past, whose commands and options need not exist any more.
RECORDS = ("CHANGELOG.md", "dev/LOG.md", "dev/results/")


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def help_of(program):
    """Returns the set of options that --help of a script, or of a tool in build/, names."""
    start = {".py": [sys.executable], ".sh": ["bash"]}.get(pathlib.Path(program).suffix, [])
    result = run(*start, program, "--help")
    return set(re.findall(r"--[a-z0-9][\w-]*", result.stdout + result.stderr))


def page_files():
    for name in PAGES:
        found = [ROOT / name] if name.endswith(".md") else sorted((ROOT / name).rglob("*.md"))
        yield from (path for path in found if not any(part.endswith("venv") for part in path.parts))


# ---- What a page says: prose, code and spans between backticks

def split_page(text):
    """Returns the prose of a page, with code blanked, and its code lines, with continued lines joined."""
    prose, code, fenced, before = [], [], False, "blank"
    for line in text.split("\n"):
        fence = line.startswith("```")
        fenced ^= fence
        kind = "code" if fence or fenced or (line.startswith("    ") and before != "prose") else "prose"
        kind = kind if line.strip() else "code" if before == "code" else "blank"
        if kind == "code" and not fence:
            if code and code[-1].endswith("\\"):
                code[-1] = code[-1][:-1] + line.strip()
            else:
                code.append(line.strip())
        prose.append("" if kind == "code" else line)
        before = kind
    return "\n".join(prose), code


def slug(heading):
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def anchors(text):
    return {slug(line.lstrip("#")) for line in split_page(text)[0].split("\n") if re.match("#+ ", line)}


def commands(line):
    """Yields the words of each command of a code line or span, without comments and leading settings."""
    for part in re.split(r"\s(?:&&|\|\||\||&|;)(?:\s|$)|;\s", re.sub(r"(^|\s+)#.*", "", line)):
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        words = list(itertools.dropwhile(lambda w: SETTING.fullmatch(w) or w == "do", words))
        if words:
            yield words


# ---- Checks: each yields pairs of a truth and what is wrong if it is false

def check_links(path, text):
    prose = re.sub(r"`[^`]*`", "", split_page(text)[0])
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        yield file == path or file.exists(), f"link {target}: there is no such file"
        if anchor and (file == path or file.is_file()):
            known = anchors(text if file == path else file.read_text())
            yield anchor in known, f"link {target}: the page has no such heading"


def target_exists(target, makefile):
    test = re.fullmatch(r"(?:test-|build/(?:asan/)?test_)(\w+)", target)
    bench = re.fullmatch(r"build/bench_(\w+)", target)
    if target.endswith(("-X", "_X")):
        return True
    if test:
        return any((ROOT / f"dev/test/test_{test[1]}.{end}").exists() for end in ("c", "cu", "sh", "py"))
    if bench:
        return (ROOT / f"dev/cuda/{bench[1]}.cu").exists()
    return re.search(rf"^(?:[^\s:]+ )*{re.escape(target)}(?: [^:]*)?:", makefile, re.M)


def check_make(words, makefile):
    for word in itertools.takewhile(lambda w: re.fullmatch(r"[\w./=-]+", w), words):
        if not SETTING.fullmatch(word) and not word.startswith("-"):
            yield target_exists(word, makefile), f"make {word}: there is no such target"


def dry_runs(args):
    """Yields the trainer's argument lists for a command: one for each of the words that it separates by |."""
    args = [a.strip("[]") for a in args if not re.fullmatch(r"\[?[A-Z]+\]", a)]
    for i in range(max(len(a.split("|")) for a in args)):
        picked = [a.split("|")[min(i, a.count("|"))] for a in args]
        picked = [re.sub(r"^(\d+)-\d+$", r"\1", a) for a in picked]
        yield [VALUES.get(a, "1" if PLACEHOLDER.fullmatch(a) else a) for a in picked]


def check_trainer(args, ranks, options):
    names = [re.match(r"\[?(--[\w-]+)", a)[1] for a in args if re.match(r"\[?--\w", a)]
    unknown = [n for n in names if n not in options and n not in ("--help", "--list", "--json")]
    yield not unknown, f"the trainers have no option {' '.join(unknown)}"
    if unknown or not args or "--list" in args or "--help" in args or any("..." in a or "$" in a for a in args):
        return
    uses = [i for i, a in enumerate(args) if a in ("--generate", "--evaluate")]  # these go without --dry-run
    args = [a for i, a in enumerate(args) if i not in uses and i - 1 not in uses]
    for picked in dry_runs(args):
        sizes = ["--world-size", ranks] if ranks and "--world-size" not in picked else []
        result = run("./train_fp8", *picked, *sizes, "--dry-run")
        yield result.returncode != 2, f"train_fp8 {' '.join(picked)} ends with status 2: {result.stderr.strip()}"


def check_command(words, known):
    """Checks one command, if it is of a program of the tree."""
    if words[0] == "make":
        yield from check_make(words[1:], known["makefile"])
        return
    at = next((i for i, word in enumerate(words) if PROGRAM.fullmatch(word)), None)
    if at is None:
        return
    program, args = PROGRAM.fullmatch(words[at])[1], words[at + 1:]
    if "X" in pathlib.Path(program).stem.split("_") or "MODEL" in program:
        return
    if program.startswith("train_fp8"):
        ranks = words[words.index("-np") + 1] if "-np" in words[:at] else ""
        yield from check_trainer(args, ranks, known["options"])
        return
    if program.startswith("build/") and program not in known["helps"]:
        yield from check_make([program], known["makefile"])
        return
    if not (ROOT / program).exists():
        yield False, f"{program}: there is no such program"
        return
    split = next((i for i, a in enumerate(args) if a in ("--", "[--")), len(args))
    own = known["helps"].get(program, set())
    if re.search(r"slurm|accumulation|/run_(?!recipes)", program):
        own = own | known["options"]  # these hand their words to the trainer
    for names, options in ((args[:split], own), (args[split + 1:], known["options"])):
        for word in names:
            if re.match(r"\[?--\w", word):
                name = re.match(r"\[?(--[\w-]+)", word)[1]
                yield name in options or name == "--help", f"{program}: there is no option {name}"


def check_spans(path, text, known):
    for span in re.findall(r"(?<!`)`([^`]+)`", split_page(text)[0]):
        span = " ".join(span.split())
        file = re.fullmatch(rf"(?:(?:dev|docs|data|llmc|scripts|\.github)/)[\w./*-]+{SOURCES}", span)
        if file and not re.search(r"X|[A-Z]{3,}(?!\w*\.md)|DATE", pathlib.Path(span).name):
            yield any(ROOT.glob(span)), f"`{span}`: there is no such file"
        elif re.match(r"--\w", span):
            for name in re.findall(r"(?:^|\s)(--[a-z0-9][\w-]*)", span):
                yield name in known["all"], f"`{span}`: no program has the option {name}"
        elif re.match(r"make |\./train_fp8(cu)? |mpirun |scripts/|dev/\S+\.(py|sh)|build/\w+_", span):
            for words in commands(span):
                yield from check_command(words, known)


def check_page(path, text, known):
    yield from check_links(path, text)
    if path.relative_to(ROOT).as_posix().startswith(RECORDS):
        return
    yield from check_spans(path, text, known)
    for line in split_page(text)[1]:
        for words in commands(line):
            yield from check_command(words, known)
    if path.parent.name in ("docs", ROOT.name):
        for number, line in enumerate(split_page(text)[0].split("\n"), 1):
            yield len(line) <= COLUMNS or line.startswith("|"), f"line {number} has {len(line)} columns"


def check_lengths():
    counts = {p: (ROOT / p).read_text().count("\n") for p in
              ["README.md", *(f"docs/{q.name}" for q in (ROOT / "docs").glob("*.md"))]}
    for page, most in LINES.items():
        yield counts[page] <= most, f"{page} has {counts[page]} lines, above {most}: move details to dev/"
    total = sum(counts.values())
    yield total <= ALL_LINES, f"README.md and docs/*.md have {total} lines, above {ALL_LINES}: move details to dev/"


def check_comments():
    for folder in ("llmc", "scripts", "dev", "data"):
        for path in (ROOT / folder).rglob("*"):
            if re.fullmatch(SOURCES, path.suffix) and path.is_file() and ".venv" not in path.parts:
                for name in re.findall(r"\b(?:docs/[A-Z]\w*|dev/[A-Z]\w*|dev/results/[\w-]+)\.md", path.read_text()):
                    exists = (ROOT / name).exists() or "DATE" in name
                    yield exists, f"{path.relative_to(ROOT)} names {name}, which does not exist"


def known_things():
    scripts = [p for f in ("scripts", "dev/peers", "dev/fault", "dev", "data") for p in sorted((ROOT / f).glob("*.*"))
               if p.suffix in (".sh", ".py") and p.name not in ("install.sh", "launch.sh", "tally.sh", "run_common.sh")]
    names = [str(p.relative_to(ROOT)) for p in scripts if "--help" in p.read_text() or "argparse" in p.read_text()]
    names += [n for n in ("build/synth_stories",) if (ROOT / n).exists()]
    with ThreadPoolExecutor(4) as pool:
        helps = dict(zip(names, pool.map(help_of, names)))
    options = {"--" + name for name in run("./train_fp8", "--list", "options").stdout.split()}
    return {"makefile": (ROOT / "Makefile").read_text(), "options": options, "helps": helps,
            "all": options.union(OTHERS, {"--help", "--list", "--json"}, *helps.values())}


# A sound page, and faults that must be found in it.
SOUND = """# A page

See [it](#a-page), `dev/README.md` and `--dry-run`. Prose that names `make test-options`.

    make train_fp8 CUDA_ARCH=89 && ./train_fp8 MODEL --precision bf16|fp8 --sequence-length T --dry-run   # a comment
    mpirun -np 2 ./train_fp8cu llama3.1-8b --precision fp8 --fp8-recipe R --num-steps 7-100 [--deterministic]
    scripts/sweep.sh --models tiny -- --learning-rate 1e-3
"""
PLANTED = [("#a-page", "#another-page"), ("[it](#a-page)", "[it](none.md)"), ("dev/README.md", "dev/none.md"),
           ("`--dry-run`", "`--drip-run`"), ("test-options", "test-none"), ("make train_fp8", "make train_fp9"),
           ("bf16|fp8", "bf16|fp9"), ("--sequence-length", "--sequence-lengths"), ("--fp8-recipe R", "--fp8-recipe no"),
           ("--deterministic", "--determined"), ("scripts/sweep.sh", "scripts/swept.sh"), ("--models", "--modules"),
           ("--learning-rate", "--learning"), ("7-100", "many")]


def main():
    known, failures, passed = known_things(), [], 0
    results = [(f"{path.relative_to(ROOT)}: ", pair) for path in page_files()
               for pair in check_page(path, path.read_text(), known)]
    results += [("", pair) for pair in itertools.chain(check_lengths(), check_comments())]
    results += [("the sound page: ", pair) for pair in check_page(ROOT / "PAGE.md", SOUND, known)]
    for good, bad in PLANTED:
        found = [m for ok, m in check_page(ROOT / "PAGE.md", SOUND.replace(good, bad, 1), known) if not ok]
        results.append(("", (len(found) > 0, f"a planted fault, {bad} in place of {good}, was not found")))
    for where, (ok, message) in results:
        passed += bool(ok)
        if not ok:
            failures.append(where + message)
    print(*(f"FAILED: {f}" for f in failures), f"{passed} passed, {len(failures)} failed", sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
