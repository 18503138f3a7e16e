#!/usr/bin/env python3
"""Tests scripts/verdict_stats.py: exact cases, and simulated pairs whose true difference is known.

usage: test_verdict_stats.py [--trials N] [--seed N]. With 1000 trials or more, 93 to 97% of the intervals must cover
the truth (up to 99% for validation with two pairs), and without a difference 93 to 100% of the verdicts must be "cannot
be told apart". With fewer trials (60 by default, 120 if ALL is set) these limits are wider, so that chance seldom fails
a correct interval, and the bootstrap draws fewer replicates. If this Python lacks the libraries, build/report-venv
(scripts/setup_report.sh) runs the test; without build/report-venv the test is skipped. Ends with "N passed, N failed".
"""
import argparse
import math
import os
import sys
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CURVES = os.path.join(ROOT, "..", "shared", "peers", "curves", "hf_1000_repeated.csv")
sys.path[:0] = [os.path.join(ROOT, "scripts"), os.path.join(ROOT, "dev", "test", "lib")]
from counted import check, finish, go_on_with_report_libraries  # noqa: E402

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
try:
    import numpy as np
    from arch.bootstrap import MovingBlockBootstrap
    from scipy import signal, stats

    import verdict_stats as vs
except ImportError as missing:
    go_on_with_report_libraries(missing, "statistics of the verdict")

# Lag-1 autocorrelation and standard deviation of the last half of the real curves in CURVES: of BF16's loss without its
# trend, and of FP8's loss minus BF16's without its mean (without its trend the autocorrelation is 0.52). On data that
# does not repeat, FP8's loss minus BF16's has about 0 to 0.4, and a standard deviation of 0.004 to 0.02.
LOSS_NOISE, PAIR_NOISE = (0.62, 0.18), (0.55, 0.05)
RUN_NOISE = 0.005  # deviation of a run's loss; FP8 and BF16 of one seed are 0.005 to 0.009 apart
STEPS = 1800



def refuses(text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except ValueError as error:
        check(text in str(error), f"\"{text}\" expected: {error}")
    else:
        check(False, f"no error with \"{text}\"")


def ar1(rng, noise, *shape):
    """Gaussian noise with lag-1 autocorrelation noise[0] and standard deviation noise[1] along the last axis."""
    phi, deviation = noise
    white = rng.standard_normal((*shape[:-1], shape[-1] + 100)) * deviation * math.sqrt(1 - phi**2)
    return signal.lfilter([1], [1, -phi], white, axis=-1)[..., 100:]


# ---- exact cases


def test_against_libraries(rng):
    bf16 = rng.standard_normal((4, 60))
    fp8 = bf16 + 0.1 + 0.05 * rng.standard_normal((4, 60))
    got = vs.training_difference(bf16, fp8, 50)
    expected = stats.ttest_rel(fp8[:, 10:].mean(axis=1), bf16[:, 10:].mean(axis=1)).confidence_interval()
    check(np.allclose([got.low, got.high], expected),
          f"the interval is scipy's t-interval over pairs: {got}, {expected}")
    got = vs.validation_difference(bf16[0], fp8[0])
    expected = stats.ttest_rel(fp8[0], bf16[0]).confidence_interval()
    check(np.allclose([got.low, got.high], expected),
          f"the interval is scipy's t-interval over sequences: {got}, {expected}")
    check((got.pairs, got.covers) == (1, "sequences"), f"the interval of one pair covers the noise of sequences: {got}")

    # With sequences that hardly differ, the pairs decide; with pairs that hardly differ, the sequences decide.
    seeds, sequences = rng.standard_normal((4, 1)), rng.standard_normal((1, 60))
    noise = 1e-6 * rng.standard_normal((4, 60))
    for table, sample in ((seeds + noise, seeds[:, 0]), (sequences + noise, sequences[0])):
        got = vs.validation_difference(np.zeros((4, 60)), table)
        expected = stats.ttest_1samp(sample, 0).confidence_interval()
        check(np.allclose([got.low, got.high], expected, atol=1e-4),
              f"the interval is scipy's t-interval over the noisier of pairs and sequences: {got}, {expected}")

    # The mean squares of the two-way table, computed in another way: by projections of the whole vector.
    table = seeds + sequences + rng.standard_normal((4, 60))
    y, eye = table.ravel(), np.eye
    of_pair, of_sequence = np.kron(eye(4), np.ones((60, 60)) / 60), np.kron(np.ones((4, 4)) / 4, eye(60))
    mean = np.ones((240, 240)) / 240
    squares = [y @ p @ y / d for p, d in ((of_pair - mean, 3), (of_sequence - mean, 59),
                                          (eye(240) - of_pair - of_sequence + mean, 177))]
    got = vs.validation_difference(np.zeros((4, 60)), table)
    widest = max(math.sqrt((squares[0] + squares[1] - squares[2]) / 240), math.sqrt(squares[0] / 240))
    check(got.standard_error <= widest * (1 + 1e-9),
          f"the standard error is at most the larger of the two that follow from the mean squares: {got}, {squares}")
    check(math.isclose(got.standard_error, math.sqrt((squares[0] + squares[1] - squares[2]) / 240)) or
          math.isclose(got.standard_error, math.sqrt(squares[0] / 240)),
          f"the standard error is one of the two that follow from the mean squares: {got}, {squares}")


def test_detectable(rng):
    for degrees in (1, 2, 8.5, 1000):
        shift = vs.detectable_difference(1.0, degrees)
        t = (rng.standard_normal(40000) + shift) / np.sqrt(rng.chisquare(degrees, 40000) / degrees)
        power = np.mean(np.abs(t) > stats.t.ppf(0.975, degrees))
        check(abs(power - 0.8) < 0.01,
              f"{degrees} degrees of freedom: at the detectable difference the power is 0.8: {power}")
    check(abs(vs.detectable_difference(2.0, 1e6) - 2 * 2.8016) < 1e-3,
          "with many degrees of freedom the detectable difference is that of a normal mean")
    check(vs.detectable_difference(0.0, 2) == 0, "without noise every difference is detectable")


def test_noise_band():
    band = vs.noise_band([1.0, 3.0, 10.0, 14.0], [42, 42, 43, 43], pairs=2)
    check(band.degrees == 2 and math.isclose(band.deviation, math.sqrt((2 + 8) / 2)),
          f"the noise band pools the variance of groups: {band}")
    check(math.isclose(band.half_width, stats.t.ppf(0.975, 2) * math.sqrt(5)),
          f"the half width is that of a t-interval for the mean of two differences: {band}")
    curves = vs.noise_band([[1.0, 5.0], [3.0, 5.0]], ["all", "all"])
    check(curves.half_width.shape == (2,) and curves.half_width[1] == 0,
          f"a noise band of curves has a value for each step: {curves}")
    refuses("no group has two BF16 runs", vs.noise_band, [1.0, 2.0], [42, 43])
    refuses("finite loss and a group", vs.noise_band, [1.0, math.nan], [42, 42])
    refuses("finite loss and a group", vs.noise_band, [1.0, 2.0], [42])


def falling(steps=400):
    return 5 - 0.5 * np.log(np.arange(1, steps + 1))


def match(fp8, bf16=None, pairs=1, cost=(1.35, 1.0)):
    bf16 = falling() if bf16 is None else bf16
    return vs.loss_matched_speedup(*(np.tile(x, (pairs, 1)) for x in (bf16, fp8)),
                                   *(np.full((pairs, len(bf16)), c) for c in cost))


def test_speedup_exact():
    wave = 0.001 * np.sin(np.arange(400))  # noise that both runs have
    for pairs in (1, 2, 3):
        for efficiency in (0.8, 1.0, 1.2):
            fp8 = falling() - 0.5 * math.log(efficiency) + wave
            got = match(fp8, falling() + wave, pairs)
            check(math.isclose(got.estimate, 1.35 * efficiency, rel_tol=2e-3),
                  f"pairs: {pairs}, step ratio {efficiency}: the speed-up is 1.35 times the step ratio: {got}")
            check(got.low <= got.estimate <= got.high and got.high - got.low < 0.02,
                  f"pairs: {pairs}, step ratio {efficiency}: the interval is narrow and has the estimate: {got}")
            check(got.reached == (efficiency >= 1) and math.isclose(got.equal_steps, 1.35),
                  f"pairs: {pairs}, step ratio {efficiency}: FP8 reaches BF16's loss if the ratio is 1 or more: {got}")
            check(math.isclose(got.step_ratio, efficiency, rel_tol=2e-3),
                  f"pairs: {pairs}: the step ratio is {efficiency}: {got}")
            check(("did not reach" in vs.speedup_words(got)) == (efficiency < 1),
                  f"pairs: {pairs}, step ratio {efficiency}: the words tell whether FP8 reaches BF16's loss: "
                  f"{vs.speedup_words(got)}")

    slow_start = np.r_[np.full(100, 3.0), np.full(300, 1.0)]  # steps of 3 s, then of 1 s: 600 s in all
    got = vs.loss_matched_speedup(falling(), falling() + 0.5 * math.log(1.25), slow_start, np.ones(400))
    check(math.isclose(got.estimate, (300 + 220) / 400, rel_tol=1e-6),
          f"the speed-up counts steps of unequal time: {got}")

    got = match(falling() + 1, cost=(1.4, 1.0))  # FP8 ends where BF16 was before the fitted steps
    check(got.estimate is None and got.low is None and not got.reached and math.isclose(got.high, 1.4 * 0.25),
          f"FP8 far above BF16 gets an upper limit alone: {got}")
    check("below 0.35x" in vs.speedup_words(got), f"the words have the upper limit: {vs.speedup_words(got)}")
    check(math.isclose(match(falling() + 1000).high, 1.35 * 0.25),
          "FP8 very far above BF16 gets the smallest upper limit")
    got = match(falling() - 1)
    check(got.estimate is None and got.high is None and got.reached and math.isclose(got.low, 1.35 / 0.25),
          f"FP8 far below BF16 gets a lower limit alone: {got}")
    check("above 5.40x" in vs.speedup_words(got), f"the words have the lower limit: {vs.speedup_words(got)}")
    noise = np.random.default_rng(0).standard_normal((2, 400))
    for bf16, fp8 in ((3 + 0.001 * noise[0], falling()), (falling(), 3 + 0.001 * np.arange(400)),
                      (falling() + noise[0], falling() + noise[1])):  # the last: noise hides that the curves fall
        got = match(fp8, bf16)
        check(got.estimate is None and "does not fall" in vs.speedup_words(got),
              f"curves that do not fall give no estimate: {got}")


def test_refusals():
    loss, one = falling(), np.ones(400)
    broken = np.r_[loss[:-1], math.nan]
    for function in (lambda a, b: vs.training_difference(a, b, 100), vs.validation_difference,
                     lambda a, b: vs.difference_over_steps(a, b, 50),
                     lambda a, b: vs.loss_matched_speedup(a, b, np.ones(len(a)), np.ones(len(a)))):
        refuses("FP8 holds a value that is not finite", function, loss, broken)
        refuses("BF16 holds a value that is not finite", function, broken, loss)
        refuses("BF16 has shape (1, 400), FP8 (1, 399)", function, loss, loss[1:])
        refuses("need the same", function, [], [])
    refuses("at least 2 are needed", vs.validation_difference, [[1.0], [2.0]], [[1.0], [2.0]])
    refuses("39 steps are too few", vs.training_difference, loss, loss + 1, 39)
    refuses("the last 401 of 400", vs.training_difference, loss, loss, 401)
    refuses("20 steps are too few", vs.difference_over_steps, loss, loss, 20)
    refuses("39 fitted steps are too few", vs.loss_matched_speedup, loss[:52], loss[:52], one[:52], one[:52])
    refuses("one positive value for each loss", vs.loss_matched_speedup, loss, loss, one, 0 * one)
    refuses("one positive value for each loss", vs.loss_matched_speedup, loss, loss, one[1:], one[1:])


def test_words():
    bf16 = falling()
    same = vs.training_difference(bf16, bf16, 100)
    check((same.low, same.high, vs.verdict(same).kind) == (0, 0, "same"),
          f"equal runs have the interval 0 to 0: {same}")
    noise = 0.01 * np.random.default_rng(0).standard_normal((3, 400))
    for shift, kind, word in ((0, "same", "cannot be told apart from BF16"), (1, "costs", "costs "),
                              (-1, "gains", "gains ")):
        words = vs.verdict(vs.training_difference(np.tile(bf16, (3, 1)), bf16 + shift + noise, 200))
        check(words.kind == kind and word in words.words and "one pair" not in words.words,
              f"a shift of {shift} gives \"{kind}\": {words}")
    one = vs.training_difference(bf16, bf16 + 0.1 + noise[0], 200)
    check(vs.verdict(one).kind == "costs" and "is not covered" in vs.verdict(one).words,
          f"one pair: the noise is not covered: {vs.verdict(one)}")
    wide, narrow = (vs.noise_band([2.0, 2.0 + gap], [0, 0]) for gap in (0.1, 0.001))
    check(vs.verdict(vs.with_rounding(one, wide)).kind == "same",
          "one pair within the noise of rounding has the verdict \"same\"")
    covered = vs.with_rounding(one, narrow)
    check(vs.verdict(covered).kind == "costs" and "is not covered" not in vs.verdict(covered).words
          and covered.covers == "batches and rounding",
          f"one pair beyond the noise of rounding has the verdict \"costs\", and that noise is covered: {covered}")
    check(covered.low < one.low and covered.detectable > one.detectable, f"rounding widens the interval: {covered}")
    still = vs.noise_band([2.0, 2.0], [0, 0])
    check(vs.with_rounding(one, still) == one, "without noise of rounding the difference stays")


def test_with_rounding():
    """Variances add up, worked out by hand: errors of 3 and 4, with 8 and 2 degrees of freedom, make an error of 5."""
    one = vs.Difference(7.0, 0.0, 0.0, 3.0, 8.0, 0.0, 1, "batches")
    band = vs.NoiseBand(np.array(0.0), np.array(4 * stats.t.ppf(0.975, 2)), 2)
    got = vs.with_rounding(one, band)
    degrees = 625 / (81 / 8 + 256 / 2)  # 4.52
    check(np.isclose(got.high - 7, max(5 * stats.t.ppf(0.975, degrees), 4 * stats.t.ppf(0.975, 2))),
          f"the interval has the summed variance: {got}")
    check(np.isclose(got.high + got.low, 14) and got.pairs == 1, f"the interval is symmetric around 7: {got}")


def test_real_curves():
    """The noise simulated here has the correlation and deviation of real curves. FP8's cost in these is known."""
    if not os.path.exists(CURVES):
        print("skipped: noise of real curves: there is no ../shared/peers/curves")
        return
    losses = {"bf16": [], "fp8": []}
    with open(CURVES, encoding="utf-8") as f:
        for line in f:
            losses[line.split(",")[2]].append(float(line.split(",")[-1]))
    bf16, fp8 = (np.array(losses[name])[500:] for name in ("bf16", "fp8"))
    for series, (phi, deviation), degree in ((bf16, LOSS_NOISE, 2), (fp8 - bf16, PAIR_NOISE, 1)):
        step = np.arange(len(series))
        rest = series - np.polyval(np.polyfit(step, series, degree), step)
        got = rest[1:] @ rest[:-1] / (rest @ rest)
        check(abs(got - phi) < 0.05 and abs(rest.std() / deviation - 1) < 0.1,
              f"simulated and real noise have close correlation and deviation: {got}, {rest.std()}")
    got = vs.training_difference(losses["bf16"], losses["fp8"], 100)
    check(abs(got.estimate - 0.0423) < 1e-4, f"over the last 100 steps the real curves differ by 0.0423: {got}")
    got = vs.training_difference(losses["bf16"], losses["fp8"], 500)
    print(vs.verdict(got).words)
    check(vs.verdict(got).kind == "costs", f"the last 500 steps of the real curves cost loss: {got}")


# ---- coverage


def report_coverage(name, hits, low=0.93, high=0.97):
    """Checks that the share of true `hits` is in [low, high]. With fewer than 1000 trials it allows for chance."""
    count, trials = int(np.sum(hits)), len(hits)
    if trials < 1000:
        good = stats.binom.cdf(count, trials, low) > 0.001 and stats.binom.sf(count - 1, trials, high) > 0.001
    else:
        good = low <= count / trials <= high
    print(f"{name}: {100 * count / trials:.1f}% of {trials}", flush=True)
    check(good, f"{name}: {count} of {trials}; {100 * low:.0f} to {100 * high:.0f}% are expected")


def covers(got, truth):
    return got.low is not None and got.low <= truth <= got.high


def validation_pairs(rng, true, pairs, sequences, of_pairs, of_sequences, tails=0):
    """Returns losses of BF16 and of FP8. Those of FP8 are higher by `true`, plus of_pairs times noise of each pair,
    of_sequences times noise of each sequence that all pairs share, and noise of each value. Noise is standard normal,
    or if `tails` is not 0, Student's t with `tails` degrees of freedom.
    """
    draw = (lambda *shape: rng.standard_t(tails, shape)) if tails else (lambda *shape: rng.standard_normal(shape))
    bf16 = 5 + rng.standard_normal((pairs, 1)) + draw(1, sequences)
    return bf16, bf16 + true + of_pairs * draw(pairs, 1) + of_sequences * draw(1, sequences) + draw(pairs, sequences)


def cover_validation(rng, trials):
    cases = [  # name, pairs, sequences, of_pairs, of_sequences, options
        ("3 pairs, 1,024 sequences, pairs dominate", 3, 1024, 0.3, 1, {}),
        ("3 pairs, 1,024 sequences, both", 3, 1024, 0.05, 1, {}),
        ("3 pairs, 1,024 sequences, sequences dominate", 3, 1024, 0.0, 2, {}),
        ("3 pairs, 14 sequences", 3, 14, 0.3, 1, {}),
        ("3 pairs, 1,024 sequences, heavy tails", 3, 1024, 0.05, 1, {"tails": 5}),
        ("5 pairs, 1,024 sequences", 5, 1024, 0.1, 1, {}),
        ("1 pair, 1,024 sequences", 1, 1024, 0.0, 1, {}),
    ]
    for name, *setting, options in cases:
        for true in (0.0, 0.2):
            results = [vs.validation_difference(*validation_pairs(rng, true, *setting, **options))
                       for _ in range(trials)]
            report_coverage(f"validation, {name}, difference {true}", [covers(r, true) for r in results])
            if true == 0:
                same = [vs.verdict(r).kind == "same" for r in results]
                report_coverage(f"validation, {name}: \"cannot be told apart\"", same, high=1)
    # With two pairs the t factor is so large that the noise of sequences hardly matters: the interval covers more often
    # than promised.
    results = [vs.validation_difference(*validation_pairs(rng, 0.2, 2, 1024, 0.05, 1)) for _ in range(trials)]
    hits = [covers(r, 0.2) for r in results]
    report_coverage("validation, 2 pairs, 1,024 sequences (on the safe side)", hits, high=0.99)


def training_pairs(rng, true, pairs, steps, phi, run_noise):
    bf16 = 3 + ar1(rng, LOSS_NOISE, pairs, steps)
    runs = run_noise * rng.standard_normal((pairs, 1))
    return bf16, bf16 + true + runs + ar1(rng, (phi, PAIR_NOISE[1]), pairs, steps)


def cover_training(rng, trials):
    cases = [(pairs, 200, PAIR_NOISE[0], RUN_NOISE) for pairs in (2, 3, 5)]
    cases += [(1, steps, phi, 0.0) for steps in (100, 200, 400) for phi in (0.0, 0.3, PAIR_NOISE[0])]
    for case in cases:
        name = "training, pairs: %d, %d steps, lag-1 correlation %.2f" % case[:3]
        for true in (0.0, 0.02) if case[1] == 200 else (0.02,):
            results = [vs.training_difference(*training_pairs(rng, true, *case), case[1], seed=i)
                       for i in range(trials)]
            report_coverage(f"{name}, difference {true}", [covers(r, true) for r in results])
            if true == 0:
                same = [vs.verdict(r).kind == "same" for r in results]
                report_coverage(f"{name}: \"cannot be told apart\"", same, high=1)


def cover_noise(rng, trials):
    """One pair whose runs differ in rounding: only the band of BF16 runs can tell noise from a difference."""
    band_hits, same, without = [], [], []
    for i in range(trials):
        runs = 0.02 * rng.standard_normal((3, 1)) + RUN_NOISE * rng.standard_normal((3, 2))  # 3 seeds x 2 roundings
        band = vs.noise_band(runs.ravel(), np.repeat([42, 43, 44], 2))
        band_hits.append(abs(RUN_NOISE * (rng.standard_normal() - rng.standard_normal())) <= band.half_width)
        bf16, fp8 = validation_pairs(rng, 0, 1, 256, 0, 0.0)
        fp8 = bf16 + 0.02 * (fp8 - bf16) + RUN_NOISE * (rng.standard_normal() - rng.standard_normal())
        one = vs.validation_difference(bf16, fp8)
        same.append(vs.verdict(vs.with_rounding(one, band)).kind == "same")
        without.append(vs.verdict(one).kind == "same")
    report_coverage("noise band of 3 seeds x 2 rounding seeds, two other BF16 runs", band_hits)
    report_coverage("one pair that differs in rounding, with the noise band: \"cannot be told apart\"", same, high=1)
    check(np.mean(without) < 0.9,
          f"without the noise band fewer than 90% of verdicts are \"same\", so this test can fail: {np.mean(without)}")


def cover_over_steps(rng, trials):
    hits = []
    for i in range(max(trials // 8, 10)):  # 8 windows each
        bf16, fp8 = training_pairs(rng, 0, 3, 400, PAIR_NOISE[0], 0.0)
        truth = 0.0001 * np.arange(400)
        got = vs.difference_over_steps(bf16, fp8 + truth, 50, seed=i)
        hits += list((got.low <= 0.0001 * got.steps) & (0.0001 * got.steps <= got.high))
    check(got.steps.tolist() == [24.5 + 50 * i for i in range(8)],
          f"the middles of the windows are 24.5, 74.5, ...: {got.steps}")
    report_coverage("mean difference of each 50 steps", hits)


EFFECTS = (("no difference", 1.0, 0.0), ("5% more steps needed", 1 / 1.05, 0.0), ("3% fewer", 1.03, 0.0),
           ("loss 0.02 higher", 1.0, 0.02))


def curve(step, efficiency=1.0, shift=0.0):
    """A loss curve that falls as a power law: 11 after 15 steps, 4.9 after 1,800, where it falls by 0.0003 a step."""
    return 3 + 18 * (step * efficiency)**-0.3 + shift


def matched_truth(efficiency, shift):
    """Returns the true speed-up: that of the curves without noise, not smoothed."""
    ends = curve(STEPS), curve(STEPS, efficiency, shift)
    bf16 = ((max(ends) - 3) / 18)**(-1 / 0.3)
    fp8 = ((max(ends) - 3 - shift) / 18)**(-1 / 0.3) / efficiency
    return 1.35 * bf16 / fp8


def speedup_trial(rng, pairs, efficiency, shift, seed):
    step = np.arange(1, STEPS + 1)
    batches, noise = ar1(rng, LOSS_NOISE, pairs, STEPS), ar1(rng, (PAIR_NOISE[0], 0.02), pairs, STEPS)
    runs = RUN_NOISE * rng.standard_normal((pairs, 1)) if pairs > 1 else 0.0
    speeds = 1 + (0.003 * rng.standard_normal((pairs, 1)) if pairs > 1 else 0.0)  # GPUs differ from run to run
    seconds = 1 + 0.01 * rng.standard_normal((2, pairs, STEPS))
    return vs.loss_matched_speedup(curve(step) + batches, curve(step, efficiency, shift) + batches + noise + runs,
                                   1.35 * seconds[0] * speeds, seconds[1], seed=seed)


def cover_speedup(rng, trials):
    for pairs in (3, 1, 2):
        for name, efficiency, shift in EFFECTS:
            truth = matched_truth(efficiency, shift)
            results = [speedup_trial(rng, pairs, efficiency, shift, seed) for seed in range(trials)]
            title = f"speed-up, pairs: {pairs}, {name}, {truth:.4f}x"
            report_coverage(title, [covers(r, truth) for r in results])
            middle = np.median([r.estimate for r in results if r.estimate is not None])
            check(abs(middle / truth - 1) < 0.005, f"{title}: the median estimate is within 0.5% of that: {middle}")
            missed = np.mean([not r.reached for r in results])
            check(missed > 0.9 if truth < 1.34 else missed < 0.1 if truth > 1.36 else 0.3 < missed < 0.7,
                  f"{title}: FP8 misses BF16's last loss as often as it should: in {100 * missed:.0f}%")


def cover_with_common_methods(rng, trials):
    """Common methods, not used by verdict_stats.py, cover too little here. So these simulations find a bad interval."""
    names = ("a t-test over steps", "percentiles of the moving-block bootstrap", "the hierarchical bootstrap")
    hits = {name: [] for name in names}
    for i in range(max(trials // 2, 100)):
        bf16, fp8 = training_pairs(rng, 0.02, 1, 200, PAIR_NOISE[0], 0.0)
        series = (fp8 - bf16)[0]
        low, high = stats.ttest_1samp(series, 0).confidence_interval()
        hits["a t-test over steps"].append(low <= 0.02 <= high)
        means = MovingBlockBootstrap(vs.block_length(series), series, seed=i).apply(np.mean, 300)
        low, high = np.percentile(means, [2.5, 97.5])
        hits["percentiles of the moving-block bootstrap"].append(low <= 0.02 <= high)

        # 3 pairs. Runs differ by 0.05, which is more than the noise of batches in a mean of 200 steps (0.007).
        bf16, fp8 = training_pairs(rng, 0.02, 3, 200, PAIR_NOISE[0], 0.05)
        means = np.stack([MovingBlockBootstrap(vs.block_length(row), row, seed=i).apply(np.mean, 300)[:, 0]
                          for row in fp8 - bf16])
        means = means[rng.integers(3, size=(300, 3)), np.arange(300)[:, None]].mean(axis=1)
        low, high = np.percentile(means, [2.5, 97.5])
        hits["the hierarchical bootstrap"].append(low <= 0.02 <= high)
    for name, most in zip(names, (0.85, 0.93, 0.85)):
        print(f"for comparison: {name}: {100 * np.mean(hits[name]):.1f}% of {len(hits[name])}")
        check(np.mean(hits[name]) < most,
              f"{name} covers less than {most}, so this simulation finds it: {np.mean(hits[name])}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=120 if os.environ.get("ALL") else 60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("error")  # a division by zero in the statistics is a fault
    rng = np.random.default_rng(options.seed)
    test_against_libraries(rng)
    test_detectable(rng)
    test_noise_band()
    test_with_rounding()
    test_speedup_exact()
    test_refusals()
    test_words()
    test_real_curves()
    if options.trials < 1000:
        vs.REPLICATES = 200
    for cover in (cover_validation, cover_training, cover_noise, cover_over_steps, cover_speedup,
                  cover_with_common_methods):
        cover(rng, options.trials)
    finish()


if __name__ == "__main__":
    main()
