"""Checkpoints of draft heads: round trips in three formats, hand-made folders of the foreign ones, and bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dspark.heads.blocks import Context
from dspark.heads.checkpoint import TargetShape, is_head_folder, load_head, make_head, save_head
from dspark.heads.config import HeadConfig
from dspark.heads.eagle import EagleHead
from dspark.heads.rope import rope_tables
from dspark.heads.semi_ar import SemiAutoregressiveHead, block_positions

HIDDEN, VOCABULARY, LAYERS = 32, 50, 6
BLOCK = HeadConfig(
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    draft_vocab_size=VOCABULARY,
    block_size=4,
    target_layer_ids=(-1, 1, 4),
    num_target_layers=LAYERS,
    mask_token_id=49,
    markov_rank=6,
    qk_norm=True,
    rope={"rope_type": "default", "rope_theta": 5000.0},
)
EAGLE = dataclasses.replace(
    BLOCK, kind="eagle3", num_layers=1, markov_rank=0, confidence=False, mask_token_id=None, target_layer_ids=(0, 2, 4)
)
OWN = dataclasses.replace(
    BLOCK,
    context="target",
    target_layer_ids=(3, 5),
    anchor_feature=True,
    mask_token_id=None,
    qk_norm=False,
    draft_vocab_size=30,
    confidence_temperatures=(1.0, 1.5, 0.75, 2.0),
)
TARGET = TargetShape(hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCABULARY)


def make(config: HeadConfig) -> Any:
    torch.manual_seed(5)
    head = make_head(config).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
        if config.draft_vocab_size < config.vocab_size:
            head.draft_ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size]
            head.lm_head.weight.copy_(rows_of_target()[1][head.draft_ids])
        else:
            head.lm_head.weight.copy_(rows_of_target()[1])
        head.embed_tokens.weight.copy_(rows_of_target()[0])
    return head


def rows_of_target() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(VOCABULARY, HIDDEN, generator=generator), torch.randn(VOCABULARY, HIDDEN, generator=generator)


@torch.no_grad()
def answer(head: nn.Module) -> Tensor:
    """What a head computes from fixed input, its logits over target ids (absent: -inf), and its confidence."""
    generator = torch.Generator().manual_seed(9)
    config = head.config
    assert isinstance(config, HeadConfig)
    cos, sin = rope_tables(config, 32)
    states = [torch.randn(7, HIDDEN, generator=generator) for _ in config.target_layer_ids]
    extra = []
    if isinstance(head, EagleHead):
        features, tokens = head.fuse(states), torch.arange(7)
        keys, values = head.keys_values(tokens, features, (cos[:7], sin[:7]))
        context = Context(keys=[keys], values=[values], counts=[7], anchors=torch.arange(7))
        step = head.step(tokens, features, (cos[:7], sin[:7]), context)
        logits = head.step(tokens, step.hidden, (cos[1:8], sin[1:8]), context, step.rows).logits
    else:
        assert isinstance(head, SemiAutoregressiveHead)
        if config.context == "fused":
            pairs = head.context_of(head.fuse(states), (cos[:7], sin[:7]))
        else:
            pairs = [(torch.randn(7, 2, 8, generator=generator),) * 2 for _ in head.layers]
        anchors, previous = torch.tensor([4, 7]), torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
        positions = block_positions(anchors, config.num_rows)
        contexts = [Context(keys=[k], values=[v], counts=[2], anchors=anchors) for k, v in pairs]
        feature = torch.randn(2, HIDDEN, generator=generator) if config.anchor_feature else None
        hidden = head(head.inputs(previous[:, 0], feature), (cos[positions], sin[positions]), contexts)
        logits = head.logits(hidden, previous)
        extra = [head.confidence(hidden, previous)] if config.confidence else []
    full = torch.full((*logits.shape[:-1], config.vocab_size), -torch.inf)
    full[..., head.draft_ids] = logits
    return torch.cat([full.flatten(), *(x.flatten() for x in extra)])


def variants() -> list[tuple[str, HeadConfig]]:
    markov = [dataclasses.replace(BLOCK, markov_type=kind) for kind in ("gated", "rnn")]
    plain = dataclasses.replace(BLOCK, markov_rank=0, confidence=False)
    alone = dataclasses.replace(BLOCK, confidence_with_markov=False, confidence_temperatures=(1.0, 2.0, 3.0, 4.0))
    biased = dataclasses.replace(BLOCK, qkv_bias=True, o_bias=True, max_positions=512)
    small = dataclasses.replace(BLOCK, draft_vocab_size=30)
    flash = dataclasses.replace(plain, sample_from_anchor=False)
    eagle = [
        EAGLE,
        dataclasses.replace(EAGLE, qk_norm=False, norm_before_residual=True, target_layer_ids=(1, 3)),
        dataclasses.replace(EAGLE, draft_vocab_size=20),
    ]
    both = [BLOCK, *markov, plain, alone, biased]
    return [
        *(("dspark", config) for config in (*both, OWN, small, flash, *eagle)),
        *(("deepspec", config) for config in both),
        *(("speculators", config) for config in (*both, small, flash, *eagle)),
    ]


@pytest.mark.parametrize("format, config", variants())
def test_a_reloaded_head_gives_the_same_answer(tmp_path: Path, format: str, config: HeadConfig) -> None:
    head = make(config)
    save_head(head, tmp_path, format=format, store_embeddings=True)
    found = load_head(tmp_path, target=TARGET)
    assert not found.training
    assert torch.equal(answer(found), answer(head))
    assert found.config.confidence_temperatures == config.confidence_temperatures
    if format == "dspark":
        assert found.config == config
        assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("format", ["dspark", "deepspec", "speculators"])
@pytest.mark.parametrize("config", [BLOCK, dataclasses.replace(BLOCK, draft_vocab_size=30), EAGLE])
def test_rows_of_the_target_may_be_left_out(tmp_path: Path, format: str, config: HeadConfig) -> None:
    if format == "deepspec" and config is not BLOCK:
        pytest.skip("has no form for it")
    head = make(config)
    save_head(head, tmp_path, format=format, store_embeddings=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" not in stored
    embed, output = rows_of_target()
    found = load_head(tmp_path, embed=embed, head=output)
    assert torch.equal(answer(found), answer(head))
    assert found.embed_tokens.weight.data_ptr() == embed.data_ptr()
    assert not found.embed_tokens.weight.requires_grad and found.norm.weight.requires_grad
    with pytest.raises(ValueError, match="load the head together with its target"):
        load_head(tmp_path)


def test_defaults_leave_out_what_is_the_targets(tmp_path: Path) -> None:
    expected = {"dspark": (False, True), "deepspec": (True, None), "speculators": (True, True)}
    for format, kinds in expected.items():
        for config, stored in zip((BLOCK, EAGLE), kinds, strict=True):
            if stored is not None:
                save_head(make(config), tmp_path, format=format)
                assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is stored


def test_stored_rows_that_are_the_targets_are_shared(tmp_path: Path) -> None:
    save_head(make(BLOCK), tmp_path, format="deepspec")
    embed, output = rows_of_target()
    found = load_head(tmp_path, embed=embed, head=output)
    assert found.lm_head.weight.data_ptr() == output.data_ptr()
    other = load_head(tmp_path, embed=embed + 1, head=output)
    assert torch.equal(other.embed_tokens.weight, embed)


@pytest.mark.parametrize("format", ["dspark", "deepspec", "speculators"])
def test_float_types(tmp_path: Path, format: str) -> None:
    head = make(BLOCK)
    save_head(head, tmp_path, format=format, store_embeddings=True, dtype="bfloat16")
    found = load_head(tmp_path)
    assert all(torch.equal(found.state_dict()[k], v.bfloat16().float()) for k, v in head.state_dict().items())
    kept = load_head(tmp_path, target=dataclasses.replace(TARGET, dtype=torch.bfloat16))
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    assert load_head(tmp_path, dtype=torch.float16).dtype == torch.float16


def test_int8_is_within_half_a_scale(tmp_path: Path) -> None:
    head = make(dataclasses.replace(BLOCK, markov_type="gated"))
    with torch.no_grad():
        head.layers[0].mlp.up_proj.weight[3] = 0
    save_head(head, tmp_path, dtype="int8", store_embeddings=True)
    stored, found = load_file(tmp_path / "model.safetensors"), load_head(tmp_path).state_dict()
    quantised = 0
    for name, wanted in head.state_dict().items():
        if name + "_scale" in stored:
            assert stored[name].dtype == torch.int8 and stored[name + "_scale"].dtype == torch.float32
            assert ((found[name] - wanted).abs() <= stored[name + "_scale"].unsqueeze(1) * 0.5001).all()
            quantised += 1
        else:
            assert torch.equal(found[name], wanted)
    assert quantised == 2 * 7 + 3


def test_json_is_sorted_and_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_head(make(BLOCK), tmp_path / name, provenance={"b": 1, "a": [2]}, target_name="some/target")
    assert (tmp_path / "one/config.json").read_bytes() == (tmp_path / "two/config.json").read_bytes()
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    values = json.loads((tmp_path / "one/config.json").read_text())
    assert list(values) == sorted(values) and values["target_name"] == "some/target"
    assert json.loads((tmp_path / "one/provenance.json").read_text()) == {"a": [2], "b": 1}
    save_head(make(BLOCK), tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_says_whether_it_is_a_head(tmp_path: Path) -> None:
    assert not is_head_folder(tmp_path)
    for format in ("dspark", "deepspec", "speculators"):
        save_head(make(BLOCK), tmp_path, format=format)
        assert is_head_folder(tmp_path)
    for values in ({"architectures": ["Qwen3ForCausalLM"]}, {"architectures": None}, {}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert not is_head_folder(tmp_path)


def deepspec_values() -> dict[str, Any]:
    """As a deep copy of a Qwen3 target's configuration becomes, with keys that have nothing to say to us."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 4,
        "bos_token_id": 48,
        "confidence_head_with_markov": True,
        "dtype": "float32",
        "enable_confidence_head": True,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "layer_types": ["full_attention", "full_attention"],
        "markov_head_type": "vanilla",
        "markov_rank": 6,
        "mask_token_id": 49,
        "max_position_embeddings": 4096,
        "max_window_layers": 6,
        "model_type": "qwen3",
        "num_anchors": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": LAYERS,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000.0,
        "sliding_window": None,
        "target_layer_ids": [-1, 1, 4],
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCABULARY,
    }


def write(folder: Path, values: Any, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_deepspec_folder_made_by_hand(tmp_path: Path) -> None:
    head = make(BLOCK)
    write(tmp_path, deepspec_values(), dict(head.state_dict()))
    found = load_head(tmp_path, target=TARGET)
    assert found.config.rope["rope_theta"] == 5000.0
    assert found.config.target_layer_ids == (-1, 1, 4) and found.config.taps == (0, 2, 5)
    assert torch.equal(answer(found), answer(head))


def test_shards_with_an_index(tmp_path: Path) -> None:
    head = make(BLOCK)
    tensors = dict(head.state_dict())
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    (tmp_path / "config.json").write_text(json.dumps(deepspec_values()))
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(answer(load_head(tmp_path)), answer(head))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors cannot be read"):
        load_head(tmp_path)


def speculators_values(kind: str, **changes: Any) -> dict[str, Any]:
    layers = {
        "attention_bias": False,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "max_position_embeddings": 4096,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 1 if kind == "eagle3" else 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "vocab_size": VOCABULARY,
    }
    return {
        "architectures": ["Speculator"],
        "draft_vocab_size": 30,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": None},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "transformer_layer_config": layers,
        **changes,
    }


def speculators_tensors(head: nn.Module) -> dict[str, Tensor]:
    """The head's draft ids must be ascending."""
    ids = head.draft_ids
    assert isinstance(ids, Tensor)
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[ids] = True
    return {**head.state_dict(), "t2d": mask, "d2t": ids - torch.arange(len(ids))}


def ascending(config: HeadConfig) -> Any:
    head = make(dataclasses.replace(config, draft_vocab_size=30))
    head.draft_ids = head.draft_ids.sort().values
    return head


def test_a_speculators_dspark_folder_made_by_hand(tmp_path: Path) -> None:
    head = ascending(BLOCK)
    values = speculators_values(
        "dspark",
        aux_hidden_state_layer_ids=[0, 2, 5],
        block_size=4,
        confidence_head_with_markov=True,
        enable_confidence_head=True,
        markov_head_type="vanilla",
        markov_rank=6,
        mask_token_id=49,
        sample_from_anchor=True,
    )
    tensors = {**speculators_tensors(head), "verifier_norm.weight": torch.ones(HIDDEN)}
    found = load_head(write(tmp_path, values, tensors), target=TARGET)
    assert found.config.taps == (0, 2, 5)
    assert torch.equal(found.draft_ids, head.draft_ids)
    assert torch.equal(answer(found), answer(head))
    del values["sample_from_anchor"]
    assert load_head(write(tmp_path, values, tensors)).config.sample_from_anchor
    values["block_size"] = 5
    found = load_head(write(tmp_path, values, tensors))
    assert not found.config.sample_from_anchor and found.config.block_size == 4


def test_a_speculators_dflash_folder_made_by_hand(tmp_path: Path) -> None:
    """Five rows, the anchor's predicts nothing: four drafted tokens."""
    head = ascending(dataclasses.replace(BLOCK, markov_rank=0, confidence=False, sample_from_anchor=False))
    values = speculators_values(
        "dflash", aux_hidden_state_layer_ids=[0, 2, 5], block_size=5, mask_token_id=49, sample_from_anchor=False
    )
    found = load_head(write(tmp_path, values, speculators_tensors(head)))
    assert (found.config.block_size, found.config.num_rows) == (4, 5)
    assert torch.equal(answer(found), answer(head))
    save_head(found, tmp_path / "again", format="speculators")  # though how many layers the target has is not known
    assert torch.equal(answer(load_head(tmp_path / "again")), answer(head))


def test_rows_after_an_anchor_that_predicts_nothing(tmp_path: Path) -> None:
    """The same weights with five rows that all predict: the last four are those of the head with a silent anchor."""
    silent = dataclasses.replace(BLOCK, markov_rank=0, confidence=False, sample_from_anchor=False)
    head = make(silent)
    loud = SemiAutoregressiveHead(dataclasses.replace(silent, sample_from_anchor=True, block_size=5)).eval()
    loud.load_state_dict(head.state_dict())
    cos, sin = rope_tables(silent, 32)
    keys = [(torch.randn(6, 2, 8), torch.randn(6, 2, 8)) for _ in head.layers]
    anchors = torch.tensor([6])
    contexts = [Context(keys=[k], values=[v], counts=[1], anchors=anchors) for k, v in keys]
    positions = block_positions(anchors, 5)
    with torch.no_grad():
        found = [h(h.inputs(torch.tensor([7])), (cos[positions], sin[positions]), contexts) for h in (head, loud)]
    assert found[0].shape == (1, 4, HIDDEN)
    assert torch.equal(found[0], found[1][:, 1:])


def test_a_speculators_eagle_folder_made_by_hand(tmp_path: Path) -> None:
    head = ascending(dataclasses.replace(EAGLE, norm_before_residual=True))
    values = speculators_values(
        "eagle3", eagle_aux_hidden_state_layer_ids=[1, 3, 5], norm_before_residual=True, target_hidden_size=None
    )
    found = load_head(write(tmp_path, values, speculators_tensors(head)), target=TARGET)
    assert found.config.taps == (1, 3, 5) and found.config.block_size == 4
    assert torch.equal(answer(found), answer(head))
    values["eagle_aux_hidden_state_layer_ids"] = None
    folder = write(tmp_path, values, speculators_tensors(head))
    assert load_head(folder, target=TARGET).config.taps == (2, 3, 3)
    with pytest.raises(ValueError, match="load the head together with its target"):
        load_head(folder)


def test_llama_layers_have_no_query_norm(tmp_path: Path) -> None:
    head = ascending(dataclasses.replace(EAGLE, qk_norm=False))
    values = speculators_values("eagle3", eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    layers = {**values["transformer_layer_config"], "model_type": "llama"}
    scaling = {"factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}
    del layers["rope_parameters"], layers["head_dim"]
    layers |= {"rope_theta": 5000.0, "rope_scaling": {**scaling, "rope_type": "llama3"}}
    values["transformer_layer_config"] = layers
    found = load_head(write(tmp_path, values, speculators_tensors(head)))
    assert found.config.rope == {**scaling, "rope_type": "llama3", "rope_theta": 5000.0}
    assert not found.config.qk_norm and found.config.head_dim == 8


@pytest.mark.parametrize("format", ["deepspec", "speculators"])
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"context": "target", "target_layer_ids": (1, 2)}, "context 'target'"),
        ({"anchor_feature": True}, "anchor_feature"),
        ({"mask_token_id": None}, "mask vector"),
        ({"qk_norm": False}, "qk_norm = true"),
        ({"o_bias": True}, "qkv_bias and o_bias"),
        ({"target_layer_ids": (3, 1)}, "ascending order"),
        ({"target_layer_ids": (1, 5)}, "last layer"),
    ],
)
def test_what_only_our_format_holds(tmp_path: Path, format: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        save_head(make(dataclasses.replace(BLOCK, **changes)), tmp_path, format=format)
    assert "format 'dspark'" in str(raised.value) and "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes", [{"draft_vocab_size": 30}, {"sample_from_anchor": False}], ids=["vocabulary", "anchor"]
)
def test_what_deepspec_does_not_hold(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'speculators'"):
        save_head(make(dataclasses.replace(BLOCK, **changes)), tmp_path, format="deepspec")
    with pytest.raises(ValueError, match="'speculators'"):
        save_head(make(EAGLE), tmp_path, format="deepspec")


def test_bad_requests(tmp_path: Path) -> None:
    head = make(BLOCK)
    for request, words in (
        ({"format": "onnx"}, "use one of dspark, deepspec, speculators"),
        ({"dtype": "int4"}, "use one of float32, bfloat16, float16, int8"),
        ({"dtype": "int8", "format": "deepspec"}, "use a float dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            save_head(head, tmp_path, **request)


def refused(folder: Path, words: str, **arguments: Any) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        load_head(folder, **arguments)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": 64}, "a hidden size of 32, this one has 64: give the head"),
        ({"num_layers": 7}, "6 layers, this one has 7"),
        ({"vocab_size": 51}, "a vocabulary of 50, this one has 51"),
    ],
)
@pytest.mark.parametrize("format", ["dspark", "deepspec"])
def test_a_head_of_another_target(tmp_path: Path, format: str, changes: dict[str, int], words: str) -> None:
    save_head(make(BLOCK), tmp_path, format=format)
    refused(tmp_path, words, target=dataclasses.replace(TARGET, **changes))


def test_a_speculators_head_of_another_target(tmp_path: Path) -> None:
    save_head(make(BLOCK), tmp_path, format="speculators")
    refused(tmp_path, "do not fit a target of 3 layers", target=dataclasses.replace(TARGET, num_layers=3))
    refused(tmp_path, "a hidden size of 32", target=dataclasses.replace(TARGET, hidden_size=64))


def test_weights_of_another_target(tmp_path: Path) -> None:
    save_head(make(BLOCK), tmp_path)
    embed, output = rows_of_target()
    refused(tmp_path, r"given as embed are \(50, 16\), it needs \(50, 32\)", embed=embed[:, :16], head=output)
    refused(tmp_path, r"given as head are \(49, 32\)", embed=embed, head=output[:49])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda v: v.update(dspark_head=2), "version 2"),
        (lambda v: v.pop("embeddings_from_target"), "embeddings_from_target"),
        (lambda v: v.update(colour="red"), "unknown keys"),
        (lambda v: v.pop("hidden_size"), "not complete"),
        (lambda v: v.update(hidden_size="32"), "hidden_size"),
        (lambda v: v.update(markov_rank="6"), "markov_rank='6'"),
        (lambda v: v.update(confidence=1), "confidence=1"),
        (lambda v: v.update(rms_norm_eps=None), "rms_norm_eps=None"),
        (lambda v: v.update(target_layer_ids=3), "wrong type"),
        (lambda v: v.update(target_layer_ids=["3"]), "not complete"),
        (lambda v: v.update(target_layer_ids=[1.5]), "target_layer_ids"),
        (lambda v: v.update(rope={}), "rope="),
        (lambda v: v.update(mask_token_id=50), "mask_token_id=50 is no id of 50 tokens"),
        (lambda v: v.update(mask_token_id=True), "mask_token_id=True"),
        (lambda v: v.update(markov_type="lstm"), "use one of vanilla, gated, rnn"),
        (lambda v: v.update(markov_rank=5), "config.json asks for"),
        (lambda v: v.update(num_layers=3), "the weights lack layers.2"),
        (lambda v: v.update(num_layers=1), "the weights have beside the head's layers.1"),
    ],
)
def test_a_bad_config_of_our_own(tmp_path: Path, change: Any, words: str) -> None:
    save_head(make(BLOCK), tmp_path, store_embeddings=True)
    values = json.loads((tmp_path / "config.json").read_text())
    change(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused(tmp_path, words)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda v: v.update(architectures=["LlamaForCausalLM"]), "is not of a draft head"),
        (lambda v: v.pop("architectures"), "is not of a draft head"),
        (lambda v: v.pop("target_layer_ids"), "lacks target_layer_ids"),
        (lambda v: v.pop("mask_token_id"), "lacks mask_token_id"),
        (lambda v: v.pop("markov_head_type"), "lacks markov_head_type"),
        (lambda v: v.pop("confidence_head_with_markov"), "lacks confidence_head_with_markov"),
        (lambda v: v.pop("hidden_size"), "lacks hidden_size"),
        (lambda v: v.update(model_type="gemma4_text"), "gemma4_text"),
        (lambda v: v.update(hidden_act="gelu"), "gelu"),
        (lambda v: v.update(layer_types=["sliding_attention"] * 2), "sliding-window"),
        (lambda v: v.update(partial_rotary_factor=0.5), "of a part of the head"),
        (lambda v: v.update(quantization_config={"bits": 4}), "quantised"),
        (lambda v: v.update(num_attention_heads="four"), "not a qwen3 configuration"),
        (lambda v: v.update(markov_rank="6"), "markov_rank='6'"),
        (lambda v: v.update(block_size="4"), "block_size='4'"),
        (lambda v: v.update(target_layer_ids="all"), "wrong type"),
        (lambda v: v.update(target_layer_ids=[1, 6]), "do not fit a target of 6 layers"),
        (lambda v: v.update(target_layer_ids=[1, 4]), "fc.weight is"),
    ],
)
def test_a_bad_config_of_deepspec(tmp_path: Path, change: Any, words: str) -> None:
    values = deepspec_values()
    change(values)
    refused(write(tmp_path, values, dict(make(BLOCK).state_dict())), words)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"speculators_model_type": "mtp"}, "use one of dspark, dflash, eagle3"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"draft_vocab_size": None}, "lacks draft_vocab_size"),
        ({"target_hidden_size": 64}, "for a target of 64"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer_ids"),
        ({"sample_from_anchor": None, "block_size": 9}, "add sample_from_anchor"),
        ({"sample_from_anchor": False, "markov_head_type": "rnn"}, "'rnn' with sample_from_anchor false"),
        ({"draft_vocab_size": 29}, "d2t is not 29 whole numbers"),
        ({"block_size": "4"}, "block_size='4'"),
    ],
)
def test_a_bad_config_of_speculators(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    save_head(make(dataclasses.replace(BLOCK, draft_vocab_size=30)), tmp_path, format="speculators")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    refused(tmp_path, words)


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_output"])
def test_eagle_variants_that_compute_otherwise(tmp_path: Path, name: str) -> None:
    save_head(make(EAGLE), tmp_path, format="speculators")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, name: True}))
    refused(tmp_path, f"{name} of an eagle3 head is not supported")


def test_bad_files(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "config.json cannot be read")
    save_head(make(BLOCK), tmp_path, store_embeddings=True)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good, whole = config.read_text(), weights.read_bytes()
    for text, words in (("{", "is not JSON"), ("[1]", "is not a JSON object"), ("\udc80", "is not JSON")):
        config.write_bytes(text.encode("utf-8", "surrogateescape"))
        refused(tmp_path, words)
    config.write_text(good)
    for content in (whole[:-5], whole[:100], whole[:3], b"", b"\xff" * 200):
        weights.write_bytes(content)
        refused(tmp_path, "is damaged or cut short")
    weights.unlink()
    refused(tmp_path, "model.safetensors cannot be read")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("norm.weight"), "the weights lack norm.weight"),
        (lambda t: t.pop("embed_tokens.weight"), "the weights lack embed_tokens.weight"),
        (lambda t: t.pop("draft_ids"), "the weights lack draft_ids"),
        (lambda t: t.update(extra=torch.ones(1)), "beside the head's extra"),
        (lambda t: t.update({"norm.weight": torch.ones(31)}), r"norm.weight is \(31,\) float32"),
        (lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int32)}), r"norm.weight is \(32,\) int32"),
        (lambda t: t.update(draft_ids=torch.arange(49)), "draft_ids is not 50 whole numbers"),
        (lambda t: t.update(draft_ids=torch.arange(50.0)), "draft_ids is not 50 whole numbers"),
        (lambda t: t.update(draft_ids=torch.zeros(50, dtype=torch.int32)), "50 different ids below 50"),
        (lambda t: t.update(draft_ids=torch.arange(1, 51)), "50 different ids below 50"),
        (lambda t: t.update({"fc.weight_scale": torch.ones(32)}), "fc.weight_scale does not belong"),
    ],
)
def test_bad_tensors(tmp_path: Path, change: Any, words: str) -> None:
    save_head(make(BLOCK), tmp_path, store_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, words)


def test_a_mask_and_offsets_that_disagree(tmp_path: Path) -> None:
    save_head(make(dataclasses.replace(BLOCK, draft_vocab_size=30)), tmp_path, format="speculators")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["t2d"] = ~tensors["t2d"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "t2d and d2t name different tokens")
    del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "the weights lack d2t")
