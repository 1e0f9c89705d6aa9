"""What all tests share: the real default model, and which tests need a GPU.
It must never make a test pass by skipping it where CI demands that it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of smollm2-135m, fetched on first use.

    A machine that cannot fetch it skips the tests that ask, unless DSPARK_REQUIRE_MODELS is set (CI sets it).
    """
    from dspark.model.registry import fetch

    try:
        return fetch("smollm2-135m")
    except ValueError as error:
        if os.environ.get("DSPARK_REQUIRE_MODELS"):
            raise
        pytest.skip(f"smollm2-135m cannot be fetched: {error}")


@pytest.fixture(autouse=True, scope="session")
def costs_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave no measured costs in the user's cache, and find none there."""
    from dspark.engine import measure

    folder = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "cache_dir", lambda: folder)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks for a real model is marked so; tests/gpu needs a GPU."""
    skip_gpu: pytest.MarkDecorator | None = None
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)
        if GPU_TESTS in item.path.parents:
            if skip_gpu is None:
                skip_gpu = _needs_cuda()
            item.add_marker(skip_gpu)


def _needs_cuda() -> pytest.MarkDecorator:
    import torch

    return pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
