"""Free memory: what a device's programs may still take, by the system and by the limits of its containers.
It must never call memory free that a container's limit forbids."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

Read = Callable[[str], str | None]
_CGROUP = "/sys/fs/cgroup"


@dataclass(frozen=True, kw_only=True)
class Free:
    """`num_bytes` may still be taken of `total`, as `source` says."""

    num_bytes: int
    total: int
    source: str


def read_text(path: str) -> str | None:
    """A small file's text; None where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return None


def free_memory(device: Any = "cpu") -> Free:
    """Of a CPU or CUDA device."""
    import torch

    checked = torch.device(device)
    if checked.type == "cuda":
        free, total = torch.cuda.mem_get_info(checked)
        return Free(num_bytes=int(free), total=int(total), source=f"free on {checked}")
    return cpu_free()


def cpu_free(read: Read = read_text) -> Free:
    """The least of what the system has available and of what each control group above this process leaves."""
    found = [_system(read), *_limits(read)]
    least = min(found, key=lambda free: free.num_bytes)
    return Free(num_bytes=max(0, least.num_bytes), total=min(free.total for free in found), source=least.source)


def _system(read: Read) -> Free:
    values = {}
    for line in (read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemAvailable", "MemTotal"):
            values[name] = int(rest.split()[0]) * 1024
    if len(values) == 2:
        return Free(num_bytes=values["MemAvailable"], total=values["MemTotal"], source="MemAvailable")
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    total = os.sysconf("SC_PHYS_PAGES") * page
    return Free(num_bytes=free or total, total=total, source="the system's pages")


def _limits(read: Read) -> list[Free]:
    """One for each group with a limit; memory of files that can be dropped counts as free."""
    found = []
    for hierarchy, _, path in (line.split(":", 2) for line in (read("/proc/self/cgroup") or "").splitlines() if line):
        version2 = hierarchy == "0"
        if not version2 and "memory" not in _:
            continue
        root = _CGROUP if version2 else f"{_CGROUP}/memory"
        # In a container the path may be that of the host, and the group the root of what is mounted here.
        for folder in dict.fromkeys([*(f"{root}{part}".rstrip("/") for part in _upwards(path)), root]):
            if (limit := _limit(read, folder, version2=version2)) is not None:
                found.append(limit)
    return found


def _upwards(path: str) -> list[str]:
    here = PurePosixPath(path)
    return [str(here), *map(str, here.parents)]


def _limit(read: Read, folder: str, *, version2: bool) -> Free | None:
    names = ("memory.max", "memory.current") if version2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (_number(read(f"{folder}/{name}")) for name in names)
    if limit is None or used is None or limit >= 2**60:
        return None
    droppable = "inactive_file" if version2 else "total_inactive_file"
    lines = (line.split() for line in (read(f"{folder}/memory.stat") or "").splitlines())
    inactive = next((int(line[1]) for line in lines if len(line) == 2 and line[0] == droppable), 0)
    return Free(num_bytes=limit - max(0, used - inactive), total=limit, source="the limit of the control group")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None
