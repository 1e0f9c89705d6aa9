"""Pairs: every question answered by both sides, the first difference judged, and the ends of both checked.
It must never pass over a question: what was refused or cannot be judged is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.quality.oracle import FAULT, IDENTICAL, TIE, Finding, classify, first_difference
from dspark.quality.questions import Question
from dspark.quality.sides import Reply, Side

UNJUDGED = "unjudged"
"""The verdict on a difference between servers that tell no log-probabilities."""
Judge = Callable[[Question, Reply, Reply], Finding]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A question with both answers. `late`: what an answer has behind its end, by side; empty when both are clean."""

    question: Question
    plain: Reply
    other: Reply
    finding: Finding
    late: tuple[str, ...] = ()

    @property
    def refused(self) -> str | None:
        """Why there is nothing to compare."""
        return self.plain.error or self.other.error

    @property
    def num_compared(self) -> int:
        """Tokens up to where the answers part, that one included."""
        if self.plain.tokens is None or self.refused:
            return 0
        position = self.finding.position
        return len(self.plain.tokens) if position is None else min(position + 1, len(self.plain.tokens))


def ask_both(
    plain: Side, other: Side, questions: Sequence[Question], *, judge: Judge, late: Callable[..., list[str]], chunk: int
) -> Iterator[Pair]:
    """The pairs, `chunk` questions at a time: first one side, then the other, the order changing each time."""
    for number, start in enumerate(range(0, len(questions), chunk)):
        asked = questions[start : start + chunk]
        if number % 2:
            others, plains = other.answer(asked), plain.answer(asked)
        else:
            plains, others = plain.answer(asked), other.answer(asked)
        for question, a, b in zip(asked, plains, others, strict=True):
            refused = a.error or b.error
            finding = Finding(verdict=FAULT if a.error != b.error else IDENTICAL) if refused else judge(question, a, b)
            ends = [
                f"{side.name}: {word}" for side, reply in ((plain, a), (other, b)) for word in late(question, reply)
            ]
            yield Pair(question=question, plain=a, other=b, finding=finding, late=tuple(ends))


def local_judge(llm: Any, *, bound: float) -> Judge:
    """By the near-tie oracle over the plain LLM, under each question's own processors."""
    from dspark.quality.margin import ProcessedMargin

    def judge(question: Question, plain: Reply, other: Reply) -> Finding:
        assert plain.prompt is not None and plain.tokens is not None and other.tokens is not None
        if first_difference(plain.tokens, other.tokens) is None and plain.text != other.text:
            return Finding(verdict=FAULT, position=len(plain.tokens), bound=bound)  # the same tokens, another text
        margin = ProcessedMargin(llm, question.params, num_prompt=len(plain.prompt))
        return classify(plain.prompt, plain.tokens, other.tokens, margin=margin, bound=bound)

    return judge


def remote_judge(*, bound: float) -> Judge:
    """By what the servers told of their own tokens; there is no fresh pass, so both of their rows are looked at.

    Without tokens and log-probabilities a difference of texts is UNJUDGED, its position counted in characters.
    """

    def judge(question: Question, plain: Reply, other: Reply) -> Finding:
        if plain.tokens is None or other.tokens is None or plain.logprobs is None or other.logprobs is None:
            position = first_difference([*map(ord, plain.text)], [*map(ord, other.text)])
            return Finding(verdict=IDENTICAL if position is None else UNJUDGED, position=position, bound=bound)
        position = first_difference(plain.tokens, other.tokens)
        if position is None:
            same = plain.text == other.text
            return Finding(verdict=IDENTICAL if same else FAULT, position=None if same else len(plain.tokens))
        if position >= min(len(plain.tokens), len(other.tokens)):
            # The end of a text is no token here: where it was as likely as a token cannot be told.
            ended = plain if position >= len(plain.tokens) else other
            verdict = UNJUDGED if ended.finish_reason == "stop" else FAULT
            return Finding(verdict=verdict, position=position, bound=bound)
        a, b = plain.tokens[position], other.tokens[position]
        margin = max(_gap(row[position], a, b) for row in (plain.logprobs, other.logprobs))
        if not question.params.greedy or not question.params.plain or question.params.structure is not None:
            return Finding(verdict=UNJUDGED, position=position, plain=a, other=b, margin=margin, bound=bound)
        verdict = TIE if 0 < bound and margin <= bound else FAULT
        return Finding(verdict=verdict, position=position, plain=a, other=b, margin=margin, bound=bound)

    return judge


def _gap(row: Any, a: Any, b: Any) -> float:
    if a not in row or b not in row:
        return float("inf")
    return max(row.values()) - min(row[a], row[b])


def local_ends(llm: Any) -> Callable[[Question, Reply], list[str]]:
    """What an answer has that should not be there, by the request alone: no other answer is looked at, so a fault that
    both sides share is found too. Empty for a clean one."""
    eos, decode = set(llm.target.facts.eos_token_ids), llm.tokenizer.decode

    def late(question: Question, reply: Reply) -> list[str]:
        params, tokens, found = question.params, list(reply.tokens or []), []
        if reply.error is not None:
            return []
        if params.max_tokens is not None and len(tokens) > params.max_tokens:
            found.append(f"{len(tokens)} tokens, {params.max_tokens} were asked for")
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        first = next((i for i, token in enumerate(tokens) if token in ends and i + 1 >= params.min_tokens), None)
        if first is not None and first + 1 < len(tokens):
            found.append(f"{len(tokens) - first - 1} tokens behind the end of text")
        if params.stop and tokens:
            before = decode(tokens[: len(tokens) - 1])
            fresh = decode(tokens[: max(0, params.min_tokens - 1)])
            words = [word for word in params.stop if before.find(word, max(0, len(fresh) - len(word) + 1)) >= 0]
            if words and len(tokens) > params.min_tokens:
                found.append(f"a token behind the stop string {words[0]!r}")
        found += [f"the stop string {word!r} in its text" for word in params.stop if _shown(word, reply, params)]
        if reply.finish_reason == "length" and params.max_tokens is not None and len(tokens) < params.max_tokens:
            full = len(reply.prompt or []) + len(tokens) >= llm.engine.max_context
            if not full:
                found.append(f"ended for length after {len(tokens)} of {params.max_tokens} tokens")
        return found

    return late


def _shown(word: str, reply: Reply, params: Any) -> bool:
    """Before min_tokens a stop string is text like any other."""
    return params.min_tokens <= 1 and word in reply.text and not params.include_stop_str_in_output


def remote_ends(question: Question, reply: Reply) -> list[str]:
    """As far as a server's answer shows it."""
    params, found = question.params, []
    limit = params.max_tokens
    if reply.tokens is not None and limit is not None and len(reply.tokens) > limit:
        found.append(f"{len(reply.tokens)} tokens, {limit} were asked for")
    return found + [f"the stop string {word!r} in its text" for word in params.stop if _shown(word, reply, params)]
