"""The runs of one trunk: itself from step 0 on, the arms that branch from it, and the runs that end early.

Every arm leaves the trunk after the same step, so that horizons differ in length alone. A horizon before the last is a
run of its own, which leaves its arm where its decay of the rate begins.
"""
import os

from runs.options import fail
from runs.runner import ANSWERS

NULL = 1000  # the null arm's rounding seed is the seed plus this
DECAY = 5    # the rate decays in the last fifth of a run


class Lengths:
    """Where the runs of a trunk branch, decay and end, in steps. scale: the trunk's tokens per step over the arms'.
    Each run trains on as many tokens after the branch as with a scale of 1. early: not only the longest runs."""

    def __init__(self, steps, branch, early, scale=1):
        self.branch = branch
        ends = [branch + (steps - branch) // part for part in (4, 2) if early] + [steps]  # tokens since then double
        self.ends = [branch + int((end - branch) * scale) for end in ends]
        self.decays = [int(end // DECAY * scale) for end in ends]
        # after these an arm is saved for the runs that end before the last
        self.saves = [end - decay for end, decay in zip(self.ends[:-1], self.decays)]

    def decay_follows(self):
        """True if the rate of the shortest run decays after the branch."""
        return self.ends[0] - self.decays[0] > self.branch


def trunk_runs(make, lengths, seed, recipes, trunk=None):
    """The runs of a seed, each after the one that it branches from. make(precision, rounding seed or None, last step,
    the checkpoint's run and step or None, saved steps) returns a Run. recipes: the trunk's, which with a trunk of other
    tokens per step branches from it too, then those of arms."""
    parent, last = trunk and (trunk, lengths.branch), lengths.ends[-1]
    stays = make(recipes[0], None, last, parent, lengths.saves if trunk else [lengths.branch, *lengths.saves])
    if not trunk:
        stays.kept, parent = lengths.branch, (stays, lengths.branch)
    arms = [stays, make(recipes[0], seed + NULL, last, parent, lengths.saves)]
    arms += [make(recipe, None, last, parent, lengths.saves) for recipe in recipes[1:]]
    early = [make(arm.precision, arm.rounding, end, (arm, step), []) for arm in arms
             for end, step in zip(lengths.ends, lengths.saves)]
    return arms + early


def require_checkpoints(runs):
    """Dies if a run is left that branches from a checkpoint which is no longer there."""
    for run in runs:
        if run.parent and run.kind not in ANSWERS and run.parent.kind == "done" and not os.path.isdir(run.start):
            fail(f"{run.title}: it branches from {run.start}, which is gone; remove the folders of this seed to train "
                 "its trunk again, or give another --out")
