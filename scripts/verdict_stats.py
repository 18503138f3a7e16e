"""Statistics of the FP8 verdict: functions on arrays, without files or options. Needs scripts/setup_report.sh.

A trunk is a seed: one BF16 run, and an FP8 run of each recipe that shares its data and begins with its weights, at step
0 (a whole pair) or at a step after warm-up (a branch). Every difference is FP8 minus BF16, so a positive one is a cost.
Trunks are the only unit that repeats, so every interval is a t-interval over trunks. All functions but `trunks_needed`
take more axes before [trunks, ...] and then return arrays, which lets the simulations of
dev/test/test_verdict_stats.py run thousands of verdicts at once. One trunk gives an estimate without an interval: real
pairs that differed in the rounding seed alone always looked different over their steps and sequences.

Intervals have 95% for themselves. A verdict is read from simultaneous ones, whose level is divided by the recipes of
one model and batch and by the planned looks (`level`), so that 95% of such groups in which nothing differs say so.
Variances are not pooled over recipes: a test with 1 to 4 degrees of freedom cannot show that they are equal. Pooled
behind Bartlett's test at 5%, with Dunnett's factor, three recipes of 1, 3 and 10 times the noise that differ in nothing
else make 15% of pages false with 2 trunks, 13% with 3 and 7% with 5; without pooling it is 5% (40,000 pages each).

Validation: every pair reads the same sequences, so that trunks and sequences are crossed random factors. The variance
of the mean is the sum of both parts, from the mean squares of the two-way table (Cornfield and Tukey 1956), with
Satterthwaite's degrees of freedom (1946), and never less than that of the trunks alone. Neighbouring sequences may be
of one document, so that the columns of the table are means of blocks of neighbours, not sequences.

Speed-up at equal loss: a cost d is priced by how much a longer run lowers the last loss of BF16, m = d(loss) /
d(log steps) over lengths of runs. log speed-up = log(time of a BF16 step / time of an FP8 step) - d / |m|, a ratio of
means over trunks, with Fieller's interval (1954). The slope of a run's own curve is no price: at the end of a decay it
is nearly 0.
"""
import dataclasses
import math

import numpy as np
from scipy import optimize, stats

ALPHA, POWER = 0.05, 0.80
LARGEST_LOG = math.log(1000)  # a speed-up beyond this is none: the slope that prices a loss is near 0
# Blocks of 16 neighbours, but at least 4 and at most 16 blocks. EDGE: documents of 8 sequences that lie in two blocks
# make the variance between blocks too small by up to a sixth. Simulated with 2, 3 and 5 trunks and documents of 8
# sequences, this rule covers 94 to 98%; blocks of 8 sequences, or EDGE 1, cover 89 to 93%.
BLOCK, FEWEST_BLOCKS, MOST_BLOCKS, EDGE = 16, 4, 16, 1.25
LEAST_SEQUENCES = BLOCK * FEWEST_BLOCKS  # with fewer, blocks are shorter than documents may be


@dataclasses.dataclass(frozen=True)
class Difference:
    """FP8 minus BF16 with its interval; from one trunk the estimate alone."""
    estimate: float
    low: float | None
    high: float | None
    standard_error: float | None
    degrees: float
    trunks: int
    sequence_variance: float = 0.0  # the part of the variance that is of validation sequences


@dataclasses.dataclass(frozen=True)
class Curve:
    """A paired difference over steps: one interval for each window of steps, at the window's middle (from 0)."""
    steps: np.ndarray
    estimate: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Speedup:
    """What BF16 takes over what FP8 takes: to equal loss, and for equal steps. Without an estimate, see `reason`."""
    estimate: float | None
    low: float | None
    high: float | None
    equal_steps: float
    reason: str = ""


def level(recipes, looks, alpha=ALPHA):
    """The level of each of `recipes` two-sided intervals at each of `looks` that hold together with 1 - alpha."""
    return alpha / (max(recipes, 1) * max(looks, 1))


def _paired(bf16, fp8, what):
    """Both as [..., trunks, n] in float64. ValueError if shapes differ or a value is not finite."""
    bf16, fp8 = (np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in (bf16, fp8))
    if bf16.shape != fp8.shape or bf16.size == 0:
        raise ValueError(f"{what}: BF16 has shape {bf16.shape}, FP8 {fp8.shape}; both need the same [trunks, n]")
    for name, values in (("BF16", bf16), ("FP8", fp8)):
        if not np.isfinite(values).all():
            raise ValueError(f"{what}: {name} holds a value that is not finite")
    return bf16, fp8


def _factor(degrees, alpha):
    return stats.t.ppf(1 - alpha / 2, degrees)


def trunk_interval(values, alpha=ALPHA):
    """The t-interval of the mean of values [..., trunks]."""
    values = np.asarray(values, dtype=np.float64)
    trunks, mean = values.shape[-1], values.mean(axis=-1)
    if trunks == 1:
        return Difference(mean, None, None, None, 0, 1)
    error = values.std(axis=-1, ddof=1) / math.sqrt(trunks)
    half = _factor(trunks - 1, alpha) * error
    return Difference(mean, mean - half, mean + half, error, trunks - 1, trunks)


def block_means(table):
    """Means of blocks of neighbours along the last axis; single values if there are fewer than FEWEST_BLOCKS."""
    count = table.shape[-1]
    edges = np.linspace(0, count, min(count, MOST_BLOCKS, max(count // BLOCK, FEWEST_BLOCKS)) + 1).astype(int)
    return np.add.reduceat(table, edges[:-1], axis=-1) / np.diff(edges)


def validation_difference(bf16, fp8, alpha=ALPHA):
    """Difference in validation loss. bf16, fp8: losses [..., trunks, sequences] of the same sequences in all runs."""
    bf16, fp8 = _paired(bf16, fp8, "validation losses")
    of_trunk, trunks = (fp8 - bf16).mean(axis=-1), bf16.shape[-2]
    plain = trunk_interval(of_trunk, alpha)
    if trunks == 1 or bf16.shape[-1] == 1:
        return plain
    table = block_means(fp8 - bf16)
    blocks = table.shape[-1]
    mean, of_block = table.mean(axis=(-2, -1), keepdims=True), table.mean(axis=-2, keepdims=True)
    rest = table - table.mean(axis=-1, keepdims=True) - of_block + mean
    rest = (rest**2).sum(axis=(-2, -1)) / ((trunks - 1) * (blocks - 1)) / (trunks * blocks)
    # Both parts contain `rest`, but the variance of the mean contains it once.
    of_sequences = EDGE * np.maximum(of_block[..., 0, :].var(axis=-1, ddof=1) / blocks - rest, 0.0)
    of_trunks = plain.standard_error**2
    variance = np.maximum(of_trunks + of_sequences, 1e-300)
    degrees = variance**2 / np.maximum(of_trunks**2 / (trunks - 1) + of_sequences**2 / (blocks - 1), 1e-300)
    degrees = np.clip(degrees, 1, None)
    wider = np.sqrt(variance) * _factor(degrees, alpha) > plain.standard_error * _factor(trunks - 1, alpha)
    error = np.where(wider, np.sqrt(variance), plain.standard_error)
    degrees = np.where(wider, degrees, trunks - 1)
    half = _factor(degrees, alpha) * error
    return Difference(plain.estimate, plain.estimate - half, plain.estimate + half, error, degrees, trunks,
                      of_sequences)


def window_means(values, window):
    """Values [n, steps] as means of windows of `window` steps, of which the last ends the run."""
    first = values.shape[1] % window
    return values[:, first:].reshape(len(values), -1, window).mean(axis=2)


def difference_over_steps(bf16, fp8, window, alpha=ALPHA):
    """The paired difference in windows of `window` steps, of which the last ends the run, each with its interval."""
    bf16, fp8 = _paired(bf16, fp8, "training losses")
    if bf16.shape[-1] < window:
        raise ValueError(f"{bf16.shape[-1]} steps are too few for a curve of windows of {window}")
    parts = window_means(fp8 - bf16, window)
    got = trunk_interval(parts.T, alpha)
    middles = bf16.shape[-1] % window + window * np.arange(parts.shape[1]) + (window - 1) / 2
    return Curve(middles, got.estimate, got.low, got.high)


# ---- cost at equal loss, and over lengths


def ratio_interval(top, bottom, extra=0.0, alpha=ALPHA):
    """(estimate, low, high) of mean(top) / mean(bottom), [..., trunks] each, by Fieller; all nan where the interval of
    mean(bottom) holds 0 or what is below. extra: more variance of mean(top), which no trunk shows."""
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    trunks, a, b = top.shape[-1], top.mean(axis=-1), bottom.mean(axis=-1)
    scale = _factor(trunks - 1, alpha)**2 / (trunks * (trunks - 1))
    da, db = top - a[..., None], bottom - b[..., None]
    square = b**2 - scale * (db**2).sum(axis=-1)
    middle = a * b - scale * (da * db).sum(axis=-1)
    rest = a**2 - scale * ((da**2).sum(axis=-1) + extra * trunks * (trunks - 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        square = np.where((square > 0) & (b > 0), square, np.nan)
        root = np.sqrt(np.maximum(middle**2 - square * rest, 0))
        return a / b + 0 * square, (middle - root) / square, (middle + root) / square


def last_slope(steps, losses):
    """d(last loss) / d(log steps) at the longest of runs of these lengths. losses: [..., trunks, lengths], two or more.

    Between two lengths a curve is steeper than at the longer one, which would price a cost too low: with 10% of it on a
    power law of exponent 0.3, where intervals at a cost of 1% then cover 88%. With three lengths the slope is carried
    on from the middles of both spans to the end, as a power law does it; steps in which it rises are noise."""
    x, losses = np.log(np.asarray(steps, dtype=np.float64)), np.asarray(losses, dtype=np.float64)
    slopes = np.diff(losses, axis=-1) / np.diff(x)
    if len(x) == 2:
        return slopes[..., -1]
    before, last = slopes[..., -2], slopes[..., -1]
    flatter = np.clip(np.where((before < 0) & (last < 0), last / np.minimum(before, -1e-12), 1), 0.25, 1)
    return last * flatter**((x[-1] - x[-2]) / (x[-1] - x[-3]))


def equal_loss_speedup(log_ratio, gap, slope, gap_variance=0.0, alpha=ALPHA):
    """The speed-up at equal loss, of each trunk [..., trunks]: log_ratio: log(time, or joules, of a BF16 step / of an
    FP8 step); gap: FP8's loss minus BF16's; slope: d(last loss of BF16) / d(log steps). gap_variance: variance of the
    mean gap beside that of trunks."""
    log_ratio, gap, slope = (np.asarray(x, dtype=np.float64) for x in (log_ratio, gap, slope))
    ratio, fall = log_ratio.mean(axis=-1, keepdims=True), -slope
    equal = np.exp(ratio[..., 0])
    if log_ratio.shape[-1] == 1:
        return Speedup(None, None, None, equal, "one trunk gives no interval")
    # mean(ratio) - mean(gap) / mean(fall) is mean(top) / mean(fall); to first order each trunk's part is this:
    top = fall * ratio + fall.mean(axis=-1, keepdims=True) * (log_ratio - ratio) - gap
    logs = ratio_interval(top, fall, gap_variance, alpha)
    if equal.ndim == 0 and not np.isfinite(logs[1]):
        return Speedup(None, None, None, equal, "the interval of the fall of BF16's loss with more steps holds 0")
    logs = [np.clip(one, -LARGEST_LOG, LARGEST_LOG) for one in logs]
    if equal.ndim == 0 and max(map(abs, logs)) == LARGEST_LOG:
        return Speedup(None, None, None, equal, "BF16's loss hardly falls with more steps, so the interval has no end")
    return Speedup(*map(np.exp, logs), equal)


def trend(x, values, at=None, alpha=ALPHA):
    """The slope of values [..., trunks, points] over x [points]: a line for each trunk, then the interval over trunks.
    With `at`, instead the value of these lines at x = at."""
    x, values = np.asarray(x, dtype=np.float64), np.asarray(values, dtype=np.float64)
    weights = (x - x.mean()) / ((x - x.mean())**2).sum()
    slopes = values @ weights
    return trunk_interval(slopes if at is None else values.mean(axis=-1) + slopes * (at - x.mean()), alpha)


# ---- what a number of trunks can see


def null_deviation(gaps, confidence=0.9):
    """(deviation, its upper limit) of a trunk's gap where nothing differs: of null pairs, whose mean gap is 0."""
    gaps = np.asarray(gaps, dtype=np.float64)
    squares = float((gaps**2).sum())
    return math.sqrt(squares / len(gaps)), math.sqrt(squares / stats.chi2.ppf(1 - confidence, len(gaps)))


def no_quieter(difference, null_gaps, alpha=ALPHA):
    """The difference, with an interval at least as wide as null pairs make it: an arm's gap has the noise of two runs,
    as a null pair's has, so trunks that agree better do so by luck. null_gaps: [pairs]."""
    deviation = null_deviation(null_gaps)[0]
    error, degrees = deviation / math.sqrt(difference.trunks), len(null_gaps)
    half = _factor(degrees, alpha) * error
    if difference.trunks == 1 or difference.high - difference.estimate >= half:
        return difference
    return dataclasses.replace(difference, low=difference.estimate - half, high=difference.estimate + half,
                               standard_error=error, degrees=degrees)


def smallest_cost(deviation, trunks, alpha=ALPHA, power=POWER):
    """The smallest true cost, in the unit of `deviation`, that the two-sided interval at level alpha over `trunks`
    trunks tells from 0 in a share `power` of verdicts. It is also how far the true cost must be from a margin for the
    verdict to say on which side it is. deviation: of a trunk's gap. inf for one trunk."""
    if trunks < 2:
        return math.inf
    factor = _factor(trunks - 1, alpha)
    # Intervals that exclude 0 on the other side are too rare to count. The bracket holds the root for all degrees.
    shift = optimize.brentq(lambda shift: stats.nct.sf(factor, trunks - 1, shift) - power, 0, 1.4 * factor + 1)
    return float(deviation * shift / math.sqrt(trunks))


def trunks_needed(deviation, cost, alpha=ALPHA, power=POWER, most=1000):
    """The smallest number of trunks, from 2, whose smallest_cost is at most `cost`; None if it is above `most`.

    For a margin, cost is its distance from the true cost: the margin itself if FP8 costs nothing."""
    low, high = 1, 2
    while smallest_cost(deviation, high, alpha, power) > cost:
        low, high = high, 2 * high
        if low >= most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if smallest_cost(deviation, middle, alpha, power) <= cost else (middle, high)
    return high if high <= most else None
