"""The pages name files that exist.
They must never send a reader to a file that has moved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [(ROOT / page).parent / target for target in re.findall(r"\]\(([^):#]+)\)", text)]
    quoted = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|\.toml|\.txt)|src/[a-z/]+|tests/[a-z/]+)`", text)
    assert links or quoted
    for path in links:
        assert path.exists(), f"{page} links to {path}"
    for name in quoted:
        assert (ROOT / name).exists() or (ROOT / "src" / "dspark" / name).exists(), f"{page} names {name}"


def test_what_architecture_says_of_layers_is_the_contract() -> None:
    drawn = re.search(r"## Layers\n\n((?:    .*\n)+)", (ROOT / "docs/architecture.md").read_text())
    contract = re.search(r"\nlayers =\n((?:    .*\n)+)", (ROOT / ".importlinter").read_text())
    assert drawn and contract
    existing = [
        [part for part in re.split(r"[ |]+", line.strip()) if "(" not in part] for line in contract[1].splitlines()
    ]
    assert [line.split() for line in drawn[1].splitlines()] == existing
