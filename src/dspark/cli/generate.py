"""`dspark generate`: one prompt, answered as a stream, with the figures on request.
It must never mix figures into the answer: the answer goes to stdout, the rest to stderr (or all of it into --json)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli import options
from dspark.cli.progress import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Callable

    from dspark.config import Config, SpeculationConfig
    from dspark.engine.llm import LLM
    from dspark.params import SamplingParams
    from dspark.types import CompletionOutput, RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, how it is asked, and what is printed."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from stdin")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument(
        "--compare", action="store_true", help="plain and speculative decoding side by side, with figures"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measured runs of each side with --compare")
    parser.add_argument("--stats", action="store_true", help="figures on stderr after the answer")
    parser.add_argument(
        "--explain", action="store_true", help="a line on stderr for each step: what was drafted and why"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options.add_engine_arguments(parser)
    options.add_speculation_arguments(parser)
    options.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt. 1 only when --compare finds a difference that exact mode forbids."""
    params = options.read_params(args)
    config = options.read_config(args)
    ask = Question(text=read_prompt(args), system=args.system, raw=args.raw)
    if args.compare and args.explain:
        raise ValueError("--explain tells of one run and --compare makes several: leave one of them out")
    if args.compare:
        from dspark.cli import compare

        return compare.run(ask, params=params, config=config, model=args.model, repeat=args.repeat, as_json=args.json)
    llm = load(args.model, config=config)
    if args.explain:
        from dspark.cli.explain import Explainer

        llm.add_row_sink(Explainer(sys.stderr))
    printer = None if args.json or args.explain or params.n > 1 else StreamPrinter()
    output = ask.put(llm, params=params, on_output=printer)
    if args.json:
        print(json.dumps(describe(output, ask=ask, llm=llm), ensure_ascii=False))
    elif printer is None and params.n == 1:
        print(output.outputs[0].text)
    elif printer is None:
        for completion in output.outputs:
            print(f"[{completion.index + 1}]\n{completion.text}")
    else:
        printer.finish(output)
    if args.stats:
        print_stats(output, llm=llm)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a text, with the chat template around it or `raw`."""

    text: str
    system: str | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise ValueError("--raw uses no chat template, so it has no place for --system: leave one of them out")

    def put(
        self, llm: LLM, *, params: SamplingParams, on_output: Callable[[RequestOutput], None] | None = None
    ) -> RequestOutput:
        """The finished answer. Raises ValueError when the prompt is refused."""
        if self.raw:
            [output] = llm.generate(self.text, params, on_output=on_output)
        else:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            messages = [*system, {"role": "user", "content": self.text}]
            [output] = llm.chat(messages, params, on_output=on_output)
        if output.error is not None:
            raise ValueError(output.error)
        return output


class StreamPrinter:
    """Writes the growing text of the first answer to stdout, each character once."""

    def __init__(self) -> None:
        self._num_written = 0
        self._ends_line = False

    def __call__(self, output: RequestOutput) -> None:
        text = output.outputs[0].text
        if piece := text[self._num_written :]:
            sys.stdout.write(piece)
            sys.stdout.flush()
            self._num_written = len(text)
            self._ends_line = piece.endswith("\n")

    def finish(self, output: RequestOutput) -> None:
        """Write what is still missing and end the line."""
        self(output)
        if not self._ends_line:
            sys.stdout.write("\n")
            sys.stdout.flush()


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from the argument, stdin (-) or --prompt-file. Raises ValueError when there is none, or two."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give one prompt: as an argument, as - to read stdin, or with --prompt-file")
    if args.prompt_file is not None:
        try:
            text = Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"cannot read the prompt file {args.prompt_file}: {error}; give a UTF-8 text file"
            ) from None
    else:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty: give at least one word")
    return text


def load(model: str, *, config: Config, speculation: SpeculationConfig | None = None) -> LLM:
    """The engine of `config`, with another drafter if `speculation` is given; progress goes to stderr."""
    from dspark import LLM

    bar = ProgressBar(sys.stderr)
    try:
        return LLM(
            model,
            speculative_config=speculation or config.speculation,
            progress=bar,
            **dataclasses.asdict(config.engine),
        )
    finally:
        bar.close()


def decode_seconds(output: RequestOutput) -> float:
    """Seconds from the first token to the last."""
    return output.timings["finished"] - output.timings["first_token"]


def decode_rate(output: RequestOutput) -> float:
    """Tokens a second after the first token, (n - 1) / (finished - first_token); 0 when there was only one."""
    num_tokens = len(output.outputs[0].token_ids)
    seconds = decode_seconds(output)
    return (num_tokens - 1) / seconds if num_tokens > 1 and seconds > 0 else 0.0


def describe(output: RequestOutput, *, ask: Question, llm: LLM) -> dict[str, Any]:
    """Everything about an answer, for JSON. Times in seconds."""
    timings = output.timings
    return {
        "model": llm.info()["model"],
        "speculation": dataclasses.asdict(llm.speculation),
        "prompt": ask.text,
        "system": ask.system,
        "outputs": [_describe_completion(completion) for completion in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_prompt_tokens": output.num_cached_prompt_tokens,
            "completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
        },
        "time_to_first_token": timings["first_token"] - timings["arrival"],
        "decode_seconds": decode_seconds(output),
        "decode_tokens_per_second": decode_rate(output) if len(output.outputs) == 1 else None,
        "phase_seconds": dict(llm.stats.seconds),
    }


def print_stats(output: RequestOutput, *, llm: LLM) -> None:
    """The figures of one answer on stderr."""
    for completion in output.outputs:
        record = completion.speculation
        name = f"answer {completion.index + 1}: " if len(output.outputs) > 1 else ""
        lines = [
            f"{name}{len(output.prompt_token_ids)} prompt tokens, {len(completion.token_ids)} tokens, "
            f"ended by {completion.finish_reason}",
            f"mean accepted length {record.mean_accepted_length:.2f} tokens a pass; drafted {record.num_drafted}, "
            f"verified {record.num_verified}, accepted {record.num_accepted}",
        ]
        print(*lines, sep="\n", file=sys.stderr)
    if len(output.outputs) == 1:
        first = output.timings["first_token"] - output.timings["arrival"]
        print(f"{decode_rate(output):.1f} tokens/s after the first, which took {1000 * first:.0f} ms", file=sys.stderr)
    phases = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in llm.stats.seconds.items())
    print(f"milliseconds by phase: {phases}", file=sys.stderr)


def _describe_completion(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": completion.logprobs
        and [[dataclasses.asdict(token) for token in position] for position in completion.logprobs],
        "speculation": completion.speculation.as_dict(),
    }
