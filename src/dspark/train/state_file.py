"""The file from which an interrupted training goes on.
It must never leave a file that was half written, nor lose the one before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

STATE = "training-state.pt"


def write_state(folder: Path, value: Mapping[str, Any]) -> None:
    """Replace the folder's file as a whole. Raises ValueError where the disk is full or cannot be written."""
    temporary = folder / (STATE + ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(dict(value), temporary)
        os.replace(temporary, folder / STATE)
    except (OSError, RuntimeError) as error:  # torch's writer raises the second
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"the checkpoint cannot be written to {folder} ({error}): free space, and give the same command again; "
            "what was saved before is kept"
        ) from None


def read_state(folder: Path, *, device: str | torch.device) -> dict[str, Any] | None:
    """What was written last; None where nothing was. Raises ValueError for a file that cannot be read."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of a pickle reader and an archive reader: any
        raise ValueError(f"{path} cannot be read ({error}): delete it to train from the start") from None
