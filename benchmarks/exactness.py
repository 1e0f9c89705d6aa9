"""Exact mode: count the tokens by which drafts, batches and their mixtures change a greedy answer. It ought to be none.

    python benchmarks/exactness.py MODEL --data FOLDER [--drafts ngram,suffix,NAME:int4] [--prompts 60] [--batches 1,8]

Plain exact decoding alone, one prompt after another, is the reference; every drafter at every batch size must give
its tokens. Prints a line for each and appends JSON lines with provenance to --out. Exit code 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from dspark import LLM, SamplingParams
from dspark.bench.data import encode_rows, load_rows
from dspark.bench.variants import parse_variants
from dspark.provenance import provenance


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams, *, batch: int) -> list[list[int]]:
    if batch > 1:
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    return [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--drafts", default="ngram,suffix")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--out")
    args = parser.parse_args()
    llm = LLM(args.model, exact=True, max_num_seqs=8, max_model_len=2048)
    rows = load_rows([args.data])
    step = max(1, len(rows) // args.prompts)
    prompts = encode_rows(rows[::step][: args.prompts], llm.tokenizer, max_tokens=1000)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    reference = tokens_of(llm, prompts, params, batch=1)
    head = provenance(sys.argv, config=llm.info(), threads=torch.get_num_threads(), device="cpu")
    lines = [head | {"kind": "exactness", "num_prompts": len(prompts), "num_tokens": sum(map(len, reference))}]
    for batch in map(int, args.batches.split(",")):
        for variant in parse_variants(args.drafts):
            engine = llm.variant(speculation=variant.speculation, max_num_seqs=batch)
            start = time.perf_counter()
            answers = tokens_of(engine, prompts, params, batch=batch)
            differing = sum(a != b for x, y in zip(reference, answers) for a, b in zip(x, y, strict=False))
            differing += sum(abs(len(x) - len(y)) for x, y in zip(reference, answers))
            lines.append(
                {
                    "draft": variant.name,
                    "batch": batch,
                    "num_differing_tokens": differing,
                    "num_differing_answers": sum(x != y for x, y in zip(reference, answers)),
                    "mean_accepted_length": round(engine.stats.record.mean_accepted_length, 3),
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
            print(json.dumps(lines[-1]), flush=True)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        with open(args.out, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return int(any(line.get("num_differing_tokens") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
