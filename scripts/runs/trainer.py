"""The trainer's command: its program, data, precision and ranks, and the GPUs of this machine."""
import glob
import itertools
import os
import re
import shutil
import subprocess

from runs.options import fail, say

SHARDS = {"llama": "data/tinystories_llama3_train*.bin", "qwen": "data/tinystories_qwen_train*.bin"}
NO_GPU = "nvidia-smi, CUDA_VISIBLE_DEVICES); --trainer ./train_fp8 runs on the CPU"


def output_of(*command):
    """What a program prints; "" if it fails or is missing."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else ""
    except OSError:
        return ""


def nvidia_smi(field):
    lines = output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()
    return [line.strip() for line in lines]


def visible_gpus():
    """The GPUs that CUDA_VISIBLE_DEVICES names, or if it is not set, the numbers of all GPUs.

    As CUDA does, takes words up to the first that names none, such as -1 or NoDevFiles, and none if one comes twice.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return nvidia_smi("index")
    words = [word.strip() for word in given.split(",")]
    named = list(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, words))
    return named if len(set(named)) == len(named) else []


def data_of(model, shards, option):
    """Returns the glob of the model's training shards: shards[""] if it is given, else that of the model's family. Dies
    if there are none."""
    name = os.path.basename(model).lower()
    found = shards.get("") or next((shards[family] for family in SHARDS if name.startswith(family)), "")
    if not found:
        fail(f"no data known for model {model}; name its training shards with {option}")
    if not glob.glob(found):
        fail(f"no training shards {found} for model {model}; data/README.md shows how to make them, {option} chooses "
             "other files")
    return found


def folder_names(models):
    """Returns {model: start of its runs' names}. Dies if two models have the same."""
    names = {model: os.path.basename(model.rstrip("/")) for model in models}
    if len(set(names.values())) < len(names):
        fail("two models would share a folder; start one of them with another --out")
    return names


def precision_words(precision, extra):
    """The trainer's options of a precision such as fp8:rowwise:emulate, fp8:fast (--fast) or fp8+fp8-filter=first/last,
    then those of `extra` that apply to it: options that begin with --fp8 are for FP8 runs only."""
    recipe, *options = precision.split("+")
    parts = recipe.split(":")
    words = ["--precision", parts[0]] + (["--fp8-recipe", parts[1]] if len(parts) > 1 else [])
    words = (["--fast"] if parts[1:2] == ["fast"] else words) + ["--fp8-emulate"] * (len(parts) > 2)
    if parts[0] == "fp8":
        pairs = [option.split("=", 1) for option in options]
        return words + extra + [word for name, value in pairs for word in (f"--{name}", value.replace("/", ","))]
    skips_value = False
    for word in extra:
        is_option = word.startswith("--")
        if not word.startswith("--fp8") and not (skips_value and not is_option):
            words.append(word)
        skips_value = word.startswith("--fp8") and "=" not in word
    return words


class Trainer:
    def __init__(self, program, mpirun="mpirun"):
        """Dies if there is no such program."""
        self.program, self.mpirun = program, mpirun.split()
        if not os.path.isfile(program) or not os.access(program, os.X_OK):
            fail(f"there is no program {program}; build it with: make {os.path.basename(program)}")
        self.on_cpu = os.path.basename(program) == "train_fp8"  # its ranks share the cores

    def list(self, what):
        return subprocess.run([self.program, "--list", what], capture_output=True, text=True).stdout.split()

    def check_precisions(self, option, precisions, plain=()):
        """Dies unless all are of `plain`, fp8, fp8:RECIPE or fp8:RECIPE:emulate with a recipe that the trainer has or
        `fast`, the last three also with +fp8-OPTION=VALUE."""
        known = None
        for word in precisions:
            match = re.fullmatch(r"fp8(:([a-z0-9_]+)(:emulate)?)?(\+fp8-[a-z0-9-]+=[\w./-]+)*", word)
            if not match and word not in plain:
                fail(f"{option} takes {', '.join(plain + ('fp8', 'fp8:RECIPE', 'fp8:fast'))} and fp8:RECIPE:emulate, "
                     f"not \"{word}\"")
            if match and match[2]:
                known = known or self.list("recipes") + ["fast"]
                if match[2] not in known:
                    fail(f"{option} {word}: {self.program} has no such recipe; it has {' '.join(known)}")

    def launch(self, ranks):
        """The words before the program that start so many ranks; none for one rank."""
        if ranks == 1:
            return []
        # by default, Open MPI binds all threads of a rank to one core (2 ranks) or to one socket (more ranks)
        words = self.mpirun + ["-np", str(ranks), "--bind-to", "none"]
        words += ["--allow-run-as-root"] if os.getuid() == 0 else []
        words += ["--oversubscribe"] if self.on_cpu else []
        if self.on_cpu and not os.environ.get("OMP_NUM_THREADS"):
            words += ["-x", f"OMP_NUM_THREADS={-(-os.cpu_count() // ranks)}"]
        return words

    def check_mpirun(self):
        """Dies if there is no mpirun. Says so if it would wait for a name server at each start: it looks up localhost,
        and lacks it on a machine without /etc/hosts."""
        if not shutil.which(self.mpirun[0]):
            fail(f"there is no program {self.mpirun[0]} to start several ranks; install Open MPI")
        try:
            subprocess.run(["getent", "hosts", "localhost"], capture_output=True, timeout=1)
        except subprocess.TimeoutExpired:
            say("slow: each mpirun waits 5 s or longer for a name server that does not answer, because /etc/hosts "
                "does not name localhost; mend it with: echo 127.0.0.1 localhost >>/etc/hosts")
        except OSError:
            pass
