"""Published drafts for known targets, from a table in the package.
It must never ask a hub, or claim that a draft pays: that is for a measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources


def suggestions(model: str) -> list[Mapping[str, str]]:
    """Entries whose pattern is found in the model's name, the particular ones before the general."""
    table = json.loads(resources.files("dspark.bench").joinpath("suggestions.json").read_text(encoding="utf-8"))
    name = model.rsplit("/", 1)[-1].lower()
    return [entry for entry in table if re.match(entry["target"], _plain(name))]


def _plain(name: str) -> str:
    """Without what publishers put before a family's name."""
    return re.sub(r"^(meta-|hf-)", "", name)
