"""generate: `model.generate` of transformers with our drafters, for a model object that a user has loaded.
It must never change what the model would have answered, nor accept a setting that it does not honour.

Shapes: B rows (prompts times num_return_sequences), L tokens of the padded prompts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dspark.engine.llm import LLM
from dspark.integrations.hf_engines import Draft, check_model, engines_of, forget
from dspark.integrations.hf_settings import Settings, read_prompts, read_settings
from dspark.types import Sequence

__all__ = ["custom_generate", "engine_of", "forget", "generate"]

_REFUSED = (
    ("assistant_model", "give the draft model as draft="),
    ("cache", "dspark keeps a cache of its own"),
    ("custom_generate", "dspark is the method here"),
    ("inputs_embeds", "give input_ids"),
    ("negative_prompt_ids", "use model.generate"),
    ("past_key_values", "dspark keeps a cache of its own"),
    ("position_ids", "give input_ids and attention_mask"),
    ("synced_gpus", "use model.generate"),
)
_SEED_BITS = 63


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    *,
    draft: Draft = "auto",
    seed: int | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """As `model.generate(input_ids, ...)`: input_ids (B, L) -> (B, L + N) token ids, or an object with `sequences`.

    `draft`: "suffix", "ngram", "auto", a draft model's or head's name or folder, a model object, or a table of
    dspark.config.SpeculationConfig. `seed`: makes sampled answers repeatable; without it they follow
    torch.manual_seed. `tokenizer`: needed for stop_strings and for draft models by name. `engine`: fields of
    dspark.config.EngineConfig; its path is "shared" (the model's own weights, no copy) unless you say "native", which
    packs a copy of all weight matrices for this CPU, in memory as much as these again (less with quantization).
    `settings` are those of model.generate: generation_config, attention_mask, max_new_tokens, eos_token_id,
    stop_strings, do_sample, temperature, stopping_criteria and so on (docs/integrations.md lists what is honoured).

    Raises ValueError for a model that cannot be run, and for every setting that would change the answer and is not
    honoured, by its name.
    """
    check_model(model)
    for name, cure in _REFUSED:
        value = settings.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not honoured by dspark: {cure}")
    assistant_tokenizer = settings.pop("assistant_tokenizer", None)
    _take_stop_strings(model, tokenizer, settings)

    def method(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
        made = {"draft": draft, "engine": engine or {}, **tokenizers}
        return _decode(model, input_ids, made, seed=seed, streamer=streamer, **prepared)

    return model.generate(input_ids, custom_generate=method, streamer=streamer, **settings)


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    draft: Draft = "auto",
    seed: int | None = None,
    engine: Mapping[str, Any] | None = None,
    **prepared: Any,
) -> Any:
    """For `model.generate(..., custom_generate=custom_generate, draft="suffix")`. transformers gives such a method
    neither streamer nor tokenizer: with these call `generate` above."""
    check_model(model)
    found = dict(
        logits_processor=logits_processor, stopping_criteria=stopping_criteria, generation_config=generation_config
    )
    made = {"draft": draft, "engine": engine or {}, "tokenizer": None, "assistant_tokenizer": None}
    return _decode(model, input_ids, made, seed=seed, streamer=prepared.pop("streamer", None), **found, **prepared)


def engine_of(
    model: Any, *, draft: Draft = "auto", engine: Mapping[str, Any] | None = None, tokenizer: Any = None
) -> LLM:
    """The engine that `generate` uses with these settings: for its `stats`, `info`, sinks and `save_history`."""
    check_model(model)
    engines = engines_of(model)
    with engines.lock:
        return engines.llm(draft=draft, engine=engine or {}, tokenizer=tokenizer, assistant_tokenizer=None)


def _take_stop_strings(model: Any, tokenizer: Any, settings: dict[str, Any]) -> None:
    """transformers gives a method of others no tokenizer, so its criterion for stop strings is made here."""
    import transformers

    places = (settings.get("generation_config"), getattr(model, "generation_config", None))
    found = settings.get("stop_strings")
    for place in places:
        found = getattr(place, "stop_strings", None) if found is None else found
    if found is None:
        return
    if tokenizer is None:
        raise ValueError("stop_strings need the tokenizer: give tokenizer=")
    if settings.get("generation_config") is not None:
        config = settings["generation_config"] = transformers.GenerationConfig.from_dict(
            settings["generation_config"].to_dict()
        )
        config.stop_strings = None
    settings["stop_strings"] = None
    criterion = transformers.StopStringCriteria(tokenizer, found)
    settings["stopping_criteria"] = transformers.StoppingCriteriaList(
        [criterion, *(settings.get("stopping_criteria") or ())]
    )


def _decode(
    model: Any,
    input_ids: Tensor,
    made: Mapping[str, Any],
    *,
    generation_config: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    seed: int | None,
    streamer: Any,
    **prepared: Any,
) -> Any:
    """The decoding method: prompts (B, L) that transformers has prepared -> what its own methods return."""
    import transformers

    if prepared.pop("synced_gpus", False):
        raise ValueError("synced_gpus is not honoured by dspark: use model.generate")
    prompts = read_prompts(input_ids, prepared)
    settings = read_settings(
        generation_config,
        logits_processor,
        stopping_criteria,
        width=input_ids.shape[1],
        padded=any(len(prompt) < input_ids.shape[1] for prompt in prompts),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
    )
    if len(prompts) > 1 and settings.criteria and not settings.has_end:
        raise ValueError(
            "stopping_criteria over several rows without an eos_token_id are not honoured: transformers goes on "
            "writing rows that have ended; give an eos_token_id"
        )
    engines = engines_of(model)
    with engines.lock:
        llm = engines.llm(**made)
        rows = _Rows(llm, input_ids, settings, streamer)
        rows.run(prompts, seed)
    sequences = rows.sequences()
    if streamer is not None:
        streamer.end()
    return transformers.generation.GenerateDecoderOnlyOutput(sequences=sequences) if settings.as_dict else sequences


class _Rows:
    """The answers of one call as they grow."""

    def __init__(self, llm: LLM, input_ids: Tensor, settings: Settings, streamer: Any) -> None:
        self.llm = llm
        self.input_ids = input_ids
        self.settings = settings
        self.streamer = streamer
        self.answers: list[list[int]] = [[] for _ in input_ids]
        self.ended = [False] * len(input_ids)
        self.num_streamed = 0

    def run(self, prompts: list[list[int]], seed: int | None) -> None:
        """Answer prompts, one a row, until all have ended."""
        self._check_room(prompts)
        engine, places = self.llm.engine, {}
        try:
            for row, request in enumerate(self._requests(prompts, seed)):
                (seq,) = self.llm.requests.sequences(request)
                places[seq.id] = row
            while engine.has_work:
                for seq in engine.step():
                    self._take(places[seq.id], seq)
                self._stream()
        finally:
            for seq_id in places:  # an interrupted call must not leave its rows to the next one
                engine.abort(seq_id)

    def _requests(self, prompts: list[list[int]], seed: int | None) -> list[Any]:
        """Row i has the i-th seed that follows from `seed`; without one the engine draws them, from a start that
        torch's generator gives."""
        requests, params = self.llm.requests, self.settings.params
        if seed is None and not params.greedy:
            requests.seed = int(torch.randint(2**_SEED_BITS - 1, ()))
            requests.seeds = random.Random(requests.seed)
        seeds = random.Random(seed)
        own = [params if seed is None else replace(params, seed=seeds.getrandbits(_SEED_BITS)) for _ in prompts]
        return [requests.make(prompt, one) for prompt, one in zip(prompts, own)]

    def _check_room(self, prompts: list[list[int]]) -> None:
        most = self.settings.params.max_tokens
        assert most is not None
        longest = max(map(len, prompts)) + most
        if longest > self.llm.engine.max_context:
            raise ValueError(
                f"a prompt of {longest - most} tokens and {most} new ones do not fit into the context of "
                f"{self.llm.engine.max_context}: lower max_new_tokens or max_length, or raise cache_gib in engine="
            )

    def _take(self, row: int, seq: Sequence) -> None:
        """What a step brought one row, up to where a criterion ends it."""
        if seq.finish_reason == "error":
            raise RuntimeError(f"row {row} cannot go on: {seq.stop_reason}")
        answer = self.answers[row]
        if not self.settings.criteria:
            answer.extend(seq.output_token_ids[len(answer) :])
        for token in seq.output_token_ids[len(answer) :]:
            answer.append(token)
            if self._is_over(row):
                self.llm.engine.abort(seq.id)
                self.ended[row] = True
                return
        self.ended[row] = seq.finish_reason is not None

    def _is_over(self, row: int) -> bool:
        """Criteria see the row alone, (1, L + n), padded as it came."""
        new = torch.tensor([self.answers[row]], dtype=torch.long, device=self.input_ids.device)
        return bool(self.settings.criteria(torch.cat([self.input_ids[row : row + 1], new], dim=1), None).all())

    def _stream(self) -> None:
        """Columns (B,) that every row has reached or will not reach."""
        if self.streamer is None:
            return
        lengths = [len(answer) for answer in self.answers]
        ready = min((n for n, ended in zip(lengths, self.ended) if not ended), default=max(lengths))
        for column in range(self.num_streamed, ready):
            self.streamer.put(torch.tensor([self._token(answer, column) for answer in self.answers]))
        self.num_streamed = max(self.num_streamed, ready)

    def _token(self, answer: list[int], column: int) -> int:
        if column < len(answer):
            return answer[column]
        pad = self.settings.pad_token_id
        if pad is None:
            raise ValueError("rows end at different lengths and there is no pad_token_id: give one")
        return pad

    def sequences(self) -> Tensor:
        """(B, L + N), ended rows padded."""
        longest = max(map(len, self.answers))
        new = [[self._token(answer, column) for column in range(longest)] for answer in self.answers]
        return torch.cat([self.input_ids, torch.tensor(new, dtype=torch.long, device=self.input_ids.device)], dim=1)
