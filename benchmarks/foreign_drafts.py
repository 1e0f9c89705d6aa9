"""How many tokens of a text a draft model of another family gets right, by how it reads and how it drafts.

    python benchmarks/foreign_drafts.py qwen2.5-coder-1.5b smollm2-135m --data FOLDER --per-task 6

Texts are the reference answers of HumanEval and GSM8K in the target's tokens, so that no target has to run. At every
third place the draft model writes `--tokens` of its own tokens, greedily. Reading "by piece" writes each target token
apart in the draft's tokens, "as written" writes the text as the draft's tokenizer does (what dspark does). Drafting "by
shared tokens" and "by text": docs/choosing-a-draft.md. Counts, no times: they do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from dspark.draft.vocab import SharedVocabulary
from dspark.model.load import resolve
from dspark.model.tokenizer import Tokenizer
from dspark.provenance import provenance

EVERY = 3
LONGEST = 60


class Model:
    """A language model over one growing sequence that keeps what does not change."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache()
        self.tokens: list[int] = []

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """(W,) behind the last token."""
        same = 0
        while same < min(len(tokens) - 1, len(self.tokens)) and tokens[same] == self.tokens[same]:
            same += 1
        if same < len(self.tokens):
            self.cache.crop(same - len(self.tokens))
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([tokens[same:]]), past_key_values=self.cache)
        self.tokens = tokens
        return out.logits[0, -1].float()


def texts(folder: Path, count: int) -> Iterator[tuple[str, str]]:
    """Prompts with their reference answers."""
    for line in (folder / "humaneval.jsonl").read_text().splitlines()[:count]:
        row = json.loads(line)
        yield row["prompt"], row["canonical_solution"]
    for line in (folder / "gsm8k.jsonl").read_text().splitlines()[:count]:
        row = json.loads(line)
        yield f"Question: {row['question']}\nAnswer: ", row["answer"]


def draft(model: Model, words: SharedVocabulary, view: list[int], *, by_text: bool, count: int) -> list[int]:
    """`count` own tokens behind `view`, told in the target's."""
    own: list[int] = []
    for _ in range(count):
        logits = model.logits(view + own)
        own.append(int(logits.argmax()) if by_text else int(words.draft_ids[logits[words.draft_ids].argmax()]))
    if by_text:
        return words.retell(own)[0]
    told = {theirs: ours for ours, theirs in words.to_draft.items()}
    return [told[token] for token in own]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4)
    args = parser.parse_args(argv)
    target, own = Tokenizer(resolve(args.target)), Tokenizer(resolve(args.draft))
    loaded = AutoModelForCausalLM.from_pretrained(resolve(args.draft), dtype=torch.float32)
    words = SharedVocabulary(target, own, max_target=target.num_tokens, max_draft=loaded.config.vocab_size)
    found: dict[str, list[int]] = {}
    for prompt, answer in texts(args.data, args.per_task):
        start, ids = own.encode(prompt), target.encode(answer, add_special_tokens=False)[:LONGEST]
        models = {(read, by_text): Model(loaded) for read in (0, 1) for by_text in (False, True)}
        for place in range(1, len(ids) - args.tokens - 1, EVERY):
            pieces = [piece for token in ids[:place] for piece in words.spell(token) or ()]
            views = (pieces, words.write(target.decode(ids[:place])))
            for (read, by_text), model in models.items():
                told = draft(model, words, start + views[read], by_text=by_text, count=args.tokens)
                right = 0
                while right < min(len(told), len(ids) - place) and told[right] == ids[place + right]:
                    right += 1
                name = f"{('by piece', 'as written')[read]}, {'by text' if by_text else 'by shared tokens'}"
                found.setdefault(name, []).append(right)
    means = {name: round(sum(counts) / len(counts), 3) for name, counts in found.items()}
    places = len(next(iter(found.values())))
    head = provenance(
        sys.argv if argv is None else argv, config=vars(args) | {"data": str(args.data)}, threads=1, device="cpu"
    )
    print(json.dumps({"right": means, "places": places, "shared": len(words), "provenance": head}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
