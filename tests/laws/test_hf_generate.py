"""dspark.integrations.hf answers as model.generate does, whatever drafts, and refuses by name what it cannot honour."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers

from dspark.integrations import hf
from dspark.model.native import library
from tests.fakes import random_prompts
from tests.tiny_folder import tiny_folder
from tests.tiny_models import FAMILIES, tiny_model

VOCAB = 96
NEW = 20
PAD = 0
SUFFIX = {"method": "suffix", "policy": "fixed"}
PLAIN = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}

OURS = {**PLAIN, "draft": SUFFIX}


def by(model: Any, **settings: Any) -> dict[str, Any]:
    """Drafts by a model object, of one length, so that nothing is measured."""
    return {"model": model, "policy": "fixed", "num_speculative_tokens": 4, **settings}


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows of one length, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def prompts(count: int = 4) -> list[list[int]]:
    """Some repeat themselves, so that lookup has something to say."""
    return [prompt + prompt[:3] for prompt in random_prompts(count, vocab_size=VOCAB)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama", vocab_size=VOCAB)


@pytest.mark.parametrize("path", ("shared", "general", "native"))
def test_greedy_text_is_transformers(model: Any, path: str) -> None:
    if path == "native" and library() is None:
        pytest.skip("no C++ compiler for the native path")
    batch = padded(prompts())
    wanted = model.generate(**batch, **PLAIN)
    for draft in (None, SUFFIX, {"method": "ngram", "num_speculative_tokens": 3, "policy": "fixed"}):
        got = hf.generate(model, **batch, **PLAIN, draft=draft, engine={"path": path, "check": True})
        assert torch.equal(got, wanted), draft


def test_another_model_drafts(model: Any) -> None:
    """One that is always right, as it is the same, and one that is not."""
    batch = padded(prompts())
    wanted = model.generate(**batch, **PLAIN)
    for draft in (by(copy.deepcopy(model)), by(tiny_model("llama", vocab_size=VOCAB, seed=7))):
        assert torch.equal(hf.generate(model, **batch, **PLAIN, draft=draft, engine={"check": True}), wanted)
        record = hf.engine_of(model, draft=draft, engine={"check": True}).stats.record
        assert record.num_drafted > 0
        if draft["model"].config.model_type == model.config.model_type != "llama":
            assert record.mean_accepted_length > 3, "the same model is not always right"


def test_what_is_drafted_is_accepted(llama: Any) -> None:
    """The integration does draft: a perfect draft needs fewer passes than tokens."""
    settings: dict[str, Any] = {"draft": by(copy.deepcopy(llama)), "engine": {"check": True}}
    hf.generate(llama, **padded(prompts()), **PLAIN, **settings)
    record = hf.engine_of(llama, **settings).stats.record
    assert record.num_accepted > 0 and record.mean_accepted_length > 1.5


CASES: dict[str, dict[str, Any]] = {
    "ends": {"eos_token_id": [5, 17, 40, 63], "max_new_tokens": 40},
    "least": {"eos_token_id": [5, 17, 40, 63], "min_new_tokens": 9},
    "min_length": {"eos_token_id": [5, 17, 40, 63], "min_length": 18},
    "max_length": {"max_length": 36, "max_new_tokens": None},
    "penalty": {"repetition_penalty": 1.4},
    "greedy with a law": {"temperature": 0.5, "top_k": 3, "repetition_penalty": 0.7},
    "no end": {"eos_token_id": None},
    "beyond the vocabulary": {"eos_token_id": [VOCAB + 3, 17]},
    "one token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize(
    ("case", "through"),
    [*((case, "generate") for case in CASES), ("ends", "custom_generate"), ("least", "generation_config")],
)
def test_settings_mean_what_they_mean_there(llama: Any, case: str, through: str) -> None:
    batch, settings = padded(prompts()), {**PLAIN, **CASES[case]}
    wanted = llama.generate(**batch, **settings)
    if through == "generate":
        got = hf.generate(llama, **batch, **settings, draft=SUFFIX)
    elif through == "custom_generate":
        got = llama.generate(**batch, **settings, custom_generate=hf.custom_generate, draft=SUFFIX)
    else:
        got = hf.generate(llama, **batch, generation_config=transformers.GenerationConfig(**settings), draft=SUFFIX)
    assert torch.equal(got, wanted)


def test_padding_that_nobody_masked(llama: Any) -> None:
    """Without a mask transformers takes it from the padding; so must we."""
    ids = padded(prompts())["input_ids"]
    assert torch.equal(hf.generate(llama, ids, **OURS), llama.generate(ids, **PLAIN))


def test_sequences_in_an_object(llama: Any) -> None:
    got = hf.generate(llama, **padded(prompts()), **OURS, return_dict_in_generate=True)
    assert isinstance(got, transformers.generation.GenerateDecoderOnlyOutput)
    assert torch.equal(got.sequences, llama.generate(**padded(prompts()), **PLAIN))


class AfterToken(transformers.StoppingCriteria):
    """Ends a row with a token, or at a length."""

    def __init__(self, token: int, most: int) -> None:
        self.token, self.most = token, most

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return (input_ids[:, -1] == self.token) | (input_ids.shape[1] >= self.most)


def test_stopping_criteria(llama: Any) -> None:
    """Asked after each token, drafted or not: the first that ends a row does."""
    batch = padded(prompts())
    plain = llama.generate(**batch, **PLAIN)
    width = batch["input_ids"].shape[1]
    token = int(plain[1, width + 4])
    settings = {**PLAIN, "eos_token_id": [VOCAB - 1]}
    for criterion in (AfterToken(token, 10**6), AfterToken(-1, width + 7), AfterToken(token, width + 3)):
        criteria = transformers.StoppingCriteriaList([criterion])
        wanted = llama.generate(**batch, **settings, stopping_criteria=criteria)
        got = hf.generate(llama, **batch, **settings, stopping_criteria=criteria, draft=by(copy.deepcopy(llama)))
        assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match="eos_token_id"):
        hf.generate(llama, **batch, **OURS, stopping_criteria=criteria)


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model and a tokenizer, loaded by transformers."""
    folder = tiny_folder(tmp_path_factory.mktemp("worded"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_stop_strings(worded: tuple[Any, Any]) -> None:
    model, tokenizer = worded
    ids = tokenizer("hello hello", return_tensors="pt")["input_ids"]
    text = tokenizer.decode(model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :])
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isprintable() and text[i] != "\ufffd")
    settings = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer, "stop_strings": [stop]}
    wanted = model.generate(ids, **settings)
    assert wanted.shape[1] < ids.shape[1] + NEW, "the stop string does not stop"
    assert torch.equal(hf.generate(model, ids, **settings, draft=SUFFIX), wanted)
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, stop_strings=[stop])
    assert torch.equal(hf.generate(model, ids, generation_config=config, tokenizer=tokenizer), wanted)
    assert config.stop_strings == [stop], "the caller's own config was changed"
    with pytest.raises(ValueError, match="tokenizer"):
        hf.generate(model, ids, max_new_tokens=NEW, stop_strings=[stop])


def test_a_streamer_gets_the_text(worded: tuple[Any, Any]) -> None:
    model, tokenizer = worded
    ids = tokenizer("abc abc abc", return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": NEW, "do_sample": False}
    for skip in (True, False):
        texts = []
        for call in (model.generate, lambda *args, **kwargs: hf.generate(model, *args, **kwargs)):
            streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=skip, timeout=60)
            thread = threading.Thread(target=call, args=(ids,), kwargs={**settings, "streamer": streamer})
            thread.start()
            texts.append("".join(streamer))
            thread.join()
        assert texts[0] == texts[1] and texts[0]


class Columns(transformers.generation.streamers.BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.over = False

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.over = True


def test_a_streamer_of_several_rows(llama: Any) -> None:
    settings = {**PLAIN, "eos_token_id": [5, 17, 40, 63]}
    ours, theirs = Columns(), Columns()
    wanted = llama.generate(**padded(prompts()), **settings, streamer=theirs)
    got = hf.generate(llama, **padded(prompts()), **settings, streamer=ours, draft=by(copy.deepcopy(llama)))
    assert torch.equal(got, wanted) and ours.over and ours.seen == theirs.seen


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3]]},
    "suppress_tokens": {"suppress_tokens": [3]},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.1},
    "sequence_bias": {"sequence_bias": {(3,): 2.0}},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "assistant_model": {"assistant_model": object()},
    "past_key_values": {"past_key_values": transformers.DynamicCache()},
    "min_p beside top_p": {"do_sample": True, "min_p": 0.1, "top_p": 0.9},
    "PrefixConstrained": {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2, 3]},
    "context": {"max_new_tokens": 600},
    "guidance_scale": {"guidance_scale": 1.5},
    "draft": {"draft": "no-such-model-anywhere/at/all"},
    "device": {"engine": {"device": "cpu"}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(llama: Any, name: str) -> None:
    batch = padded(prompts(1))
    with pytest.raises(ValueError, match=name.split(" ")[0] if name != "draft" else "no-such-model"):
        hf.generate(llama, **batch, **{**OURS, **REFUSED[name]})


class OwnProcessor(transformers.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_processors_of_others(llama: Any) -> None:
    batch = padded(prompts())
    with pytest.raises(ValueError, match="OwnProcessor"):
        hf.generate(llama, **batch, **OURS, logits_processor=transformers.LogitsProcessorList([OwnProcessor()]))
    known = transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.3)])
    settings = {**PLAIN, "logits_processor": known}
    with pytest.raises(ValueError, match="counts padding"):  # transformers' own use of it counts padding as said
        hf.generate(llama, **batch, **settings, draft=SUFFIX)
    batch = padded(prompts(1))
    assert torch.equal(hf.generate(llama, **batch, **settings, draft=SUFFIX), llama.generate(**batch, **settings))


def test_masks_that_are_no_left_padding(llama: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    for mask in ([1, 1, 1, 0], [1, 0, 1, 1]):
        with pytest.raises(ValueError, match="attention_mask"):
            hf.generate(llama, ids, attention_mask=torch.tensor([mask]), **OURS)


def test_models_outside() -> None:
    small = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        hf.generate(transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).eval(), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="training mode"):
        hf.generate(tiny_model("llama").train(), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="not a causal language model"):
        hf.generate(torch.nn.Linear(2, 2), torch.tensor([[1]]))
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="Mamba"):
        hf.generate(transformers.MambaForCausalLM(config).eval(), torch.tensor([[1, 2]]), max_new_tokens=2)


def test_weights_are_shared_and_changes_seen(llama: Any) -> None:
    model = copy.deepcopy(llama)
    batch = padded(prompts())
    hf.generate(model, **batch, **OURS)
    engine = hf.engine_of(model, draft=SUFFIX)
    runner = engine.engine.runner
    own = model.model.layers[0].mlp.down_proj.weight
    assert runner.name == "torch"
    assert any(own.data_ptr() == tensor.data_ptr() for tensor in _tensors(runner)), "the path holds a copy"
    assert hf.engine_of(model, draft=SUFFIX) is engine, "made anew for each call"
    with torch.no_grad():
        own.add_(0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0)))
        model.model.norm.weight.mul_(1.5)
    wanted = model.generate(**batch, **PLAIN)
    assert not torch.equal(wanted, llama.generate(**batch, **PLAIN))
    assert torch.equal(hf.generate(model, **batch, **OURS), wanted)


def _tensors(root: Any) -> list[torch.Tensor]:
    """All tensors that an object reaches through its attributes."""
    found, seen, stack = [], set(), [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, (str, int, float, type)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found += [thing] if thing.layout == torch.strided and not thing.is_mkldnn else []
        elif isinstance(thing, dict):
            stack.extend(thing.values())
        elif isinstance(thing, (list, tuple)):
            stack.extend(thing)
        elif hasattr(thing, "__dict__"):
            stack.extend(vars(thing).values())
    return found


def test_hooks_take_the_general_path(llama: Any) -> None:
    """A hook changes what a layer gives; a path over the bare weights would not see it."""
    model = copy.deepcopy(llama)
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * 1.3)
    batch = padded(prompts())
    wanted = model.generate(**batch, **PLAIN)
    assert not torch.equal(wanted, llama.generate(**batch, **PLAIN))
    assert torch.equal(hf.generate(model, **batch, **OURS), wanted)
    with pytest.raises(ValueError, match="hook"):
        hf.generate(model, **batch, **OURS, engine={"path": "torch"})


@pytest.mark.parametrize("path", ("shared", "general"))
def test_all_goes_with_the_model(path: str, tmp_path: Any) -> None:
    model = tiny_model("qwen2", vocab_size=VOCAB)
    same: dict[str, Any] = {"draft": SUFFIX, "engine": {"path": path}}
    hf.generate(model, **padded(prompts()), **PLAIN, **same)
    twin = copy.deepcopy(model)
    assert hf.engine_of(twin, **same) is not hf.engine_of(model, **same)
    twin.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(**padded(prompts()), **PLAIN), model.generate(**padded(prompts()), **PLAIN))
    gone, kept = weakref.ref(model), weakref.ref(hf.engine_of(model, **same))
    del model
    gc.collect()
    assert gone() is None and kept() is None


def test_a_call_that_fails_leaves_nothing(llama: Any) -> None:
    class Faulty(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            raise KeyError("mine")

    batch = padded(prompts(1))
    with pytest.raises(KeyError, match="mine"):
        hf.generate(llama, **batch, **OURS, stopping_criteria=transformers.StoppingCriteriaList([Faulty()]))
    assert not hf.engine_of(llama, draft=SUFFIX).engine.has_work
    assert torch.equal(hf.generate(llama, **batch, **OURS), llama.generate(**batch, **PLAIN))


def test_the_real_model(smollm2: Any) -> None:
    """In float32, where argmax has no ties worth the name; the head that comes with dspark is found by the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["Repeat: one two three four five. One two", "def add(a, b):\n"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(**batch, **settings)
    for method in ("suffix", "dspark"):
        draft = {"method": method, "policy": "fixed", "num_speculative_tokens": 4}
        assert torch.equal(hf.generate(model, **batch, **settings, draft=draft), wanted)
        assert hf.engine_of(model, draft=draft).stats.record.num_accepted > 0
