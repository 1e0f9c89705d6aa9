"""Memory: the estimate against the bytes that runners and caches really hold, free memory, and refusals that help.
It must never look at this machine's memory where it checks a figure: the source is handed in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.cli import main
from dspark.config import EngineConfig
from dspark.engine.build import build_cache
from dspark.model.build import library, reason
from dspark.model.fit import Plan, cures, estimate, refusal
from dspark.model.free_memory import Free, cpu_free
from dspark.model.load import load_model
from dspark.model.memory import packed_bytes, plan_cache, read_shape, weights
from dspark.model.runner import build_runner
from tests.tiny_folder import tiny_folder
from tests.tiny_models import FAMILIES

needs_native = pytest.mark.skipif(library() is None, reason=f"no native library: {reason()}")
MIB = 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny_folder(root / family, family=family) for family in FAMILIES}


def free(num_bytes: int) -> Free:
    return Free(num_bytes=num_bytes, total=2 * num_bytes, source="the test")


def tensors_of(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that is reachable through attributes and containers, once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from tensors_of(item, seen)
    elif type(thing).__module__.startswith("dspark.model") and hasattr(thing, "__dict__"):
        for item in vars(thing).values():
            yield from tensors_of(item, seen)


def num_bytes(tensors: Iterator[Tensor]) -> int:
    """A storage that several share counts once; oneDNN's own tensors have none to ask for."""
    sizes: dict[object, int] = {}
    for tensor in tensors:
        key = tensor if tensor.layout is torch._mkldnn else tensor.untyped_storage().data_ptr()  # type: ignore[attr-defined]
        sizes[key] = max(sizes.get(key, 0), tensor.numel() * tensor.element_size())
    return sum(sizes.values())


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_native_weights_are_what_was_estimated(folders, family, quantization):
    loaded = load_model(folders[family])
    runner: Any = build_runner(loaded.model, path="native", quantization=quantization, max_context=loaded.max_context)
    found = weights(folders[family], path="native", quantization=quantization)
    assert found is not None
    assert found.num_bytes == pytest.approx(runner.num_weight_bytes, rel=0.02)


@needs_native
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_native_weights_of_a_quantised_folder(folders, tmp_path, kind):
    out = tmp_path / "out"
    assert main(["quantize", str(folders["llama"]), "--to", kind, "--out", str(out)]) == 0
    loaded = load_model(out)
    runner: Any = build_runner(loaded.model, path="native", max_context=loaded.max_context)
    found, dense = weights(out, path="native"), weights(folders["llama"], path="native")
    assert found is not None and dense is not None
    assert found.num_bytes == pytest.approx(runner.num_weight_bytes, rel=0.02)
    assert found.loading < dense.loading and found.num_bytes < dense.num_bytes


@needs_native
def test_bfloat16_is_near_its_packed_size(folders):
    """12.25 bits a weight, as real models take; a tiny one is a few percent off."""
    loaded = load_model(folders["llama"], dtype="bfloat16")
    runner: Any = build_runner(loaded.model, path="native", max_context=loaded.max_context)
    found = weights(folders["llama"], path="native", dtype="bfloat16")
    assert found is not None
    assert found.num_bytes == pytest.approx(runner.num_weight_bytes, rel=0.06)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_torch_weights_are_what_was_estimated(folders, family, quantization):
    loaded = load_model(folders[family])
    runner = build_runner(loaded.model, path="torch", quantization=quantization, max_context=loaded.max_context)
    found = weights(folders[family], path="torch", quantization=quantization)
    assert found is not None
    assert found.num_bytes == pytest.approx(num_bytes(tensors_of(runner, set())), rel=0.04)


def test_general_weights_are_the_parameters(folders):
    found = weights(folders["gemma3"], path="general")
    model = load_model(folders["gemma3"]).model
    assert found is not None
    assert found.num_bytes == sum(p.numel() * p.element_size() for p in model.parameters())


@needs_native
@pytest.mark.parametrize("size", [(1, 32), (33, 100), (160, 48), (96, 4864)], ids=str)
def test_packed_bytes_are_the_library_s(size):
    lib = library()
    assert lib is not None
    for kind, element, code in ((None, 4, 0), ("int8", 4, 3), ("int4", 4, 4)):
        assert packed_bytes(kind, element, size) == lib.dspark_packed_bytes(code, *size)
    assert packed_bytes(None, 2, size) < lib.dspark_packed_bytes(1, *size)


@pytest.mark.parametrize("settings", [{}, {"max_model_len": 100}, {"cache_gib": 0.0005}, {"max_num_seqs": 3}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_caches_are_what_was_estimated(folders, family, settings):
    config = EngineConfig(**settings)
    loaded = load_model(folders[family])
    runner = build_runner(loaded.model, path="torch", max_context=loaded.max_context)
    context = min(loaded.max_context, config.max_model_len or loaded.max_context)
    cache, _ = build_cache(runner, config, max_context=context)
    held = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    found = estimate(Plan(target=folders[family], path="torch", **settings), free(10**12))
    assert found is not None
    assert next(n.num_bytes for n in found.needs if n.name == "target cache") == held


def test_what_config_says_of_layers(folders):
    for family in FAMILIES:
        shape = read_shape(folders[family])
        runner = build_runner(load_model(folders[family]).model, path="torch")
        assert shape is not None
        specs = [(s.num_kv_heads, s.head_dim, s.window) for s in runner.layer_specs]
        assert [(s.num_kv_heads, s.head_dim, s.window) for s in shape.layers] == specs


def test_folders_that_do_not_tell_are_not_refused(tmp_path, folders):
    assert weights(tmp_path) is None and read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    assert weights(tmp_path) is None
    assert refusal(Plan(target=tmp_path, path="native"), free(1)) is None
    assert estimate(Plan(target=folders["llama"], path="native", draft=tmp_path), free(10**9)) is None


def test_a_cache_never_has_more_pages_than_fit():
    class Layer:
        num_kv_heads, head_dim, window = 2, 16, 0

    plan = plan_cache(
        [Layer()], page_size=4, element=2, max_context=100, max_seqs=8, max_tokens=64, budget=10 * 2 * 4 * 2 * 16 * 2
    )
    assert (plan.num_pages, plan.available, plan.context_pages) == (10, 10, 25)
    assert plan.num_bytes == plan.page_bytes * 10


# -- where memory is asked for


def reading(files: dict[str, str]) -> Any:
    return files.get


MEMINFO = "MemTotal:       8000000 kB\nMemFree:  100 kB\nMemAvailable:   4000000 kB\n"


def test_free_is_what_the_system_has_available():
    found = cpu_free(reading({"/proc/meminfo": MEMINFO}))
    assert (found.num_bytes, found.total, found.source) == (4_000_000 * 1024, 8_000_000 * 1024, "MemAvailable")


def test_a_container_s_limit_counts_less_what_can_be_dropped():
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/box/inner\n",
        "/sys/fs/cgroup/box/memory.max": f"{1000 * MIB}\n",
        "/sys/fs/cgroup/box/memory.current": f"{700 * MIB}\n",
        "/sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {200 * MIB}\n",
        "/sys/fs/cgroup/box/inner/memory.max": "max\n",
        "/sys/fs/cgroup/box/inner/memory.current": f"{10 * MIB}\n",
    }
    found = cpu_free(reading(files))
    assert (found.num_bytes, found.total) == (500 * MIB, 1000 * MIB)
    assert "control group" in found.source
    inside = {"/proc/self/cgroup": "0::/host/path\n", "/sys/fs/cgroup/memory.max": f"{64 * MIB}"}
    inside |= {"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.current": f"{60 * MIB}"}
    assert cpu_free(reading(inside)).num_bytes == 4 * MIB


def test_the_older_control_groups():
    root = "/sys/fs/cgroup/memory/job"
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n",
        f"{root}/memory.limit_in_bytes": f"{300 * MIB}",
        f"{root}/memory.usage_in_bytes": f"{100 * MIB}",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
    }
    assert cpu_free(reading(files)).num_bytes == 200 * MIB


# -- what does not fit


def test_a_refusal_names_bytes_and_only_cures_that_work(folders):
    plan = Plan(
        target=folders["llama"],
        path="native",
        draft=folders["qwen2"],
        draft_path="native",
        max_model_len=400,
        max_num_batched_tokens=64,
    )
    whole = estimate(plan, free(10**12))
    assert whole is not None and whole.fits and refusal(plan, free(10**12)) is None
    tight = free(whole.least - 1)
    line = refusal(plan, tight)
    assert line is not None and "\n" not in line
    for words in ("llama with draft qwen2", "target weights", "draft cache", "the test", "check_memory"):
        assert words in line
    assert cures(plan, tight) and all(cure in line for cure in cures(plan, tight))
    found = estimate(replace(plan, draft_quantization="int8"), tight)
    assert found is not None and ("the draft in int8" in cures(plan, tight)) == found.fits
    hopeless = refusal(plan, free(1000))
    assert hopeless is not None and "a machine with more memory" in hopeless


def test_a_cache_that_was_asked_for_must_fit(folders):
    plan = Plan(target=folders["llama"], path="torch", cache_gib=0.01)
    base = estimate(replace(plan, cache_gib=None), free(10**9))
    assert base is not None and base.least < 30 * MIB
    short = free(base.least + MIB)
    assert estimate(replace(plan, cache_gib=None), short).fits  # type: ignore[union-attr]
    line = refusal(plan, short)
    assert line is not None and "leave cache_gib out" in line


@needs_native
def test_the_engine_refuses_before_it_loads_and_may_be_told_not_to(folders, monkeypatch):
    from dspark import LLM

    monkeypatch.setattr("dspark.engine.fitting.free_memory", lambda device: free(1000))
    with monkeypatch.context() as patch:
        patch.setattr("dspark.engine.build.load_model", None)
        with pytest.raises(ValueError, match="llama needs .* and 0.00 GiB are there"):
            LLM(str(folders["llama"]))
    assert LLM(str(folders["llama"]), check_memory=False, max_num_seqs=1).info()["model"]


@needs_native
def test_info_prints_the_table(folders, capsys, monkeypatch):
    words = ["info", str(folders["llama"]), "--draft", str(folders["qwen2"])]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    names = set(facts["memory"]["needs"])
    assert names == {"target weights", "draft weights", "activations", "target cache", "draft cache"}
    assert facts["memory"]["fits"] and facts["memory"]["total"] == sum(facts["memory"]["needs"].values())
    assert facts["model"]["weights"] == "float32"
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "draft cache" in out and "MiB" in out and "free" in out
    monkeypatch.setattr("dspark.engine.fitting.free_memory", lambda device: free(1000))
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert not facts["memory"]["fits"] and "needs" in facts["model"]["refused"]
