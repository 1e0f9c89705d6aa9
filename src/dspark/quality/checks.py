"""Checks: what the pairs and samples of a run amount to, each a verdict with its figures, and the gate over them.
It must never call a check passed that looked at nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.quality.oracle import FAULT, IDENTICAL, TIE
from dspark.quality.paired import Paired, interval, mcnemar, questions_needed
from dspark.quality.pairs import UNJUDGED, Pair
from dspark.quality.questions import LETTERS
from dspark.quality.sampled import Sampled
from dspark.quality.scoring import SCORES, letter_of, likeliest_letter, refuses, repetition
from dspark.types import SpeculationRecord

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
ALPHA = 0.01
"""Of McNemar's test over all scored tasks together (Bonferroni)."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """`verdict`: PASS, FAIL or INCONCLUSIVE; `text`: why, in a line; `figures` for JSON."""

    name: str
    verdict: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One scored task. `counts` of right answers; `alike`: all pairs were token for token the same."""

    task: str
    counts: Paired
    interval: tuple[float, float]
    p_value: float
    needed: int
    alike: bool


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How the answers of one task agree, or of all. `rate`: ties for each 1,000 tokens compared."""

    task: str
    num_pairs: int
    verdicts: Mapping[str, int]
    num_tokens: int
    refused: int

    @property
    def rate(self) -> float:
        return 1000 * self.verdicts.get(TIE, 0) / self.num_tokens if self.num_tokens else 0.0


def agreement(pairs: Sequence[Pair], task: str) -> Agreement:
    """Of these pairs."""
    answered = [pair for pair in pairs if not pair.refused]
    verdicts = [pair.finding.verdict for pair in answered]
    return Agreement(
        task=task,
        num_pairs=len(answered),
        verdicts={name: verdicts.count(name) for name in (IDENTICAL, TIE, UNJUDGED, FAULT) if name in verdicts},
        num_tokens=sum(pair.num_compared for pair in answered),
        refused=len(pairs) - len(answered),
    )


def by_task(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """In the order they came."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(pair.question.task, []).append(pair)
    return found


def speculation(pairs: Sequence[Pair]) -> SpeculationRecord:
    """What the speculative side did for all of them."""
    total = SpeculationRecord()
    for pair in pairs:
        total.merge(pair.other.record)
    return total


class Scorer:
    """Whether answers are right; the same text to the same question is judged once."""

    def __init__(self, scores: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = SCORES) -> None:
        self.scores = scores
        self.known: dict[tuple[str, str, str], bool] = {}

    def pair(self, pair: Pair) -> tuple[bool, bool] | None:
        """(plain, other); None for a task without a key, and where an answer was refused."""
        if pair.refused:
            return None
        if pair.question.task == LETTERS:
            right = letter_of(pair.question.row)
            chosen = [likeliest_letter(letter_logprobs(reply, pair)) for reply in (pair.plain, pair.other)]
            return None if None in chosen else (chosen[0] == right, chosen[1] == right)
        if pair.question.task not in self.scores:
            return None
        return self._right(pair, pair.plain.text), self._right(pair, pair.other.text)

    def _right(self, pair: Pair, text: str) -> bool:
        task = pair.question.task
        key = task, pair.question.id, text
        if key not in self.known:
            self.known[key] = self.scores[task](text, pair.question.row)
        return self.known[key]


def letter_logprobs(reply: Any, pair: Pair) -> dict[str, float]:
    """Of each choice's letter at the first token, by the likelier of its spellings; those that are not told are left
    out."""
    if not reply.logprobs:
        return {}
    words: Mapping[Any, str] = pair.question.row.get("letter_ids") or {}
    found: dict[str, float] = {}
    for token, logprob in reply.logprobs[0].items():
        letter = words.get(token) if words else str(token).strip()
        if letter and letter in "ABCDEFGHIJ"[: len(pair.question.row["choices"])]:
            found[letter] = max(logprob, found.get(letter, -math.inf))
    return found


def score_tasks(pairs: Sequence[Pair], scorer: Scorer, *, margin: float) -> list[Score]:
    """`margin` as a share."""
    found = []
    for task, of_task in by_task(pairs).items():
        outcomes = [outcome for pair in of_task if (outcome := scorer.pair(pair)) is not None]
        if outcomes:
            counts = Paired.of(outcomes)
            found.append(
                Score(
                    task=task,
                    counts=counts,
                    interval=interval(counts),
                    p_value=mcnemar(counts),
                    needed=questions_needed(counts, margin=margin),
                    alike=all(pair.finding.verdict == IDENTICAL for pair in of_task),
                )
            )
    return found


def check_identity(pairs: Sequence[Pair], *, exact: bool) -> Check:
    """No difference in exact mode, none beyond a near-tie otherwise."""
    total = agreement(pairs, "all")
    faults, unjudged = total.verdicts.get(FAULT, 0), total.verdicts.get(UNJUDGED, 0)
    one_sided = sum(bool(pair.plain.error) != bool(pair.other.error) for pair in pairs)
    figures = {"pairs": total.num_pairs, **total.verdicts, "tokens": total.num_tokens, "tie_rate_per_1000": total.rate}
    text = f"{total.verdicts.get(IDENTICAL, 0)} of {total.num_pairs} pairs identical"
    text += f", {total.verdicts.get(TIE, 0)} near-ties ({total.rate:.2f} per 1,000 tokens), {faults} faults"
    text += f", {unjudged} that cannot be judged" if unjudged else ""
    text += f", {one_sided} refused by one side only" if one_sided else ""
    if faults or one_sided or (exact and unjudged):
        verdict = FAIL
    else:
        verdict = INCONCLUSIVE if unjudged or not total.num_pairs else PASS
    return Check(name="same answers", verdict=verdict, text=text, figures=figures)


def check_ends(pairs: Sequence[Pair]) -> Check:
    """Nothing behind an end, on either side."""
    late = [word for pair in pairs for word in pair.late]
    text = f"{len(late)} answers go on behind their end, such as {late[0]}" if late else f"{2 * len(pairs)} answers end"
    text += "" if late else " where they should"
    return Check(name="ends", verdict=FAIL if late else PASS if pairs else INCONCLUSIVE, text=text)


def check_drafts(pairs: Sequence[Pair], *, told: bool) -> Check:
    """Something was drafted, kept and refused: else equality shows little. `told`: whether the side says so."""
    record = speculation(pairs)
    figures = record.as_dict()
    if not told:
        text = "the server does not tell what it drafted: see that speculation is on"
        return Check(name="drafts", verdict=INCONCLUSIVE, text=text)
    both = 0 < record.num_accepted < record.num_verified
    text = f"{record.num_accepted} of {record.num_verified} verified drafts kept"
    text += f", {record.mean_accepted_length:.2f} tokens a pass"
    return Check(name="drafts", verdict=PASS if both else INCONCLUSIVE, text=text, figures=figures)


def check_scores(scores: Sequence[Score], *, margin: float) -> list[Check]:
    """One for each task."""
    return [_check_score(score, margin=margin, alpha=ALPHA / len(scores)) for score in scores]


def _check_score(score: Score, *, margin: float, alpha: float) -> Check:
    counts, (low, high) = score.counts, score.interval
    text = f"{100 * counts.plain:.1f}% plain, {100 * counts.other:.1f}% speculative, difference "
    text += f"{100 * counts.difference:+.2f} points [{100 * low:.2f}, {100 * high:.2f}]"
    figures = {
        "n": counts.n,
        "plain": counts.plain,
        "speculative": counts.other,
        "plain_only": counts.plain_only,
        "speculative_only": counts.other_only,
        "difference": counts.difference,
        "interval": [low, high],
        "mcnemar_p": score.p_value,
        "margin": margin,
        "questions_needed": score.needed,
    }
    need = f"an interval within {100 * margin:g} points takes about {score.needed} questions, here are {counts.n}"
    if score.p_value < alpha:
        verdict, text = FAIL, f"{text}: different (McNemar p {score.p_value:.2g})"
    elif -margin <= low and high <= margin:
        verdict, text = PASS, f"{text}: equivalent within {100 * margin:g} points"
    elif score.alike:
        verdict, text = PASS, f"{text}: the answers are the same, so their scores are; {need}"
    elif abs(counts.difference) <= margin:
        verdict, text = INCONCLUSIVE, f"{text}: no difference seen; {need}"
    else:
        verdict, text = INCONCLUSIVE, f"{text}: not significant (McNemar p {score.p_value:.2g}); {need}"
    return Check(name=f"score {score.task}", verdict=verdict, text=text, figures=figures)


def check_letters(pairs: Sequence[Pair], *, bound: float) -> Check | None:
    """Log-probabilities of the choices' letters, side by side."""
    gaps = []
    for pair in by_task(pairs).get(LETTERS, []):
        if pair.refused is None:
            plain, other = letter_logprobs(pair.plain, pair), letter_logprobs(pair.other, pair)
            gaps += [abs(plain[letter] - other[letter]) for letter in plain if letter in other]
    if not gaps:
        return None
    text = f"log-probabilities of letters differ by at most {max(gaps):.3g} (allowed {bound:g})"
    figures = {"largest": max(gaps), "bound": bound, "compared": len(gaps)}
    return Check(name="log-likelihood", verdict=PASS if max(gaps) <= bound else FAIL, text=text, figures=figures)


def check_open(pairs: Sequence[Pair]) -> Check | None:
    """Answers without a key: identity, lengths, refusals and repetition. A report, and a gate only by identity."""
    answered = [p for p in pairs if p.refused is None and p.question.task.startswith("mtbench")]
    if not answered:
        return None
    sides = {"plain": [p.plain.text for p in answered], "speculative": [p.other.text for p in answered]}
    figures: dict[str, Any] = {"n": len(answered)}
    for name, texts in sides.items():
        figures[name] = {
            "mean_characters": sum(map(len, texts)) / len(texts),
            "refusals": sum(map(refuses, texts)),
            "mean_repetition": sum(map(repetition, texts)) / len(texts),
        }
    gaps = [len(p.other.text) - len(p.plain.text) for p in answered]
    mean, spread = sum(gaps) / len(gaps), _standard_error(gaps)
    figures["length_difference"] = {"mean": mean, "standard_error": spread}
    a, b = figures["plain"], figures["speculative"]
    text = (
        f"characters {a['mean_characters']:.0f} and {b['mean_characters']:.0f} (difference {mean:+.1f}, standard error "
        f"{spread:.1f}), refusals {a['refusals']} and {b['refusals']}, repetition {a['mean_repetition']:.3f} and "
        f"{b['mean_repetition']:.3f}"
    )
    apart = spread > 0 and len(gaps) >= 20 and abs(mean) > 4 * spread
    return Check(name="open answers", verdict=FAIL if apart else PASS, text=text, figures=figures)


def _standard_error(values: Sequence[float]) -> float:
    n, mean = len(values), sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, n - 1) / n)


def check_sampled(sampled: Sampled, *, kind: str = "the target's law") -> Check:
    """The distribution test with its power and its control."""
    plan, record = sampled.plan, sampled.record
    text = f"p {sampled.p_value:.3g} against {kind} over {len(sampled.tested)} prefixes of {plan.samples} samples"
    text += f" ({record.num_verified} drafts verified, {record.num_accepted} kept)" if record.num_verified else ""
    text += f"; departures from {sampled.detectable:.3f} total variation on are found with 80% power"
    text += f"; control (keeps {plan.share:.0%} of refused drafts): p {sampled.control_p_value:.3g}"
    if sampled.verdict == INCONCLUSIVE and sampled.control_p_value >= plan.alpha:
        text += ", NOT found: the test has no power here; raise --samples or name a draft that is refused more often"
    elif sampled.verdict == INCONCLUSIVE:
        text += "; too little was drafted to show anything"
    else:
        text += ", found" if sampled.control_p_value < plan.alpha else ""
    figures = {
        "p_value": sampled.p_value,
        "control_p_value": sampled.control_p_value,
        "alpha": plan.alpha,
        "detectable_total_variation": sampled.detectable,
        "samples": plan.samples,
        "depth": plan.depth,
        "drafts": record.as_dict(),
        "overruled": sampled.num_overruled,
    }
    return Check(name="sampled answers", verdict=sampled.verdict, text=text, figures=figures)


def gate(checks: Sequence[Check], *, strict: bool = False) -> bool:
    """Whether all is well: nothing failed, something passed, and with `strict` nothing is left open."""
    verdicts = [check.verdict for check in checks]
    return FAIL not in verdicts and PASS in verdicts and not (strict and INCONCLUSIVE in verdicts)
