#!/usr/bin/env python3
"""Style that a machine can check: line length, how comments begin, trailing blanks, and the format of the code.

Code has at most 120 columns; tables between "clang-format off" and "clang-format on" may be wider. No comment begins
with a word that makes its reader guess its subject (RIDDLES), unless the word begins a subclause (SUBCLAUSE). Prints
every offender; ends with "N passed, N failed".
"""
import pathlib
import re
import subprocess
import sys
import tempfile

COLUMNS = 120
SUFFIXES = {".c": "//", ".h": "//", ".cu": "//", ".cuh": "//", ".sh": "#", ".py": "#", "Makefile": "#"}
FOLDERS = ("llmc", "dev", "data", "scripts")
RIDDLES = re.compile(r"(Of|Those|The same|What|Whatever|Whether|Where|Who|Whoever)\b", re.I)
SUBCLAUSE = re.compile(r"(Where|What|Whether)\b[^.:]*,", re.I)  # allowed, as in "Where GPUs differ, ..."


def comments(lines, mark):
    """Yields (line number, text) of the first line of comments on lines of their own, and of comments behind code that
    has no quotes.
    """
    before = False
    for number, line in enumerate(lines, 1):
        own = re.match(rf"\s*{mark}+!?\s*(.*)", line)
        if own:
            if not before and own.group(1):
                yield number, own.group(1)
            before = bool(own.group(1)) and not re.match(r"[-=]{4,}|clang-format", own.group(1))
            continue
        before = False
        behind = re.search(rf'^[^"\'`]*\S\s+{mark} (\S.*)$', line)
        if behind:
            yield number, behind.group(1)


def offenders(root):
    """Yields a line of text for each rule that a line of code breaks."""
    root = pathlib.Path(root)
    files = [p for p in root.iterdir() if p.is_file()]
    for folder in FOLDERS:
        files += (p for p in (root / folder).rglob("*") if p.is_file() and ".venv" not in p.parts)
    for path in sorted(files):
        mark = SUFFIXES.get(path.suffix) or SUFFIXES.get(path.name)
        if not mark:
            continue
        name, lines, fenced = path.relative_to(root).as_posix(), path.read_text().split("\n"), False
        for number, line in enumerate(lines, 1):
            fenced = "clang-format off" in line or (fenced and "clang-format on" not in line)
            if len(line) > COLUMNS and not fenced:
                yield f"{name}:{number}: {len(line)} columns, above {COLUMNS}"
            if line != line.rstrip():
                yield f"{name}:{number}: blanks at its end"
        for number, text in comments(lines, mark):
            if RIDDLES.match(text) and not SUBCLAUSE.match(text):
                yield f"{name}:{number}: a comment begins with \"{RIDDLES.match(text).group(1)}\": {text[:60]}"


def planted():
    """Returns True if offenders() finds exactly what is planted in a scratch tree."""
    bad = {"llmc/base/a.h": "// Of the current device.\n", "llmc/base/b.cuh": "int x;  // whether it is on\n",
           "data/c.py": "# What it makes.\n", "scripts/d.sh": "echo " + "x" * COLUMNS + "\n", "train.c": "int y; \n",
           "Makefile": "# Those of tests.\n"}
    good = {"llmc/base/e.h": "// clang-format off\n#define T " + "x" * COLUMNS + "\n// clang-format on\n",
            "dev/f.c": "// Sums rows.\n// Of each row it takes the first.\n", "README.md": "x" * 200 + "\n",
            "dev/g.py": "print('# What')\n", "dev/h.sh": "# Where nvcc is missing, nothing is compiled.\n"}
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in {**bad, **good}.items():
            path = pathlib.Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = {line.split(":")[0] for line in offenders(scratch)}
    return found == set(bad)


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    found = list(offenders(root))
    for line in found:
        print(f"FAILED: {line}")
    finds = planted()
    if not finds:
        print("FAILED: planted offenders were not found")
    formatted = subprocess.run([root / "dev/format.sh", "--check", "--no-install"], capture_output=True, text=True)
    unformatted = formatted.returncode not in (0, 3)
    if unformatted:
        print("FAILED: make check-format\n" + formatted.stderr[:4000])
    elif formatted.returncode == 3:
        print("skipped: format of the code: " + formatted.stderr.strip())
    failed = len(found) + (not finds) + unformatted
    passed = (not found) + finds + (formatted.returncode == 0)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
