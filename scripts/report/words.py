"""What the page says: the decision in a sentence, notes, and numbers as text."""
import math

import verdict_stats as vs

PER_GIGA = 1e9
SENTENCES = 8        # with more comparisons, those of one model and recipe share a sentence
FEW_TOKENS = 100_000  # tokens of a step: pre-training takes more
ORDER = ("acceptable", "diverged", "undecided", "refused")  # of decisions, with the useful ones first


def number(value, digits=4):
    """A number with this many significant digits (more for large ones, which get no exponent), or "n/a"."""
    if value is None:
        return "n/a"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e" in text and abs(value) < 1e15 and abs(value) >= 1 else text


def count(n, noun):
    return f"{n} {noun}{'' if n == 1 else 's'}"


def tokens(n):
    """A number of tokens: 51,200, 89 M or 1.2 billion."""
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e9:.3g} billion" if n >= 999.5e6 else f"{n / 1e6:.3g} M"


def per_parameter(c):
    return number(c.tokens / c.parameters, 2) if c.parameters else "n/a"


def up(value):
    """Percent that is not below the value, and `down` not above it."""
    return f"{math.ceil(100 * value - 1e-9) / 100 + 0:.2f}%"


def down(value):
    return f"{math.floor(100 * value + 1e-9) / 100 + 0:.2f}%"


def span(values, form):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


# ---- the verdict


def percents(c):
    """The simultaneous bounds of the cost in percent of BF16's loss."""
    return c.percent(c.bounds.low), c.percent(c.bounds.high)


def kind_of(c):
    """diverged; costs, gains or same by the simultaneous bounds; none if no verdict is read."""
    if c.diverged:
        return "diverged"
    if not c.pairs or c.undecided or c.null or len(c.seeds) == 1:
        return "none"
    low, high = percents(c)
    return "costs" if low > 0 else "gains" if high < 0 else "same"


def decision_of(c, margin):
    """acceptable, refused, diverged or undecided at this margin in percent."""
    kind = kind_of(c)
    if kind in ("diverged", "none"):
        return "undecided" if kind == "none" else kind
    low, high = percents(c)
    return "acceptable" if high < margin else "refused" if low > margin else "undecided"


def title(c, several):
    """FP8 RECIPE after step b, with the place where several are on the page. A verdict against another recipe than BF16
    names recipes as its --recipes does."""
    recipe = c.recipe if c.versus else "FP8 " + c.recipe.removeprefix("fp8:").replace(":emulate", " (emulated)")
    place = f" of {c.name.split(', fp8')[0]}" if several else ""
    batch = f", {c.batch:,} tokens per step," if several and "tokens per step" in c.name else ""
    return f"{recipe}{place}{batch} " + (f"after step {c.branch}" if c.branch else "from step 0")


def measured(c):
    return (f"measured at {tokens(c.tokens)} tokens ({per_parameter(c)} per parameter), {c.batch:,} tokens per step")


def saving(c):
    """What FP8 saves at equal loss, as the end of a sentence; emulated FP8 has no speed of its own."""
    if c.emulated:
        return ""
    if c.speedup is None or c.speedup.estimate is None:
        return "; saving not determined"
    saved = [100 * (1 - 1 / limit) for limit in (c.speedup.low, c.speedup.high)]
    if max(saved) < 0:
        return f"; it takes {span([100 / c.speedup.low - 100, 100 / c.speedup.high - 100], '{:.0f}')}% more of the " \
               "time and the money at equal loss"
    return f"; it saves {span(saved, '{:.0f}')}% of the time and the money at equal loss"


def hours_needed(c, margin):
    """How many more GPU hours a decision probably takes, as the end of a sentence; "" if nothing tells."""
    have, need = len(c.seeds), c.planned
    if have > 1:
        distance = abs(margin - c.percent(c.bounds.estimate))
        need = vs.trunks_needed(c.percent(c.bounds.standard_error) * math.sqrt(have), max(distance, 1e-9), c.alpha)
    elif c.deviation:
        need = vs.trunks_needed(c.deviation[1], margin, c.alpha)
    if need is None:
        return f"; a decision is likely to need more than {number(1000 * c.hours, 2)} GPU-hours"
    need = max(need, c.planned, have + (have == c.planned))
    return f"; a decision is likely to need {number((need - have) * c.hours, 2)} GPU-hours"


def sentence(c, margin=None, several=False):
    """(beginning, rest) of the sentence on one comparison."""
    name, decision = title(c, several), decision_of(c, margin) if margin else ""
    heads = {"acceptable": "Acceptable: ", "refused": "Not acceptable: ", "undecided": "Undecided: ",
             "diverged": "Not acceptable: "}
    head = heads.get(decision, "")
    if c.diverged:
        total = len(c.pairs) + len(c.refused)
        return head + name, f" DIVERGED in {len(c.diverged)} of {count(total, 'pair')} ({'; '.join(c.diverged)})."
    if not c.pairs:
        return name, f": no verdict; {'; '.join(c.refused + c.notes)}."
    so_far = f"{c.undecided}: " if c.undecided else ""
    so_far = so_far if head else so_far.capitalize()
    if len(c.seeds) == 1:
        end = hours_needed(c, margin) if margin else \
            "" if c.emulated else f"; {c.speed:.2f}x the tokens per second of {c.say('BF16')}"
        return f"{head}{so_far}{name}", f": one pair cannot tell what it costs in loss{c.versus}, {measured(c)}{end}."
    low, high = percents(c)
    loss = f"in loss{c.versus}"
    nothing = f"nothing{c.versus}: its loss is at least {down(-high)} lower"
    most = f"at most {up(high)} {loss}" if high > 0 else nothing
    cost = {"acceptable": f"{most} (97.5%)", "refused": f"at least {down(low)} {loss} (97.5%)"}
    cost = cost.get(decision, f"between {down(low)} and {up(high)} {loss} (95%)")
    end = hours_needed(c, margin) if decision == "undecided" else saving(c)
    return f"{head}{so_far}{name}", f" costs {cost}, {measured(c)}{end}."


def shared_sentence(members):
    """(beginning, rest) of one sentence on all lengths and numbers of GPUs of one model and recipe."""
    first, paired = members[0], [c for c in members if c.pairs]
    name = f"{first.model}, {first.recipe}{first.versus}"
    if not paired:
        return name, f": no verdict; {'; '.join(c.refused[0] for c in members if c.refused)}."
    parts = [f"{span([c.speed for c in paired], '{:.2f}x')} the tokens per second of {first.say('BF16')} in "
             f"{count(len(paired), 'combination')} of T ({span([c.length for c in paired], '{}')}) and GPUs "
             f"({span([c.gpus for c in paired], '{}')})"]
    kinds = [kind_of(c) for c in members]
    parts += [f"{text} in {kinds.count(kind)}" for kind, text in (
        ("costs", "its loss is higher"), ("gains", "its loss is lower"), ("same", "no difference in loss is seen"),
        ("diverged", "it diverged")) if kind in kinds]
    single = sum(len(c.seeds) == 1 for c in paired)
    if single:
        where = "each" if single == len(paired) else f"in {single}"
        parts.append(f"one pair {where} cannot tell what it costs in loss")
    refused = [c.refused[0] for c in members if not c.pairs and c.refused]
    if refused:
        parts.append(f"{len(refused)} without a verdict ({refused[0]})")
    return name, ": " + "; ".join(parts) + "."


def common_kind(kinds):
    """One word for several verdicts: mixed if some cost and some gain."""
    kinds = set(kinds)
    seen = kinds - {"same", "none"}
    return "diverged" if "diverged" in kinds else seen.pop() if len(seen) == 1 else "mixed" if seen else \
        "same" if "same" in kinds else "none"


def verdict(comparisons, margin=None):
    """[(kind, beginning, rest)]: a sentence for each comparison, or for each model and recipe if there are many."""
    shown = [c for c in comparisons if not c.null]
    if len(shown) > SENTENCES:
        groups = {}
        for c in shown:
            groups.setdefault((c.model, c.recipe), []).append(c)
        return [(common_kind(map(kind_of, members)), *shared_sentence(members)) for members in groups.values()]
    several = len({c.place[:4] for c in shown}) > 1
    if margin:
        shown.sort(key=lambda c: ORDER.index(decision_of(c, margin)))
    return [(kind_of(c), *sentence(c, margin, several)) for c in shown]


def pilot(comparisons, margin=None):
    """What null pairs show, one text for each place."""
    return [null_words(c, margin) if c.smallest else f"{c.recipe}: its losses are the trunk's, so it shows no noise; "
            "nothing was rounded stochastically" for c in comparisons if c.null and c.smallest not in (None, math.inf)]


def null_words(c, margin):
    """How small a cost so many trunks see, and what the margin takes."""
    apart, most = c.deviation
    text = (f"{c.recipe}, {c.batch:,} tokens per step: pairs that differ in chance alone are {apart:.2f}% apart (at "
            f"most {most:.2f}%), so {count(c.planned, 'trunk')} see a cost of {c.smallest:.2f}% or more")
    if not margin or c.smallest <= margin:
        return text
    return (f"{text}; {margin:g}% takes {vs.trunks_needed(most, margin, c.alpha) or 'more than 1000'} trunks of "
            f"{number(c.hours / 2, 2)} GPU-hours for each arm, or calmer pairs: a later --branch-step, a lower rate")


def notes(comparisons, margin=None):
    """What a reader of the sentences must know too."""
    texts = []
    for c in comparisons:
        total = len(c.pairs) + len(c.refused)
        reasons = [reason for reason in c.refused if reason not in c.diverged] if c.pairs else []
        left_out = [f"{len(reasons)} of {count(total, 'pair')} left out ({'; '.join(reasons)})"] if reasons else []
        texts += [f"{c.recipe}{f', after step {c.branch}' if c.branch else ''}: {text}"
                  for text in left_out + (c.notes if c.pairs else [])]
    texts += pilot(comparisons, margin)
    small = sorted({c.batch for c in comparisons if c.batch < FEW_TOKENS})
    if small:
        texts.append(f"steps of {span(small, '{:,}')} tokens are small: pre-training takes {FEW_TOKENS:,} or more, "
                     "where the cost may be another")
    if any(c.emulated for c in comparisons):
        texts.append("emulated FP8 computes the losses of FP8, but not with its speed or energy")
    # what a run took is said once, not for each recipe
    return list(dict.fromkeys(text.split(": ", 1)[-1] if "took" in text else text for text in texts))


# ---- energy and money


def money_per_giga(c, price):
    """(BF16, FP8): the price of a billion tokens at this price of a GPU hour."""
    return tuple(seconds * PER_GIGA / 3600 * c.gpus * price for seconds in c.seconds_per_token)


def run_sentence(run, recipe):
    """A run by itself, where there is nothing to compare it with."""
    tail = run.last_losses
    loss = f", loss {sum(tail) / len(tail):.4f} (mean of the last {count(len(tail), 'step')})" if tail else ""
    speed = number(run.median_speed, 4)
    return f"{run.name}: {run.settings['model']}, {recipe}, {run.state()}{loss}, {speed} tokens per second."
