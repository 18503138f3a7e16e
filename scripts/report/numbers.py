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
    if isinstance(value, (np.ndarray, np.generic)):
        return clean(value.tolist())
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, str):
        return sweep_folder.clean(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def in_percent(c, difference):
    """A Difference of the primary loss in percent of BF16's; None without one."""
    one = difference and c.in_percent(difference)
    return one and {"estimate": one.estimate, "low": one.low, "high": one.high}


def comparison_numbers(c, price, margin):
    """A comparison as a dictionary."""
    kwh = [joules * words.PER_GIGA / 3.6e6 for joules in c.joules_per_token] if c.joules_per_token else None
    money = words.money_per_giga(c, price) if price is not None and c.seconds_per_token else None
    base, arm, of = ("bf16", "fp8", {}) if c.against == "bf16" else ("base", "arm", {"against": c.against})
    return {
        **of, "model": c.model, "sequence_length": c.length, "gpus": c.gpus, "tokens_per_step": c.batch,
        "branch_step": c.branch, "design": "branches" if c.branch else "whole", "num_steps": c.horizon,
        "recipe": c.recipe, "null": c.null, "verdict": words.kind_of(c), "undecided": c.undecided,
        "decision": words.decision_of(c, margin) if margin and not c.null else None,
        "words": "" if c.null else "".join(words.sentence(c, margin)), "seeds": c.seeds if c.pairs else [],
        "steps": c.steps, "planned_trunks": c.planned, "tokens": c.tokens, "parameters": c.parameters,
        "pairs": [{base: p.base.name, arm: p.arm.name, "seed": p.arm.seed, "rounding_seed": p.arm.rounding_seed}
                  for p in c.pairs],
        "refused": c.refused, "diverged": c.diverged, "notes": c.notes, "missing": c.why,
        "tokens_per_second_ratio": c.speed, "tokens_per_second_ratio_range": c.speed_range,
        "primary": c.primary, "level": c.alpha, "bounds": c.bounds, "bounds_percent": in_percent(c, c.bounds),
        "training": c.training, "training_last_steps": c.last,
        "validation": c.validation, "validation_step": c.validation_step,
        "difference_over_steps": c.curve, "window": c.window, "null_differences_over_steps": c.null_curves,
        "over_tokens": [
            {"steps": h.horizon, "done_steps": h.steps, "tokens": h.tokens, "tokens_since_branch": h.tokens_since,
             "trunks": len(h.seeds), "gap_percent": in_percent(h, getattr(h, c.primary))} for h in c.horizons],
        "trend_percent": c.trend, "extrapolated_percent": c.extrapolated, "batch_trend_percent": c.batch_trend,
        "null_deviation_percent": c.deviation, "smallest_cost_percent": c.smallest,
        "speedup": c.speedup, "energy_speedup": c.energy_speedup, "gpu_hours_per_trunk": c.hours,
        "kwh_per_billion_tokens": kwh, "money_per_billion_tokens": money}


def run_numbers(run, recipe):
    """A run as a dictionary."""
    tail, tokens = run.last_losses, run.median_speed
    flops = run.settings.get("model_flops_per_token")
    peak = run.settings.get("peak_bf16_flops")
    tflops = flops * tokens / run.gpus * 1e-12 if flops else None
    joules = run.costs("joules")
    return {
        "name": run.name, "place": run.place, "model": run.settings["model"], "sequence_length": run.length,
        "gpus": run.gpus, "tokens_per_step": run.tokens_per_step, "recipe": recipe, "seed": run.seed,
        "rounding_seed": run.rounding_seed, "state": run.state(),
        "steps": run.last_step, "num_steps": run.num_steps, "complete": run.complete, "running": run.running,
        "half_written": run.half_written, "repeated_steps": run.repeated, "starts": len(run.starts),
        "diverged_at": run.diverged, "skipped": int(np.count_nonzero(run.array("skipped"))),
        "stalled": len(run.stalls), "first_step": run.first_step, "last_loss": sum(tail) / len(tail) if tail else None,
        "validation_loss": run.validations[-1]["loss"] if run.validations else None,
        "tokens_per_second": tokens, "tokens_per_second_per_gpu": tokens / run.gpus, "tflops_per_gpu": tflops,
        "mfu": tflops * 1e12 / peak if tflops and peak and peak > 0 else None,
        "memory_bytes": max((peak for peak in run.column("memory_bytes") if peak is not None), default=None),
        "joules_per_token": sum(joules) / (run.tokens_per_step * len(joules)) if joules else None,
        "repeats_data": run.repeats_data}


def loss_curve(run, most):
    """The training loss over steps, as means of windows of steps."""
    middles, losses = means_of_windows(run.column("loss"), min(max(most, 10), 100))
    return {"step": (middles + run.first_step).tolist(), "loss": [round(loss, 6) for loss in losses.tolist()]}


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


def facts(runs, keys=("program", "build", "version", "versions", "device", "host", "model", "parameters", "world_size",
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
        gpus = verdict.get("gpu_names") if isinstance(verdict.get("gpu_names"), list) else []  # else it is damaged
        commit = str(verdict.get("commit") or "unknown") + (", with changes" if verdict.get("dirty") else "")
        rows += [("command", [str(verdict.get("command", "unknown"))]), ("commit", [commit]),
                 ("date", [str(verdict.get("date", "unknown"))]), ("driver", [str(verdict.get("driver") or "none")]),
                 ("GPU names", [sweep_folder.clean(str(name)) for name in gpus] or ["none"])]
    rows += [("command", [command]) for command in found.commands]
    return {"facts": rows + facts(runs), "common": common, "differing": differing}


def everything(found, names, comparisons, price, margin, sources, made):
    """The whole of report.json, except `figures`, `left_out` and `singles`."""
    return clean({
        "made": made, "sources": sources, "price_of_a_gpu_hour": price, "margin_percent": margin,
        "verdict": [{"kind": kind, "name": begin, "words": begin + rest}
                    for kind, begin, rest in words.verdict(comparisons, margin)],
        "notes": found.notes + words.notes(comparisons, margin), "pilot": words.pilot(comparisons, margin),
        "comparisons": [comparison_numbers(c, price, margin) for c in comparisons],
        "runs": [{**run_numbers(run, names[run.name]), "curve": loss_curve(run, CURVES // len(found.runs))}
                 for run in found.runs],
        "runs_without_numbers": [{"name": name, "reason": reason} for name, reason in found.without],
        "problems": found.problems, "receipt": receipt(found, found.runs),
    })
