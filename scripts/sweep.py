"""usage: scripts/sweep.sh [options] [-- trainer options]

Runs the trainer for every combination of the lists and writes one table of all runs. List items are separated by
commas or blanks. Paths are relative to the repository's root. Defaults are in parentheses.

  --models LIST            presets, or folders with a config.json
                           (llama3.2-1b,llama3.2-3b,llama3.1-8b,qwen3-4b,qwen3-14b)
  --sequence-lengths LIST  tokens in a sequence (2048,4096,8192)
  --precisions LIST        bf16, fp8, fp8:RECIPE (fp8:rowwise, fp8:blockwise, ...), fp8:RECIPE:emulate, fp8:fast (the
                           trainer's --fast); the CPU trainer also has fp32 (bf16,fp8)
  --gpus LIST              numbers of GPUs, or of ranks of the CPU trainer (1,2,4)
  --num-steps N            optimizer steps in each run (100)
  --llama-data GLOB        training shards for models named llama* or Llama* (data/tinystories_llama3_train*.bin)
  --qwen-data GLOB         training shards for models named qwen* or Qwen* (data/tinystories_qwen_train*.bin)
  --data GLOB              training shards for all models; models with other names need it
  --trainer PROGRAM        ./train_fp8cu, or ./train_fp8 on the CPU (./train_fp8cu)
  --out FOLDER             folder of the tables and of all runs (log/sweep)
  --mpirun COMMAND         command that starts several ranks, for example "mpirun --hostfile hosts" (mpirun)
  --max-gpus N             number of GPUs available (those of this machine, as far as CUDA_VISIBLE_DEVICES names them;
                           4096 ranks of the CPU trainer); set it if you use several machines
  --parallel N             most runs side by side, each on GPUs of its own (as many as fit on this machine; 1 on the
                           CPU and if --max-gpus is above the GPUs of this machine)
  --retry WHICH            which unsuccessful runs to repeat when the sweep is started again: none, failed (not those
                           out of memory or unsupported) or all (failed). Runs that were skipped are tried again in any
                           case
  --no-table               write the table, do not print it
  --dry-run                print the command of each run and exit; without a GPU, the GPU trainer needs --max-gpus
  --                       all options after this one are passed to the trainer; those that begin with --fp8 are passed
                           to FP8 runs only; --fast and --msamp are refused, because they set --precision

FOLDER gets table.txt, table.csv and table.md. Each run has a folder in it with its output (stdout.txt), its log.jsonl
and its result. If a run fails, its error message is recorded and the sweep continues. Out of memory is a normal result,
and so is a run that this GPU or trainer cannot do (unsupported).

Start the sweep again to continue it: finished runs (status 0, and log.jsonl ends with the summary of all steps) are
kept. Once a run has finished, the trainer, its options, the number of steps and the data cannot change. Ctrl-C or
SIGTERM stops the sweep and its current runs, which start from the beginning next time. The sweep continues if the
reader of its output goes away.

Exit status 0: every run finished, ran out of memory, is unsupported, or was skipped because there are too few GPUs. 1:
a run failed, the command is wrong, or FOLDER cannot be used. 128 plus the signal's number: a signal stopped the sweep.
"""
import itertools
import os
import re
import shlex

import sweep_table
from runs.options import check_extra, end, fail, number, parse, say, split
from runs.runner import ANSWERS, Pool, Run, refuse_other_settings, write_file
from runs.trainer import NO_GPU, SHARDS, Trainer, data_of, folder_names, precision_words, visible_gpus
from sweep_folder import lines_of

DEFAULTS = {"models": "llama3.2-1b,llama3.2-3b,llama3.1-8b,qwen3-4b,qwen3-14b", "sequence-lengths": "2048,4096,8192",
            "precisions": "bf16,fp8", "gpus": "1,2,4", "num-steps": "100", "llama-data": SHARDS["llama"],
            "qwen-data": SHARDS["qwen"], "data": "", "trainer": "./train_fp8cu", "out": "log/sweep",
            "mpirun": "mpirun", "max-gpus": "", "parallel": "", "retry": "failed"}
SET_HERE = ("train-data", "sequence-length", "num-steps", "precision", "fp8-recipe", "log-dir")
KEPT = {"none": (*ANSWERS, "failed"), "failed": ANSWERS, "all": ("done",)}


class Sweep:
    """The checked options, and what follows from them."""

    def __init__(self, o, extra):
        self.o, self.extra, self.out = o, extra, o.out.rstrip("/") or "/"
        self.lengths = [number("--sequence-lengths", word) for word in split(o.sequence_lengths)]
        self.gpus = [number("--gpus", word) for word in split(o.gpus)]
        self.steps = number("--num-steps", o.num_steps)
        if o.retry not in KEPT:
            fail(f"--retry takes none, failed or all, not \"{o.retry}\"")
        self.trainer = Trainer(o.trainer, o.mpirun)
        self.precisions = split(o.precisions)
        self.trainer.check_precisions("--precisions", self.precisions, ("bf16", "fp32"))
        self.place()
        known = self.trainer.list("models")
        self.names = folder_names(split(o.models))
        shards = {"": o.data, "llama": o.llama_data, "qwen": o.qwen_data}
        for model in self.names:
            if not os.path.isdir(model) and model not in known:
                fail(f"--models {model}: neither a folder nor a model that {o.trainer} knows by name: "
                     f"{' '.join(known)}")
        self.data = {model: data_of(model, shards, "--data") for model in self.names}
        check_extra(extra, SET_HERE, "sweep")

    def place(self):
        """Sets the number of GPUs available, those of them that runs get, or None, and the most runs side by side."""
        here = [] if self.trainer.on_cpu else visible_gpus()
        self.available = (number("--max-gpus", self.o.max_gpus) if self.o.max_gpus else
                          4096 if self.trainer.on_cpu else len(here))
        if not self.available:
            fail(f"no GPU found here ({NO_GPU}")
        placed = 0 < self.available <= len(here)
        self.own = here[:self.available] if placed else None
        self.parallel = (number("--parallel", self.o.parallel) if self.o.parallel else
                         self.available if placed else 1)
        if self.parallel > 1 and not placed and not self.trainer.on_cpu:
            fail(f"--parallel {self.parallel}: {len(here)} GPUs are here and --max-gpus is {self.available}, so runs "
                 "cannot have GPUs of their own; start them one at a time")

    def name(self, model, length, gpus, precision):
        return f"{self.names[model]}_T{length}_{precision.replace(':', '-')}_{gpus}gpu"

    def combinations(self):
        return itertools.product(self.names, self.lengths, self.gpus, self.precisions)

    def run(self, model, length, gpus, precision):
        folder = os.path.join(self.out, self.name(model, length, gpus, precision))
        command = self.trainer.launch(gpus) + [
            self.o.trainer, model, "--train-data", self.data[model], "--sequence-length", str(length), "--num-steps",
            str(self.steps), "--learning-rate", "1e-5", "--log-dir", folder, *precision_words(precision, self.extra)]
        title = f"{model}, T {length}, {precision}, {gpus} GPU{'s' if gpus > 1 else ''}"
        size = re.search(r"(\d+(\.\d)?)b", model.lower())  # the time grows with the parameters, such as "8b"
        expected = (1 + float(size[1] if size else 1)) * (2048 + length)
        return Run(folder, command, title, model, precision, gpus, self.steps, expected)

    def settings(self):
        """The settings that all runs in one folder share. One table must not compare runs with different settings."""
        o = self.o
        return "".join(f"{line}\n" for line in (
            f"trainer {o.trainer}", f"steps {self.steps}", f"llama data {o.llama_data}", f"qwen data {o.qwen_data}",
            f"data {o.data}", f"trainer options {' '.join(self.extra)}"))

    def different_settings(self):
        """Returns how the settings differ from those in settings.txt, as texts. Dies if they do, or if that file was
        lost, and a run there has finished."""
        before, now = lines_of(os.path.join(self.out, "settings.txt")), self.settings().split("\n")[:-1]
        steps = {int(line[6:]) for line in before if re.fullmatch(r"steps \d+", line)} or None
        different = [f"{a} there, {b} now" for a, b in itertools.zip_longest(before, now) if a != b]
        if not before:
            different = ["settings.txt was lost"]
        refuse_other_settings(self.out, different, steps)
        return different if before else []

    def enlist(self):
        """Adds the runs to runs.txt, which gives the order of the table. Runs of earlier starts stay in it."""
        path = os.path.join(self.out, "runs.txt")
        before = lines_of(path)
        lines = [f"{self.name(m, t, g, p)} {t} {g} {p} {m}" for m, t, g, p in self.combinations()]
        known = {line.split(" ")[0]: line for line in before}
        for line in lines:
            if known.get(line.split(" ")[0], line) != line:
                fail(f"two models would share the folder {line.split(' ')[0]} in {self.out}; train one of them in a "
                     "sweep with another --out")
        write_file(path, "".join(line + "\n" for line in dict.fromkeys(before + lines)))

    def train(self):
        """Trains the runs. Returns them."""
        runs = [self.run(*of) for of in self.combinations()]
        if max(self.gpus) > 1:
            self.trainer.check_mpirun()
        different = self.different_settings()
        hint = f"scripts/sweep_table.py {shlex.quote(self.out)} prints the table"
        kept = KEPT[self.o.retry]
        with Pool(self.out, runs, self.own, self.parallel, (*kept, "skipped"), "sweep", hint) as pool:
            if different:
                pool.forget(different)
            write_file(os.path.join(self.out, "settings.txt"), self.settings())
            self.enlist()
            for run in runs:
                if run.kind == "skipped" and run.gpus <= self.available:
                    run.kind = ""
                elif run.kind not in kept and run.gpus > self.available:
                    run.record("skipped", 0, f"the run needs {run.gpus} GPUs; {self.available} available")
            pool.train()
        return runs


def main(words):
    o, _, extra = parse(words, __doc__, DEFAULTS, ("no-table", "dry-run"))
    sweep = Sweep(o, extra)
    if o.dry_run:
        for of in sweep.combinations():
            say(shlex.join(sweep.run(*of).command))
        return 0
    runs = sweep.train()
    table, _ = sweep_table.main(sweep.out)
    if not o.no_table:
        say(f"\n{table}\nfigures and intervals: scripts/report.py {shlex.quote(sweep.out)}")
    return 1 if any(run.kind == "failed" for run in runs) else 0


if __name__ == "__main__":
    end(main)
