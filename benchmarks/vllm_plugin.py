"""vLLM with our proposer and scheduler, against vLLM plain and its own speculation, on the same prompts in one run.

    .venv-vllm/bin/python benchmarks/vllm_plugin.py smollm2-135m --data benchmarks/prompts --per-task 2 --repeat 3 \\
        --concurrency 1,8 --max-tokens 128 --out FILE.jsonl

Every way of decoding has a process of its own, all alive together; prompts (at concurrency N: batches of N) go through
them in turns that move on, so that each is asked what the others are asked, at about the same moment. Each repetition
and concurrency begins with fresh processes: suffix caches, ours and theirs, must not find an answer given before. The
stock way "suffix" needs `pip install arctic-inference`; without it the output says that it was unavailable.

One stream: tokens/s of decoding, a one-token run subtracted. Batches: output tokens over wall time. Ratios are of
medians over prompts (or batches), with a 95% bootstrap interval; the best stock way is chosen in hindsight, by its own
median, for each concurrency. Never run it beside another busy process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.bench.data import interleave, load_rows
from dspark.bench.stats import bootstrap_ratio, ratio_of_medians
from dspark.provenance import provenance

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "dspark",  # the package of the stock way "suffix" brings a plugin that changes more
}
MAX_PROMPT_TOKENS = 1500
WARM_UP = ("Count from one to thirty in words.", "Repeat this line three times: the quick brown fox.")
OURS = {"method": "custom_class", "model": "dspark.integrations.vllm.Proposer", "num_speculative_tokens": 16}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dspark": {"speculative_config": OURS},
    "dspark-scheduler": {"speculative_config": OURS, "scheduler_cls": "dspark.integrations.vllm.Scheduler"},
    "ngram@2": {"speculative_config": NGRAM | {"num_speculative_tokens": 2}},
    "ngram@4": {"speculative_config": NGRAM | {"num_speculative_tokens": 4}},
    "ngram@8": {"speculative_config": NGRAM | {"num_speculative_tokens": 8}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 24}},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print every line as it comes, and the ratios last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", default=["benchmarks/prompts"])
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated (%(default)s)")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        return work(args.model, json.loads(args.worker), dtype=args.dtype)
    lines: list[dict[str, Any]] = []
    emit(lines, args, {"provenance": head(args)})
    rows = interleave(load_rows(args.data, per_task=args.per_task))
    for concurrency in (int(word) for word in args.concurrency.split(",")):
        for repetition in range(args.repeat):
            measure(lines, args, rows, concurrency=concurrency, repetition=repetition)
    for line in ratios(lines):
        emit(lines, args, line)
    return 0


def head(args: argparse.Namespace) -> dict[str, Any]:
    """What it was measured with."""
    from dspark.integrations.vllm.settings import installed

    found = provenance(sys.argv, config=vars(args) | {"out": None}, threads=os.cpu_count() or 1, device="cpu")
    return found | {"vllm": installed(), "ways": {name: WAYS[name] for name in args.ways.split(",")}}


def emit(lines: list[dict[str, Any]], args: argparse.Namespace, line: dict[str, Any]) -> None:
    """Kept, printed, and appended to the file, so that an interrupt costs nothing that was measured."""
    lines.append(line)
    text = json.dumps(line, default=str)
    print(text, flush=True)
    if args.out is not None:
        with args.out.open("a" if len(lines) > 1 else "w") as file:
            file.write(text + "\n")


# -- the side that measures


@dataclass(kw_only=True)
class Way:
    """A process with one vLLM in it."""

    name: str
    process: subprocess.Popen[str]

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError where the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"dspark":'):
                return json.loads(line)["dspark"]
        raise ValueError(f"{self.name} ended with {self.process.wait()}")


def start(stack: ExitStack, args: argparse.Namespace, name: str, *, num_seqs: int) -> Way:
    """Its vLLM is being loaded when this returns."""
    settings = WAYS[name] | {"max_num_seqs": num_seqs}
    command = [sys.executable, __file__, args.model, "--dtype", args.dtype, "--worker", json.dumps(settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.kill)
    return Way(name=name, process=process)


def measure(
    lines: list[dict[str, Any]], args: argparse.Namespace, rows: Sequence[Any], *, concurrency: int, repetition: int
) -> None:
    """All prompts once through each way."""
    with ExitStack() as stack:
        ways = []
        for name in args.ways.split(","):  # one after another: loading takes all cores
            way = start(stack, args, name, num_seqs=concurrency)
            try:
                way.read()
                ways.append(way)
            except ValueError as error:
                emit(lines, args, {"unavailable": name, "why": str(error)})
        place = {"concurrency": concurrency, "repetition": repetition}
        batches = [rows[i : i + concurrency] for i in range(0, len(rows) - concurrency + 1, concurrency)]
        for number, batch in enumerate(batches):
            job = {"messages": [list(row.messages) for row in batch], "max_tokens": args.max_tokens}
            shift = (number + repetition) % len(ways)
            texts = {}
            for way in [*ways[shift:], *ways[:shift]]:
                answer = way.ask(job)
                texts[way.name] = answer.pop("token_ids")
                line = place | {"batch": number, "tasks": [row.task for row in batch], "way": way.name} | answer
                emit(lines, args, line)
            equal = {name: sum(a == b for a, b in zip(ids, texts["plain"])) for name, ids in texts.items()}
            emit(lines, args, place | {"batch": number, "of": len(batch), "same_as_plain": equal})
        for way in ways:
            emit(lines, args, place | {"way": way.name, "counters": way.ask({"counters": True})})


def ratios(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours against plain and against the best of the stock ways, by concurrency."""
    speeds: dict[int, dict[str, dict[int, list[float]]]] = {}
    for line in lines:
        if "tokens_per_second" in line:
            of_way = speeds.setdefault(line["concurrency"], {}).setdefault(line["way"], {})
            of_way.setdefault(line["batch"], []).append(line["tokens_per_second"])
    found = []
    for concurrency, ways in speeds.items():
        medians = {
            name: {batch: statistics.median(values) for batch, values in of.items()} for name, of in ways.items()
        }
        overall = {name: statistics.median(of.values()) for name, of in medians.items()}
        stock = [name for name in overall if not name.startswith("dspark") and name != "plain"]
        best = max(stock, key=overall.__getitem__, default=None)
        for name in (name for name in overall if name.startswith("dspark")):
            for against in ("plain", best):
                if against in medians:
                    shared = sorted(set(medians[name]) & set(medians[against]))
                    pairs = [(medians[against][batch], medians[name][batch]) for batch in shared]
                    line = {"concurrency": concurrency, "ratio": name, "against": against, "prompts": len(pairs)}
                    line |= {"value": ratio_of_medians(pairs), "interval": bootstrap_ratio(pairs)}
                    found.append(line)
        found.append({"concurrency": concurrency, "median_tokens_per_second": overall, "best_stock": best})
    return found


# -- the side that decodes


def work(model: str, settings: dict[str, Any], *, dtype: str) -> int:
    """One vLLM that answers jobs on stdin."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    from dspark.model.registry import fetch

    path = model if Path(model).exists() else str(fetch(model))
    fixed = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "enforce_eager": True}
    llm = LLM(model=path, dtype=dtype, enable_prefix_caching=False, disable_log_stats=False, **fixed, **settings)
    tokenizer = llm.get_tokenizer()

    def encode(messages: Any) -> dict[str, Any]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return {"prompt_token_ids": tokenizer(text)["input_ids"][:MAX_PROMPT_TOKENS]}

    def run(prompts: list[dict[str, Any]], max_tokens: int) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
        return time.perf_counter() - began, [list(output.outputs[0].token_ids) for output in outputs]

    run([encode([{"role": "user", "content": text}]) for text in WARM_UP], 48)
    say({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("counters"):
            say(counters(llm))
            continue
        prompts = [encode(messages) for messages in job["messages"]]
        alone = len(prompts) == 1
        before = run(prompts, 1)[0] if alone else 0.0
        seconds, ids = run(prompts, job["max_tokens"])
        tokens = sum(map(len, ids)) - alone
        say(
            {
                "seconds": seconds - before,
                "tokens": tokens,
                "token_ids": ids,
                "tokens_per_second": tokens / (seconds - before),
            }
        )
    return 0


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own of speculation."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            found[metric.name] = getattr(metric, "value", getattr(metric, "values", None))
    return found


def say(value: Any) -> None:
    """One line that the other side knows."""
    print(json.dumps({"dspark": value}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
