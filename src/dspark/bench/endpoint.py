"""Endpoint: a server with the OpenAI API, as a side of paired runs, a source of samples, and a judge.
It must never retry an answer into being: what a server refuses is said, with its own words.
"""

from __future__ import annotations

import json
import os
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dspark.params import SamplingParams
from dspark.quality.questions import Question
from dspark.quality.sides import Reply
from dspark.types import SpeculationRecord

SECONDS = 600.0
TOP_LOGPROBS = 20
MAX_N = 64
LONGEST_SHOWN = 300


class Endpoint:
    """`url` with or without "/v1". `extra`: fields added to every request, such as {"speculation": False}.

    The key is read from OPENAI_API_KEY when a request is made, and is shown nowhere.
    """

    def __init__(self, url: str, *, model: str | None = None, extra: Mapping[str, Any] | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address: give http://HOST:PORT, with or without /v1")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.extra = dict(extra or {})
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        models = self._get("/v1/models").get("data") or []
        if not models:
            raise ValueError(f"{self.url} lists no model: name one")
        return str(models[0]["id"])

    def _get(self, path: str) -> dict[str, Any]:
        return self._send(urllib.request.Request(self.url + path, headers=self._headers()))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a JSON body. Raises ValueError with what the server says."""
        data = json.dumps({"model": self.model, **self.extra, **body}).encode()
        return self._send(urllib.request.Request(self.url + path, data=data, headers=self._headers()))

    def _headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            said = error.read(4096).decode(errors="replace")
            raise ValueError(f"{self.url} refuses with {error.code}: {_message(said)}") from None
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(f"{self.url} cannot be reached ({reason}): is the server running there?") from None
        except ValueError as error:
            raise ValueError(f"{self.url} answers with what is no JSON object ({error})") from None


def _message(text: str) -> str:
    try:
        value = json.loads(text)
        text = value.get("error", value).get("message", text) if isinstance(value, dict) else text
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:LONGEST_SHOWN]


class RemoteSide:
    """A side of paired runs. `concurrency` requests at a time."""

    def __init__(self, endpoint: Endpoint, *, name: str, concurrency: int) -> None:
        self.endpoint = endpoint
        self.name = name
        self.concurrency = concurrency
        self.tells_logprobs = True

    def answer(self, questions: Sequence[Question]) -> list[Reply]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._ask, questions))

    def _ask(self, question: Question) -> Reply:
        body = chat_body(question, logprobs=self.tells_logprobs)
        try:
            answer = self.endpoint.post("/v1/chat/completions", body)
        except ValueError as error:
            if not self.tells_logprobs or "logprob" not in str(error):
                if "cannot be reached" in str(error):
                    raise
                return Reply(text="", error=str(error))
            self.tells_logprobs = False  # it does not know them: ask without, from now on
            return self._ask(question)
        return _reply(answer)


def chat_body(question: Question, *, logprobs: bool) -> dict[str, Any]:
    """The request of a question, in the names that servers share; what has its default is left out."""
    params = question.params
    body: dict[str, Any] = {
        "messages": [dict(message) for message in question.messages],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
    }
    for name in ("presence_penalty", "frequency_penalty", "min_tokens"):
        if value := getattr(params, name):
            body[name] = value
    if params.seed is not None:
        body["seed"] = params.seed
    if params.stop:
        body["stop"] = list(params.stop)[:4]  # more are not taken everywhere
    if params.structure is not None:
        schema = {"name": "answer", "schema": params.structure.schema()}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
    return body


def _reply(answer: Mapping[str, Any]) -> Reply:
    choice = answer["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content")
    tokens = rows = None
    if entries is not None:
        tokens = [entry["token"] for entry in entries]
        rows = [{e["token"]: e["logprob"] for e in (*entry.get("top_logprobs", ()), entry)} for entry in entries]
    return Reply(
        text=choice["message"].get("content") or "",
        tokens=tokens,
        finish_reason=choice.get("finish_reason"),
        logprobs=rows,
        record=_record(answer),
    )


def _record(answer: Mapping[str, Any]) -> SpeculationRecord:
    """What our own server tells of its drafts; nothing of another."""
    told = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    return SpeculationRecord(
        num_drafted=told.get("num_draft_tokens", 0),
        num_verified=told.get("num_verified_tokens", 0),
        num_accepted=told.get("num_accepted_draft_tokens", 0),
    )


def draw_remote(endpoint: Endpoint, prompt: str, params: SamplingParams, *, samples: int) -> Counter:
    """So many answers to one raw prompt, counted by their first tokens (by their text where tokens are not told)."""
    counts: Counter = Counter()
    left, told = samples, True
    while left > 0:
        body = {
            "prompt": prompt,
            "n": min(left, MAX_N),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
        }
        if params.presence_penalty:
            body["presence_penalty"] = params.presence_penalty
        answer = endpoint.post("/v1/completions", body | ({"logprobs": 1} if told else {}))
        for choice in answer["choices"]:
            tokens = (choice.get("logprobs") or {}).get("tokens")
            counts[tuple(tokens[:-1]) if tokens else (choice["text"],)] += 1
        left -= len(answer["choices"])
    return counts


def spoil(counts: Counter, *, share: float, seed: int) -> Counter:
    """The control where the drafts are not ours to keep: of the samples this share becomes the likeliest answer, as
    drafts would make them that are kept too often."""
    chance, spoilt = random.Random(seed), Counter(counts)
    best = counts.most_common(1)[0][0]
    for cell, count in counts.items():
        for _ in range(count):
            if cell != best and chance.random() < share:
                spoilt[cell] -= 1
                spoilt[best] += 1
    return spoilt


JUDGE = (
    "Two answers to the same question follow. Which is better? Reply with A, B or SAME, and nothing else.\n\n"
    "[Question]\n{question}\n\n[Answer A]\n{a}\n\n[Answer B]\n{b}"
)


def preference(judge: Endpoint, question: str, plain: str, other: str) -> int:
    """1 where a model prefers the other answer, -1 the plain one, 0 neither: asked in both orders, which must agree."""
    votes = []
    for first, second, sign in ((plain, other, 1), (other, plain, -1)):
        body = {
            "messages": [{"role": "user", "content": JUDGE.format(question=question, a=first, b=second)}],
            "temperature": 0.0,
            "max_tokens": 8,
        }
        said = str(judge.post("/v1/chat/completions", body)["choices"][0]["message"].get("content") or "").upper()
        votes.append(0 if "SAME" in said else sign * (1 if "B" in said else -1 if "A" in said else 0))
    return votes[0] if votes[0] == votes[1] else 0
