"""`dspark profile-hardware`: what it prints is what it measured, and is kept."""

from __future__ import annotations

import json

import pytest

from dspark.cli import main
from dspark.engine import measure
from tests.tiny_folder import tiny_folder


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "cache_dir", lambda: tmp_path)
    return tmp_path / "costs"


def test_target_and_draft_model_are_measured_printed_drawn_and_kept(kept, tmp_path, capsys):
    model, draft = (str(tiny_folder(tmp_path / name)) for name in ("model", "draft"))
    words = ["--model", model, "--draft", draft, "--path", "torch"]
    assert main(["profile-hardware", *words, "--plot", str(tmp_path / "p.svg")]) == 0
    text = capsys.readouterr().out
    assert "target" in text and "ms/row" in text and "a cached token more" in text
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    assert main(["profile-hardware", *words, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert len(costs) == 2 and all(cost["points"][0][1] > 0 for cost in costs.values())
    stored = [json.loads(path.read_text()) for path in kept.iterdir()]
    assert all(cost in stored for cost in costs.values())


@pytest.mark.parametrize("name", ("p.txt", "nowhere/p.png"))
def test_a_plot_that_cannot_be_written_is_refused_before_measuring(kept, name, capsys, tmp_path):
    assert main(["profile-hardware", "--model", "/absent", "--plot", str(tmp_path / name)]) == 2
    assert "in a folder that is there" in capsys.readouterr().err and not kept.exists()
