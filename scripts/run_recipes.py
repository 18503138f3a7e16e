"""usage: scripts/run_recipes.sh [options] [-- trainer options]

Trains a model in BF16 and in FP8 recipes with equal data and steps. Prints a table: the loss (mean of the last 20
steps) and its change from BF16 in percent, tokens per second, memory, and the lowest SQNR (signal to quantization noise
ratio) that --fp8-audit found for each kind of GEMM. If this GPU lacks the GEMMs of a recipe, the recipe is emulated
and marked in the table. Paths are relative to the repository's root. Defaults are in parentheses.

  --model MODEL            preset, or folder with a config.json (llama3.2-1b)
  --data GLOB              training shards of the model's tokenizer (data/tinystories_llama3_train*.bin)
  --num-steps N            optimizer steps in each run (300)
  --sequence-length N      tokens in a sequence (2048)
  --recipes LIST           recipes, such as fp8,rowwise or fp8:rowwise; fast: --fast (all of the trainer, fast)
  --audit-every N          steps between audits (a tenth of the steps, rounded up)
  --gpus N                 GPUs, or ranks of the CPU trainer (1)
  --parallel N             most runs side by side, each on GPUs of its own (as many as fit; 1 on the CPU)
  --trainer PROGRAM        ./train_fp8cu, or ./train_fp8 on the CPU (./train_fp8cu)
  --out FOLDER             folder of the table and of all runs (log/recipes_MODEL)
  --                       all options after this one are passed to the trainer (those that begin with --fp8 in FP8 runs
                           only), after these defaults: --batch-size 4 --learning-rate 3e-4 --beta2 0.95
                           --weight-decay 0.1 --grad-clip 1, and warm-up for a tenth of the steps, rounded up

The runs are those of scripts/sweep.sh. FOLDER gets recipes.txt and recipes.md beside the files of the sweep. Start the
script again to continue: finished runs are kept. Another model, sequence length or number of GPUs needs another FOLDER.
Exit status 0: every row of the table has results, or the reader of the output has gone. 128 plus the signal's number: a
signal stopped it. 1: anything else.
"""
import os

import recipes_table
import sweep
from runs.options import end, fail, number, parse, say, split
from runs.trainer import SHARDS, Trainer
from sweep_folder import lines_of, read_runs

DEFAULTS = {"model": "llama3.2-1b", "data": SHARDS["llama"], "num-steps": "300", "sequence-length": "2048",
            "recipes": "", "audit-every": "", "gpus": "1", "parallel": "", "trainer": "./train_fp8cu", "out": ""}


def check_folder(out, of_runs):
    """Dies if the folder holds runs that the table must not compare with those of this start."""
    for line in lines_of(os.path.join(out, "runs.txt")):
        name, length, gpus, _, model = line.split(" ", 4)
        if (length, gpus, model) != of_runs:
            fail(f"{out} holds {name}, a run of another model, sequence length or number of GPUs; give another --out")


def main(words):
    o, _, extra = parse(words, __doc__, DEFAULTS, ())
    tenth = -(-number("--num-steps", o.num_steps) // 10)
    every = number("--audit-every", o.audit_every) if o.audit_every else tenth
    recipes = split(o.recipes) or [*Trainer(o.trainer).list("recipes"), "fast"]
    recipes = ["tensorwise" + one[3:] if f"{one}+".startswith("fp8+") else one.removeprefix("fp8:") for one in recipes]
    if len(recipes) == 1 and not o.recipes:
        fail(f"{o.trainer} --list recipes names none")
    model = o.model.rstrip("/")
    out = o.out.rstrip("/") or "log/recipes_" + os.path.basename(model)
    length, gpus = number("--sequence-length", o.sequence_length), number("--gpus", o.gpus)
    check_folder(out, (str(length), str(gpus), model))
    of_sweep = ["--no-table", "--models", model, "--data", o.data, "--num-steps", o.num_steps, "--sequence-lengths",
                str(length), "--gpus", str(gpus), "--trainer", o.trainer, "--out", out]
    of_sweep += ["--parallel", o.parallel] if o.parallel else []
    of_trainer = ["--", "--batch-size", "4", "--learning-rate", "3e-4", "--warmup-steps", str(tenth), "--beta2", "0.95",
                  "--weight-decay", "0.1", "--grad-clip", "1", "--fp8-audit", str(every), *extra]
    sweep.main([*of_sweep, "--precisions", ",".join(["bf16"] + ["fp8:" + recipe for recipe in recipes]), *of_trainer])
    # recipes whose GEMMs this GPU lacks
    refused = [run["precision"] for run in read_runs(out) if run["kind"] == "unsupported"]
    refused = [word for word in refused if word.startswith("fp8:") and not word.endswith(":emulate")]
    if refused:
        sweep.main([*of_sweep, "--precisions", ",".join(word + ":emulate" for word in refused), *of_trainer])
    table, status = recipes_table.main(out)
    say("\n" + table.rstrip("\n"))
    return status


if __name__ == "__main__":
    end(main)
