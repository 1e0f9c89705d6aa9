"""Compilers of grammars on JSON schemas: what they take, how long they compile, mask and take back, and whether walks
of their legal tokens validate. Both must be installed: pip install llguidance xgrammar jsonschema.

    python benchmarks/grammars.py smollm2-135m --schemas FOLDER/jsonschema.jsonl --out DIR
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np

LONGEST_WALK = 300
BACK = 5
ENDING = ['"', "}", "]", '"}', '"]', "}}", '",', ",", ":", "1", "true"]
"""Tokens that a walk takes nine times in ten where they are legal, so that it comes to an end."""


class Llguidance:
    name = "llguidance"

    def __init__(self, tokenizer: Any, width: int, eos: Sequence[int]) -> None:
        import llguidance.hf

        self.words = llguidance.hf.from_tokenizer(tokenizer, n_vocab=width, eos_token=list(eos))
        self.mask = np.zeros((1, (width + 31) // 32), np.int32)

    def compile(self, schema: Any) -> Any:
        from llguidance import LLMatcher

        found = LLMatcher(self.words, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if found.is_error():
            raise ValueError(found.get_error())
        return found

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.try_consume_tokens([token]))

    def rollback(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.is_accepting())


class Xgrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Any, width: int, eos: Sequence[int]) -> None:
        import torch
        import xgrammar  # type: ignore[import-not-found]

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=width, stop_token_ids=list(eos))
        self.compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self.make = xgrammar.GrammarMatcher
        self.tensor = torch.zeros((1, (width + 31) // 32), dtype=torch.int32)
        self.mask = self.tensor.numpy()
        self.eos = set(eos)

    def compile(self, schema: Any) -> Any:
        return self.compiler.compile_json_schema(json.dumps(schema))

    def matcher(self, compiled: Any) -> Any:
        return self.make(compiled)

    def fill(self, matcher: Any) -> None:
        if not matcher.fill_next_token_bitmask(self.tensor):
            self.mask.fill(-1)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def rollback(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def ended(self, matcher: Any) -> bool:
        return bool(matcher.is_completed()) if hasattr(matcher, "is_completed") else bool(matcher.is_terminated())


def legal(mask: Any, width: int) -> Any:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:width])


def walk(engine: Any, compiled: Any, width: int, rng: random.Random, likely: set[int], eos: set[int]) -> dict[str, Any]:
    """A random answer: its tokens, whether it ended, and seconds of each kind of call."""
    matcher = engine.matcher(compiled)
    tokens: list[int] = []
    times: dict[str, list[float]] = defaultdict(list)
    ended = False
    for _ in range(LONGEST_WALK):
        start = time.perf_counter()
        engine.fill(matcher)
        times["mask"].append(time.perf_counter() - start)
        choices = legal(engine.mask[0], width).tolist()
        if engine.ended(matcher) and (not choices or set(choices) & eos):
            ended = True
            break
        choices = [token for token in choices if token not in eos]
        if not choices:
            break
        short = [token for token in choices if token in likely]
        token = rng.choice(short) if short and rng.random() < 0.9 else rng.choice(choices)
        start = time.perf_counter()
        taken = engine.accept(matcher, token)
        times["accept"].append(time.perf_counter() - start)
        if not taken:
            return {
                "tokens": tokens,
                "ended": False,
                "times": times,
                "fault": f"token {token} was legal and is refused",
            }
        tokens.append(token)
        if len(tokens) % 10 == 0 and len(tokens) >= BACK:
            start = time.perf_counter()
            engine.rollback(matcher, BACK)
            times["rollback"].append(time.perf_counter() - start)
            for again in tokens[-BACK:]:
                engine.accept(matcher, again)
    return {"tokens": tokens, "ended": ended, "times": times, "fault": None}


def measure(engine: Any, rows: Sequence[dict], tokenizer: Any, width: int, eos: set[int]) -> list[dict[str, Any]]:
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in ENDING]
    likely = {ids[0] for ids in encoded if len(ids) == 1}
    results = []
    for row in rows:
        result: dict[str, Any] = {"id": row["id"], "source": row["source"], "engine": engine.name}
        start = time.perf_counter()
        try:
            compiled = engine.compile(row["schema"])
            matcher = engine.matcher(compiled)
            engine.fill(matcher)
        except Exception as error:  # each has kinds of its own
            results.append(result | {"refused": " ".join(str(error).split())[:200]})
            continue
        result["compile"] = time.perf_counter() - start
        times: dict[str, list[float]] = defaultdict(list)
        outcome: Counter[str] = Counter()
        for seed in range(3):
            made = walk(engine, compiled, width, random.Random(f"{row['id']} {seed}"), likely, eos)
            for kind, values in made["times"].items():
                times[kind] += values
            if made["fault"]:
                outcome["faults"] += 1
            elif made["ended"]:
                outcome[validates(tokenizer.decode(made["tokens"]), row["schema"])] += 1
        results.append(result | {"times": dict(times), "walks": dict(outcome)})
    return results


def validates(text: str, schema: Any) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return "no JSON"
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        return "valid" if kind(schema).is_valid(value) else "invalid"
    except Exception:  # a schema that the library itself cannot read
        return "not judged"


def micro(seconds: Sequence[float], share: float) -> str:
    """A quantile in microseconds."""
    return f"{1e6 * float(np.quantile(seconds, share)):.0f}" if seconds else "-"


def table(results: Sequence[dict], group: Callable[[dict], str]) -> list[list[str]]:
    lines = []
    for name in dict.fromkeys(map(group, results)):
        of = [result for result in results if group(result) == name]
        done = [result for result in of if "refused" not in result]
        walks: Counter[str] = Counter()
        for result in done:
            walks.update(result["walks"])

        times: dict[str, list[float]] = defaultdict(list)
        for result in done:
            for kind, values in result["times"].items():
                times[kind] += values
        compile_ms = [1000 * result["compile"] for result in done]
        lines.append(
            [
                name,
                str(len(of)),
                str(len(of) - len(done)),
                f"{statistics.median(compile_ms):.1f} / {max(compile_ms):.0f}" if done else "-",
                f"{micro(times['mask'], 0.5)} / {micro(times['mask'], 0.99)}",
                micro(times["accept"], 0.5),
                micro(times["rollback"], 0.5),
                " ".join(f"{kind}: {count}" for kind, count in sorted(walks.items())),
            ]
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a tokenizer, or a registered name")
    parser.add_argument("--schemas", required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=None, metavar="N")
    parser.add_argument("--out", default=None, metavar="DIR")
    args = parser.parse_args()
    from transformers import AutoConfig, AutoTokenizer

    folder = args.model
    if not Path(folder).exists():
        from dspark.model.load import resolve

        folder = str(resolve(args.model))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    width = AutoConfig.from_pretrained(folder, local_files_only=True).vocab_size
    eos = {tokenizer.eos_token_id}
    rows = [json.loads(line) for line in Path(args.schemas).read_text().splitlines()][: args.limit]
    results: list[dict[str, Any]] = []
    for make in (Llguidance, Xgrammar):
        results += measure(make(tokenizer, width, sorted(eos)), rows, tokenizer, width, eos)
    header = ["", "schemas", "refused", "compile ms, median / most", "mask us, p50 / p99", "accept us"]
    header += [f"back {BACK} us", "walks that ended"]
    lines = [
        f"{len(rows)} schemas, 3 random walks of up to {LONGEST_WALK} legal tokens each; vocabulary {width}.",
        f"llguidance {version('llguidance')}, xgrammar {version('xgrammar')}; {datetime.date.today()}.",
        "",
    ]
    for group in (lambda result: result["engine"], lambda result: f"{result['engine']} {result['source']}"):
        body = [header, ["---"] * len(header), *table(results, group)]
        lines += ["| " + " | ".join(row) + " |" for row in body] + [""]
    refused = Counter(f"{result['engine']}: {result['refused'][:90]}" for result in results if "refused" in result)
    lines += ["Refused, most frequent first:", "", *(f"- {count} x {why}" for why, count in refused.most_common(24))]
    text = "\n".join(lines)
    print(text)
    if args.out:
        path = Path(args.out) / f"{datetime.date.today()}-grammars.md"
        path.write_text(
            f"## Grammar compilers\n\n```\npython benchmarks/grammars.py {args.model} --schemas FILE\n```\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
