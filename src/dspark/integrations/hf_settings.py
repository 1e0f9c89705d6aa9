"""What `model.generate` of transformers was asked, in our words.
It must never let a setting pass that would change the answer and is not honoured: it is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor

from dspark.params import SamplingParams

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "assistant_early_exit": (None,),
        "assistant_ensemble_weight": (None,),
        "bad_words_ids": (None,),
        "begin_suppress_tokens": (None,),
        "cache_implementation": (None, "dynamic"),
        "constraints": (None,),
        "dola_layers": (None,),
        "encoder_no_repeat_ngram_size": (None, 0),
        "encoder_repetition_penalty": (None, 1),
        "epsilon_cutoff": (None, 0),
        "eta_cutoff": (None, 0),
        "exponential_decay_length_penalty": (None,),
        "force_words_ids": (None,),
        "forced_bos_token_id": (None,),
        "forced_eos_token_id": (None,),
        "guidance_scale": (None, 1),
        "is_assistant": (None, False),
        "no_repeat_ngram_size": (None, 0),
        "num_beam_groups": (None, 1),
        "num_beams": (None, 1),
        "output_attentions": (None, False),
        "output_hidden_states": (None, False),
        "output_logits": (None, False),
        "output_scores": (None, False),
        "penalty_alpha": (None, 0),
        "prompt_lookup_num_tokens": (None,),
        "remove_invalid_values": (None, False),
        "sequence_bias": (None,),
        "speculation_type": (None,),
        "suppress_tokens": (None,),
        "token_healing": (None, False),
        "top_h": (None,),
        "typical_p": (None, 1),
        "use_mtp": (None, False),
        "watermarking_config": (None,),
    }
)
"""Fields of a generation config that are not honoured, with the values at which they ask for nothing."""
ORDER = (
    "RepetitionPenaltyLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "LogitNormalization",
)
"""Processors whose law the engine knows, in the order in which it applies them; the last changes no law."""
COUNTED = ("MaxLengthCriteria", "EosTokenCriteria")
"""Stopping criteria that the engine keeps itself."""
PREPARED = frozenset({"attention_mask", "cache", "logits_to_keep", "past_key_values", "position_ids", "use_cache"})
"""What transformers hands a decoding method beside the tokens."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What holds for every row. `criteria`: those that must be asked after every token. `has_end`: whether end tokens
    were given, so that rows that have ended are padded."""

    params: SamplingParams
    criteria: transformers.StoppingCriteriaList
    pad_token_id: int | None
    has_end: bool
    as_dict: bool


def read_settings(
    config: Any, processors: Sequence[Any], criteria: Sequence[Any], *, width: int, padded: bool, vocab_size: int
) -> Settings:
    """From what transformers has prepared for prompts of `width` tokens, padding included, if any is `padded`.
    `vocab_size`: rows of the output. Raises ValueError naming what cannot be honoured."""
    for name, values in NEUTRAL.items():
        if (value := getattr(config, name, None)) not in values:
            raise ValueError(f"{name}={value!r} is not honoured by dspark: leave it out, or use model.generate")
    _check_penalty(processors, padded=padded)
    ends, longest = _ends(criteria, vocab_size=vocab_size)
    if longest is None:
        raise ValueError("max_length and max_new_tokens are not set: give one of them")
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else int(pad)
    return Settings(
        params=SamplingParams(
            max_tokens=longest - width,
            stop_token_ids=tuple(token for token in ends or () if token < vocab_size),
            ignore_eos=True,
            skip_special_tokens=False,
            **_law(processors, sampled=bool(config.do_sample), width=width, max_tokens=longest - width),
        ),
        criteria=transformers.StoppingCriteriaList(c for c in criteria if type(c).__name__ not in COUNTED),
        pad_token_id=pad,
        has_end=ends is not None,
        as_dict=bool(config.return_dict_in_generate),
    )


def _ends(criteria: Sequence[Any], *, vocab_size: int) -> tuple[list[int] | None, int | None]:
    """End tokens (None: none were given) and the largest length."""
    ends: list[int] | None = None
    lengths = []
    for criterion in criteria:
        if type(criterion).__name__ == "EosTokenCriteria":
            ends = sorted({*(ends or ()), *criterion.eos_token_id.flatten().tolist()})
        elif type(criterion).__name__ == "MaxLengthCriteria":
            lengths.append(int(criterion.max_length))
    return ends, min(lengths, default=None)


def _check_penalty(processors: Sequence[Any], *, padded: bool) -> None:
    """dspark counts all tokens of a prompt and no padding. So does the processor that transformers makes itself."""
    for processor in processors:
        if type(processor).__name__ == ORDER[0]:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if (ignored is None and padded) or (isinstance(ignored, int) and ignored > 0):
                raise ValueError(
                    "a RepetitionPenaltyLogitsProcessor that counts padding, or leaves out a part of the prompt, is "
                    "not honoured: give repetition_penalty"
                )


def _law(processors: Sequence[Any], *, sampled: bool, width: int, max_tokens: int) -> dict[str, Any]:
    """Fields of SamplingParams; `width` as in `read_settings`."""
    names = [type(processor).__name__ for processor in processors]
    if unknown := [name for name in names if name not in ORDER]:
        raise ValueError(
            f"{unknown[0]} is not honoured by dspark (known are {', '.join(ORDER)}): leave out what asks for it, in "
            "logits_processor or in the generation config, or use model.generate"
        )
    if names != sorted(set(names), key=ORDER.index):
        raise ValueError(f"logits_processor makes the order {', '.join(names)}: dspark has one of each, in this order")
    found = dict(zip(names, processors))
    values: dict[str, Any] = {"temperature": 1.0 if sampled else 0.0}
    least = 0
    if (penalty := found.get(ORDER[0])) is not None:
        values["repetition_penalty"] = float(penalty.penalty)
    if (length := found.get(ORDER[1])) is not None:
        least = max(least, int(length.min_length) - width)
    if (length := found.get(ORDER[2])) is not None:
        least = max(least, int(length.min_new_tokens))
    values["min_tokens"] = min(least, max_tokens)
    if not sampled:
        return values  # what is left shapes a law of which only the largest is taken
    for name, field, kind in (
        (ORDER[3], "temperature", float),
        (ORDER[4], "top_k", int),
        (ORDER[5], "top_p", float),
        (ORDER[6], "min_p", float),
    ):
        if name in found:
            values[field] = kind(getattr(found[name], field))
    if values.get("min_p", 0) > 0 and values.get("top_p", 1) < 1:
        raise ValueError("min_p beside top_p is not honoured: transformers cuts by top_p first, dspark by min_p")
    return values


def read_prompts(input_ids: Tensor, given: Mapping[str, Any]) -> list[list[int]]:
    """The rows of `input_ids` (B, L) without their padding on the left. `given`: what transformers hands a decoding
    method beside them. Raises ValueError for what cannot be honoured."""
    for name, value in given.items():
        if name not in PREPARED and value is not None and value is not False:
            raise ValueError(f"{name} is not honoured by dspark, which reads input_ids and attention_mask alone")
    for name in ("cache", "past_key_values"):
        cache = given.get(name)
        if cache is not None and _num_held(cache) > 0:
            raise ValueError(f"{name} holds tokens already: leave it out, dspark keeps a cache of its own")
    mask = given.get("attention_mask")
    held = torch.ones_like(input_ids) if mask is None else (mask != 0).long().to(input_ids.device)
    if held.shape != input_ids.shape:
        raise ValueError(f"attention_mask is {tuple(held.shape)} and input_ids {tuple(input_ids.shape)}: give it so")
    if bool((held[:, 1:] < held[:, :-1]).any()) or bool((held[:, -1] == 0).any()):
        raise ValueError("attention_mask leaves out tokens inside or behind a prompt: pad on the left")
    positions = given.get("position_ids")
    if positions is not None:
        wanted = (held.cumsum(-1) - 1).to(positions.device)
        if positions.shape[-1] != input_ids.shape[1] or bool(((positions != wanted) & (wanted >= 0)).any()):
            raise ValueError("position_ids other than 0, 1, 2, ... from the first token on are not honoured")
    return [row[mask_row.bool()].tolist() for row, mask_row in zip(input_ids, held)]


def _num_held(cache: Any) -> int:
    """Tokens in a cache of transformers; none in those that do not count them, as of models without attention."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, NotImplementedError, ValueError):
        return 0
