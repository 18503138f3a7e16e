"""usage: dev/test/lib/check_log.py LOG RANKS [--energy]

Checks what log.jsonl says about time, energy and validation: the parts of a step's time take at most 1.001 times as
long as the step on one rank, 1.5 times on several; the parts of the run's time add up; a validation loss is the mean of
its sequences' losses; only several ranks wait for each other. With --energy every step must have energy, and power,
clock, temperature and throttle reasons of every GPU. Prints the losses of the last validation's sequences. Exits with 1
and the reason if something is wrong.
"""
import json
import sys


def close(a, b, tolerance):
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def check_steps(steps, ranks, energy):
    for step in steps:
        parts = [step[key] for key in ("data_ms", "communication_ms", "optimizer_ms")]
        # Parts are means over all ranks and "ms" is the time of rank 0, so with several ranks the parts may add up to
        # more than "ms".
        assert min(parts) >= 0 and sum(parts) <= (1.001 if ranks == 1 else 1.5) * step["ms"], step
        assert step["optimizer_ms"] > 0, step
        assert not energy or step["joules"] > 0, step
        for key in ("watts", "sm_mhz", "celsius", "throttle") if energy else ():
            assert len(step[key]) == ranks and (key == "throttle" or min(step[key]) > 0), step
    waited = sum(step["communication_ms"] for step in steps)
    assert (waited > 0) == (ranks > 1), f"{ranks} ranks waited {waited} ms for each other"


def check_summary(summary, steps, ranks, energy):
    seconds = dict(summary["seconds"])
    wall = seconds.pop("wall")
    assert min(seconds.values()) >= 0 and close(sum(seconds.values()), wall, 1e-6), seconds
    parts = sum(seconds[key] for key in ("compute", "data", "communication", "optimizer"))
    assert close(parts, sum(step["ms"] for step in steps) / 1e3, 1e-3 if ranks == 1 else 0.5), (parts, seconds)
    assert 0 < summary["goodput"] <= (seconds["compute"] + seconds["optimizer"]) / wall + 1e-9, summary["goodput"]
    # A run whose steps took less than 2 s has no energy.
    assert not energy or ("joules" in summary) == (sum(step["ms"] for step in steps) >= 2000), summary
    if "joules" in summary:
        assert close(summary["joules"], sum(step["joules"] for step in steps), 1e-6), summary
        assert summary["kwh"] * 3.6e6 >= 0.99 * summary["joules"] and summary.get("joules_per_token", 1) > 0, summary


def main(path, ranks, energy):
    records = [json.loads(line) for line in open(path)]
    of = {kind: [r for r in records if r["type"] == kind] for kind in ("step", "validation", "save", "summary")}
    check_steps(of["step"], ranks, energy)
    check_summary(of["summary"][-1], of["step"], ranks, energy)
    for record in of["validation"]:
        losses = record["losses"]
        assert close(record["loss"], sum(losses) / len(losses), 1e-12) and record["seconds"] > 0, record
    assert all(record["seconds"] > 0 for record in of["save"]), of["save"]
    print(*of["validation"][-1]["losses"])


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), "--energy" in sys.argv)
    except (AssertionError, KeyError) as error:
        sys.exit(f"{sys.argv[1]}: {type(error).__name__}: {error}")
