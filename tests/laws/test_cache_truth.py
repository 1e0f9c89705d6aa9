"""Law of cache truth: logits after any history of chunks, company and rollbacks are those of a fresh prefill.
The reference is transformers' own forward without a cache, in float32."""

from __future__ import annotations

import random

import pytest
import torch

from driver import PATHS, Driver, own_logits, runner_of
from dspark.model.cache import KVCache, LayerSpec
from tiny_models import FAMILIES, WINDOW, tiny_model

VOCAB = 96
ATOL = 2e-4


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_walks_with_rollback(family: str, path: str) -> None:
    model = tiny_model(family)
    driver = Driver(runner_of(model, path))
    rng = random.Random(7)
    seen: dict[int, list[torch.Tensor]] = {}
    for seq_id in range(4):
        driver.open(seq_id)
        seen[seq_id] = []
    for _ in range(24):
        crowd = rng.sample(range(4), rng.randint(1, 4))
        new = {seq_id: _tokens(rng, rng.choice([1, 1, 2, 5, 9])) for seq_id in crowd}
        keep = {seq_id: rng.randint(1, len(tokens)) for seq_id, tokens in new.items()}
        for seq_id, logits in driver.step(new, keep=keep).items():
            seen[seq_id].append(logits[: keep[seq_id]])
    assert max(map(len, driver.texts.values())) > 3 * WINDOW
    for seq_id, text in driver.texts.items():
        torch.testing.assert_close(torch.cat(seen[seq_id]), own_logits(model, text), atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_to_every_length_of_a_block(family: str, path: str) -> None:
    """A block of drafts is cut at every offset, at every position relative to a page's edge, past the window's wrap."""
    model = tiny_model(family)
    driver = Driver(runner_of(model, path))
    rng = random.Random(11)
    driver.open(0)
    driver.step({0: _tokens(rng, 2 * WINDOW + 1)})
    for kept in [0, 1, 2, 3, 4, 5, 6, 0, 6, 5, 4]:
        driver.step({0: _tokens(rng, 6)}, keep={0: kept})
        probe = _tokens(rng, 2)
        got = driver.step({0: probe}, keep={0: 1})[0]
        want = own_logits(model, driver.texts[0] + probe[1:])[-2:]
        torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes(family: str, path: str) -> None:
    """Prompts that share pages with earlier ones, of every remainder, give the logits of a cold prompt."""
    model = tiny_model(family)
    driver = Driver(runner_of(model, path), prefix_reuse=True)
    rng = random.Random(5)
    prompt = _tokens(rng, 35)
    driver.open(0, prompt)
    driver.step({0: prompt})
    hits = []
    for seq_id, length in enumerate(range(29, 36), start=1):
        asked = [*prompt[: length - 2], *_tokens(rng, 2)]
        hits.append(driver.open(seq_id, asked))
        got = driver.step({seq_id: asked[hits[-1] :]})[seq_id]
        torch.testing.assert_close(got, own_logits(model, asked)[hits[-1] :], atol=ATOL, rtol=1e-4)
        if seq_id % 2:
            driver.close(seq_id)
    assert max(hits) >= 24


@pytest.mark.parametrize("window", (0, 6))
def test_what_is_not_final_is_not_found_again_and_stays_visible(window: int) -> None:
    """Tokens that were committed as not final are replaced: nobody may find the pages under the old ones, and none may
    have left the window."""
    cache = KVCache([LayerSpec(num_kv_heads=1, head_dim=2, window=window)], num_pages=32, page_size=4)
    old, new = list(range(16)), [0, 1, *range(50, 64)]
    cache.open(1, old)
    assert cache.reserve(1, 16)
    cache.commit(1, old, 14, num_final=2)
    kept = cache.sequences[1].tables[0].pages[0]
    cache.commit(1, new, 2, num_final=2)
    assert cache.sequences[1].tables[0].pages[0] == kept, "a page that the third token sees is gone"
    assert cache.reserve(1, 16)
    cache.commit(1, new, 12, num_final=12)
    assert cache.open(2, old) == 0
    assert cache.open(3, new) == 12
    cache.check()
