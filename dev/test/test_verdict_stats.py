#!/usr/bin/env python3
"""Tests scripts/verdict_stats.py: exact cases, and simulated verdicts whose true differences are known.

usage: test_verdict_stats.py [--trials N] [--seed N]. Prints a table of each simulated cell. 95% intervals must cover
the truth in 94% of trials or more (above 97% is marked, no failure), and at most 5% of pages on which nothing differs
may have a tag, plus two standard errors. With fewer than 4,000 trials a cell (300 by default; 4,000 with LONG=1 in the
environment, in minutes) these limits are wider, so that chance seldom fails a correct interval. If this Python lacks
the libraries, build/report-venv (scripts/setup_report.sh) runs the test; without build/report-venv the test is skipped.
Ends with "N passed, N failed".
"""
import argparse
import math
import os
import sys
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "dev", "test", "lib")]
from counted import check, finish, go_on_with_report_libraries  # noqa: E402

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
try:
    import numpy as np
    from scipy import signal, stats

    import verdict_stats as vs
except ImportError as missing:
    go_on_with_report_libraries(missing, "statistics of the verdict")

LONG = 4000      # trials from which on the limits are strict
CHUNK = 250      # trials at once, so that they take less than 1 GB
RUN_NOISE = 0.005  # deviation of a run's last loss from that of its trunk
STEPS, LAST = 120, 40
SEQUENCES, DOCUMENT = 256, 8


def refuses(text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except ValueError as error:
        check(text in str(error), f"\"{text}\" expected: {error}")
    else:
        check(False, f"no error with \"{text}\"")


def close(got, expected, what, tolerance=1e-9):
    check(np.allclose(got, expected, rtol=tolerance, atol=1e-12), f"{what}: {got}, not {expected}")


# ---- exact cases


def test_against_libraries(rng):
    bf16 = rng.standard_normal((4, 64))
    fp8 = bf16 + 0.1 + 0.05 * rng.standard_normal((4, 64))
    gaps = (fp8 - bf16)[:, -50:].mean(axis=1)
    for alpha in (0.05, 0.01):
        got = vs.trunk_interval(gaps, alpha)
        expected = stats.ttest_rel(fp8[:, 14:].mean(axis=1), bf16[:, 14:].mean(axis=1)).confidence_interval(1 - alpha)
        close([got.low, got.high], expected, f"scipy's t-interval over trunks at level {alpha}")
    one = vs.validation_difference(bf16[:1], fp8[:1])
    check((one.low, one.high, one.trunks) == (None, None, 1), f"one trunk has an estimate alone: {one}")
    close(one.estimate, (fp8 - bf16)[0].mean(), "the estimate of one trunk")

    # With sequences that hardly differ the trunks decide; with trunks that hardly differ, the blocks of sequences.
    trunks, sequences = rng.standard_normal((4, 1)), rng.standard_normal((1, 64))
    noise = 1e-6 * rng.standard_normal((4, 64))
    blocks = sequences[0].reshape(4, 16).mean(axis=1)
    widened = np.mean(blocks) + math.sqrt(vs.EDGE) * (blocks - np.mean(blocks))
    for table, sample in ((trunks + noise, trunks[:, 0]), (sequences + noise, widened)):
        got = vs.validation_difference(np.zeros((4, 64)), table)
        close([got.low, got.high], stats.ttest_1samp(sample, 0).confidence_interval(), "trunks or blocks alone", 1e-3)

    x, lines = np.array([1.0, 2.0, 4.0]), rng.standard_normal((5, 3))
    fits = [np.polyfit(x, line, 1) for line in lines]
    for at, values in ((None, [fit[0] for fit in fits]), (7.0, [np.polyval(fit, 7.0) for fit in fits])):
        got = vs.trend(x, lines, at)
        close([got.low, got.high], stats.ttest_1samp(values, 0).confidence_interval(), f"lines of trunks at {at}")
    curve = vs.difference_over_steps(bf16, fp8, 20)
    check(curve.steps.tolist() == [13.5, 33.5, 53.5], f"windows end with the run: {curve.steps}")
    expected = stats.ttest_1samp((fp8 - bf16)[:, 44:].mean(axis=1), 0).confidence_interval()
    close([curve.low[-1], curve.high[-1]], expected, "the last window")


def test_blocks():
    for count, blocks in ((3, 3), (14, 4), (64, 4), (256, 16), (1000, 16)):
        means = vs.block_means(np.arange(float(count)))
        check(len(means) == blocks, f"{count} sequences make {blocks} blocks: {len(means)}")
        check(abs(means.mean() - (count - 1) / 2) < 0.5, f"{count} sequences: block means have the mean: {means}")


def test_ratio(rng):
    """Fieller's limits are the ratios at which a t-test of top - ratio * bottom just rejects."""
    top, bottom = 0.3 + 0.02 * rng.standard_normal(5), 0.6 + 0.05 * rng.standard_normal(5)
    middle, low, high = vs.ratio_interval(top, bottom)
    close(middle, top.mean() / bottom.mean(), "the ratio of means")
    for limit in (low, high):
        close(stats.ttest_1samp(top - limit * bottom, 0).pvalue, 0.05, "the p-value at Fieller's limit", 1e-6)
    check(vs.ratio_interval(top, bottom, 1e-3)[2] > high, "more variance of the gap widens the interval")
    for exponent in (0.1, 0.3, 0.5):
        steps = np.array([100.0, 200.0, 400.0])
        close(vs.last_slope(steps, 2 + steps**-exponent), -exponent * 400**-exponent, "the slope of a power law", 1e-2)
    close(vs.last_slope([100, 200], [3.0, 2.0]), -1 / math.log(2), "the slope of two lengths")
    # Speed and slope known without noise: 1.3 times the speed, a fall of 0.5 for each unit of log(steps).
    got = vs.equal_loss_speedup([math.log(1.3)] * 3, [0.01, 0.012, 0.008], [-0.5] * 3)
    gap = vs.trunk_interval([0.01, 0.012, 0.008])
    close([got.estimate, got.low, got.high], 1.3 * np.exp(-np.array([gap.estimate, gap.high, gap.low]) / 0.5),
          "a known slope prices the gap")
    for slope, word in (([-0.5, 0.1, -0.1], "holds 0"), ([0.5, 0.5, 0.5], "holds 0"), ([-0.5], "one trunk")):
        got = vs.equal_loss_speedup([0.2] * len(slope), [0.01] * len(slope), slope)
        check(got.estimate is None and word in got.reason, f"slopes {slope}: no speed-up, \"{word}\": {got}")


def test_smallest_cost(rng):
    for trunks, alpha in ((2, 0.05), (3, 0.025), (5, 0.05), (9, 0.01)):
        cost = vs.smallest_cost(2.0, trunks, alpha)
        got = vs.trunk_interval(cost + 2 * rng.standard_normal((40000, trunks)), alpha)
        power = np.mean(got.low > 0)
        check(abs(power - 0.8) < 0.01, f"{trunks} trunks, level {alpha}: 80% of verdicts see the cost: {power}")
        check(vs.trunks_needed(2.0, cost * 1.0001, alpha) == trunks, f"{trunks} trunks are needed for {cost}")
    check(vs.trunks_needed(1.0, 0.001) is None and vs.smallest_cost(1.0, 1) == math.inf, "some costs cannot be seen")
    deviations = np.array([vs.null_deviation(rng.standard_normal(3)) for _ in range(4000)])
    check(abs(np.mean(deviations[:, 1] > 1) - 0.9) < 0.02, "the upper limit of a deviation holds in 90%")
    check(np.isclose(vs.level(2, 2), 0.0125) and vs.level(0, 0) == 0.05, "the level is shared by recipes and looks")


def test_refusals():
    loss = np.linspace(5, 4, 400)[None]
    broken = np.c_[loss[:, :-1], [[math.nan]]]
    for function in (vs.validation_difference, lambda a, b: vs.difference_over_steps(a, b, 50)):
        refuses("FP8 holds a value that is not finite", function, loss, broken)
        refuses("BF16 holds a value that is not finite", function, broken, loss)
        refuses("BF16 has shape (1, 400), FP8 (1, 399)", function, loss, loss[:, 1:])
        refuses("need the same", function, [], [])
    refuses("400 steps are too few", vs.difference_over_steps, loss, loss, 401)


# ---- simulated verdicts

TABLE = []


def coverage(name, hits, note=""):
    """Notes the share of `hits`, and checks that it is 94% or more."""
    hits = np.asarray(hits)
    count, trials = int(hits.sum()), hits.size
    share = count / trials
    TABLE.append(f"{name:<66} covers {100 * share:5.1f}%{' (wide)' if share > 0.97 else ''}{note}")
    good = share >= 0.94 if trials >= LONG else stats.binom.cdf(count, trials, 0.95) > 0.0005
    check(good, f"{name}: {count} of {trials} intervals cover the truth")


def false_pages(name, pages):
    count, trials = int(np.sum(pages)), len(pages)
    TABLE.append(f"{name:<66} false  {100 * count / trials:5.1f}%")
    limit = 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials)
    good = count / trials <= limit if trials >= LONG else stats.binom.sf(count - 1, trials, 0.05) > 0.0005
    check(good, f"{name}: {count} of {trials} pages have a tag although nothing differs")


def covers(got, truth):
    return (got.low <= truth) & (truth <= got.high)


def curve(kind):
    """A loss curve that falls as a power law, and further while the rate decays: over the run, or at its end."""
    step = np.arange(1, STEPS + 1) / STEPS
    decayed = (1 - np.cos(np.pi * step)) / 2 if kind == "cosine" else np.clip((step - 0.75) / 0.25, 0, 1)
    return 3 + (1 + 10 * step)**-0.3 - 0.12 * decayed


def draws(rng, tails, *shape):
    """Standard normal noise, or with `tails`, Student's t with 3 degrees of freedom, of deviation 1."""
    return rng.standard_t(3, shape) / math.sqrt(3) if tails else rng.standard_normal(shape)


def own_noise(rng, scale, tails, *shape):
    """What one run has for itself, [..., steps]: a shift, a slow drift, batches and rare spikes."""
    drift = np.cumsum(rng.standard_normal((*shape, STEPS)), axis=-1) * 0.6 / math.sqrt(STEPS)
    batches = signal.lfilter([0.85], [1, -0.5], draws(rng, tails, *shape, STEPS), axis=-1)
    spikes = 30 * (rng.random((*shape, STEPS)) < 0.003)
    return scale * RUN_NOISE * (draws(rng, tails, *shape, 1) + drift + batches + spikes)


def training_verdicts(rng, trials, trunks, scales, kind="cosine", tails=False):
    """(gaps of trunks) [recipe, trials, trunks] without a difference. Recipes share the BF16 run of their trunk."""
    shared = curve(kind) + 0.15 * draws(rng, tails, trials, trunks, STEPS)
    bf16 = shared + own_noise(rng, 1, tails, trials, trunks)
    return np.array([(shared + own_noise(rng, scale, tails, trials, trunks) - bf16)[..., -LAST:].mean(axis=-1)
                     for scale in scales])


def validation_verdicts(rng, trials, trunks, scales, tails=False, single=1.0):
    """Differences of validation losses [recipe, trials, trunks, sequences]: of sequences, which all recipes share in
    part, and in documents of DOCUMENT neighbours, which begin anywhere."""
    begin = rng.integers(DOCUMENT, size=trials)
    document = (begin[:, None] + np.arange(SEQUENCES)) // DOCUMENT

    def texts(*shape):
        of = draws(rng, tails, trials, *shape, SEQUENCES // DOCUMENT + 1)
        index = document.reshape(trials, *[1] * len(shape), SEQUENCES)
        of = np.take_along_axis(of, np.broadcast_to(index, (trials, *shape, SEQUENCES)), -1)
        return 0.05 * single * (0.7 * of + 0.7 * draws(rng, tails, trials, *shape, SEQUENCES))

    common, bf16 = texts(), RUN_NOISE * draws(rng, tails, trials, trunks, 1)
    return [common[:, None] + texts(trunks) + RUN_NOISE * scale * draws(rng, tails, trials, trunks, 1) - bf16
            for scale in scales]


def chunked(function, rng, trials, *arguments, **options):
    """The results of function(rng, CHUNK, ...) over all trials, joined along their last axis."""
    sizes = [min(CHUNK, trials - at) for at in range(0, trials, CHUNK)]
    return np.concatenate([function(rng, size, *arguments, **options) for size in sizes], axis=-1)


def cover_training(rng, trials):
    cells = [(trunks, scale, "cosine", False) for trunks in (2, 3, 5) for scale in (1, 3, 10)]
    cells += [(trunks, 1, "wsd", tails) for trunks in (2, 3, 5) for tails in (False, True)]
    for trunks, scale, kind, tails in cells:
        hits = chunked(lambda *a: covers(vs.trunk_interval(training_verdicts(*a, kind, tails)[0]), 0), rng, trials,
                       trunks, (scale,))
        coverage(f"training, {trunks} trunks, {kind}, noise x{scale}{', t3' * tails}", hits)


def cover_validation(rng, trials):
    for trunks in (2, 3, 5):
        for scale, single, tails in ((1, 1, False), (3, 0.3, False), (10, 1, False), (1, 1, True)):
            def hits(*a):
                (table,) = validation_verdicts(*a, tails, single)
                return covers(vs.validation_difference(np.zeros_like(table), table), 0)
            what = f"documents of 8, noise x{scale}, sequences x{single}{', t3' * tails}"
            coverage(f"validation, {trunks} trunks, {what}", chunked(hits, rng, trials, trunks, (scale,)))


def tagged(got):
    return (got.low > 0) | (got.high < 0)


def page_of(rng, trials, looks, scales, loss, tails=False):
    """True for each simulated page on which, at a look, a recipe has a tag."""
    alpha, any_tag = vs.level(len(scales), len(looks)), np.zeros(trials, bool)
    if loss == "training":
        gaps = training_verdicts(rng, trials, max(looks), scales, tails=tails)
        for look in looks:
            any_tag |= tagged(vs.trunk_interval(gaps[..., :look], alpha)).any(axis=0)
        return any_tag
    for table in validation_verdicts(rng, trials, max(looks), scales, tails):
        for look in looks:
            first = table[:, :look]
            any_tag |= tagged(vs.validation_difference(np.zeros_like(first), first, alpha))
    return any_tag


def false_on_pages(rng, trials):
    mixed = (1, 3, 10, 1, 3, 10)
    for loss in ("training", "validation"):
        for looks in ((2,), (3,), (5,), (3, 5)):
            for recipes in (1, 2, 6):
                for name, scales in (("equal noise", (1,) * 6), ("noise x1, x3, x10", mixed)):
                    if recipes == 1 and scales == mixed:
                        continue
                    pages = chunked(page_of, rng, trials, looks, scales[:recipes], loss)
                    false_pages(f"{loss}, {recipes} recipes, looks at {looks}, {name}", pages)
        pages = chunked(page_of, rng, trials, (3, 5), mixed[:2], loss, tails=True)
        false_pages(f"{loss}, 2 recipes, looks at (3, 5), t3", pages)


def equal_loss(rng, trials, trunks, gap, fall=0.5, noise=RUN_NOISE / 2, lengths=3):
    """Simulated speed-ups, and the slopes of their trunks. BF16's last loss falls as N**-0.3, with the slope -fall at
    the longest N. A trunk's level moves all of its losses; each run has noise of its own. FP8 is 1.3 times as fast,
    with GPUs that differ by 0.3%."""
    steps = np.array([250, 500, 1000])[-lengths:]
    level = 0.03 * rng.standard_normal((trials, trunks, 1)) + fall / 0.3 * (steps / 1000)**-0.3
    bf16 = level + noise * rng.standard_normal((trials, trunks, lengths))
    fp8 = (level + noise * rng.standard_normal((trials, trunks, 1)) + 3 * gap)[..., -1]
    ratio, slope = math.log(1.3) + 0.003 * rng.standard_normal((trials, trunks)), vs.last_slope(steps, bf16)
    return vs.equal_loss_speedup(ratio, fp8 - bf16[..., -1], slope), slope


def cover_equal_loss(rng, trials):
    for trunks in (2, 3, 5):
        for gap in (0, 0.001, 0.003, 0.01):
            got, _ = equal_loss(rng, trials, trunks, gap)
            known = np.isfinite(got.estimate)
            coverage(f"speed-up at equal loss, {trunks} trunks, gap {100 * gap:.1f}%",
                     covers(got, 1.3 * math.exp(-3 * gap / 0.5))[known],
                     f", not determined {100 * np.mean(~known):.1f}%")
        got, slope = equal_loss(rng, trials, trunks, 0.003, fall=0.01, noise=0.01)
        slopes = vs.trunk_interval(slope)
        check((np.isfinite(got.estimate) == (slopes.high < 0)).all() and np.mean(np.isfinite(got.estimate)) < 0.3,
              f"{trunks} trunks: not determined where, and only where, the slope's interval holds 0")
    share = np.mean(covers(equal_loss(rng, trials, 3, 0.01, lengths=2)[0], 1.3 * math.exp(-0.03 / 0.5)))
    TABLE.append(f"no check: gap 1.0%, 3 trunks, without the third length             covers {100 * share:5.1f}%")


def cover_trend(rng, trials):
    x = np.log2([6, 14, 30])
    for trunks in (2, 3, 5):
        level, slope = (0.002 * rng.standard_normal((trials, trunks, 1)) for _ in range(2))
        gaps = level + (0.001 + slope) * x + 0.003 * rng.standard_normal((trials, trunks, 3))
        coverage(f"trend of the gap over tokens, {trunks} trunks", covers(vs.trend(x, gaps), 0.001))
        coverage(f"extrapolation of the gap, {trunks} trunks", covers(vs.trend(x, gaps, 9.0), 0.009))


def power_of_tests(rng, trials):
    """Intervals that are too narrow are found by these simulations: over sequences, and without shared levels."""
    table = np.concatenate([validation_verdicts(rng, CHUNK, 5, (0.1,))[0] for _ in range(max(trials // CHUNK, 1))])
    half = 1.96 * table.mean(axis=1).std(axis=-1, ddof=1) / math.sqrt(SEQUENCES)
    share = np.mean(np.abs(table.mean(axis=(1, 2))) < half)
    check(share < 0.9, f"an interval over single sequences covers too little here: {share}")
    gaps = np.concatenate([training_verdicts(rng, CHUNK, 3, (1,) * 6) for _ in range(max(trials // CHUNK, 1))], axis=1)
    share = np.mean(tagged(vs.trunk_interval(gaps)).any(axis=0))
    check(share > 0.12, f"without simultaneous bounds many pages are false here: {share}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=LONG if os.environ.get("LONG") else 300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("error")  # a division by zero in the statistics is a fault
    rng = np.random.default_rng(options.seed)
    test_against_libraries(rng)
    test_blocks()
    test_ratio(rng)
    test_smallest_cost(rng)
    test_refusals()
    for simulate in (cover_training, cover_validation, false_on_pages, cover_equal_loss, cover_trend, power_of_tests):
        simulate(rng, options.trials)
    print(f"{options.trials} trials a cell", *TABLE, sep="\n")
    finish()


if __name__ == "__main__":
    main()
