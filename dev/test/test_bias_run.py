#!/usr/bin/env python3
"""Tests build/gradient_bias and scripts/gradient_bias.sh on the CPU, on a model of two layers with emulated FP8.

The null arm's interval holds zero. A scale that is planted wrong by 0.5% in one GEMM of one layer is found there, and
nowhere else. FP8 in one linear layer or GEMM alone reaches only the gradients that depend on it. Two checkpoints of one
run share bias. Wrong words are refused before any work. Needs ./train_fp8 and build/synth_stories; builds the program.
Ends with "N passed, N failed".
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from counted import ROOT, check, finish  # noqa: E402

PROGRAM = "build/gradient_bias"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 128,
          "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
          "head_dim": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
MATRICES = [f"{layer}.{linear}" for layer in (0, 1) for linear in ("qkv", "attn_out", "gate_up", "down")]
PLANTED, FACTOR = "1.gate_up", 1.005

def run(*words):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


class Bench:
    def __init__(self, folder):
        self.folder, self.model, self.out = folder, f"{folder}/mini", f"{folder}/out.json"
        os.mkdir(self.model)
        pathlib.Path(self.model, "config.json").write_text(json.dumps(CONFIG))
        made = run("build/synth_stories", "--out", f"{folder}/synth", "--bytes", "300000", "--seed", "1")
        self.data = ["--train-data", f"{folder}/synth_train.bin", "--sequence-length", "64", "--batch-size", "2"]
        check(made.returncode == 0, made.stderr)

    def start(self, *words, model=None, micro_batches=16):
        return run(PROGRAM, model or self.model, "--bias-out", self.out, "--micro-batches", str(micro_batches),
                   *self.data, *words)

    def measure(self, *words, **options):
        """Returns {tensor: its row} of each checkpoint."""
        result = self.start(*words, **options)
        check(result.returncode == 0, f"{words}: {result.stderr}")
        report = json.loads(pathlib.Path(self.out).read_text())
        return [{row["name"]: row for row in at["tensors"]} for at in report["checkpoints"]]


def holds(interval, value):
    return interval[1] <= value <= interval[2]


def test_null(bench):
    (rows,) = bench.measure("--precision", "bf16")
    check(list(rows) == MATRICES + ["rest", "qkv", "attn_out", "gate_up", "down", "whole"], f"rows: {list(rows)}")
    check(rows["whole"]["error_variance"][0] > 0, "the null arm's gradients differ")
    check(holds(rows["whole"]["squared_bias"], 0), f"null arm: squared bias {rows['whole']['squared_bias']}")
    check(abs(rows["whole"]["along"][0]) < 1e-4, f"null arm: along {rows['whole']['along']}")

    (planted,) = bench.measure("--precision", "bf16", "--plant", f"{PLANTED}.wgrad={FACTOR}")
    for name in MATRICES:
        along = planted[name]["along"]
        if name == PLANTED:
            check(holds(along, FACTOR - 1) and along[1] > 0, f"planted in {PLANTED}: along {along}")
            check(planted[name]["squared_bias"][1] > 0, "the planted scale gives a bias")
        else:
            check(abs(along[0]) < 2e-4, f"planted in {PLANTED}, but {name} has along {along}")


def test_recipes(bench):
    """In FP8 the planted scale adds to the recipe's own error: a wgrad's in its tensor, a dgrad's in layers below."""
    fp8 = ["--precision", "fp8", "--fp8-recipe", "rowwise"]
    (plain,) = bench.measure(*fp8)
    check(plain["whole"]["squared_bias"][1] > 0, "at fresh weights the rounding of weights is a bias")
    (wgrad,) = bench.measure(*fp8, "--plant", f"{PLANTED}.wgrad={FACTOR}")
    for name in MATRICES:
        expected = (1 + plain[name]["along"][0]) * (FACTOR if name == PLANTED else 1) - 1
        check(abs(wgrad[name]["along"][0] - expected) < 1e-4, f"{name}: along {wgrad[name]['along']}, not {expected}")
    (dgrad,) = bench.measure("--precision", "bf16", "--plant", "1.qkv.dgrad=2")
    moved = [name for name in MATRICES if dgrad[name]["squared_bias"][1] > 1e-6]
    check(moved == MATRICES[:4], f"a scale planted in 1.qkv.dgrad moves {moved}")


def test_only(bench):
    (linear,) = bench.measure("--precision", "fp8", "--only", "1.down", micro_batches=8)
    check(all(linear[name]["error_variance"][0] > 0 for name in MATRICES), "FP8 in 1.down reaches all gradients")
    (wgrad,) = bench.measure("--precision", "fp8", "--only", "1.down.wgrad", micro_batches=8)
    moved = [name for name in MATRICES if wgrad[name]["error_variance"][0] > 0]
    check(moved == ["1.down"], f"FP8 in 1.down.wgrad reaches {moved}")
    (dgrad,) = bench.measure("--precision", "fp8", "--fp8-recipe", "delayed", "--only", "0.down.dgrad", micro_batches=8)
    moved = [name for name in MATRICES if dgrad[name]["error_variance"][0] > 0]
    check(moved == MATRICES[:3], f"FP8 in 0.down.dgrad reaches {moved}")


def test_checkpoints(bench):
    trained = run("./train_fp8", bench.model, *bench.data, "--num-steps", "12", "--learning-rate", "1e-3",
                  "--checkpoint-dir", f"{bench.folder}/run", "--checkpoint-every", "6", "--keep-checkpoints", "2")
    check(trained.returncode == 0, trained.stderr)
    steps = [f"{bench.folder}/run/step-{step:08d}" for step in (6, 12)]
    first, second = bench.measure("--precision", "fp8", "--checkpoints", steps[1], model=steps[0])
    check(first["whole"]["persists"] is None, "the first checkpoint has none before it")
    (again,) = bench.measure("--precision", "fp8", model=steps[0])
    check(again["whole"] == first["whole"], "the same checkpoint gives the same numbers")
    share = second["whole"]["persists"]
    check(share and 0 < share[0] < 1.2, f"after 6 steps part of the bias persists: {share}")
    (equal, same) = bench.measure("--precision", "fp8", "--checkpoints", steps[0], model=steps[0])
    check(holds(same["whole"]["persists"], 1), f"of equal weights all persists: {same['whole']['persists']}")

    recipe = "fp8:fast+fp8-filter=first/qkv"
    out = run("scripts/gradient_bias.sh", "--checkpoints", ",".join(steps), *bench.data, "--micro-batches", "8",
              "--program", PROGRAM, "--recipes", f"bf16,{recipe}", "--out", f"{bench.folder}/reports")
    check(out.returncode == 0 and out.stdout.count("No B found") == 2, f"the script: {out.stdout} {out.stderr}")
    check("The bias equals the sampling noise from about B = " in out.stdout, f"the headline: {out.stdout}")
    check(f"step-00000012, {recipe}: 8 micro-batches" in out.stdout, f"a table names the recipe as given: {out.stdout}")
    check(" persists from the checkpoint before" in out.stdout, "the script prints the share that persists")


def test_refused(bench):
    for words, message in ((["--plant", "1.down=2"], "GEMM and factor"), (["--only", "9.down"], "no layer 9"),
                           (["--only", "0.up"], "no place such as"), (["--micro-batches", "2"], "from 8 on"),
                           (["--only", "0.down"], "--only needs --precision fp8"),
                           (["--fast", "--only", "0.down"], "with --fast add --fp8-lm-head off"),
                           (["--precision", "fp32"], "bf16 or fp8"),
                           (["--checkpoints", bench.model], "no weights"), (["--batch-size", "999"], "need"),
                           (["--plant"], "needs a value")):
        result = bench.start(*words)
        check(result.returncode == 2 and message in result.stderr, f"{words}: {result.returncode} {result.stderr}")
    result = run("scripts/gradient_bias.sh", "--program", PROGRAM)
    check(result.returncode == 1 and "give one MODEL" in result.stderr, f"no MODEL: {result.stderr}")


def main():
    made = run("make", "-s", PROGRAM)
    check(made.returncode == 0, made.stderr)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        for test in (test_null, test_recipes, test_only, test_checkpoints, test_refused):
            test(bench)
    finish()


if __name__ == "__main__":
    main()
