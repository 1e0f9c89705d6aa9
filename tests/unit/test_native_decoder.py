"""NativeRunner against a plain torch reference of the same weights, and its law: a row does not feel its company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.model.batch import Span, pack
from dspark.model.build import library, reason
from dspark.model.cache import KVCache
from dspark.model.native import NativeRunner
from dspark.model.runner import Output
from dspark.model.weights import DecoderWeights, LayerWeights

pytestmark = pytest.mark.skipif(library() is None, reason=f"no native library: {reason()}")

PAGE = 16
BASE: dict[str, Any] = dict(vocab=97, hidden=48, heads=4, kv_heads=2, dim=16, ffn=80, windows=(0, 0, 0))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": dict(bias=True),
    "qk_norm": dict(qk_norm=True),
    "sandwich": dict(sandwich=True, activation="gelu_tanh", embed_scale=6.9375, softcap=30.0),
    "windows": dict(windows=(5, 0, 40)),
    "two_ropes": dict(ropes=2, windows=(9, 0, 9)),
    "one_kv_head": dict(heads=6, kv_heads=1),
    "no_groups": dict(heads=3, kv_heads=3),
    "wide_heads": dict(heads=4, kv_heads=2, dim=128, windows=(0, 33, 0)),
    "huge_heads": dict(heads=2, kv_heads=1, dim=256),
    "head_64": dict(heads=9, kv_heads=3, dim=64, windows=(0, 50, 0)),
    "odd_sizes": dict(vocab=131, hidden=52, heads=5, kv_heads=5, dim=18, ffn=77),
    "untied": dict(tied=False),
}


def make_weights(
    *,
    vocab: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    dim: int,
    ffn: int,
    windows: Sequence[int],
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    qk_norm: bool = False,
    sandwich: bool = False,
    activation: str = "silu",
    embed_scale: float = 1.0,
    softcap: float = 0.0,
    ropes: int = 1,
    tied: bool = True,
    max_context: int = 400,
) -> DecoderWeights:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, scale: float | None = None) -> Tensor:
        scale = 1.5 / shape[-1] ** 0.5 if scale is None else scale
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def norm(size: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    layers = [
        LayerWeights(
            attn_norm=norm(hidden),
            qkv=draw((heads + 2 * kv_heads) * dim, hidden),
            qkv_bias=draw((heads + 2 * kv_heads) * dim, scale=0.3) if bias else None,
            q_norm=norm(dim) if qk_norm else None,
            k_norm=norm(dim) if qk_norm else None,
            o=draw(hidden, heads * dim),
            o_bias=draw(hidden, scale=0.3) if bias else None,
            post_attn_norm=norm(hidden) if sandwich else None,
            mlp_norm=norm(hidden),
            gate_up=draw(2 * ffn, hidden),
            down=draw(hidden, ffn),
            post_mlp_norm=norm(hidden) if sandwich else None,
            window=window,
            rope=index % ropes,
        )
        for index, window in enumerate(windows)
    ]
    tables = []
    for base in (10000.0, 500.0)[:ropes]:
        frequencies = base ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(max_context).float()[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=1)
        tables.append((angles.cos(), angles.sin()))
    embed = draw(vocab, hidden, scale=1.0)
    return DecoderWeights(
        layers=layers,
        embed=embed,
        head=embed if tied else draw(vocab, hidden),
        norm=norm(hidden),
        rope_tables=tables,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        activation=activation,
        eps=1e-5,
        attn_scale=dim**-0.5,
        embed_scale=embed_scale,
        logit_softcap=softcap,
    )


def variant(name: str, **more: Any) -> DecoderWeights:
    return make_weights(**(BASE | VARIANTS[name] | more))


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin[:, None]


def _attend(w: DecoderWeights, layer: LayerWeights, h: Tensor) -> Tensor:
    num, heads, groups, dim = len(h), w.num_heads, w.num_kv_heads, w.head_dim
    qkv = h @ layer.qkv.double().T + (0 if layer.qkv_bias is None else layer.qkv_bias.double())
    q, k, v = qkv.split([heads * dim, groups * dim, groups * dim], dim=1)
    cos, sin = (table[:num].double() for table in w.rope_tables[layer.rope])
    q = _rotate(_norm(q.view(num, heads, dim), layer.q_norm, w.eps), cos, sin)
    k = _rotate(_norm(k.view(num, groups, dim), layer.k_norm, w.eps), cos, sin)
    k, v = (x.reshape(num, groups, dim).repeat_interleave(heads // groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) * w.attn_scale
    distance = torch.arange(num)[:, None] - torch.arange(num)[None]
    hidden = (distance < 0) | (distance >= (layer.window or num))
    out = torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).reshape(num, -1)
    return out @ layer.o.double().T + (0 if layer.o_bias is None else layer.o_bias.double())


def reference(w: DecoderWeights, tokens: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits of every position and all taps, in float64."""
    x = w.embed[torch.tensor(tokens)].double() * w.embed_scale
    taps = [x]
    for layer in w.layers:
        x = x + _norm(_attend(w, layer, _norm(x, layer.attn_norm, w.eps)), layer.post_attn_norm, w.eps)
        gate, up = (_norm(x, layer.mlp_norm, w.eps) @ layer.gate_up.double().T).chunk(2, dim=1)
        act = (
            torch.nn.functional.silu(gate)
            if w.activation == "silu"
            else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        x = x + _norm((act * up) @ layer.down.double().T, layer.post_mlp_norm, w.eps)
        taps.append(x)
    taps[-1] = _norm(x, w.norm, w.eps)
    logits = taps[-1] @ w.head.double().T
    return (torch.tanh(logits / w.logit_softcap) * w.logit_softcap if w.logit_softcap else logits), taps


class Driver:
    """Sequences of one runner, each a list of tokens of which some are cached."""

    def __init__(self, runner: NativeRunner, *, num_pages: int = 200, page_size: int = PAGE) -> None:
        self.runner = runner
        self.cache = KVCache(
            runner.layer_specs, num_pages=num_pages, page_size=page_size, dtype=runner.cache_dtype, prefix_reuse=False
        )
        self.lengths: dict[int, int] = {}

    def step(self, chunks: dict[int, Sequence[int]], *, taps: Sequence[int] = ()) -> Output:
        """One pass over new tokens of several sequences, all rows with logits; nothing is committed."""
        spans = []
        for seq_id, tokens in chunks.items():
            if seq_id not in self.lengths:
                self.cache.open(seq_id, tokens)
                self.lengths[seq_id] = 0
            start = self.lengths[seq_id]
            assert self.cache.reserve(seq_id, start + len(tokens))
            spans.append(Span(seq_id=seq_id, start=start, tokens=tokens, num_logits=len(tokens)))
        return self.runner.forward(pack(spans, self.cache), self.cache, taps=taps)

    def commit(self, seq_id: int, tokens: Sequence[int]) -> None:
        """The first len(tokens) positions stay."""
        self.cache.commit(seq_id, tokens, len(tokens))
        self.lengths[seq_id] = len(tokens)

    def feed(self, seq_id: int, tokens: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The whole text in chunks of these sizes (the last repeats); logits of every position."""
        parts, done, turn = [], 0, 0
        while done < len(tokens):
            size = sizes[min(turn, len(sizes) - 1)]
            parts.append(self.step({seq_id: tokens[done : done + size]}).logits)
            done, turn = min(done + size, len(tokens)), turn + 1
            self.commit(seq_id, tokens[:done])
        return torch.cat(parts)


def text(length: int, seed: int = 0, vocab: int = 97) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_equals_reference(name: str) -> None:
    weights = variant(name)
    driver = Driver(NativeRunner(weights, threads=2))
    tokens = text(150)
    out = driver.step({0: tokens}, taps=range(4))
    logits, taps = reference(weights, tokens)
    scale = max(1.0, logits.abs().max().item())
    assert (out.logits - logits).abs().max() < 1e-4 * scale
    for got, wanted in zip(out.taps, taps, strict=True):
        assert (got - wanted).abs().max() < 1e-4 * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_is_close_to_reference(name: str) -> None:
    weights = variant(name, dtype=torch.bfloat16)
    logits = Driver(NativeRunner(weights, threads=2)).feed(0, text(100), [70, 1])
    wanted, _ = reference(weights, text(100))
    error = (logits - wanted).norm() / wanted.norm()
    assert error < 0.03
    assert (logits.argmax(1) == wanted.argmax(1)).float().mean() > 0.85


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", VARIANTS)
def test_row_does_not_feel_chunks_or_threads(name: str, dtype: torch.dtype) -> None:
    weights = variant(name, dtype=dtype)
    tokens = text(120)
    wanted = Driver(NativeRunner(weights, threads=1)).feed(0, tokens, [1])
    for threads, sizes in ((2, [len(tokens)]), (2, [7, 1, 2, 3, 31, 5]), (3, [64, 17]), (1, [100, 4])):
        got = Driver(NativeRunner(weights, threads=threads)).feed(0, tokens, sizes)
        assert torch.equal(got, wanted), (threads, sizes)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["windows", "head_64", "sandwich"])
def test_row_does_not_feel_other_sequences(name: str, quantization: str | None) -> None:
    weights = variant(name, dtype=torch.bfloat16)
    runner = NativeRunner(weights, threads=2, quantization=quantization)
    texts = {seq_id: text(30 + 23 * seq_id, seed=seq_id) for seq_id in range(5)}
    alone = {seq_id: Driver(runner).feed(seq_id, tokens, [9]) for seq_id, tokens in texts.items()}
    crowd = Driver(runner)
    done = dict.fromkeys(texts, 0)
    turn = 0
    while any(done[s] < len(texts[s]) for s in texts):
        turn += 1
        sizes = {s: 1 + (turn * (s + 3)) % 11 for s in texts if done[s] < len(texts[s])}
        chunks = {s: texts[s][done[s] : done[s] + size] for s, size in sizes.items()}
        rows = crowd.step(chunks).logits.split([len(chunk) for chunk in chunks.values()])
        for (seq_id, chunk), logits in zip(chunks.items(), rows, strict=True):
            assert torch.equal(logits, alone[seq_id][done[seq_id] : done[seq_id] + len(chunk)])
            done[seq_id] += len(chunk)
            crowd.commit(seq_id, texts[seq_id][: done[seq_id]])


@pytest.mark.parametrize("name", ["windows", "head_64"])
def test_rollback_leaves_nothing(name: str) -> None:
    weights = variant(name, dtype=torch.bfloat16)
    runner = NativeRunner(weights, threads=2)
    tokens = text(140)
    wanted = Driver(runner).feed(0, tokens, [len(tokens)])
    driver = Driver(runner)
    driver.feed(0, tokens[:20], [20])
    generator = torch.Generator().manual_seed(1)
    done = 20
    while done < len(tokens):
        accepted, rejected = torch.randint(0, 6, (2,), generator=generator).tolist()
        good = tokens[done : done + 1 + accepted]
        logits = driver.step({0: good + text(rejected, seed=done)}).logits
        assert torch.equal(logits[: len(good)], wanted[done : done + len(good)])
        done += len(good)
        driver.commit(0, tokens[:done])


def test_stale_values_in_a_page_do_not_leak() -> None:
    """Positions that no row sees may hold anything, even what is not a number."""
    weights = variant("head_64", dtype=torch.bfloat16)
    runner = NativeRunner(weights, threads=2)
    clean, dirty = Driver(runner), Driver(runner)
    for tensor in dirty.cache.keys + dirty.cache.values:
        tensor.fill_(float("nan"))
    tokens = text(75)
    assert torch.equal(clean.feed(0, tokens, [37, 1, 3]), dirty.feed(0, tokens, [37, 1, 3]))


@pytest.mark.parametrize("page_size", [5, 16, 64])
def test_page_size_changes_no_bit(page_size: int) -> None:
    runner = NativeRunner(variant("windows"), threads=2)
    tokens = text(90)
    wanted = Driver(runner, page_size=32).feed(0, tokens, [90])
    assert torch.equal(Driver(runner, page_size=page_size).feed(0, tokens, [41, 2]), wanted)


def test_compression_changes_no_bit() -> None:
    weights = variant("head_64", dtype=torch.bfloat16)
    tokens = text(64)
    plain, packed = (
        Driver(NativeRunner(weights, threads=2, compress=c)).feed(0, tokens, [40, 1]) for c in (False, True)
    )
    assert torch.equal(plain, packed)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.06), ("int4", 0.6)])
def test_quantised_is_close(quantization: str, bound: float) -> None:
    weights = variant("head_64", dtype=torch.bfloat16)
    logits = Driver(NativeRunner(weights, threads=2, quantization=quantization)).feed(0, text(80), [80])
    wanted, _ = reference(weights, text(80))
    error = ((logits - wanted).norm() / wanted.norm()).item()
    assert 0 < error < bound


def test_no_rows_want_logits() -> None:
    runner = NativeRunner(variant("plain"), threads=2)
    driver = Driver(runner)
    driver.cache.open(0, text(10))
    driver.cache.reserve(0, 10)
    packed = pack([Span(seq_id=0, start=0, tokens=text(10), num_logits=0)], driver.cache)
    assert runner.forward(packed, driver.cache).logits.shape == (0, 97)


def test_bad_input_is_refused() -> None:
    runner = NativeRunner(variant("plain", max_context=20), threads=1)
    with pytest.raises(ValueError, match="vocabulary"):
        Driver(runner).step({0: [97]})
    with pytest.raises(ValueError, match="context"):
        Driver(runner).step({0: text(21)})
    with pytest.raises(ValueError, match="float16"):
        NativeRunner(variant("plain", dtype=torch.float16))
    with pytest.raises(ValueError, match="int3"):
        NativeRunner(variant("plain"), quantization="int3")
