"""What the page says: the verdict in sentences, and numbers as text."""
import collections

import verdict_stats as vs

PER_GIGA = 1e9
SENTENCES = 8  # with more comparisons, those of one model and recipe share a sentence


def number(value, digits=4):
    """A number with this many significant digits (more for large ones, which get no exponent), or "n/a"."""
    if value is None:
        return "n/a"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e" in text and abs(value) < 1e15 and abs(value) >= 1 else text


def count(n, noun):
    return f"{n} {noun}{'' if n == 1 else 's'}"


def bracket(difference):
    return f"{difference.estimate:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def loss_words(comparison, name):
    """The verdict on one loss, as a part of a sentence; "" if there is no number."""
    difference = getattr(comparison, name)
    if difference is None:
        return ""
    said = vs.verdict(difference)
    where = f"in {name} loss" + (f" over the last {comparison.last} steps" if name == "training" else "")
    text = said.words.replace(" in loss", "", 1)
    for kind, clearer in (("costs", "is higher by"), ("gains", "is lower by")):
        text = text.replace(f"{kind} ", f"{clearer} ", 1) if said.kind == kind else text
    return f"{where} it {text}"


def kinds_of(comparison):
    """{validation or training: same, costs or gains}, as far as there are numbers."""
    return {name: vs.verdict(getattr(comparison, name)).kind
            for name in ("validation", "training") if getattr(comparison, name) is not None}


def common_kind(kinds):
    """One word for several verdicts: diverged if one diverged; mixed if one is mixed, or if some cost and some gain;
    else costs or gains if one does; else same if one is the same; else none."""
    kinds = set(kinds)
    if "diverged" in kinds:
        return "diverged"
    seen = kinds - {"same", "none"}
    return seen.pop() if len(seen) == 1 else "mixed" if seen else "same" if "same" in kinds else "none"


def kind_of(comparison):
    """diverged, same, costs, gains, mixed; none without a number."""
    return "diverged" if comparison.diverged else common_kind(kinds_of(comparison).values())


def speed_words(comparison):
    words = f"{comparison.speed:.2f}x the tokens per second of BF16"
    pairs = len(comparison.pairs)
    return words + (f" ({span(comparison.speed_range, '{:.2f}')} in {pairs} pairs)" if pairs > 1 else "")


def energy_words(comparison):
    """How much energy FP8 saves or takes for a billion tokens, as a part of a sentence; "" if it is not known."""
    if not comparison.joules_per_token:
        return ""
    bf16, fp8 = (joules * PER_GIGA / 3.6e6 for joules in comparison.joules_per_token)
    verb, amount = ("saves", bf16 - fp8) if fp8 <= bf16 else ("takes", fp8 - bf16)
    return f"{verb} {number(amount, 2)}{'' if fp8 <= bf16 else ' more'} of {number(bf16, 2)} kWh a billion tokens " \
           f"({100 * amount / bf16:.0f}% of the energy)"


def money_words(comparison, price):
    if price is None or not comparison.seconds_per_token:
        return ""
    bf16, fp8 = (money_per_giga(comparison, price))
    return f"a billion tokens cost {number(fp8, 3)} instead of {number(bf16, 3)}"


def money_per_giga(comparison, price):
    """(BF16, FP8): the price of a billion tokens at this price of a GPU hour."""
    return tuple(seconds * PER_GIGA / 3600 * comparison.gpus * price for seconds in comparison.seconds_per_token)


def seen_words(comparison):
    """The smallest difference that these runs could have seen, where the words on a loss do not have it."""
    parts = [f"{getattr(comparison, name).detectable:.4f} in {name} loss"
             for name, kind in kinds_of(comparison).items() if kind != "same"]
    return f"the smallest difference that these runs could have seen is {' and '.join(parts)}" if parts else ""


def sentence(comparison, price=None):
    """The verdict on one comparison, as one sentence that begins with its name."""
    parts, total = [], len(comparison.pairs) + len(comparison.refused)
    reasons = [reason for reason in comparison.refused if reason not in comparison.diverged]
    if comparison.diverged:
        parts.append(f"DIVERGED in {len(comparison.diverged)} of {count(total, 'pair')} "
                     f"({'; '.join(comparison.diverged)})")
    if comparison.pairs and reasons:
        parts.append(f"{len(reasons)} of {count(total, 'pair')} left out ({'; '.join(reasons)})")
    parts += comparison.notes
    if not comparison.pairs:
        return f"{comparison.name}: no verdict; " + "; ".join(parts + reasons) + "."
    parts += [speed_words(comparison), loss_words(comparison, "validation"), loss_words(comparison, "training"),
              seen_words(comparison), vs.speedup_words(comparison.speedup) if comparison.speedup else "",
              energy_words(comparison), money_words(comparison, price)]
    if comparison.training is None:
        parts.append("no difference in training loss: " + comparison.why.get("training", ""))
    return f"{comparison.name}, {count(len(comparison.seeds), 'seed')}: " + "; ".join(filter(None, parts)) + "."


def span(values, form):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def shared_sentence(comparisons):
    """One sentence on all lengths and numbers of GPUs of one model and recipe."""
    first, paired = comparisons[0], [c for c in comparisons if c.pairs]
    name = f"{first.model}, {first.recipe}"
    if not paired:
        return f"{name}: no verdict; {'; '.join(c.refused[0] for c in comparisons if c.refused)}."
    kinds = collections.Counter(kind_of(c) for c in paired)
    says = {"same": "it cannot be told apart from BF16", "costs": "its loss is higher", "gains": "its loss is lower",
            "mixed": "one loss is higher and one lower", "diverged": "it diverged", "none": "no loss is compared"}
    parts = [f"{span([c.speed for c in paired], '{:.2f}x')} the tokens per second of BF16 in "
             f"{count(len(paired), 'combination')} of T ({span([c.length for c in paired], '{}')}) and GPUs "
             f"({span([c.gpus for c in paired], '{}')})"]
    parts += [f"{says[kind]} in {n}" for kind, n in kinds.items()]
    if len(paired) < len(comparisons):
        refused = [c.refused[0] for c in comparisons if not c.pairs]
        parts.append(f"{len(refused)} without a verdict ({refused[0]})")
    single = sum(any(difference and not vs.covers_runs(difference) for difference in (c.validation, c.training))
                 for c in paired)
    if single:
        where = "each, so" if single == len(paired) else f"in {single}, where"
        parts.append(f"one pair of runs {where} the noise from run to run is not covered")
    seen = [getattr(c, n).detectable for c in paired for n in ("validation", "training") if getattr(c, n)]
    if seen:
        parts.append(f"the smallest differences in loss that these runs could have seen are {span(seen, '{:.4f}')}")
    return f"{name}: " + "; ".join(parts) + "."


def verdict(comparisons, price=None):
    """[(kind, name, sentence)]: one for each comparison, or for each model and recipe if there are many. A sentence
    begins with the name."""
    if len(comparisons) <= SENTENCES:
        return [(kind_of(c), c.name, sentence(c, price)) for c in comparisons]
    groups = {}
    for comparison in comparisons:
        groups.setdefault((comparison.model, comparison.recipe), []).append(comparison)
    return [(common_kind(map(kind_of, members)), ", ".join(key), shared_sentence(members))
            for key, members in groups.items()]


def run_sentence(run, recipe):
    """A run by itself, where there is nothing to compare it with."""
    losses = [loss for loss in run.column("loss") if loss is not None]
    tail = losses[-20:]
    loss = f", loss {sum(tail) / len(tail):.4f} (mean of the last {count(len(tail), 'step')})" if tail else ""
    speed = run.steps[-1]["tokens_per_second"] if len(run.steps) == 1 else median_speed(run)
    return f"{run.name}: {run.settings['model']}, {recipe}, {run.state()}{loss}, {number(speed, 4)} tokens per second."


def median_speed(run):
    """Tokens per second of all ranks, of the median step after the first ones (Run.after_warmup)."""
    times = sorted(run.after_warmup("ms"))
    middle = len(times) // 2
    median = times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2
    return run.tokens_per_step / median * 1000
