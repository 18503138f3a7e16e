"""Tests scripts/sweep_table.py and scripts/recipes_table.py on a sweep's folder with damaged files.

With known faults, the tables must name the damaged run with its file and the reason, and the other runs must keep their
rows. With 400 random faults, there must be no traceback, and the other runs must keep their rows unless runs.txt is
damaged. Also starts sweep_table.py with other encodings, with a reader that goes away, and where it cannot read or
write. Ends with "N passed, N failed".
"""
import csv
import json
import os
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import counted
from counted import check

SCRIPTS = str(counted.ROOT / "scripts")
sys.path.insert(0, SCRIPTS)
import recipes_table
import sweep_folder
import sweep_table

RUNS = {"m_T64_bf16_1gpu": "bf16", "m_T64_fp8_1gpu": "fp8", "m_T64_fp8-rowwise_1gpu": "fp8:rowwise",
        "m_T64_fp8-mxfp8_1gpu": "fp8:mxfp8"}
FAILED = "m_T64_fp8-mxfp8_1gpu"
NAME = "m_T64_fp8_1gpu"  # the run that is damaged
LOG, RESULT = NAME + "/log.jsonl", NAME + "/result"


def log_lines(precision):
    settings = {"num-steps": 4, "grad-accumulation-steps": 1, "batch-size": 2, "sequence-length": 64,
                "precision": precision[:4].rstrip(":")}
    yield {"type": "settings", "version": "0.1", "program": "train_fp8", "versions": "compiler 12", "device": "CPU",
           "world_size": 1, "model": "m", "parameters": 98688, "fp8_gemms": 24 * (precision != "bf16"),
           "settings": settings}
    for step in range(1, 5):
        yield {"type": "step", "step": step, "loss": 6.0 - 0.1 * step, "norm": 2.5, "skipped": False}
        for gemm in ("fprop", "dgrad", "wgrad") if precision != "bf16" else ():
            yield {"type": "fp8_audit", "step": step, "layer": 0, "linear": "qkv", "operand": "x", "gemm": gemm,
                   "sqnr_db": 31.5, "amax": 1.5}
    speed = {"tokens_per_second_per_gpu": 9984.5, "tokens_per_second": 9984.5, "tflops_per_gpu": 0.25, "mfu": None,
             "sol": None}
    yield {"type": "summary", "steps": 4, "skipped": 0, "first_loss": 5.9, "last_loss": 5.75, "median_ms": 12.5,
           **speed, "memory_bytes": 15728640}


def sound_files():
    files = {"runs.txt": "".join("%s 64 1 %s models/m\n" % run for run in RUNS.items()).encode()}
    for name, precision in RUNS.items():
        files[name + "/result"] = b"failed\t3\tno products of recipe mxfp8" if name == FAILED else b"done\t3\t\n"
        if name != FAILED:
            files[name + "/log.jsonl"] = "".join(json.dumps(line) + "\n" for line in log_lines(precision)).encode()
    return files


def run_both(folder, files):
    """Runs both programs on these files. Returns (status, output) of each.

    An error's text is the status. That of an exception fails the check.
    """
    outputs = []
    for path, data in files.items():
        with open(os.path.join(folder, path), "wb") as file:
            file.write(data)
    for program in (sweep_table, recipes_table):
        status, printed, error = counted.call(lambda: sweep_folder.run_program(program.main, program.__doc__), folder)
        outputs.append((error or status, printed))
    return outputs


def well_ended(status):
    return status in (0, 1) or str(status).startswith("error: ")


def damage(name, path, data, reason):
    """Checks the tables if one file contains `data` (None: it is missing).

    The tables must name the run with its file and the reason. The two other runs with numbers must keep these.
    """
    files = dict(sound, **{path: data or b""})
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            os.mkdir(os.path.join(folder, run))
        if data is None:
            del files[path]
        (status, table), (recipes_status, recipes) = run_both(folder, files)
        expected = "%s: %s" % (os.path.join(folder, path), reason)
        with open(os.path.join(folder, "table.csv"), newline="") as file:
            messages = [row[-1] for row in csv.reader(file) if row[4] == "damaged"]
        check(status == 0 and messages == [expected] and "damaged: " in table,
              f"{name}: sweep_table.py succeeds and reports \"{expected}\":", status, messages, table)
        check(recipes_status == 1 and "damaged: " + expected in recipes,
              f"{name}: recipes_table.py has status 1 and reports \"{expected}\":", recipes_status, recipes)
        rows = [line for line in table.split("\n") if "5.7500" in line]
        check([row.split()[3] for row in rows] == ["bf16", "fp8:rowwise"] and rows[0].split()[4] == "9984",
              f"{name}: the other rows with numbers keep them in sweep_table.py's table", table)


def edited(key, value, line=-1):
    lines = sound[LOG].decode().splitlines()
    record = json.loads(lines[line])
    record[key] = value
    lines[line] = json.dumps(record)
    return "\n".join(lines).encode() + b"\n"


def test_named():
    log = sound[LOG]
    damage("an empty log", LOG, b"", "it is empty")
    damage("no log", LOG, None, "there is no such file")
    damage("a cut last line", LOG, log[:-40], "line 18: not JSON")
    damage("no summary", LOG, log[:log.rindex(b'{"type": "summary"')],
           "the first line is not of type settings, or the last not of type summary")
    damage("bytes that are not UTF-8", LOG, log.replace(b"CPU", b"C\xffU"), "line 1: not UTF-8")
    damage("an empty object", LOG, b"{}\n", "line 1: no object with a \"type\"")
    damage("an array", LOG, b"[1, 2]\n" + log, "line 1: no object with a \"type\"")
    damage("zeros of a power cut", LOG, log + bytes(4096), "line 19: not JSON")
    damage("deep nesting", LOG, b"[" * 100000 + b"\n" + log, "line 1: not JSON")
    damage("an integer of 5000 digits", LOG, log.replace(b"9984.5", b"9" * 5000), "line 18: not JSON")
    damage("an integer of 400 digits", LOG, log.replace(b"9984.5", b"9" * 400),
           "line 18: \"tokens_per_second_per_gpu\" is not a number or null")
    damage("1e999", LOG, log.replace(b"9984.5", b"1e999"),
           "line 18: \"tokens_per_second_per_gpu\" is not a number or null")
    damage("NaN", LOG, edited("last_loss", float("nan")), "line 18: \"last_loss\" is not a number or null")
    damage("a text for a number", LOG, edited("skipped", "0"), "line 18: \"skipped\" is not a number")
    damage("a list for a text", LOG, edited("device", [], 0), "line 1: \"device\" is not text")
    damage("an audit of another type", LOG, edited("sqnr_db", {}, 2), "line 3: \"sqnr_db\" is not a number or null")
    damage("settings that lack one", LOG, edited("settings", {}, 0), "line 1: no \"num-steps\"")
    damage("a count of GEMMs that is text", LOG, edited("fp8_gemms", "24", 0), "line 1: \"fp8_gemms\" is not a number")
    damage("an empty result", RESULT, b"", "it does not begin with done or memory or unsupported or failed or skipped")
    damage("a line of runs.txt that is cut", "runs.txt", sound["runs.txt"].replace(b" 64 1 fp8 models/m", b" 64"),
           "a line is not the name, length, GPUs, precision and model of a run")


def mutate(data, rng):
    """Changes, cuts, repeats or inserts some bytes, or replaces a value by another, one to three times."""
    words = (b"null", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"{}", b"[]", b'"x"', b"\xff\xfe", b"\0", b"\n",
             b"\t", b'"\\ud800"', b"true", b"-0", b"|", b"\r")
    for _ in range(rng.randint(1, 3)):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(6)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1:]
        elif kind == 2:
            data = data[:at] + data[rng.randrange(len(data) + 1):]
        elif kind == 3:
            data = data[:at] + rng.choice(words) + data[at:]
        else:  # replaces a value by another
            ends = [data.find(c, at) for c in (b",", b"}", b"\n", b" ")]
            begin, end = max(data.rfind(b" ", 0, at), data.rfind(b"\t", 0, at)) + 1, min([e for e in ends if e >= 0],
                                                                                         default=len(data))
            data = data[:begin] + rng.choice(words) + data[end:]
    return data


def test_random(rounds):
    rng = random.Random(1)
    damaged = 0
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            os.mkdir(os.path.join(folder, run))
        for i in range(rounds):
            path = rng.choice((LOG, LOG, LOG, RESULT, "runs.txt"))
            files = dict(sound, **{path: mutate(sound[path], rng)})
            (status, table), (recipes_status, recipes) = run_both(folder, files)
            check(well_ended(status) and well_ended(recipes_status),
                  "round %d, %s: both programs end with status 0 or 1 or a line \"error: ...\": %s, %s\n%r" % (
                      i, path, status, recipes_status, files[path][:2000]))
            check(path == "runs.txt" or sum("5.7500" in line for line in table.split("\n")) >= 2,
                  "round %d: at least two rows of sweep_table.py's table keep their numbers\n%s" % (i, table))
            damaged += "damaged: " in table
    check(rounds / 4 < damaged < rounds,
          "%d of %d mutated files are reported as damaged; want more than a quarter, not all" % (damaged, rounds))


def test_programs(folder):
    """Starts sweep_table.py as a process: with encodings of other locales, with a reader that goes away, with a folder
    that does not exist, and with a folder in place of table.txt. Starts both programs with --help.
    """
    files = dict(sound, **{"runs.txt": sound["runs.txt"].replace(b"models/m\n", "modèle–\n".encode(), 1)})
    for run in RUNS:
        os.mkdir(os.path.join(folder, run))
    run_both(folder, files)
    for environment in ({"LC_ALL": "C"}, {"PYTHONIOENCODING": "latin-1"},
                        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        ended = subprocess.run([sys.executable, SCRIPTS + "/sweep_table.py", folder], capture_output=True,
                               env=dict(os.environ, **environment))
        check(ended.returncode == 0 and b"Traceback" not in ended.stderr and b"9984" in ended.stdout,
              "the program prints its table with", environment, ended)
    for program in (sweep_table, recipes_table):
        ended = subprocess.run([sys.executable, program.__file__, "--help"], capture_output=True, text=True)
        check((ended.returncode, ended.stdout, ended.stderr) == (0, program.__doc__, ""),
              "--help prints the usage and succeeds", program.__file__, ended)
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, SCRIPTS + "/sweep_table.py", folder], stdout=writer, stderr=subprocess.PIPE)
    check(ended.returncode == 0 and ended.stderr == b"",
          "the program succeeds if the reader of its stdout goes away", ended)
    taken = f"error: {folder}/table.txt: Is a directory".encode()
    for path, message in (("/none", b"error: /none is not a folder"), (folder, taken)):
        os.path.exists(folder + "/table.txt") and os.remove(folder + "/table.txt")
        os.makedirs(folder + "/table.txt", exist_ok=True)
        ended = subprocess.run([sys.executable, SCRIPTS + "/sweep_table.py", path], capture_output=True)
        check(ended.returncode == 1 and ended.stderr.startswith(message), "the error is", message, path, ended)
        os.rmdir(folder + "/table.txt")


def test_machines(folder):
    """A run of another device than BF16's has no ratio to it, and the table names a run that diverged."""
    for run in RUNS:
        os.mkdir(os.path.join(folder, run))
    log = edited("device", "B200", 0).replace(b'"skipped": 0', b'"skipped": 0, "diverged": true')
    tables = [table for _, table in run_both(folder, dict(sound, **{LOG: log}))]
    for table in tables:
        check(table.count("1.00x") == table.count("+0.00%") == 1, "one of two FP8 runs has ratios", table)
    check("diverged;" in tables[0], "sweep_table.py names the run that diverged", tables[0])


sound = sound_files()
test_named()
with tempfile.TemporaryDirectory() as scratch:
    test_machines(scratch)
test_random(400)
with tempfile.TemporaryDirectory() as scratch:
    test_programs(scratch)
counted.finish()
