"""usage: scripts/gradient_bias.sh MODEL|CHECKPOINT [options] [-- trainer options]

Measures what FP8 does to gradients, without long runs. Computes the gradients of micro-batches in BF16 and by each FP8
recipe, from equal weights on equal data, and splits FP8's error into noise, which averages out, and bias, which stays.
MODEL is a preset with random weights, or a folder with weights: a checkpoint's, or an export. Prints a table for each
recipe and writes FOLDER/RECIPE.json; docs/GRADIENT_BIAS.md explains both. Needs one GPU, or the CPU with --program
build/gradient_bias. Paths are relative to the repository's root. Defaults are in parentheses.

  --recipes LIST         FP8 recipes: bf16 (the null arm), fp8 (tensorwise), fp8:RECIPE, fp8:RECIPE:emulate, fp8:fast
                         (all that this GPU has, but for fp8:fast)
  --micro-batches N      micro-batches (64)
  --batch-size B         sequences of a micro-batch (1)
  --sequence-length T    tokens of a sequence (2048)
  --train-data GLOB      shards (data/tinystories_llama3_train*.bin or ..._qwen_train*.bin for models named llama* or
                         qwen*; other models need it)
  --checkpoints LIST     several checkpoints of one run in place of MODEL, with commas between: also prints which share
                         of the bias persists between neighbours. Each reads other data
  --only PLACE           FP8 in one linear layer or one GEMM alone: LAYER.LINEAR or LAYER.LINEAR.GEMM, for example
                         3.down.dgrad
  --plant PLACE=X        for tests: multiplies the result of the GEMM LAYER.LINEAR.GEMM by X
  --program PROGRAM      build/gradient_biascu or build/gradient_bias (build/gradient_biascu)
  --out FOLDER           where the JSON files go (log/gradient_bias)

Exit status 0: every recipe was measured, or this GPU lacks it. 1: one failed, or the command is wrong.
"""
import json
import os
import subprocess

from runs.options import check_extra, end, fail, number, parse, say, split
from runs.trainer import SHARDS, Trainer, data_of, precision_words

DEFAULTS = {"recipes": "", "micro-batches": "64", "batch-size": "1", "sequence-length": "2048", "train-data": "",
            "checkpoints": "", "only": "", "plant": "", "program": "build/gradient_biascu", "out": "log/gradient_bias"}
SET_HERE = ("train-data", "batch-size", "sequence-length", "precision", "fp8-recipe", "fp8-emulate")
UNSUPPORTED = 4  # exit status of a GPU that lacks a recipe's GEMMs


def interval(values, scale=1, form="{:.2f}"):
    """Text of an interval [estimate, low, high], times `scale`; - if it is not known."""
    if values is None:
        return "-"
    estimate, low, high = (form.format(value * scale) for value in values)
    return f"{estimate} [{low}, {high}]"


def row_of(t):
    """Cells of one tensor. Bias and its parts are relative to the length of the mean gradient."""
    gradient, bias = t["squared_gradient"][0], t["squared_bias"]
    known = t["along"] is not None
    return [t["name"], f"{100 * (max(bias[0], 0) / gradient) ** 0.5:.2f}" if known else "-",
            "yes" if bias[1] > 0 else "no", interval(t["along"], 100, "{:.3f}"),
            f"{100 * (max(t['across'][0], 0) / gradient) ** 0.5:.2f}" if known and t["across"] else "-",
            interval(t["bias_to_noise"], 1, "{:.2g}"), interval(t["persists"])]


def table(tensors):
    head = ["tensor", "bias, %", "seen", "along, %", "across, %", "squared bias / sampling variance", "persists"]
    cells = [head] + [row_of(t) for t in tensors]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, width)).rstrip() for row in cells]


def tokens(value):
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def headline(whole, micro_batch):
    """Says at which batch the gradient's sampling noise is as large as the bias."""
    ratio, bias = whole["bias_to_noise"], whole["squared_bias"]
    if ratio is None or bias[1] <= 0 or ratio[1] <= 0:
        bound = f"; if there is one, B is above {tokens(micro_batch / ratio[2])}" if ratio and ratio[2] > 0 else ""
        return f"No B found: the interval of the squared bias holds zero{bound}."
    estimate, low, high = (tokens(micro_batch / ratio[i]) for i in (0, 2, 1))
    return f"The bias equals the sampling noise from about B = {estimate} tokens per step on [{low}, {high}]."


def show(result, recipe):
    """Prints the result of a recipe, which it names as --recipes does."""
    micro_batch = result["batch_size"] * result["sequence_length"]
    for at in result["checkpoints"]:
        whole = at["tensors"][-1]
        say(f"\n== {at['name']}, {recipe}: {result['micro_batches']} micro-batches of {micro_batch} tokens, "
            f"{result['device']}")
        for line in table(at["tensors"]):
            say(line)
        say(headline(whole, micro_batch))
        if whole["persists"]:
            say(f"Of the bias, {interval(whole['persists'])} persists from the checkpoint before (1: all, 0: none).")
        if result["recipe"] == "bf16" and whole["error_variance"][0] == 0:
            say("warning: both arms gave equal bits, so this null arm tests nothing")


class Plan:
    """The checked options."""

    def __init__(self, words):
        self.o, models, self.extra = parse(words, __doc__, DEFAULTS, (), takes_words=True)
        o = self.o
        self.checkpoints = split(o.checkpoints) + models
        if bool(models) == bool(o.checkpoints) or len(models) > 1:
            fail("give one MODEL, or --checkpoints A,B; for example: scripts/gradient_bias.sh llama3.2-1b")
        for name in ("micro-batches", "batch-size", "sequence-length"):
            number("--" + name, vars(o)[name.replace("-", "_")])
        check_extra(self.extra, SET_HERE, "script")
        self.trainer = Trainer(o.program)
        self.trainer.on_cpu = os.path.basename(o.program) == "gradient_bias"
        self.recipes = split(o.recipes) or ["fp8:" + recipe for recipe in self.trainer.list("recipes")]
        self.trainer.check_precisions("--recipes", self.recipes, ("bf16",))
        self.data = data_of(self.checkpoints[0], {**SHARDS, "": o.train_data}, "--train-data")

    def command(self, recipe, out):
        o = self.o
        words = [o.program, self.checkpoints[0], "--bias-out", out, "--train-data", self.data, "--micro-batches",
                 o.micro_batches, "--batch-size", o.batch_size, "--sequence-length", o.sequence_length]
        words += ["--checkpoints", ",".join(self.checkpoints[1:])] if self.checkpoints[1:] else []
        words += ["--only", o.only] if o.only and recipe != "bf16" else []
        words += ["--plant", o.plant] if o.plant else []
        return words + precision_words(recipe, self.extra)


def main(words):
    plan = Plan(words)
    failed = False
    os.makedirs(plan.o.out, exist_ok=True)
    for recipe in plan.recipes:
        out = os.path.join(plan.o.out, recipe.replace(":", "-").replace("/", "-") + ".json")
        status = subprocess.run(plan.command(recipe, out), stdout=subprocess.DEVNULL).returncode
        if status == UNSUPPORTED and not plan.o.recipes:
            say(f"{recipe}: left out, because this GPU or model lacks it")
        elif status:
            say(f"{recipe}: failed with status {status}")
            failed = True
        else:
            with open(out) as file:
                show(json.load(file), recipe)
    return 1 if failed else 0


if __name__ == "__main__":
    end(main)
