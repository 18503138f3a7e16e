"""The numbers of comparisons and runs: the content of report.json. It has no profiles, audits and memory plans."""
import dataclasses
import math

import numpy as np

import sweep_folder
from report import words
from report.style import means_of_windows

CURVES = 5000   # points that all loss curves share; each has its part of them, but at least 10 and at most 100


def clean(value):
    """The value as JSON can hold it: numbers that are not finite become null."""
    if dataclasses.is_dataclass(value):
        return clean(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def comparison_numbers(c, price):
    """A comparison as a dictionary."""
    kwh = [joules * words.PER_GIGA / 3.6e6 for joules in c.joules_per_token] if c.joules_per_token else None
    money = words.money_per_giga(c, price) if price is not None and c.seconds_per_token else None
    return {
        "model": c.model, "sequence_length": c.length, "gpus": c.gpus, "recipe": c.recipe, "verdict": words.kind_of(c),
        "words": words.sentence(c, price), "seeds": c.seeds if c.pairs else [], "steps": c.steps,
        "pairs": [{"bf16": p.bf16.name, "fp8": p.fp8.name, "seed": p.fp8.seed, "rounding_seed": p.fp8.rounding_seed}
                  for p in c.pairs],
        "refused": c.refused, "diverged": c.diverged, "notes": c.notes, "missing": c.why,
        "tokens_per_second_ratio": c.speed, "tokens_per_second_ratio_range": c.speed_range,
        "training": c.training, "training_last_steps": c.last, "training_noise": c.training_noise,
        "validation": c.validation, "validation_step": c.validation_step, "validation_noise": c.validation_noise,
        "difference_over_steps": c.curve, "window": c.window, "noise_over_steps": c.curve_noise,
        "noise_of": c.noise_of, "speedup": c.speedup, "energy_speedup": c.energy_speedup,
        "kwh_per_billion_tokens": kwh,
        "money_per_billion_tokens": money,
    }


def run_numbers(run, recipe):
    """A run as a dictionary."""
    finite = [loss for loss in run.column("loss") if loss is not None]
    memory = [peak for peak in run.column("memory_bytes") if peak is not None]
    tokens = words.median_speed(run)
    flops = run.settings.get("model_flops_per_token")
    peak = run.settings.get("peak_bf16_flops")
    tflops = flops * tokens / run.gpus * 1e-12 if flops else None
    joules = run.values("joules")
    return {
        "name": run.name, "place": run.place, "model": run.settings["model"], "sequence_length": run.length,
        "gpus": run.gpus, "recipe": recipe, "seed": run.seed, "rounding_seed": run.rounding_seed,
        "state": run.state(),
        "steps": run.last_step, "num_steps": run.num_steps, "complete": run.complete, "running": run.running,
        "half_written": run.half_written, "repeated_steps": run.repeated, "starts": len(run.starts),
        "diverged_at": run.diverged, "skipped": sum(map(bool, run.column("skipped"))),
        "last_loss": sum(finite[-20:]) / len(finite[-20:]) if finite else None,
        "validation_loss": run.validations[-1]["loss"] if run.validations else None,
        "tokens_per_second": tokens, "tokens_per_second_per_gpu": tokens / run.gpus, "tflops_per_gpu": tflops,
        "mfu": tflops * 1e12 / peak if tflops and peak and peak > 0 else None,
        "memory_bytes": max(memory) if memory else None,
        "joules_per_token": sum(joules) / (run.tokens_per_step * len(joules)) if joules else None,
        "repeats_data": run.repeats_data,
    }


def loss_curve(run, most):
    """The training loss over steps, as means of windows of steps."""
    middles, losses = means_of_windows(run.column("loss"), min(max(most, 10), 100))
    return {"step": (middles + run.steps[0]["step"]).tolist(), "loss": [round(loss, 6) for loss in losses.tolist()]}


def names_of(names):
    """The GPU names of a verdict, or ["none"]; a damaged list counts as none."""
    names = names if isinstance(names, list) else []
    return [sweep_folder.clean(str(name)) for name in names] or ["none"]


def differing_settings(runs):
    """({option: value} of options that all runs share, [(option, {value: names of runs})] of the others)."""
    common, differing = {}, []
    for key in sorted({key for run in runs for key in run.settings["settings"]} - {"log-dir"}):
        values = {}
        for run in runs:
            values.setdefault(str(run.option(key, "absent")), []).append(run.name)
        if len(values) == 1:
            common[key] = next(iter(values))
        else:
            differing.append((key, values))
    return common, differing


def facts(runs, keys=("program", "version", "versions", "device", "host", "model", "parameters", "world_size",
                      "training_tokens", "training_sequences", "training_fingerprint", "validation_fingerprint")):
    """[(fact, its values)] of the settings records of all starts."""
    rows = []
    for key in keys:
        values = list(dict.fromkeys(str(start[key]) for run in runs for start in run.starts if key in start))
        if values:
            rows.append((key.replace("_", " "), values))
    return rows


def receipt(found, runs):
    """How the runs were made: commands, commit, data, machines, settings."""
    common, differing = differing_settings(runs)
    rows = []
    for verdict in found.verdicts:
        commit = str(verdict.get("commit") or "unknown") + (", with changes" if verdict.get("dirty") else "")
        rows += [("command", [str(verdict.get("command", "unknown"))]), ("commit", [commit]),
                 ("date", [str(verdict.get("date", "unknown"))]),
                 ("driver", [str(verdict.get("driver") or "none")]),
                 ("GPU names", names_of(verdict.get("gpu_names")))]
    rows += [("command", [command]) for command in found.commands]
    return {"facts": rows + facts(runs), "common": common, "differing": differing}


def everything(found, names, comparisons, price, sources, made):
    """The whole of report.json, except `figures`, `left_out` and `singles`."""
    return clean({
        "made": made, "sources": sources, "price_of_a_gpu_hour": price,
        "verdict": [{"kind": kind, "name": name, "words": text}
                    for kind, name, text in words.verdict(comparisons, price)],
        "comparisons": [comparison_numbers(c, price) for c in comparisons],
        "runs": [{**run_numbers(run, names[run.name]), "curve": loss_curve(run, CURVES // len(found.runs))}
                 for run in found.runs],
        "runs_without_numbers": [{"name": name, "reason": reason} for name, reason in found.without],
        "problems": found.problems, "receipt": receipt(found, found.runs),
    })
