"""The runs of one trunk: BF16 from step 0 on, the arms that branch from it, and the runs that end early.

Every arm leaves the trunk after the same step, so that horizons differ in length alone. A horizon before the last is a
run of its own, which leaves its arm where its decay of the rate begins.
"""
import os

from runs.options import fail
from runs.runner import ANSWERS, CHECKPOINTS

NULL = 1000  # the null arm's rounding seed is the seed plus this
DECAY = 5    # the rate decays in the last fifth of a run


def horizons(steps, branch):
    """The tokens since the branch double from one to the next."""
    return [branch + (steps - branch) // 4, branch + (steps - branch) // 2, steps]


def decay_steps(horizon):
    return horizon // DECAY


def saved_steps(steps, branch):
    """The steps after which an arm is saved for the runs that end before `steps`."""
    return [h - decay_steps(h) for h in horizons(steps, branch)[:-1]]


def checkpoint(run, step):
    return os.path.join(run.folder, CHECKPOINTS, f"step-{step:08d}")


def trunk_runs(make, steps, branch, seed, recipes):
    """The runs of a seed, each after the one that it branches from. make(precision, rounding seed or None, horizon,
    the checkpoint's run and step or None, saved steps) returns a Run."""
    saves = saved_steps(steps, branch)
    trunk = make("bf16", None, steps, None, [branch, *saves])
    arms = [make("bf16", seed + NULL, steps, (trunk, branch), saves)]
    arms += [make(recipe, None, steps, (trunk, branch), saves) for recipe in recipes]
    early = [make(arm.precision, arm.rounding, horizon, (arm, step), []) for arm in [trunk, *arms]
             for horizon, step in zip(horizons(steps, branch), saves)]
    trunk.kept = branch
    return [trunk, *arms, *early]


def require_checkpoints(runs):
    """Dies if a run is left that branches from a checkpoint which is no longer there."""
    for run in runs:
        if run.parent and run.kind not in ANSWERS and run.parent.kind == "done" and not os.path.isdir(run.start):
            fail(f"{run.title}: it branches from {run.start}, which is gone; remove the folders of this seed to train "
                 "its trunk again, or give another --out")
