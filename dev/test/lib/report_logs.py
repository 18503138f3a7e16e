"""Makes logs of runs with known differences, for dev/test/test_report.py: like a CPU run's, and like a GPU run's.

usage: report_logs.py FOLDER: makes FOLDER/verdict, FOLDER/branches and FOLDER/sweep, to look at their reports.
"""
import json
import pathlib
import sys

import numpy as np

STEPS, SEQUENCES = 400, 24
LINEARS = {"qkv": (3072, 2048), "attn_out": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
LAYERS = 16


def settings(precision, seed, **changes):
    """A settings record. A change replaces the record's field of that name; if there is none, it sets an option.

    Like older logs it has fp8-weight-cache, an option that was removed since.
    """
    options = {"train-data": "data.bin", "val-data": "val.bin", "sequence-length": 64, "batch-size": 2,
               "grad-accumulation-steps": 1, "num-steps": STEPS, "seed": seed, "rounding-seed": seed,
               "precision": precision, "fp8-recipe": "tensorwise", "fp8-emulate": "off", "fp8-weight-cache": "off",
               "learning-rate": 0.001, "log-dir": f"{precision}{seed}"}
    record = {"type": "settings", "version": "0.1", "program": "train_fp8cu", "versions": "compiler 12",
              "device": "CPU, 1 threads", "world_size": 1, "model": "tiny", "parameters": 143680, "vocab_size": 320,
              "model_flops_per_token": 958464.0, "peak_bf16_flops": None, "fp8_gemms": 24 * (precision == "fp8"),
              "memory_plan_bytes": 3000000, "training_tokens": 2005067, "training_sequences": 31329,
              "training_fingerprint": "0123456789abcdef", "validation_fingerprint": "fedcba9876543210"}
    for key, value in changes.items():
        (record if key in record else options)[key] = value
    return {**record, "settings": options}


def step_record(step, loss, ms, **fields):
    rate = 128 / ms * 1000
    return {"type": "step", "step": step, "loss": loss, "norm": 1.0, "lr": 0.001, "ms": ms,
            "tokens_per_second_per_gpu": rate, "tokens_per_second": rate, "tflops_per_gpu": 0.01, "mfu": None,
            "sol": None, "memory_bytes": 9000000 + step, "skipped": False, **fields}


def summary(steps):
    return {"type": "summary", "steps": steps, "skipped": 0, "first_loss": 5.0, "last_loss": 3.0, "median_ms": 10.0,
            "tokens_per_second_per_gpu": 12800.0, "tokens_per_second": 12800.0, "tflops_per_gpu": 0.01, "mfu": None,
            "sol": None, "memory_bytes": 9000000}


def make_losses(seed, rounding, difference):
    """(training losses [STEPS], validation losses [SEQUENCES]) of a run."""
    rng = np.random.default_rng([seed, 0])
    batches = 0.05 * rng.standard_normal(STEPS)
    sequences = 3.0 + 0.3 * np.random.default_rng(7).standard_normal(SEQUENCES) + 0.01 * rng.standard_normal()
    own = np.random.default_rng([seed, rounding, round(1e6 * difference)])
    training = 3 + 3 * np.arange(1, STEPS + 1)**-0.5 + batches + difference
    return (training + 0.004 * own.standard_normal() + 0.002 * own.standard_normal(STEPS),
            sequences + difference + 0.003 * own.standard_normal() + 0.004 * own.standard_normal(SEQUENCES))


def records_of(precision, seed, rounding=None, difference=0.0, ms=10.0, joules=None, **changes):
    """All records of a finished run of the CPU trainer."""
    rounding = seed if rounding is None else rounding
    training, validation = make_losses(seed, rounding, difference)
    yield settings(precision, seed, **{"rounding-seed": rounding, **changes})
    for step in range(1, STEPS + 1):
        energy = {"joules": joules * (1 + 0.01 * (step % 3))} if joules else {}
        yield step_record(step, float(training[step - 1]), ms * (1 + 0.01 * (step % 5)), **energy)
    yield {"type": "validation", "step": STEPS, "loss": float(validation.mean()), "losses": validation.tolist()}
    yield summary(STEPS)


def write(folder, records, tail=""):
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


# ---- branches: arms that leave a BF16 trunk at step BRANCH, and runs of three lengths

BRANCH, HORIZONS = 40, (100, 200, 400)
ARMS = {"bf16": 0.0, "null": 0.0, "fp8:tensorwise": 0.006, "fp8:rowwise": 0.03}  # cost in loss


def branch_losses(seed, arm, horizon, noise=0.001):
    """(training losses of steps 1 to horizon, validation losses) of an arm; until BRANCH they are the trunk's."""
    rng, own = np.random.default_rng([seed, 1]), np.random.default_rng([seed, list(ARMS).index(arm), horizon])
    batches, level = 0.05 * rng.standard_normal(max(HORIZONS)), 0.02 * rng.standard_normal()
    away = np.arange(1, horizon + 1) > BRANCH
    ends = 3 + 3 * np.arange(1, horizon + 1)**-0.3 + level
    shift = ARMS[arm] + noise * own.standard_normal()
    sequences = 0.3 * np.random.default_rng(7).standard_normal(64) + 0.004 * own.standard_normal(64)
    return (ends + batches[:horizon] + away * (shift + 0.001 * own.standard_normal(horizon)),
            ends[-1] + shift + sequences)


def tokens_at(step):
    """Tokens up to a step. Steps up to BRANCH are twice as large as the arms'."""
    return 128 * (step + min(step, BRANCH))


def branch_records(seed, arm, horizon, ms=10.0, norm=1.0, **changes):
    """All records of a run: the trunk's and the arms' own log is the longest, and the others begin with their decay."""
    rounding, fp8 = seed + 1000 * (arm == "null"), arm.startswith("fp8")
    own = {"precision": "fp8" if fp8 else "bf16", "fp8_recipe": arm[4:] if fp8 else None, "rounding_seed": rounding}
    trunk = {"precision": "bf16", "fp8_recipe": None, "rounding_seed": seed}
    branches = [] if arm == "bf16" else [{"step": BRANCH, **trunk}]
    branches += [{"step": horizon * 3 // 4, **own}] * (horizon < max(HORIZONS))
    training, validation = branch_losses(seed, arm, horizon)
    begin = branches[-1]["step"] if branches else 0
    first = settings(own["precision"], seed, **{
        "rounding-seed": rounding, "num-steps": horizon, "decay-steps": horizon // 4, "branch": "x" * bool(branches),
        "lr-schedule": "wsd", "fp8-recipe": arm[4:] if fp8 else "tensorwise", **changes})
    sequences = tokens_at(begin) // first["settings"]["sequence-length"]
    yield {**first, "first_sample": sequences, "branches": branches, "build": "0123456789ab"}
    for step in range(begin + 1, horizon + 1):
        yield step_record(step, float(training[step - 1]), ms / (1.25 if fp8 else 1) * (1 + 0.01 * (step % 5)),
                          joules=5.0 / (1.1 if fp8 else 1), norm=norm * (1 + 0.1 * (step % 3)))
    yield {"type": "validation", "step": horizon, "loss": float(validation.mean()), "losses": validation.tolist()}
    yield summary(horizon)


def branches_folder(folder, trunks=(42, 43, 44), arms=ARMS, lengths=HORIZONS, **verdict):
    """Makes a verdict of branches. verdict: entries of verdict.json beside `runs`; without any there is none."""
    runs = []
    for seed in trunks:
        for arm in arms:
            for horizon in lengths:
                runs.append({"folder": f"tiny.{arm.replace(':', '-')}.s{seed}.n{horizon}",
                             "recipe": arm.replace("null", "bf16")})
                write(folder / runs[-1]["folder"], branch_records(seed, arm, horizon))
    if verdict:
        (folder / "verdict.json").write_text(json.dumps({"runs": runs, **verdict}))
    return folder


# ---- logs as the GPU trainer writes them


def gemms_of(precision):
    """The GEMMs of a settings record. With precision fp8 they are FP8, except those of layer 0 and of lm_head."""
    gemms = []
    for linear, (n, k) in {**LINEARS, "lm_head": (128256, 2048)}.items():
        for gemm, operands in (("fprop", "xw"), ("dgrad", "yw"), ("wgrad", "yx")):
            for fp8 in (True, False):
                all_layers = range(LAYERS) if linear != "lm_head" else ()
                layers = [layer for layer in all_layers if fp8 == (precision == "fp8" and layer > 0)]
                if not layers and (linear != "lm_head" or fp8):
                    continue
                dtypes = {"dy" if o == "y" else o: {"dtype": ("e5m2" if o == "y" else "e4m3") if fp8 else "bf16"}
                          for o in operands}
                gemms.append({"linear": linear, "gemm": gemm, "layers": layers, "M": 2048, "N": n, "K": k, **dtypes,
                              "fast_accum": False})
    return gemms


def gpu_settings(model, precision, recipe, seed, length, gpus, steps, **changes):
    sizes = {"weights": 2.5e9, "gradients (bf16)": 2.5e9, "optimizer state": 5e9, "workspaces": 1e9,
             "activations kept for backward": 8e5 * length, "logits of one chunk": 5e8, "gathered weights": 2e8,
             "amaxes, scales, audit": 1e6, "FP8 weights of one layer at a time": 2e8 * (precision == "fp8")}
    groups = [{"name": name, "bytes": int(size)} for name, size in sizes.items() if size]
    options = {"num-steps": steps, "sequence-length": length, "batch-size": 1, "fp8-recipe": recipe,
               "fp8-filter": "first" if precision == "fp8" else "", "log-dir": f"{model}{precision}{recipe}{seed}"}
    record = settings(precision, seed, world_size=gpus, model=model, device="NVIDIA H200", program="train_fp8cu",
                      peak_bf16_flops=989.5e12, model_flops_per_token=7.8e9 + 1.5e5 * length, **options, **changes)
    return {**record, "host": "node7", "started": 1.79e9, "gemms": gemms_of(precision),
            "memory": {"groups": groups, "reused_bytes": 0, "other_bytes": int(1.2e9),
                       "total_bytes": sum(g["bytes"] for g in groups) + int(1.2e9)}}


def gpu_step(rng, step, loss, ms, gpus, tokens):
    """A step with everything that NVML tells."""
    warm = min(step / 200, 1.0)
    watts = [380 + 280 * warm + 10 * rng.standard_normal() + 6 * gpu for gpu in range(gpus)]
    rate = tokens / ms * 1000
    return {"type": "step", "step": step, "loss": loss, "norm": 1.0, "lr": 1e-3, "ms": ms, "data_ms": 0.004 * ms,
            "communication_ms": 0.03 * ms * (gpus > 1), "optimizer_ms": 0.05 * ms,
            "tokens_per_second_per_gpu": rate / gpus, "tokens_per_second": rate, "tflops_per_gpu": 400.0, "mfu": 0.4,
            "sol": 0.4, "memory_bytes": int(22e9 + 1e6 * step), "skipped": step == 700,
            "joules": sum(watts) * ms / 1000, "watts": watts,
            "sm_mhz": [1980 - 200 * warm + 15 * rng.standard_normal() for _ in range(gpus)],
            "celsius": [40 + 28 * warm + gpu for gpu in range(gpus)],
            "throttle": ["power cap" if step > 150 and rng.random() < 0.4 else "" for _ in range(gpus)]}


def audit_records(rng, step):
    for layer in range(1, LAYERS):
        for linear in LINEARS:
            for gemm, operands in (("fprop", ("x", "w")), ("dgrad", ("dy", "w")), ("wgrad", ("dy", "x"))):
                for operand in operands:
                    yield {"type": "fp8_audit", "step": step, "layer": layer, "linear": linear, "gemm": gemm,
                           "operand": operand, "amax": 3.0, "scale_min": 100.0, "scale_max": 100.0,
                           "flushed": 0.02 if operand == "dy" and layer > 12 else 0.0,
                           "saturated": 0.001 if linear == "down" and layer == 3 else 0.0,
                           "sqnr_db": (26 if operand == "dy" else 31.5) - 0.2 * layer + 0.3 * rng.standard_normal()}


def profile_record(step, fast):
    parts = [("attn forward", 16, 3.1, "gemm", 2.0), ("attn backward", 16, 7.9, "gemm", 5.1),
             ("down fprop", 16, 3.1 / fast, "gemm", 2.6 / fast), ("down dgrad", 16, 3.2 / fast, "gemm", 2.6 / fast),
             ("down wgrad", 16, 3.3 / fast, "gemm", 2.6 / fast), ("gate_up fprop", 16, 6 / fast, "gemm", 5.1 / fast),
             ("gate_up dgrad", 16, 6.2 / fast, "gemm", 5.1 / fast),
             ("gate_up wgrad", 16, 6.5 / fast, "gemm", 5.1 / fast),
             ("lm_head", 3, 9.0, "gemm", 7.6), ("swiglu", 32, 1.8, "memory", 1.5), ("rmsnorm", 66, 1.2, "memory", 0.9),
             ("AdamW", 1, 4.1, "memory", 3.8), ("gradient norm", 1, 0.6, "memory", 0.5),
             ("quantize", 90, 1.5 * (fast > 1), "memory", 1.1), ("gradients: waiting", 17, 1.4, "wait", None),
             ("cross-entropy", 1, 0.9, "memory", 0.7), ("embedding", 2, 0.2, "memory", 0.1)]
    return {"type": "profile", "step": step, "parts": [
        {"name": name, "calls": calls, "ms": ms, "kind": kind, "speed_of_light_ms": light}
        for name, calls, ms, kind, light in parts if ms]}


def gpu_records(model, precision, recipe, seed, *, length=2048, gpus=2, steps=1800, speed=1.0, difference=0.0,
                **changes):
    """A finished run of the GPU trainer with a profile, saves and a resume; in FP8 with audits. If there is a step 700,
    it is skipped.
    """
    rng = np.random.default_rng([seed, round(1000 * speed), round(1e6 * difference)])
    batches = np.random.default_rng(seed).standard_normal(steps)
    at = np.arange(1, steps + 1)
    loss = 3 + 18 * at**-0.3 + 0.15 * batches + difference + 0.02 * rng.standard_normal(steps)
    sequences = 5.2 + 0.4 * np.random.default_rng(1).standard_normal(256)
    first = gpu_settings(model, precision, recipe, seed, length, gpus, steps, **changes)
    ms = 62.0 / speed * length / 2048
    yield first
    for step in range(1, steps + 1):
        if step == steps * 2 // 3:
            yield {"type": "save", "step": step - 1, "seconds": 4.2}
            yield first
        yield gpu_step(rng, step, float(loss[step - 1]), ms * (1 + 0.004 * rng.standard_normal()), gpus, gpus * length)
        if step % (steps // 6) == 0:
            losses = sequences + difference + 0.02 * rng.standard_normal() + 0.03 * rng.standard_normal(256)
            yield {"type": "validation", "step": step, "loss": float(losses.mean()), "losses": losses.tolist(),
                   "seconds": 1.5}
        if step % (steps // 3) == 0 and precision == "fp8":
            yield from audit_records(rng, step)
    yield {"type": "save", "step": steps, "seconds": 4.0}
    yield profile_record(steps, speed * (1.3 if speed > 1 else 1))
    work = ms * steps / 1000
    yield {**summary(steps), "goodput": 0.95,
           "seconds": {"wall": 1.07 * work, "start": 0.02 * work, "compute": 0.915 * work, "data": 0.004 * work,
                       "communication": 0.03 * work, "optimizer": 0.05 * work, "validation": 0.02 * work,
                       "sampling": 0.0, "saving": 0.02 * work, "other": 0.01 * work}}


def verdict_folder(folder, seeds=(42, 43, 44), steps=1800):
    """Makes a verdict of llama3.2-1b in BF16 and three FP8 recipes."""
    model, runs = "llama3.2-1b", []
    for recipe, speed, difference in (("bf16", 1.0, 0.0), ("fp8:tensorwise", 1.31, 0.012), ("fp8:rowwise", 1.22, 0.004),
                                      ("fp8:mxfp8:emulate", 0.8, 0.03)):
        precision, name, *emulate = [*recipe.split(":"), "tensorwise"][:3] if ":" not in recipe else recipe.split(":")
        for seed in seeds:
            run = f"{model}.{recipe.replace(':', '-')}.s{seed}"
            options = {"fp8-emulate": "on"} if emulate == ["emulate"] else {}
            write(folder / run, gpu_records(model, precision, name, seed, steps=steps, speed=speed,
                                            difference=difference, **options))
            runs.append({"folder": run, "model": model, "recipe": recipe, "seed": seed, "rounding_seed": seed})
    verdict = {"command": "scripts/verdict.sh llama3.2-1b --recipes bf16,fp8,fp8:rowwise,fp8:mxfp8:emulate",
               "commit": "abc1234", "dirty": False, "date": "2026-11-23T07:00:00Z", "models": [model],
               "recipes": ["bf16", "fp8:tensorwise", "fp8:rowwise", "fp8:mxfp8:emulate"], "seeds": list(seeds),
               "num_steps": steps,
               "sequence_length": 2048, "gpus": 2, "price": 3.5, "currency_note": "", "regime": "fresh",
               "driver": "580.65", "gpu_names": ["NVIDIA H200"], "runs": runs}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return folder


def sweep_folder(folder, steps=100, models=("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "qwen3-4b", "qwen3-14b"),
                 lengths=(2048, 4096, 8192), gpu_counts=(1, 2, 4)):
    """Makes a sweep of models x lengths x numbers of GPUs x 2 precisions. qwen3-14b is out of memory on one GPU."""
    lines = []
    for number, model in enumerate(models):
        for length in lengths:
            for gpus in gpu_counts:
                for precision, speed in (("bf16", 1.0), ("fp8", 1.2 + 0.02 * number)):
                    name = f"{model}_T{length}_{precision}_{gpus}gpu"
                    lines.append(f"{name} {length} {gpus} {precision} {model}\n")
                    if model == "qwen3-14b" and gpus == 1:
                        (folder / name).mkdir(parents=True)
                        (folder / name / "result").write_text("memory\t9\tout of GPU memory: 150 GiB are needed\n")
                        continue
                    rate = speed * (1 - 0.02 * gpus) / (1 + number) / (1 + length / 30000)
                    write(folder / name, gpu_records(model, precision, "tensorwise", 42, length=length, gpus=gpus,
                                                     steps=steps, speed=rate, difference=0.001 * (precision == "fp8")))
                    (folder / name / "result").write_text("done\t60\t\n")
    (folder / "runs.txt").write_text("".join(lines))
    return folder


if __name__ == "__main__":
    verdict_folder(pathlib.Path(sys.argv[1]) / "verdict")
    branches_folder(pathlib.Path(sys.argv[1]) / "branches")
    sweep_folder(pathlib.Path(sys.argv[1]) / "sweep")
