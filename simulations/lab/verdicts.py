"""The verdict on a setting: what was found, with which certainty, next to what is published.

interval        the 95 % t interval of the mean over seeds
prediction      the 95 % t interval in which one more run would lie
difference      of the paper's rule less the best baseline (by its mean here), in pairs of the same
                seed, with its 95 % t interval

*Reproduced* is a setting whose difference to the best published baseline lies on the published side
of 0 with its whole interval, and whose published number lies in the interval of prediction; *order
only*, if the number does not; *not*, if the interval holds 0 or lies on the other side. Where the
paper's rule is behind a baseline by its own numbers, the differences to all published baselines
must lie on their sides. A setting without a paper's rule, of a benchmark, is reproduced if each
published number lies in its rule's interval of prediction. A setting without published numbers says
whether the rule is *ahead* of the best baseline or *behind* it with the whole interval, or *level*;
without a paper's rule, too, it has *no verdict*. What cannot be run says why.

While a baseline of these has not run, the only verdicts are *not* and *behind*, which it could not
change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from simulations.lab.measured import KINDS
from simulations.lab.studies import Setting

Verdict = Literal[
    "reproduced",
    "order only",
    "not",
    "not run",
    "not possible here",
    "ahead",
    "level",
    "behind",
    "no verdict",
]

CONFIDENCE = 0.95
FEWEST = 5
"""Seeds from which rounds to a target have an interval that is shown."""


class Interval(NamedTuple):
    """A mean, and how far its interval goes to either side."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Its lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Its upper end."""
        return self.mean + self.half


def interval(values: Sequence[float], *, of_next: bool = False) -> Interval:
    """Return the t interval of the mean of ``values``, or of one value more.

    Raises ``ValueError`` for fewer than two values, of which there is none.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least two values, got {n}")
    factor = math.sqrt(1.0 / n + of_next)
    from scipy.stats import t  # here: it takes a second, and few tables need it

    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(values) * factor
    return Interval(fmean(values), half)


def one_by_one(figure: str, values: Sequence[float]) -> bool:
    """Whether the seeds' numbers are shown, and no interval.

    The first round that touches a value is far from normal: with few seeds its interval is too
    short.
    """
    return figure == "rounds_to_target" and len(values) < FEWEST


def each_seed(values: Sequence[float], missed: int) -> list[str]:
    """Return each seed's rounds to a target, one text if all missed it.

    ``missed`` are the runs that did not reach it: their value is one more than their rounds.
    """
    never = max(values) if missed else None
    texts = [f"more than {n - 1:g}" if n == never else f"{n:g}" for n in values]
    return texts[:1] if missed == len(values) else texts


class Row(NamedTuple):
    """A rule of a setting: what is published, and what its seeds came to."""

    rule: str
    published: float | None
    values: tuple[float, ...]
    chosen: str
    """Its learning rate, and what else was tuned."""
    seconds: float
    """Of all its runs, the choice of its hyperparameters included."""
    seeds: tuple[int, ...] = ()
    """Of the values."""
    tried: tuple[str, ...] = ()
    """The hyperparameters from which its own were chosen."""
    ended: tuple[str, ...] = ()
    """The runs that ended early, each with its cause: their last good model counts."""


class Judged(NamedTuple):
    """A setting with what was found."""

    setting: Setting
    rows: tuple[Row, ...]
    best: str
    """The best baseline, by its mean here."""
    difference: Interval | None
    verdict: Verdict

    @property
    def ran(self) -> bool:
        """Whether any of its runs is finished."""
        return any(row.values for row in self.rows)


def judge(setting: Setting, rows: Sequence[Row]) -> Judged:
    """Return the verdict on ``rows``, those of the rules that ran with every seed.

    One seed alone gives none.
    """
    if setting.impossible:
        return Judged(setting, tuple(rows), "", None, "not possible here")
    whole = {row.rule: row for row in rows if len(row.values) == len(setting.seeds)}
    names = [n for n, rule in setting.rules.items() if n != setting.ours and not rule.reference]
    baselines = [whole[name] for name in names if name in whole]
    if not setting.ours:
        return Judged(setting, tuple(rows), "", None, _foretold(setting, whole))
    ours = whole.get(setting.ours)
    if ours is None or not baselines:
        return Judged(setting, tuple(rows), "", None, "not run")
    if len(setting.seeds) < 2:
        return Judged(setting, tuple(rows), "", None, "no verdict")
    sign = -1.0 if KINDS[setting.figure].less_is_better else 1.0
    best = max(baselines, key=lambda row: sign * fmean(row.values))
    difference = _difference(ours, best)
    low, high = sorted((sign * difference.low, sign * difference.high))
    verdict: Verdict = "ahead" if low > 0 else "behind" if high < 0 else "level"
    if setting.published:
        names = [name for name in names if name in setting.published]
        verdict = "not"
        if _in_order(setting, whole, [name for name in names if name in whole], sign):
            verdict = "reproduced" if _within(ours) else "order only"
    if set(names) - whole.keys() and verdict not in ("not", "behind"):
        verdict = "not run"  # a further baseline could be better
    return Judged(setting, tuple(rows), best.rule, difference, verdict)


def _difference(ours: Row, other: Row) -> Interval:
    return interval([a - b for a, b in zip(ours.values, other.values, strict=True)])


def _in_order(
    setting: Setting, whole: Mapping[str, Row], baselines: Sequence[str], sign: float
) -> bool:
    """Return whether whole intervals of the differences lie on their published sides."""
    ours = whole[setting.ours]
    gaps = {
        name: sign * (setting.published[setting.ours] - published)
        for name, published in setting.published.items()
        if name != setting.ours and not setting.rules[name].reference
    }
    sides = {name: gaps[name] for name in baselines if gaps[name]}
    if all(gap >= 0.0 for gap in gaps.values()) and baselines:
        best = max(baselines, key=lambda name: sign * fmean(whole[name].values))
        sides = {best: 1.0}
    differences = [(_difference(ours, whole[name]), sign * side) for name, side in sides.items()]
    return all(
        math.copysign(1.0, side) * difference.mean > difference.half
        for difference, side in differences
    )


def _within(row: Row) -> bool:
    """Return whether the published number could be that of one more run."""
    ahead = interval(row.values, of_next=True)
    return row.published is not None and ahead.low <= row.published <= ahead.high


def _foretold(setting: Setting, whole: Mapping[str, Row]) -> Verdict:
    """Return the verdict on a benchmark's numbers."""
    if (setting.published or setting.rules).keys() - whole.keys():
        return "not run"
    if not setting.published or len(setting.seeds) < 2:
        return "no verdict"
    return "reproduced" if all(_within(whole[rule]) for rule in setting.published) else "not"
