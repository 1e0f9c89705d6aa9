"""Answers sampled with a draft head have the target's law: chi-square against plain decoding's exact marginals.
A head that reports another law than it drew from must fail the same test."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats

from dspark.model.build import library
from dspark.model.runner import build_runner
from dspark.params import SamplingParams
from tests.fakes import make_engine, run
from tests.tiny_heads import BLOCK, tiny_head
from tests.tiny_models import tiny_model

VOCAB = 12
PROMPT = [3, 7, 5]
LENGTH = 3
NUM_RUNS = 1500
TOO_UNLIKELY = 1e-4


def marginals(model, temperature):
    """The exact law of the token at each of LENGTH positions, by transformers alone."""
    texts, found = {(): 1.0}, []
    for _ in range(LENGTH):
        law, longer = torch.zeros(VOCAB, dtype=torch.float64), {}
        batch = torch.tensor([[*PROMPT, *text] for text in texts])
        with torch.no_grad():
            logits = model(input_ids=batch, use_cache=False).logits[:, -1].double()
        rows = torch.softmax(logits / temperature, dim=-1)
        for (text, chance), row in zip(texts.items(), rows):
            law += chance * row
            longer |= {(*text, token): chance * float(row[token]) for token in range(VOCAB)}
        texts = longer
        found.append(law)
    return found


def p_value(answers, laws):
    worst = 1.0
    for position, law in enumerate(laws):
        counts = Counter(answer[position] for answer in answers)
        expected = (law * len(answers)).tolist()
        observed = [counts.get(token, 0) for token in range(VOCAB)]
        # Cells too small for the approximation are joined.
        big = [i for i, e in enumerate(expected) if e >= 5]
        rest = (sum(observed) - sum(observed[i] for i in big), sum(expected) - sum(expected[i] for i in big))
        cells = [(observed[i], expected[i]) for i in big] + ([rest] if rest[1] >= 1 else [])
        total = sum(e for _, e in cells)
        scaled = [e * sum(o for o, _ in cells) / total for _, e in cells]
        worst = min(worst, stats.chisquare([o for o, _ in cells], scaled).pvalue * len(laws))
    return worst


def sampled(model, head, temperature, *, lie=False):
    path = "native" if library() is not None else "torch"
    engine = make_engine(
        build_runner(model, path=path), head=head, max_seqs=32, num_pages=512, max_tokens=256, max_drafts=BLOCK
    )
    drafter = engine.speculator.drafter
    if lie:
        honest = drafter.propose

        def propose(*args, **options):
            drafts = honest(*args, **options)
            for draft in drafts:
                if draft.q is not None:
                    draft.q = (draft.q + 1.0 / VOCAB) / 2
            return drafts

        drafter.propose = propose
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH + 2)
    torch.manual_seed(0)
    seqs = run(engine, [PROMPT] * NUM_RUNS, params)
    record = engine.totals.record
    assert 0 < record.num_accepted < record.num_verified
    return [seq.output_token_ids for seq in seqs]


@pytest.mark.parametrize("temperature", (0.7, 1.0))
@pytest.mark.parametrize(
    "shape",
    (
        {"context": "target", "layers": (0, 2)},
        {"context": "fused", "layers": (0, 1, 2)},
        {"kind": "eagle3", "layers": (0, 1, 2)},
    ),
    ids=("target", "fused", "eagle3"),
)
def test_sampled_answers_have_the_targets_law(shape, temperature):
    model = tiny_model("llama", vocab_size=VOCAB)
    head = tiny_head(tiny_model("llama", vocab_size=VOCAB), draft_vocab=9, **shape)
    laws = marginals(tiny_model("llama", vocab_size=VOCAB), temperature)
    assert p_value(sampled(model, head, temperature), laws) > TOO_UNLIKELY


def test_a_head_that_lies_about_its_law_is_found_out():
    model = tiny_model("llama", vocab_size=VOCAB)
    head = tiny_head(tiny_model("llama", vocab_size=VOCAB))
    laws = marginals(tiny_model("llama", vocab_size=VOCAB), 1.0)
    assert p_value(sampled(model, head, 1.0, lie=True), laws) < TOO_UNLIKELY
