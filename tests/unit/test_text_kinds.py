"""TextKinds: recent tokens are called what they look like, and acceptance is learned by that too."""

from __future__ import annotations

import pytest

from dspark.engine.text_kinds import NUM_RECENT, TextKinds
from dspark.plan.acceptance import AcceptanceModel


@pytest.mark.parametrize(
    ("text", "kind"),
    (
        ("The quick brown fox jumps over the lazy dog, and then it sleeps.", "prose"),
        ("for (int i = 0; i < n; ++i) { a[i] = b[i]; }", "code"),
        ("<td><b>x</b></td><td>|</td>", "markup"),
        ("12 345 6789 10", "numbers"),
        ("\u0422\u0435\u043a\u0441\u0442 \u043f\u043e-\u0440\u0443\u0441\u0441\u043a\u0438", "script"),
        ("\u00e9l\u00e8ve na\u00efve", "prose"),
        ("", "prose"),
    ),
)
def test_a_text_is_called_what_it_looks_like(text, kind):
    kinds = TextKinds(lambda ids: "".join(map(chr, ids)))
    assert kinds([ord(char) for char in text]) == kind


def test_only_recent_tokens_count_and_each_is_decoded_once():
    calls = []

    def decode(ids):
        calls.append(ids)
        return "{" if ids == [1] else "word"

    kinds = TextKinds(decode)
    assert kinds([1] * 50) == "code"
    assert kinds([1] * 50 + [2] * NUM_RECENT) == "prose"
    assert kinds([2] * 50 + [1] * NUM_RECENT) == "code"
    assert calls == [[1], [2]]


def test_acceptance_is_learned_by_kind_of_text():
    """The same request and class, drafts that hold in code and fail in prose: each starts at its own after a change."""
    model = AcceptanceModel()
    for seq_id in range(20):
        model.begin(seq_id, "t")
        for step in range(20):
            kind, holds = ("code", 3) if step // 5 % 2 else ("prose", 0)
            model.read(seq_id, kind)
            model.update(seq_id, "x", (0.7, 0.5, 0.35), num_verified=3, num_accepted=holds)
        model.forget(seq_id)
    foreseen = {}
    for kind in ("code", "prose", "never seen"):
        model.begin(99, "t")
        model.read(99, kind)
        foreseen[kind] = (model.survival(99, "x", (0.7,))[0], model.foresee(99, "x", 1)[0])
    for code, other, prose in zip(foreseen["code"], foreseen["never seen"], foreseen["prose"]):
        assert code > 0.75 > other > prose and prose < 0.4
