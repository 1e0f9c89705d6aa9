"""A model object's own generate, its assisted generation, and dspark.integrations.hf over the same prompts in one run.

    python benchmarks/hf_integration.py smollm2-135m --data benchmarks/prompts --out benchmarks/results

Participants: `generate`, `lookup` (prompt_lookup_num_tokens), `assisted` (with --draft), and dspark by draft and path,
such as `suffix` (the model's own weights) and `suffix native` (a packed copy). They take turns prompt by prompt, and
whoever comes first moves on; each repetition has fresh engines, so that no answer is copied from an earlier one to the
same prompt. Greedy, one stream. tokens/s: tokens of the answer / seconds of the whole call, prompt included. It must
never drop a prompt for one participant only.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.bench.data import PromptRow, encode_rows, load_rows
from dspark.bench.peers import PROMPT_LOOKUP_TOKENS, PeerSettings, load_peer
from dspark.bench.report import free_stem
from dspark.bench.stats import Interval, bootstrap_ratio, median, ratio_of_medians
from dspark.integrations import hf
from dspark.model.load import resolve
from dspark.model.tokenizer import Tokenizer
from dspark.provenance import provenance

BASE = "generate"
PEERS = (BASE, "lookup", "assisted")
WARM_UP = "Write one sentence about the sea."
Call = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One call. `same`: the tokens are those of `generate` in the same repetition."""

    task: str
    id: str
    participant: str
    repetition: int
    num_tokens: int
    seconds: float
    same: bool = True

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = resolve(args.model)
    settings = PeerSettings(model=folder, dtype=args.dtype, device=args.device)
    peer, own = load_peer(folder, settings=settings), load_peer(folder, settings=settings)
    draft = load_peer(resolve(args.draft), settings=settings) if args.draft else None
    tokenizer = Tokenizer(folder)
    rows = load_rows(args.data, per_task=args.per_task)
    prompts = encode_rows(rows, tokenizer)
    [warm_up] = encode_rows([PromptRow(task="", id="", messages=({"role": "user", "content": WARM_UP},))], tokenizer)
    answers: list[Answer] = []
    for repetition in range(args.repeat):
        hf.forget(own)
        calls = participants(args, peer, own, draft, tokenizer)
        for call in calls.values():
            call(torch.tensor([warm_up]))
        for number, (row, prompt) in enumerate(zip(rows, prompts)):
            answers += turn(calls, row, prompt, number=number, repetition=repetition)
            print(f"{repetition + 1}: {number + 1}/{len(rows)} {row.task} {row.id}", file=sys.stderr, flush=True)
    head = provenance(sys.argv, config=vars(args), threads=torch.get_num_threads(), device=args.device)
    lines = summary(answers, rows)
    print("\n".join(shown(line) for line in lines))
    if args.out:
        write(args, head, lines, answers)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("--data", nargs="+", default=["benchmarks/prompts"], metavar="PATH")
    add("--draft", default=None, metavar="MODEL", help="a draft model, for `assisted` and for dspark")
    add("--dspark", default="suffix,auto", metavar="DRAFTS", help="other drafts of dspark (%(default)s)")
    add("--paths", default="shared,native", help="(%(default)s)")
    add("--lookup-tokens", type=int, default=PROMPT_LOOKUP_TOKENS, metavar="N", help="(%(default)s)")
    add("--per-task", type=int, default=None, metavar="N")
    add("--max-tokens", type=int, default=128, metavar="N")
    add("--repeat", type=int, default=3, metavar="N")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", default="cpu")
    add("--threads", type=int, default=None, metavar="N")
    add("--out", default=None, metavar="DIR")
    add("--name", default=None)
    return parser.parse_args()


def participants(args: argparse.Namespace, peer: Any, own: Any, draft: Any, tokenizer: Tokenizer) -> dict[str, Call]:
    """By name, prompt (1, L) -> tokens (1, L + N). Both models are the same; `own` is dspark's."""

    def theirs(**options: Any) -> Call:
        return lambda ids: peer.generate(ids, **ask(args, ids), **options)

    def ours(draft: Any, path: str) -> Call:
        options = {"draft": draft, "engine": {"path": path, "max_num_seqs": 1}, "tokenizer": tokenizer.hf}
        return lambda ids: hf.generate(own, ids, **ask(args, ids), **options)

    calls = {BASE: theirs(), "lookup": theirs(prompt_lookup_num_tokens=args.lookup_tokens)}
    if draft is not None:
        calls["assisted"] = theirs(assistant_model=draft)
    for path in args.paths.split(","):
        word = "" if path == "shared" else f" {path}"
        calls |= {f"{name}{word}": ours(name, path) for name in args.dspark.split(",") if name}
        if draft is not None:
            calls[f"draft model{word}"] = ours(draft, path)
    return calls


def ask(args: argparse.Namespace, ids: torch.Tensor) -> dict[str, Any]:
    return {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": args.max_tokens,
        "do_sample": False,
        "repetition_penalty": 1.0,
    }


def turn(
    calls: dict[str, Call], row: PromptRow, prompt: Sequence[int], *, number: int, repetition: int
) -> list[Answer]:
    """Every participant once on one prompt."""
    names = list(calls)
    shift = (number + repetition) % len(names)
    found: dict[str, tuple[list[int], float]] = {}
    for name in [*names[shift:], *names[:shift]]:
        ids = torch.tensor([list(prompt)])
        start = time.perf_counter()
        output = calls[name](ids)
        found[name] = output[0, len(prompt) :].tolist(), time.perf_counter() - start
    plain = found[BASE][0]
    return [
        Answer(
            task=row.task,
            id=row.id,
            participant=name,
            repetition=repetition,
            num_tokens=len(found[name][0]),
            seconds=found[name][1],
            same=found[name][0] == plain,
        )
        for name in names
    ]


def summary(answers: Sequence[Answer], rows: Sequence[PromptRow]) -> list[dict[str, Any]]:
    """A participant a line: tokens/s, and the speedup over `generate` and over the better of its assisted ones with 95%
    bootstrap intervals over paired prompts, each prompt the median over its repetitions."""
    names = list(dict.fromkeys(answer.participant for answer in answers))
    rates = {
        (name, row.task, row.id): median(
            [a.rate for a in answers if (a.participant, a.task, a.id) == (name, row.task, row.id)]
        )
        or 0.0
        for name in names
        for row in rows
    }
    by_name = {name: [rates[name, row.task, row.id] for row in rows] for name in names}
    best = max((name for name in names if name in PEERS[1:]), key=lambda name: median(by_name[name]) or 0.0)

    def against(base: str, name: str) -> tuple[float, Interval | None]:
        pairs = list(zip(by_name[base], by_name[name]))
        return ratio_of_medians(pairs), bootstrap_ratio(pairs)

    lines = []
    for name in names:
        mine = [answer for answer in answers if answer.participant == name]
        over, within = against(BASE, name)
        over_best, within_best = against(best, name)
        lines.append(
            {
                "participant": name,
                "num_prompts": len(rows),
                "tokens_per_second": median(by_name[name]),
                "speedup": over,
                "interval": within,
                "best_assisted": best,
                "speedup_over_best_assisted": over_best,
                "interval_over_best_assisted": within_best,
                "same_text": sum(answer.same for answer in mine),
                "num_answers": len(mine),
            }
        )
    return lines


def shown(line: dict[str, Any]) -> str:
    def span(interval: Interval | None) -> str:
        return f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""

    return (
        f"{line['participant']:<20} {line['tokens_per_second']:7.1f} tokens/s  {line['speedup']:.2f}"
        f"{span(line['interval'])} of generate  {line['speedup_over_best_assisted']:.2f}"
        f"{span(line['interval_over_best_assisted'])} of {line['best_assisted']}  "
        f"same text {line['same_text']}/{line['num_answers']}"
    )


def write(
    args: argparse.Namespace, head: dict[str, Any], lines: Sequence[dict[str, Any]], answers: Sequence[Answer]
) -> None:
    """JSON lines: provenance, the summary, every answer."""
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, f"{args.name or Path(args.model).name}-hf-integration", date=datetime.date.today())
    parts = [head, *lines, *(dataclasses.asdict(answer) for answer in answers)]
    path = stem.with_name(f"{stem.name}.jsonl")
    path.write_text("\n".join(json.dumps(part) for part in parts) + "\n", encoding="utf-8")
    print(f"written {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
