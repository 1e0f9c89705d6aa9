"""Tokenizer: text, ids and bytes agree, and a stream joins to the decoded whole.
It must never need the network: both kinds of vocabulary are built here; a converted model is used only if cached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dspark.model import registry
from dspark.model.tokenizer import Tokenizer

TEXTS = ["", "hello  world", " lead", "naïve café\n\n\t日本語 🙂 don't", "12345 + 678", "a\r\nb\x00c"]


def _byte_level(folder: Path) -> Path:
    vocab = {"<|endoftext|>": 0, "<|im_end|>": 1}
    for character in bytes_to_unicode().values():
        vocab[character] = len(vocab)
    merges = [("h", "e"), ("Ġ", "w"), ("Ã", "¯")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool é>", special=False), AddedToken("two words", special=False)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(folder)
    return folder


def _pieces(folder: Path) -> Path:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", "h", "e", "l", "o", "w", "r", "d", "a", "1", "2", "é", "日", "▁w", "▁▁", "he", "▁a"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "w"), ("▁", "▁"), ("h", "e"), ("▁", "a")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def _metaspace(folder: Path) -> Path:
    """A decoder that is neither of the two exact kinds: streamed over a window."""
    pieces = ["▁", "a", "b", "▁a", "▁b", "日", "c"]
    backend = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


BUILDERS = {"byte_level": _byte_level, "pieces": _pieces, "metaspace": _metaspace}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: Tokenizer(build(tmp_path_factory.mktemp(name))) for name, build in BUILDERS.items()}


def _join(tokenizer: Tokenizer, ids: list[int], **kwargs) -> str:
    stream = tokenizer.stream(**kwargs)
    return "".join(stream.push(token) for token in ids) + stream.flush()


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), length=st.integers(0, 40), skip=st.booleans())
def test_stream_joins_to_decode(kind, tokenizers, seed, length, skip):
    tokenizer = tokenizers[kind]
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.num_tokens) for _ in range(length)]
    assert _join(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_by_text_bytes_and_stream(kind, text, tokenizers):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert _join(tokenizer, ids) == text
    raw = b"".join(tokenizer.token_bytes(token) for token in ids).decode("utf-8")
    assert raw.removeprefix(" " if kind == "pieces" and not text.startswith(" ") else "").lstrip() == text.lstrip()


@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_no_piece_holds_half_a_character(kind, tokenizers):
    tokenizer = tokenizers[kind]
    text = "a 🙂 日本 é w"
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # some token ended inside a character
    assert "".join(pieces) + stream.flush() == text


def test_stream_releases_text_early(tokenizers):
    tokenizer = tokenizers["byte_level"]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("he w")] == ["he", " w"]


def test_flush_reports_an_incomplete_character(tokenizers):
    tokenizer = tokenizers["byte_level"]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("🙂")[:-1]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_invalid_byte_run_is_one_replacement_a_byte(tokenizers):
    tokenizer = tokenizers["pieces"]
    ids = [tokenizer.vocabulary()[token] for token in ("a", "<0xE6>", "<0x97>", "<0xFF>", "e")]
    assert _join(tokenizer, ids) == "a\ufffd\ufffd\ufffde" == tokenizer.decode(ids)


@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_stream_goes_on_from_the_prompt(kind, cut, tokenizers):
    tokenizer = tokenizers[kind]
    text = "he w 🙂 a w"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream()
    final = "".join(stream.push(token) for token in ids[:cut])
    assert final + _join(tokenizer, ids[cut:], prompt_ids=ids[:cut]) == text


def test_long_prompts_keep_the_leading_space(tokenizers):
    tokenizer = tokenizers["pieces"]
    prompt = tokenizer.encode("a" * 200, add_special_tokens=False)
    answer = [tokenizer.vocabulary()["▁w"]]
    assert _join(tokenizer, answer, prompt_ids=prompt) == " w"
    assert _join(tokenizer, answer) == "w"


def test_token_bytes_of_every_kind(tokenizers):
    byte_level, pieces = tokenizers["byte_level"], tokenizers["pieces"]
    singles = {byte_level.token_bytes(byte_level.vocabulary()[c]) for c in bytes_to_unicode().values()}
    assert singles == {bytes([value]) for value in range(256)}
    assert byte_level.token_bytes(byte_level.vocabulary()["<tool é>"]) == "<tool é>".encode()
    assert byte_level.token_bytes(byte_level.vocabulary()["two words"]) == b"two words"
    assert pieces.token_bytes(pieces.vocabulary()["<0xE6>"]) == b"\xe6"
    assert pieces.token_bytes(pieces.vocabulary()["▁▁"]) == b"  "
    for tokenizer in tokenizers.values():
        assert tokenizer.token_bytes(tokenizer.num_tokens) == b"" == tokenizer.token_bytes(-1)


def test_padding_ids_give_nothing(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = [*tokenizer.encode("he"), tokenizer.num_tokens + 3]
    assert _join(tokenizer, ids) == "he" == tokenizer.decode(ids)


def test_specials(tokenizers):
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.bos_token_id is None
    ids = tokenizer.encode("he<|im_end|>")
    assert tokenizer.decode(ids) == "he" == _join(tokenizer, ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|im_end|>"
    assert _join(tokenizer, ids, skip_special_tokens=False) == "he<|im_end|>"
    pieces = tokenizers["pieces"]
    assert pieces.encode("a")[0] == pieces.bos_token_id == 1
    assert pieces.encode("a", add_special_tokens=False)[0] != 1


def test_chat_template(tokenizers):
    tokenizer = tokenizers["byte_level"]
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}w{% endif %}"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], chat_template=template)
    assert ids == [tokenizer.vocabulary()[token] for token in ("he", "<|im_end|>", "w")]
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "he"}])
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.apply_chat_template([{}], chat_template="{{ raise_exception('roles must alternate') }}")


def test_missing_tokenizer_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no usable tokenizer") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_cached_smollm2_splits_digits_and_streams():
    row = next(row for row in registry.list_models() if row.name == "smollm2-135m")
    if row.path is None:
        pytest.skip("smollm2-135m is not in the cache")
    tokenizer = Tokenizer(row.path)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12345")] == list("12345")
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.num_tokens) for _ in range(rng.randrange(30))]
        assert _join(tokenizer, ids) == tokenizer.decode(ids)
