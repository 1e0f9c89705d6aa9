"""model/runner and its paths: equal to transformers' own forward, bitwise exact where promised, refusing by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from driver import PATHS, Driver, own_logits, runner_of
from dspark.model import runner as runner_module
from dspark.model.attention import PagedAttention, explicit_attention
from dspark.model.batch import Span, pack
from dspark.model.cache import KVCache, LayerSpec
from dspark.model.kernels import kernel_works
from dspark.model.linear import Int8Linear, _int_matmul_in_floats, int_matmul, make_linear, quantise_rows
from dspark.model.runner import build_runner
from tiny_models import FAMILIES, tiny_loaded, tiny_model

VOCAB = 96
ATOL = 2e-4


def _tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=ATOL, rtol=1e-4)


# -- every family on every path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_taps(family: str, path: str) -> None:
    model, text = tiny_model(family), _tokens(45)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([text]), output_hidden_states=True)
    runner = runner_of(model, path)
    assert runner.name == path and runner.vocab_size == VOCAB and runner.hidden_size == 48
    driver = Driver(runner)
    driver.open(0)
    every = range(runner.num_layers + 1)
    _close(driver.step({0: text}, taps=every)[0], want.logits[0])
    for tap, hidden in zip(driver.taps, want.hidden_states, strict=True):
        _close(tap.float(), hidden[0])
    driver.open(1)
    last = runner.num_layers
    _close(driver.step({1: text}, num_logits={1: 3}, taps=[last, 0])[1], want.logits[0, -3:])
    _close(driver.taps[0].float(), want.hidden_states[last][0])
    _close(driver.taps[1].float(), want.hidden_states[0][0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill(family: str, path: str) -> None:
    """Inner chunks want no logits, the last only its last row's."""
    model, text = tiny_model(family), _tokens(47)
    driver = Driver(runner_of(model, path))
    driver.open(0)
    start = 0
    for size in (7, 1, 13, 3, 22):
        out = driver.step({0: text[start : start + size]}, num_logits={0: 0})
        assert out[0].shape == (0, VOCAB)
        start += size
    got = driver.step({0: text[start:]}, num_logits={0: 1})[0]
    _close(got, own_logits(model, text)[-1:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_crowds(family: str, path: str) -> None:
    """1..8 sequences in one pass, prompt chunks beside single rows and drafts, on pages that interleave."""
    model = tiny_model(family)
    driver = Driver(runner_of(model, path))
    texts = {seq_id: _tokens(20 + 5 * seq_id, seed=seq_id) for seq_id in range(8)}
    wants = {seq_id: own_logits(model, text) for seq_id, text in texts.items()}
    rng = random.Random(3)
    for seq_id in texts:
        driver.open(seq_id)
    while unfinished := [seq_id for seq_id in texts if len(driver.texts[seq_id]) < len(texts[seq_id])]:
        new = {}
        for seq_id in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            start = len(driver.texts[seq_id])
            new[seq_id] = texts[seq_id][start : start + rng.choice([1, 2, 4, 11])]
        for seq_id, logits in driver.step(new).items():
            end = len(driver.texts[seq_id])
            _close(logits, wants[seq_id][end - len(logits) : end])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_exact_rows_do_not_feel_their_company(
    family: str, path: str, dtype: torch.dtype, quantization: str | None
) -> None:
    runner = runner_of(tiny_model(family, dtype=dtype), path, exact=True, quantization=quantization)
    assert runner.exact
    text, other = _tokens(41), _tokens(60, seed=1)
    alone = Driver(runner)
    alone.open(0)
    want = torch.cat([alone.step({0: [token]})[0] for token in text])
    blocks = Driver(runner)
    blocks.open(0)
    got = torch.cat([blocks.step({0: text[i : i + n]})[0] for i, n in ((0, 19), (19, 5), (24, 17))])
    assert torch.equal(got, want)
    crowd = Driver(runner)
    parts = []
    for seq_id in (3, 0, 5):
        crowd.open(seq_id)
    for i in range(0, len(text), 4):
        block = {3: other[i : i + 3], 0: text[i : i + 4], 5: other[i : i + 1]}
        parts.append(crowd.step(block, keep={3: 2, 0: len(block[0]), 5: 1})[0])
    assert torch.equal(torch.cat(parts), want)


def test_bfloat16_is_close_and_keeps_its_dtype() -> None:
    text = _tokens(30)
    want = own_logits(tiny_model("llama"), text)
    for path in PATHS:
        runner = runner_of(tiny_model("llama", dtype=torch.bfloat16), path)
        assert runner.cache_dtype == torch.bfloat16
        driver = Driver(runner)
        driver.open(0)
        got = driver.step({0: text})[0]
        assert got.dtype == torch.float32
        assert (got - want).abs().mean() < 0.1 * want.std()


def test_int8_torch_path_is_close() -> None:
    text = _tokens(30)
    want = own_logits(tiny_model("qwen2"), text)
    driver = Driver(build_runner(tiny_model("qwen2"), path="torch", quantization="int8"))
    driver.open(0)
    got = driver.step({0: text})[0]
    assert 0 < (got - want).abs().mean() < 0.1 * want.std()


# -- the choice of a path


def test_auto_falls_through_to_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_native_refusal", lambda device: "no compiler")
    assert build_runner(tiny_model("qwen3")).name == "torch"
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96)
    assert build_runner(transformers.GPT2LMHeadModel(config).eval()).name == "general"


def test_auto_prefers_native() -> None:
    assert runner_of(tiny_model("qwen3"), "native").name == build_runner(tiny_loaded("qwen3").model).name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(path="fast"), ["unknown model path", "native"]),
        (dict(quantization="int3"), ["int3", "int8"]),
        (dict(path="general", exact=True), ["exact", "leave it off"]),
        (dict(path="general", quantization="int8"), ["int8", "leave quantization off"]),
        (dict(path="torch", quantization="int4"), ["int4", "native"]),
    ],
)
def test_impossible_wishes_are_refused_with_a_cure(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        build_runner(tiny_model("llama"), **options)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_an_uncovered_family_is_refused_by_name() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96)
    with pytest.raises(ValueError, match=r"torch path: .*gpt2.*general"):
        build_runner(transformers.GPT2LMHeadModel(config), path="torch")


def test_exact_needs_a_cpu() -> None:
    assert "device cpu" in str(
        runner_module._refusal("torch", exact=True, quantization=None, device=torch.device("cuda"))
    )


# -- other architectures on the general path


def _small(**changes: Any) -> dict[str, Any]:
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, max_position_embeddings=128, pad_token_id=None, initializer_range=0.3)
    return shape | changes


OTHERS = {
    "gemma2": lambda: transformers.Gemma2Config(**_small(head_dim=8, sliding_window=12, attn_logit_softcapping=2.0)),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_small(head_dim=8, sliding_window=12, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, initializer_range=0.3),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_small()),
    "phi3": lambda: transformers.Phi3Config(**_small(sliding_window=12)),
    "mixtral": lambda: transformers.MixtralConfig(**_small(num_local_experts=4)),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_small(
            num_key_value_heads=4,
            moe_intermediate_size=16,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
        )
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name: str) -> None:
    """Capped scores, sinks, absolute positions, fused projections, experts, values narrower than keys."""
    torch.manual_seed(0)
    config = OTHERS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    text = _tokens(40)
    driver = Driver(build_runner(model, path="general"))
    driver.open(0)
    parts = [driver.step({0: text[i : i + n]})[0] for i, n in ((0, 21), (21, 1), (22, 6), (28, 12))]
    _close(torch.cat(parts), own_logits(model, text))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCAB, state_size=4),
        transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCAB),
        transformers.BertConfig(**_small(is_decoder=False)),
    ],
)
def test_architectures_that_cannot_are_refused_by_name(config: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=type(model).__name__):
        build_runner(model, path="general")


# -- attention and linears


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_starts: Tensor,
    key_starts: Tensor | None,
    max_rows: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """What torch's varlen_attn computes, written out: rows stand at the end of their keys."""
    assert enable_gqa == (q.shape[1] != k.shape[-2]) and window_size[1] == 0
    parts = []
    for seq, (start, end) in enumerate(zip(row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True)):
        if block_table is not None:
            assert seqused_k is not None and key_starts is None
            keys, values = (pool[block_table[seq].long()].flatten(0, 1)[: seqused_k[seq]] for pool in (k, v))
        else:
            assert key_starts is not None
            keys, values = (pool[key_starts[seq] : key_starts[seq + 1]] for pool in (k, v))
        assert end - start <= max_rows and len(keys) <= max_keys
        rows = torch.arange(len(keys) - (end - start), len(keys))[:, None]
        columns = torch.arange(len(keys))[None]
        mask = columns <= rows
        if window_size[0] >= 0:
            mask &= columns >= rows - window_size[0]
        parts.append(explicit_attention(q[start:end], keys, values, mask, scale=scale))
    return torch.cat(parts)


@pytest.mark.parametrize("kernel", ["packed", "paged"])
def test_one_call_kernels_get_the_right_keys(kernel: str) -> None:
    """The arguments for torch's ragged kernel, which runs on GPUs only, are checked with a written-out stand-in."""
    specs = [LayerSpec(num_kv_heads=2, head_dim=8), LayerSpec(num_kv_heads=2, head_dim=8, window=6)]
    cache = KVCache(specs, num_pages=64, page_size=4, prefix_reuse=False)
    generator = torch.Generator().manual_seed(0)
    lengths = {0: 0, 1: 0, 2: 0}
    for seq_id in lengths:
        cache.open(seq_id, [])
    for counts in ({0: 9, 1: 1}, {1: 3, 2: 17, 0: 1}, {0: 5, 1: 5, 2: 1}, {2: 4, 1: 1}):
        for seq_id, count in counts.items():
            assert cache.reserve(seq_id, lengths[seq_id] + count)
        spans = [Span(seq_id=s, start=lengths[s], tokens=[0] * n, num_logits=0) for s, n in counts.items()]
        packed = pack(spans, cache)
        plain, ragged = PagedAttention(packed, cache), PagedAttention(packed, cache, kernel=kernel, varlen=_varlen)
        for layer in range(2):
            k, v = torch.randn(2, packed.num_tokens, 2, 8, generator=generator)
            q = torch.randn(packed.num_tokens, 4, 8, generator=generator)
            ragged.write(layer, k, v)
            torch.testing.assert_close(
                ragged.attend(layer, q, scale=0.3), plain.attend(layer, q, scale=0.3), atol=1e-5, rtol=1e-5
            )
        for seq_id, count in counts.items():
            lengths[seq_id] += count
            cache.commit(seq_id, [0] * lengths[seq_id], lengths[seq_id])


def test_the_trial_of_a_kernel_tells_right_from_wrong() -> None:
    cache = KVCache([LayerSpec(num_kv_heads=2, head_dim=8)], num_pages=4, page_size=4)

    def refuses(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("block_table is not supported")

    def ignores_windows(*args: Any, **kwargs: Any) -> Tensor:
        return _varlen(*args, **{**kwargs, "window_size": (-1, 0)})

    for kernel in ("paged", "packed"):
        assert kernel_works(kernel, _varlen, cache, num_heads=4)
        assert not kernel_works(kernel, refuses, cache, num_heads=4)
    assert not kernel_works("paged", ignores_windows, cache, num_heads=4)


def test_explicit_attention_with_sinks_and_caps() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 8, generator=generator) for heads in (2, 1, 1))
    out = explicit_attention(q, k, v, None, scale=1.0, sinks=torch.zeros(2), softcap=1.5)
    score = 1.5 * torch.tanh((q[0] @ k[0, 0]) / 1.5)
    torch.testing.assert_close(out[0], torch.sigmoid(score)[:, None] * v[0])


def test_int8_linear_error_and_independence() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 1100, generator=generator), torch.randn(24, generator=generator)
    x = torch.randn(19, 1100, generator=generator) * torch.logspace(-3, 3, 19)[:, None]
    linear = Int8Linear(weight, bias)
    whole = linear(x)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 19), slice(18, 19)):
        assert torch.equal(linear(x[rows]), whole[rows])
    (_, x_scale), (_, w_scale) = quantise_rows(x), quantise_rows(weight)
    bound = 0.5 * x_scale * weight.abs().sum(1) + 0.5 * w_scale[:, 0] * (x.abs() + 0.5 * x_scale).sum(1, keepdim=True)
    error = (whole.double() - (x.double() @ weight.double().T + bias)).abs()
    assert (error <= bound + 1e-4 * x_scale).all() and error.max() > 0


def test_int_products_are_exact_on_both_roads() -> None:
    a = torch.full((3, 2056), 127, dtype=torch.int8)
    b = torch.full((8, 2056), -127, dtype=torch.int8)
    b[1::2] = 127
    want = (a.long() @ b.long().T).int()
    assert torch.equal(int_matmul(a, b), want) and torch.equal(_int_matmul_in_floats(a, b), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_linear_rows_are_bitwise_independent(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 130, generator=generator).to(dtype)
    linear = make_linear(weight, exact=True)
    x = torch.randn(40, 130, generator=generator).to(dtype)
    whole = linear(x)
    torch.testing.assert_close(whole.float(), x.float() @ weight.float().T, atol=0.3, rtol=2e-2)
    for start, end in ((0, 1), (5, 6), (17, 18), (7, 24), (39, 40)):
        assert torch.equal(linear(x[start:end]), whole[start:end])
