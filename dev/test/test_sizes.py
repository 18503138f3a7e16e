#!/usr/bin/env python3
"""Tests limits that keep the code readable, in llmc/ and the trainers: lines of files, lines of functions, fields of
Trainer and of the structs of FSDP, lines of layer_forward. Also tests the budgets of folders, pages and options.

A function counts from the line of its opening brace to that of its closing brace. Kernels and __device__ functions have
no limit. Prints everything above its limit. Ends with "N passed, N failed".
"""
import pathlib
import re
import sys
import tempfile

FILE_LINES, FUNCTION_LINES, LAYER_FORWARD_LINES, FIELDS = 550, 40, 20, 20
TRAINERS = ("train_fp8.c", "train_fp8.cu")
# lines of files; FILE_LINES is for the others of llmc/
LIMITS = {"train_fp8.c": 1000, "train_fp8.cu": 930, "llmc/shard/fsdp.cuh": 450}
# Lines of all files that the patterns match. To add lines to a full budget, first cut as many elsewhere under it. Raise
# a budget in a commit of its own, whose message says what the added lines buy a user.
BUDGETS = {"llmc": (33690, "llmc/*/*.h", "llmc/*/*.cuh"),
           "dev/test": (29100, "dev/test/*.[chps]*", "dev/test/lib/*.[chps]*"),
           "scripts": (6580, "scripts/*.py", "scripts/*.sh", "scripts/*/*.py", "scripts/*/*.sh"),
           "README.md and docs": (1800, "README.md", "docs/*.md")}
OPTIONS = 84
FSDP_STRUCTS = ("FsdpPlan", "FsdpWeights", "FsdpGradients", "FsdpClip", "Fsdp")
# structs with at most FIELDS
STRUCTS = {"llmc/shard/fsdp_plan.cuh": FSDP_STRUCTS, "llmc/cpu/trainer.h": ("Trainer",), "train_fp8.cu": ("Trainer",)}


def functions(text):
    """Yields (name, line of the opening brace, number of lines, True for a kernel or a __device__ function) of each
    function that begins in the first column.
    """
    lines = text.split("\n")
    head = ""
    for i, line in enumerate(lines):
        if re.match(r"template\b[^(]*$", line):
            continue
        if re.match(r"[A-Za-z_]", line):
            head = line
        elif head and line[:1].isspace():
            head += " " + line.strip()
        else:
            head = ""
        code = re.sub(r"\s*//.*", "", head).rstrip()
        if not head or ";" in code.split("{")[0]:
            head = ""
            continue
        if "{" not in line:
            continue
        plain = re.sub(r"__(launch_bounds|attribute)__\s*\((\([^()]*\)|[^()])*\)", "", code)
        match = re.search(r"([A-Za-z_]\w*)\s*\((?!\()", plain)
        device = re.search(r"__global__|__device__", code)
        head = ""
        if not match or re.match(r"(typedef|struct|enum|union|class|extern)\b", code) or "=" in code.split("(")[0]:
            continue
        if line.rstrip().endswith("}") and line.count("{") == line.count("}"):
            yield match.group(1), i + 1, 1, bool(device)
            continue
        end = next((j for j in range(i + 1, len(lines)) if lines[j].startswith("}")), len(lines) - 1)
        yield match.group(1), i + 1, end - i + 1, bool(device)


def struct_fields(text, struct):
    """Returns the fields of a struct, or None if there is no such struct."""
    match = re.search(rf"typedef struct(?: \w+)? \{{((?:(?!typedef struct).)*?)\n\}} {struct};", text, re.S)
    if not match:
        return None
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", match.group(1), flags=re.S)
    body = re.sub(r"\{[^{}]*\}|\[[^\]]*\]|\([^()]*\)", "", body)
    return [name.strip() for field in body.split(";") if field.strip() for name in field.split(",")]


def over_budget(root):
    """Yields one line of text for every budget that is exceeded."""
    for name, (budget, *patterns) in BUDGETS.items():
        lines = sum(path.read_text().count("\n") for pattern in patterns for path in root.glob(pattern))
        if lines > budget:
            yield f"{name}: {lines} lines, above the budget of {budget}"
    table = root / "llmc/config/options_table.h"
    options = len(re.findall(r"^ +(?:INT|REAL|TEXT|CHOICE|FLAG)\(", table.read_text() if table.exists() else "", re.M))
    if options > OPTIONS:
        yield f"{options} options, above the budget of {OPTIONS}"


def offenders(root):
    """Yields one line of text for every size above its limit."""
    root = pathlib.Path(root)
    yield from over_budget(root)
    files = sorted(p for p in root.glob("llmc/*/*") if p.suffix in (".h", ".cuh")) + [root / name for name in TRAINERS]
    for path in files:
        name, text = path.relative_to(root).as_posix(), path.read_text()
        limit = LIMITS.get(name, None if name in TRAINERS else FILE_LINES)
        if limit and text.count("\n") > limit:
            yield f"{name}: {text.count(chr(10))} lines, above {limit}"
        found = list(functions(text))
        for function, line, lines, device in found:
            if lines > FUNCTION_LINES and not device:
                yield f"{name}:{line}: {function}() has {lines} lines, above {FUNCTION_LINES}"
        for struct in STRUCTS.get(name, ()):
            fields = struct_fields(text, struct)
            if fields is None:
                yield f"{name}: no struct {struct}"
            elif len(fields) > FIELDS:
                yield f"{name}: {struct} has {len(fields)} fields, above {FIELDS}"
        if name not in TRAINERS:
            continue
        layer_forward = [(line, lines) for function, line, lines, _ in found if function == "layer_forward"]
        if not layer_forward:
            yield f"{name}: no function layer_forward"
        for line, lines in layer_forward:
            if lines > LAYER_FORWARD_LINES:
                yield f"{name}:{line}: layer_forward() has {lines} lines, above {LAYER_FORWARD_LINES}"


def function(head, lines):
    """Returns a function of that many lines, including the line of its opening brace."""
    return head + " {\n" + "    x++;\n" * (lines - 2) + "}\n"


def struct(name, fields):
    """Returns a struct of that many fields."""
    body = "    int a, *b;  // c, d\n" * (fields // 2) + "    int e;\n" * (fields % 2)
    return "typedef struct {\n" + body + f"}} {name};\n"


def write_tree(root, trainer="", header="", fields=20, forward=20, lines=0, fsdp=0, without="", files=None,
               **fsdp_fields):
    """Makes a tree whose sizes are at their limits, except for those given by the arguments. `without`: a struct of
    FSDP that is missing. files: texts of more files. fsdp_fields: numbers of fields of structs of FSDP.
    """
    base = struct("Trainer", fields) + function("static void layer_forward(Trainer *t, int l)", forward) + trainer
    for folder in ("llmc/base", "llmc/config", "llmc/cpu", "llmc/shard", "dev/test", "docs", "scripts/report"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, most in (("train_fp8.c", 1000), ("train_fp8.cu", 930)):
        (root / name).write_text(base + "//\n" * max(0, (lines or most) - base.count("\n")))
    (root / "llmc/cpu/trainer.h").write_text(struct("Trainer", fields))
    (root / "llmc/config/options_table.h").write_text("    FLAG(a)\n" * OPTIONS)
    for name, text in (files or {}).items():
        (root / name).write_text(text)
    (root / "llmc/shard/fsdp.cuh").write_text("//\n" * (fsdp or 450))
    plan = "".join(struct(name, fsdp_fields.get(name, 20)) for name in FSDP_STRUCTS if name != without)
    (root / "llmc/shard/fsdp_plan.cuh").write_text(plan)
    (root / "llmc/base/a.h").write_text(header + "//\n" * (550 - header.count("\n")))


def self_test():
    """Yields a line of text for each planted tree in which offenders() finds other sizes than those above a limit."""
    long = function("static inline int f(int a,\n                    const char *(*b)(void))", 41)
    kernel = function("template <int N>\nstatic __global__ void __launch_bounds__(N * 2) k(int a)", 90)
    device = function("__device__ static inline void d(int a)", 90)
    table = "int t[] = {1,\n" + "1,\n" * 50 + "};\n"
    both = function("HOST_DEVICE static inline int g(int a)", 41)
    template = "static int y;\n" + function("template <int N>\nstatic int h(void)", 45)
    main_43 = function("int main(int argc, char **argv)", 43)
    budget = {name: lines for name, (lines, *_) in BUDGETS.items()}
    many = budget["llmc"] // 550
    planted = [
        (dict(), []),
        (dict(header=function("int f(void)", 40) + kernel + device + table), []),
        (dict(header=long), ["llmc/base/a.h:2: f() has 41 lines, above 40"]),
        (dict(header=both), ["llmc/base/a.h:1: g() has 41 lines, above 40"]),
        (dict(header=template), ["llmc/base/a.h:3: h() has 45 lines, above 40"]),
        (dict(header="//\n" * 551), ["llmc/base/a.h: 551 lines, above 550"]),
        (dict(lines=931), ["train_fp8.cu: 931 lines, above 930"]),
        (dict(lines=1001), ["train_fp8.c: 1001 lines, above 1000", "train_fp8.cu: 1001 lines, above 930"]),
        (dict(files={"llmc/config/options_table.h": "    INT(a)\n" * OPTIONS + "    TEXT(b)\n"}),
         [f"{OPTIONS + 1} options, above the budget of {OPTIONS}"])]
    planted += [(dict(files={first: "#\n" * budget[name], second: "#\n"}),
                 [f"{name}: {budget[name] + 1} lines, above the budget of {budget[name]}"]) for name, first, second in (
        ("dev/test", "dev/test/test_a.sh", "dev/test/test_b.py"), ("scripts", "scripts/a.py", "scripts/report/b.py"),
        ("README.md and docs", "README.md", "docs/DESIGN.md"))]
    planted += [
        (dict(files={f"llmc/base/b{i}.h": "//\n" * 550 for i in range(many)}),
         [f"llmc: {1072 + OPTIONS + 550 * many} lines, above the budget of {budget['llmc']}"]),
        (dict(fsdp=451), ["llmc/shard/fsdp.cuh: 451 lines, above 450"]),
        (dict(fields=21), [f"{name}: Trainer has 21 fields, above 20" for name in ("llmc/cpu/trainer.h",
                                                                                   "train_fp8.cu")]),
        (dict(forward=21), [f"{name}:13: layer_forward() has 21 lines, above 20" for name in TRAINERS]),
        (dict(trainer=main_43), [f"{name}:33: main() has 43 lines, above 40" for name in TRAINERS]),
        (dict(without="FsdpClip"), ["llmc/shard/fsdp_plan.cuh: no struct FsdpClip"]),
    ]
    planted += [({name: 21}, [f"llmc/shard/fsdp_plan.cuh: {name} has 21 fields, above 20"]) for name in FSDP_STRUCTS]
    for number, (arguments, expected) in enumerate(planted):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            write_tree(root, **arguments)
            got = sorted(offenders(root))
            if got != sorted(expected):
                yield f"planted case {number}: {got} instead of {expected}"


def main():
    wrong = list(self_test())
    found = list(offenders(pathlib.Path(__file__).resolve().parents[2]))
    for text in wrong + found:
        print(f"FAILED: {text}")
    print(f"{2 - bool(wrong) - bool(found)} passed, {len(wrong) + len(found)} failed")
    return 1 if wrong or found else 0


if __name__ == "__main__":
    sys.exit(main())
