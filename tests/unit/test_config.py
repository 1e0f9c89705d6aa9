"""Settings: from keywords, JSON and TOML; what is unknown or unusable is an error that names it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dspark.config import Config, EngineConfig, SpeculationConfig, engine_config, load_config, speculation_config


def test_defaults_are_usable() -> None:
    assert load_config() == Config()
    assert Config().speculation.method == "none"


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "float64"},
        {"path": "fast"},
        {"quantization": "int2"},
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"page_size": 0},
        {"threads": 0},
        {"max_model_len": 0},
        {"cache_gib": 0.0},
        {"cache_gib": float("nan")},
        {"max_num_batched_tokens": 8, "max_num_seqs": 9},
        {"speed": 1},
        {"history": 5},
        {"history": ""},
        {"history": ["x"]},
        {"model": 5},
        {"model": ""},
    ],
    ids=str,
)
def test_engine_settings_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))) as caught:
        engine_config(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"method": "psychic"},
        {"policy": "lucky"},
        {"quantization": "fp8"},
        {"num_speculative_tokens": -1},
        {"num_speculative_tokens": 2.0},
        {"prompt_lookup_min": 0},
        {"prompt_lookup_max": 1, "prompt_lookup_min": 2},
        {"suffix_max_cached_tokens": -1},
        {"method": "model"},
        {"method": "ngram", "model": "m"},
        {"speed": 1},
    ],
    ids=str,
)
def test_speculation_settings_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))) as caught:
        speculation_config(values)
    assert "\n" not in str(caught.value)


def test_the_spellings_of_a_draft_model() -> None:
    expected = SpeculationConfig(method="model", model="small", num_speculative_tokens=4)
    assert speculation_config({"model": "small", "num_speculative_tokens": 4}) == expected
    assert speculation_config({"method": "draft_model", "model": "small", "num_speculative_tokens": 4}) == expected
    assert SpeculationConfig.from_draft("small", num_speculative_tokens=4) == expected
    assert SpeculationConfig.from_draft(None) == SpeculationConfig.from_draft("none") == SpeculationConfig()
    assert SpeculationConfig.from_draft("ngram").method == "ngram"


def test_settings_of_each_drafter() -> None:
    ngram = SpeculationConfig(method="ngram", prompt_lookup_max=3).drafter_settings()
    assert (ngram["prompt_lookup_max"], ngram["prompt_lookup_min"]) == (3, 2)
    suffix = SpeculationConfig(method="suffix", suffix_max_cached_tokens=10).drafter_settings()
    assert suffix["max_cached_tokens"] == 10 and "prompt_lookup_max" not in suffix
    assert SpeculationConfig().drafter_settings() == {}


def test_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "dspark.toml"
    file.write_text('[engine]\nexact = true\npage_size = 8\n[speculation]\nmethod = "ngram"\n')
    config = load_config(file, overrides=["engine.page_size=32", "speculation.policy=fixed", 'engine.dtype="float32"'])
    assert config.engine == EngineConfig(exact=True, page_size=32, dtype="float32")
    assert config.speculation == SpeculationConfig(method="ngram", policy="fixed")


@pytest.mark.parametrize(
    ("text", "word"),
    [("[engine]\nspeed = 1\n", "speed"), ("[motor]\nx = 1\n", "motor"), ("[engine\n", "not TOML"), ("x = 1\n", "x")],
)
def test_bad_files_name_what_is_wrong(text: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=word):
        load_config(file)


def test_a_missing_file_and_bad_overrides(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_config(tmp_path / "absent.toml")
    for override in ("exact", "exact=true", "engine.=1", "motor.x=1", "engine.speed=1"):
        with pytest.raises(ValueError):
            load_config(overrides=[override])


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().exact = True  # type: ignore[misc]
