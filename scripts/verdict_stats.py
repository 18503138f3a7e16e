"""Statistics of the FP8 verdict: functions on arrays, without files or options. Needs scripts/setup_report.sh.

A pair is a BF16 run and an FP8 run with equal seed, rounding seed, data and data order. Every difference is FP8 minus
BF16, so a positive difference is a cost. Intervals are two-sided, with 95% confidence. Four questions are answered:

1. validation_difference: the difference in validation loss, from losses per sequence.
   Seeds and sequences are two crossed random factors: every pair reads the same sequences. The variance of the mean
   is the sum of both parts, each estimated from its mean square in the two-way table (Cornfield and Tukey 1956), with
   Satterthwaite's degrees of freedom (1946). With two or three pairs this interval is too narrow if seeds dominate, so
   it is never narrower than the t-interval over the means of the pairs. Simulated over a grid of variances, the wider
   of these two intervals covers 94 to 96% from three pairs on, and up to 98% with two pairs. With one pair: the
   t-interval over sequences, which does not cover the noise of seeds.

2. training_difference: the difference in training loss over the last steps.
   With two pairs or more: the t-interval over the means of the pairs. It covers everything in which pairs differ:
   initial weights, data order, rounding, and the noise of batches, however autocorrelated. With three pairs the
   t-factor is 4.3 instead of 2. That is the price of three pairs; a bootstrap over them would hide it, since it cannot
   draw a variance that three values do not show (Cameron, Gelbach and Miller 2008). In simulations like those of
   dev/test/test_verdict_stats.py the hierarchical bootstrap covers 73 to 98%, least where runs differ by more
   than the noise of batches moves a run's mean.
   With one pair: the moving-block bootstrap over steps (Kuensch 1989). It covers the noise of batches alone, and
   verdict() says so; runs with several rounding seeds add the noise of rounding (see 3). Percentiles of a moving-block
   bootstrap cover 81 to 95% on 40 to 400 steps, least on few of them. Therefore the interval is a t-interval with steps
   / block - 1 degrees of freedom (as for batch means, Schmeiser 1982), and its standard error is corrected for the
   number of blocks. The block is the longer of sqrt(steps) and twice the optimal block length of Politis and White
   (2004; corrected by Patton, Politis and White 2009), but at most a fifth of the steps. Simulated on 40 to 400 steps:
   93 to 96% at lag-1 correlations from 0 to 0.55. Real paired differences have 0 to 0.56. Noise whose memory is longer
   than a tenth of the steps is covered less: average over as many steps as the loss stays level.

3. noise_band: how far two BF16 runs are apart that differ only in the rounding seed, or only in the seed.
   A t-interval from the standard deviation within groups of such runs, pooled over groups. If there is only one seed,
   its difference does not show how much runs vary. with_rounding() then adds the variance of such runs to that of
   batches or sequences.

4. loss_matched_speedup: t_BF16(L) / t_FP8(L), with t the time until the smoothed loss is L, and L the smoothed loss at
   the end of BF16. A smoothed curve is a parabola in log(step), fitted to the last three quarters of the steps. The
   noise of batches is far larger than what a curve falls in 100 steps, so a narrow window would find noise; on curves
   of a power law and of a cosine schedule (Tissue and others 2024, arXiv 2408.11029) the slope of this parabola at its
   end is within 4% of the curve's. Pairs share batches, so most of the noise moves both curves alike and cancels.
   If FP8 ends above L, it never reached L: then L is where FP8 ended, the lowest loss that both runs reached, and
   `reached` is False. Nothing is extrapolated. With two pairs or more the interval is the jackknife over pairs (Tukey
   1958) with a t-factor, in log(speed-up); with one pair the moving-block bootstrap of both curves' residuals, drawn
   together. Seconds may be joules or money instead.

The smallest detectable difference is the true difference for which such an interval excludes 0 in 80% of repetitions
(power of the t-test, noncentral t). The paired design, trailing means and matched losses follow issue 7271 of
marin-community/marin.
"""
import dataclasses
import math

import numpy as np
from arch.bootstrap import MovingBlockBootstrap, optimal_block_length
from scipy import optimize, stats

CONFIDENCE, POWER = 0.95, 0.80
REPLICATES = 1000  # resamples of each bootstrap
MIN_STEPS = 40     # with fewer, too few blocks remain
ROUNDING = "rounding"  # in Difference.covers


@dataclasses.dataclass(frozen=True)
class Difference:
    """FP8 minus BF16 with its 95% interval. `detectable`: the smallest true difference found in 80% of repetitions."""
    estimate: float
    low: float
    high: float
    standard_error: float
    degrees: float
    detectable: float
    pairs: int
    covers: str  # sources of noise that the interval covers, in words


@dataclasses.dataclass(frozen=True)
class NoiseBand:
    """Differences between BF16 runs: 95% are within +-half_width, which has the shape of one run's losses.

    If noise_band() got `pairs` above 1, this holds for the mean of that many differences.
    """
    deviation: np.ndarray  # standard deviation of one run
    half_width: np.ndarray
    degrees: int


@dataclasses.dataclass(frozen=True)
class Curve:
    """A paired difference over steps: one interval for each window of steps, at the window's middle (from 0)."""
    steps: np.ndarray
    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclasses.dataclass(frozen=True)
class Speedup:
    """t_BF16 / t_FP8 at equal loss. Without an estimate, `reason` says why, and low or high may still bound it."""
    estimate: float | None
    low: float | None
    high: float | None
    loss: float | None           # the loss at which both are compared
    reached: bool                # FP8 reached the loss at the end of BF16
    equal_steps: float           # t_BF16 / t_FP8 over all steps: the speed-up before losses are matched
    step_ratio: float | None     # steps of BF16 / steps of FP8 until that loss
    pairs: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    kind: str  # "same", "costs" or "gains"
    words: str


def _paired(bf16, fp8, what):
    """Returns both as [pairs, n] in float64. ValueError if shapes differ or a value is not finite."""
    bf16, fp8 = (np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in (bf16, fp8))
    if bf16.shape != fp8.shape or bf16.ndim != 2 or bf16.size == 0:
        raise ValueError(f"{what}: BF16 has shape {bf16.shape}, FP8 {fp8.shape}; both need the same [pairs, n]")
    for name, values in (("BF16", bf16), ("FP8", fp8)):
        if not np.isfinite(values).all():
            raise ValueError(f"{what}: {name} holds a value that is not finite")
    return bf16, fp8


def _t_factor(degrees):
    return stats.t.ppf((1 + CONFIDENCE) / 2, degrees)


def detectable_difference(standard_error, degrees):
    """The smallest true difference for which a t-interval with this standard error excludes 0 in 80% of cases."""
    if standard_error == 0:
        return 0.0
    factor = _t_factor(degrees)

    # Intervals that exclude 0 on the other side are too rare to count. The bracket holds the root for all degrees >= 1.
    shift = optimize.brentq(lambda shift: stats.nct.sf(factor, degrees, shift) - POWER, 0, 1.4 * factor + 1)
    return float(standard_error * shift)


def _difference(estimate, standard_error, degrees, pairs, covers):
    half = _t_factor(degrees) * standard_error
    return Difference(float(estimate), float(estimate - half), float(estimate + half), float(standard_error),
                      float(degrees), detectable_difference(standard_error, degrees), pairs, covers)


def validation_difference(bf16, fp8):
    """Difference in validation loss. bf16, fp8: losses [pairs, sequences]; every pair reads the same sequences."""
    bf16, fp8 = _paired(bf16, fp8, "validation losses")
    table = fp8 - bf16
    pairs, sequences = table.shape
    if sequences < 2:
        raise ValueError("validation losses: one sequence gives no interval; at least 2 are needed")
    mean, of_pair, of_sequence = table.mean(), table.mean(axis=1), table.mean(axis=0)
    variance_sequences = of_sequence.var(ddof=1) / sequences
    if pairs == 1:
        return _difference(mean, math.sqrt(variance_sequences), sequences - 1, 1, "sequences")

    variance_pairs = of_pair.var(ddof=1) / pairs
    rest = table - of_pair[:, None] - of_sequence + mean
    variance_rest = (rest**2).sum() / ((pairs - 1) * (sequences - 1)) / (pairs * sequences)
    # variance_pairs and variance_sequences both contain variance_rest, but the variance of the mean contains it once.
    variance_sequences = max(variance_sequences - variance_rest, 0.0)
    variance = variance_pairs + variance_sequences
    if variance == 0:
        return _difference(mean, 0.0, pairs - 1, pairs, "seeds and sequences")
    degrees = variance**2 / (variance_pairs**2 / (pairs - 1) + variance_sequences**2 / (sequences - 1))
    candidates = [(math.sqrt(variance), degrees), (math.sqrt(variance_pairs), pairs - 1)]
    error, degrees = max(candidates, key=lambda c: c[0] * _t_factor(c[1]))
    return _difference(mean, error, degrees, pairs, "seeds and sequences")


def block_length(series):
    """Returns the block length of the moving-block bootstrap, in steps. series: [steps], or [steps, k], which gives
    the longest block length of the k columns."""
    steps = len(series)
    with np.errstate(all="ignore"):
        optimal = np.asarray(optimal_block_length(series)["circular"], dtype=np.float64)
    optimal = optimal[np.isfinite(optimal)]  # a constant series has none
    return int(np.clip(math.ceil(max(2 * optimal.max(initial=0), math.sqrt(steps))), 1, steps // 5))


def _block_error(series, statistic, parameters, seed):
    """(standard error, degrees of freedom) of a statistic of [steps] or [steps, k] that estimates `parameters`.

    The error is that of a normal distribution with the percentiles of the replicates: a ratio may have outliers.
    It is nan if the statistic is nan in over 1% of the replicates.
    """
    steps, block = len(series), block_length(series)
    bootstrap = MovingBlockBootstrap(block, series, seed=seed)
    values = bootstrap.apply(statistic, REPLICATES)[:, 0]
    degrees = steps / block - parameters
    if np.isnan(values).mean() > 0.01:
        return math.nan, degrees
    tails = 100 * (1 - CONFIDENCE) / 2
    error = stats.iqr(values, rng=(tails, 100 - tails), nan_policy="omit") / (2 * stats.norm.ppf(1 - tails / 100))
    return float(error * math.sqrt(steps / block / degrees)), degrees


def _mean_of_steps(series, seed):
    if len(series) < MIN_STEPS:
        raise ValueError(f"{len(series)} steps are too few for an interval; at least {MIN_STEPS} are needed")
    if np.ptp(series) == 0:
        return _difference(series[0], 0.0, len(series) - 1, 1, "batches")
    error, degrees = _block_error(series, np.mean, 1, seed)
    return _difference(series.mean(), error, degrees, 1, "batches")


def training_difference(bf16, fp8, last, seed=0):
    """Mean difference in training loss over the last `last` steps. bf16, fp8: losses [pairs, steps].

    seed: the bootstrap's, which one pair needs.
    """
    bf16, fp8 = _paired(bf16, fp8, "training losses")
    pairs, steps = bf16.shape
    if not 1 <= last <= steps:
        raise ValueError(f"training losses: the last {last} of {steps} steps do not exist")
    differences = (fp8 - bf16)[:, steps - last:]
    if pairs == 1:
        return _mean_of_steps(differences[0], seed)
    means = differences.mean(axis=1)
    return _difference(means.mean(), stats.sem(means), pairs - 1, pairs, "seeds and batches")


def difference_over_steps(bf16, fp8, window, seed=0):
    """The paired difference, averaged over pairs, in windows of `window` steps, of which the last ends the run.

    Its band covers the noise of batches alone, by the moving-block bootstrap. Show a NoiseBand beside it.
    """
    bf16, fp8 = _paired(bf16, fp8, "training losses")
    mean = (fp8 - bf16).mean(axis=0)
    first = len(mean) % window
    parts = [_mean_of_steps(part, seed) for part in mean[first:].reshape(-1, window)]
    columns = (np.array([getattr(part, name) for part in parts]) for name in ("estimate", "low", "high"))
    return Curve(first + window * np.arange(len(parts)) + (window - 1) / 2, *columns)


def noise_band(losses, groups, pairs=1):
    """Returns the NoiseBand of BF16 runs. losses: [runs] or [runs, n]; runs of equal `groups` differ in noise alone.

    Give each run's seed as its group if runs differ in the rounding seed, or one group if they differ in the seed.
    pairs: the band holds for the mean of this many differences. Raises ValueError if no group has two runs.
    """
    losses, groups = np.asarray(losses, dtype=np.float64), np.asarray(groups)
    if len(losses) != len(groups) or not np.isfinite(losses).all():
        raise ValueError("noise band: a finite loss and a group are needed for each run")
    squares, degrees = np.zeros(losses.shape[1:]), 0
    for group in np.unique(groups):
        runs = losses[groups == group]
        squares = squares + ((runs - runs.mean(axis=0))**2).sum(axis=0)
        degrees += len(runs) - 1
    if degrees == 0:
        raise ValueError("noise band: no group has two BF16 runs")
    deviation = np.sqrt(squares / degrees)
    return NoiseBand(deviation, _t_factor(degrees) * deviation * math.sqrt(2 / pairs), degrees)


def with_rounding(difference, noise):
    """The difference of one seed, with an interval that also covers the noise of rounding.

    noise: the NoiseBand of this loss between BF16 runs that differ in the rounding seed. Variances add up, with
    Satterthwaite's degrees of freedom; the interval is never narrower than that of rounding alone.
    """
    rounding = float(noise.half_width) / _t_factor(noise.degrees)
    variance = difference.standard_error**2 + rounding**2
    if rounding == 0:
        return difference
    degrees = variance**2 / (difference.standard_error**4 / difference.degrees + rounding**4 / noise.degrees)
    error, degrees = max([(math.sqrt(variance), degrees), (rounding, noise.degrees)],
                         key=lambda c: c[0] * _t_factor(c[1]))
    return _difference(difference.estimate, error, degrees, difference.pairs, f"{difference.covers} and {ROUNDING}")


def _match(curves, steps):
    """(steps of BF16, steps of FP8, loss, reached) at the lowest loss that both reached.

    curves: [3, 2], BF16 and FP8 in columns: the coefficients of 1, x and x**2 with x = log(step / steps).
    """
    loss = curves[0].max()
    with np.errstate(invalid="ignore"):  # a parabola below the loss has no root: take step 1, before the fitted steps
        x = 2 * (curves[0] - loss) / (np.sqrt(curves[1]**2 - 4 * curves[2] * (curves[0] - loss)) - curves[1])
    at = np.maximum(steps * np.exp(np.nan_to_num(x, nan=-np.inf)), 1.0)
    return float(at[0]), float(at[1]), float(loss), bool(curves[0, 1] <= curves[0, 0])


def _time_until(cost, step):
    """The time that the first `step` steps took. cost: [steps], of each step; step need not be a whole number."""
    return float(np.interp(step, np.arange(len(cost) + 1), np.concatenate([[0.0], np.cumsum(cost)])))


def _log_speedup(curves, costs):
    """log(t_BF16 / t_FP8) at equal loss; nan if a curve does not fall at its end. costs: [2, steps]."""
    if curves[1].max() >= 0:
        return math.nan
    at = _match(curves, costs.shape[1])
    return math.log(_time_until(costs[0], at[0]) / _time_until(costs[1], at[1]))


def _bound(curves, costs, start, equal, pairs):
    """The answer if the matched step is before the fitted steps, so that only a bound is known; None if it is not."""
    steps = costs.shape[1]
    at_bf16, at_fp8, loss, reached = _match(curves, steps)
    if min(at_bf16, at_fp8) >= start:
        return None
    if reached:
        low = _time_until(costs[0], steps) / _time_until(costs[1], start)
        return Speedup(None, low, None, loss, True, equal, None, pairs, f"FP8 reached the loss before step {start}")
    high = _time_until(costs[0], start) / _time_until(costs[1], steps)
    return Speedup(None, None, high, loss, False, equal, None, pairs,
                   f"FP8 ended at a loss that BF16 reached before step {start}")


def _speedup_error(losses, costs, design, seed):
    """(standard error, degrees of freedom) of _log_speedup.

    losses: [pairs, fitted steps, 2]; costs: [pairs, 2, steps]; design: [fitted steps, 3].
    """
    least_squares, pairs = np.linalg.pinv(design), len(losses)
    if pairs == 1:
        fitted = design @ (least_squares @ losses[0])  # a matrix [steps, steps] would fill memory
        return _block_error(losses[0] - fitted,
                            lambda residuals: _log_speedup(least_squares @ (fitted + residuals), costs[0]), 3, seed)
    values = [_log_speedup(least_squares @ losses[others].mean(axis=0), costs[others].mean(axis=0))
              for others in ~np.eye(pairs, dtype=bool)]
    return math.sqrt((pairs - 1) * np.var(values)), pairs - 1


def loss_matched_speedup(bf16, fp8, bf16_seconds, fp8_seconds, share=0.75, seed=0):
    """Speed-up at equal loss. bf16, fp8: losses [pairs, steps]; the others: seconds or joules of these steps.

    share: parabolas are fitted to this share of the steps, at the end; seed: the bootstrap's, which one pair needs.
    """
    losses = np.stack(_paired(bf16, fp8, "training losses"), axis=2)                    # [pairs, steps, 2]
    costs = np.stack(_paired(bf16_seconds, fp8_seconds, "seconds of steps"), axis=1)    # [pairs, 2, steps]
    pairs, steps = losses.shape[:2]
    if costs.shape != (pairs, 2, steps) or costs.min() <= 0:
        raise ValueError("seconds of steps: one positive value for each loss is needed")
    start = steps - int(share * steps)
    if steps - start < MIN_STEPS:
        raise ValueError(f"{steps - start} fitted steps are too few for an interval; at least {MIN_STEPS} are needed")
    step = np.arange(start + 1, steps + 1)
    design = np.vander(np.log(step / steps), 3, increasing=True)

    mean_cost, mean_loss = costs.mean(axis=0), losses[:, start:].mean(axis=0)
    curves = np.linalg.pinv(design) @ mean_loss
    equal = float(mean_cost[0].sum() / mean_cost[1].sum())
    error, degrees = _speedup_error(losses[:, start:], costs, design, seed)
    if not math.isfinite(error):
        return Speedup(None, None, None, None, bool(curves[0, 1] <= curves[0, 0]), equal, None, pairs,
                       "a loss curve does not fall clearly enough at its end to match losses")
    bound = _bound(curves, mean_cost, start, equal, pairs)
    if bound:
        return bound
    at_bf16, at_fp8, loss, reached = _match(curves, steps)
    middle, half = _log_speedup(curves, mean_cost), _t_factor(degrees) * error
    return Speedup(math.exp(middle), math.exp(middle - half), math.exp(middle + half), loss, reached, equal,
                   at_bf16 / at_fp8, pairs)


def covers_runs(difference):
    """False for one pair without the noise of rounding: the interval does not cover the noise from run to run."""
    return difference.pairs > 1 or ROUNDING in difference.covers


def verdict(difference):
    """The verdict in words."""
    estimate, low, high = difference.estimate, difference.low, difference.high
    note = "" if covers_runs(difference) else "; one pair of runs, so the noise from run to run is not covered"
    if low <= 0 <= high:
        return Verdict("same", f"cannot be told apart from BF16: {estimate:+.4f} [{low:+.4f}, {high:+.4f}] in loss, "
                               f"where {difference.detectable:.4f} would have been seen{note}")
    if low > 0:
        return Verdict("costs", f"costs {estimate:.4f} [{low:.4f}, {high:.4f}] in loss{note}")
    return Verdict("gains", f"gains {-estimate:.4f} [{-high:.4f}, {-low:.4f}] in loss{note}")


def speedup_words(speedup):
    """The loss-matched speed-up in words."""
    if speedup.estimate is None:
        bound = (f"above {speedup.low:.2f}x" if speedup.low is not None else
                 f"below {speedup.high:.2f}x" if speedup.high is not None else "unknown")
        return f"loss-matched speed-up {bound}: {speedup.reason}"
    words = f"loss-matched speed-up {speedup.estimate:.3f}x [{speedup.low:.3f}, {speedup.high:.3f}]"
    if not speedup.reached:
        words += f"; FP8 did not reach the last loss of BF16, so both are compared at {speedup.loss:.4f}"
    return words
