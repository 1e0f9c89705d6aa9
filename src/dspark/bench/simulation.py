"""`dspark simulate`: policies on thousands of simulated requests over a cost table from a file.
It must never hide where a table comes from: a file without a source is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dspark.bench.report import aligned
from dspark.plan.cost import CostTable
from dspark.plan.simulate import Kind, Machine, Report, compare

DEFAULT_KINDS = ("code=0.85,0.72,0.61,0.52,0.44,0.38,0.32", "chat=0.6,0.36,0.22,0.13,0.08,0.05,0.03")
DEFAULT_POLICIES = "plain,adaptive,fixed@1,fixed@3,fixed@7"


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """A cost table with its source: points are [rows, seconds]."""

    source: str
    target: CostTable
    draft: CostTable | None
    by_token: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The machine, the requests, the load and the policies."""
    kinds = "a kind of request: survival of drafts 1, 2, ... (vLLM's synthetic_acceptance_rates); repeat for a mixture"
    table = "JSON: source, target [[rows, seconds], ...], draft (the same, or null), by_token (a draft pass a token)"
    parser.add_argument("--table", required=True, metavar="FILE", help=table)
    parser.add_argument("--kind", action="append", metavar="NAME=RATES", help=kinds)
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--concurrency", metavar="LIST", help="closed loops of so many clients each")
    parser.add_argument("--rate", metavar="LIST", help="open loops of so many requests/s each, Poisson")
    parser.add_argument("--policies", default=DEFAULT_POLICIES, metavar="LIST", help="(%(default)s)")
    parser.add_argument("--max-seqs", type=int, default=256, metavar="N", help="running at once (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="of each request (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=256, metavar="N", help="of each request (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and verdicts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Simulate each policy at each load and print. Raises ValueError, one line, for bad input."""
    table = read_table(args.table)
    kinds = [read_kind(text, args) for text in args.kind or DEFAULT_KINDS]
    if args.requests < 1:
        raise ValueError(f"--requests {args.requests}: give at least 1")
    machine = Machine(
        target=table.target,
        draft=table.draft,
        by_token=table.by_token,
        max_seqs=args.max_seqs,
        max_drafts=max(len(kind.acceptance) for kind in kinds),
    )
    policies = [policy.strip() for policy in args.policies.split(",") if policy.strip()]
    found = {
        load: compare(machine, kinds, policies, args.requests, seed=args.seed, **settings)
        for load, settings in _loads(args).items()
    }
    if args.json:
        figures = {load: {policy: _figures(report) for policy, report in of.items()} for load, of in found.items()}
        print(json.dumps({"source": table.source, "kinds": [asdict(kind) for kind in kinds], "figures": figures}))
    else:
        print(text_report(table, found))
    return 0


def read_table(path: str | Path) -> TableFile:
    """Raises ValueError naming the file, cause and cure."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        source, target, draft = values["source"], values["target"], values.get("draft")
        if not isinstance(source, str) or not source.strip():
            raise ValueError("its source is empty")
        return TableFile(
            source=source,
            target=CostTable([(int(rows), float(seconds)) for rows, seconds in target]),
            draft=None if draft is None else CostTable([(int(rows), float(seconds)) for rows, seconds in draft]),
            by_token=bool(values.get("by_token", False)),
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no cost table ({error}): give JSON with source and target (--help)") from None


def read_kind(text: str, args: argparse.Namespace) -> Kind:
    """`NAME=RATE,RATE,...`."""
    name, equals, rates = text.partition("=")
    try:
        numbers = [float(rate) for rate in rates.split(",")]
    except ValueError:
        numbers = []
    if not (name and equals and numbers):
        raise ValueError(f"--kind {text!r}: write NAME=RATE,RATE,..., such as code=0.8,0.6,0.5")
    sizes = {"num_prompt": args.prompt_tokens, "num_output": args.output_tokens}
    return Kind.from_rates(name.strip(), numbers, **sizes)


def text_report(table: TableFile, found: Mapping[str, Mapping[str, Report]]) -> str:
    """For a terminal: tokens/s, drafts checked a request, and how well the plans foretold the tokens."""
    policies = list(next(iter(found.values())))
    sections = {
        "throughput, tokens/s of simulated time": lambda report: f"{report.throughput:.0f}",
        "drafts checked a request": lambda report: f"{report.verified_per_request:.1f}",
        "tokens foretold / emitted": lambda report: f"{report.expected / max(report.emitted, 1):.3f}",
    }
    blocks = [f"costs: {table.source}"]
    for title, cell in sections.items():
        rows = [["load", *policies], *([load, *(cell(of[name]) for name in policies)] for load, of in found.items())]
        blocks.append(f"{title}\n{aligned(rows)}")
    return "\n\n".join(blocks)


def _loads(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    from dspark.bench.arrivals import parse_loads

    loads = parse_loads(args.concurrency, args.rate, burstiness=1.0)
    if not loads:
        raise ValueError("give a load to simulate: --concurrency 1,8,64 or --rate 5,50")
    found: dict[str, dict[str, float]] = {}
    for load in loads:
        found[load.name] = {"rate": load.rate} if load.rate is not None else {"concurrency": load.concurrency or 1}
    return found


def _figures(report: Report) -> dict[str, float]:
    return {
        "throughput": report.throughput,
        "seconds": report.seconds,
        "num_tokens": report.num_tokens,
        "num_steps": report.num_steps,
        "verified_per_request": report.verified_per_request,
        "expected": report.expected,
        "emitted": report.emitted,
    }
