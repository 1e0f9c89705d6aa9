"""Peers: transformers' generate, assisted generation and prompt lookup, measured on the same prompts in the same run.
They must never be held back: same weights, dtype and threads, transformers' own defaults, the model loaded once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dspark.bench.harness import Answer
from dspark.params import SamplingParams

PROMPT_LOOKUP_TOKENS = 10
"""Draft length of prompt lookup: the value that transformers' documentation uses (it has no default)."""


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """`dtype` "bfloat16" or "float32"; `threads` of torch while a peer runs; `draft` is assisted generation's model."""

    model: Path
    dtype: str
    device: str = "cpu"
    threads: int | None = None
    draft: Path | None = None


class FirstTokens:
    """A streamer for `generate`: the time at which the first new tokens arrived, and how many they were.

    `generate` puts the prompt first, then the tokens of each step.
    """

    def __init__(self) -> None:
        self.num_puts = 0
        self.num_first = 0
        self.time: float | None = None

    def put(self, tokens: Any) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.num_first = int(tokens.numel())
            self.time = time.perf_counter()

    def end(self) -> None:
        return None


class HfPeer:
    """`model.generate` with `options`: one prompt at a time, one stream.

    Speculation in transformers may deliver several tokens with its first step, which also holds the draft model's
    prefill; that step counts as the first "token", so decoding is (n - num_first) tokens over the time after it.
    """

    def __init__(self, name: str, model: Any, *, threads: int | None, options: dict[str, Any] | None = None) -> None:
        self.name = name
        self.model = model
        self.threads = threads
        self.options = dict(options or {})

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """Generate under `params` (temperature, max_tokens and seed; end-of-text respected)."""
        before = torch.get_num_threads()
        if self.threads:
            torch.set_num_threads(self.threads)
        try:
            return self._generate(prompt, params)
        finally:
            torch.set_num_threads(before)

    def _generate(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        ids = torch.tensor([list(prompt)], device=self.model.device)
        streamer = FirstTokens()
        sampling: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(params.seed or 0)
        start = time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            repetition_penalty=1.0,
            streamer=streamer,
            **sampling,
            **self.options,
        )
        tokens = output[0, ids.shape[1] :].tolist()
        finished = time.perf_counter()
        first = streamer.time if streamer.time is not None else finished
        ended = len(tokens) < (params.max_tokens or 0)
        return Answer(
            tokens=tokens,
            first_seconds=first - start,
            decode_seconds=finished - first,
            num_first=streamer.num_first,
            finish_reason="stop" if ended else "length",
        )


def hf_peers(settings: PeerSettings, *, plain_only: bool = False) -> list[HfPeer]:
    """`hf` (plain generate), `hf-lookup`, and `hf-assisted` when there is a draft model, over one loaded model."""
    model = load_peer(settings.model, settings=settings)
    peers = [HfPeer("hf", model, threads=settings.threads)]
    if plain_only:
        return peers
    lookup = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    peers.append(HfPeer("hf-lookup", model, threads=settings.threads, options=lookup))
    if settings.draft is not None:
        draft = {"assistant_model": load_peer(settings.draft, settings=settings)}
        peers.append(HfPeer("hf-assisted", model, threads=settings.threads, options=draft))
    return peers


def load_peer(folder: Path, *, settings: PeerSettings) -> Any:
    """In evaluation mode, with transformers' own choice of attention, and an id for padding so that it keeps quiet."""
    dtype = getattr(torch, settings.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model = model.to(settings.device).eval()
    if model.generation_config.pad_token_id is None:
        eos = model.generation_config.eos_token_id
        model.generation_config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    return model
