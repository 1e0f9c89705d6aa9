"""What the live page shows, as one JSON value.
It must never hold a text of a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dspark import __version__
from dspark.observe.metrics import Acceptance

if TYPE_CHECKING:
    from dspark.serve.service import Service

MAX_RUNNING = 50


def state(service: Service) -> dict[str, Any]:
    """Of this moment. Speeds are of the last seconds (observe/metrics.WINDOW)."""
    metrics, llm = service.metrics, service.llm
    speed, gauges, counts = metrics.speed(), metrics.gauges(), metrics.counts
    with metrics.lock:
        running = metrics.running()
        kinds = {
            "by_class": _rows(metrics.by_class),
            "by_drafter": _rows(metrics.by_drafter),
            "by_grammar": _rows(metrics.by_grammar),
        }
    places = zip(counts.verified_at, counts.accepted_at)
    return {
        "model": service.names[0],
        "version": __version__,
        "uptime_seconds": round(time.monotonic() - service.began, 1),
        "draining": service.draining,
        "speculation": {
            "method": llm.speculation.method,
            "model": llm.speculation.model,
            "policy": llm.speculation.policy,
            "num_speculative_tokens": llm.speculation.num_speculative_tokens,
        },
        "requests": {
            "running": gauges.num_running,
            "waiting": gauges.num_waiting,
            "max_running": llm.engine_config.max_num_seqs,
        },
        "speed": {
            "tokens_per_second": round(speed.tokens_per_second, 2),
            "plain_tokens_per_second": _rounded(speed.plain_tokens_per_second, 2),
            "speedup": _rounded(speed.speedup, 3),
        },
        "kv_cache_usage": round(gauges.cache_usage, 4),
        "totals": {
            "prompt_tokens": counts.num_prompt_tokens,
            "generation_tokens": counts.num_generation_tokens,
            "drafted": counts.num_drafted,
            "verified": counts.num_verified,
            "accepted": counts.num_accepted,
            "steps": counts.num_steps,
            "seconds_saved": round(counts.plain_seconds - counts.decode_seconds, 2) if counts.plain_seconds else None,
        },
        "acceptance": {
            "by_position": [
                {"position": place, "verified": verified, "accepted": accepted}
                for place, (verified, accepted) in enumerate(places)
            ],
            **kinds,
        },
        "running": [
            {
                "id": answer.id,
                "class": answer.prompt_class,
                "seconds": round(answer.seconds, 2),
                "prompt_tokens": answer.num_prompt,
                "tokens": answer.num_tokens,
                "tokens_per_second": round(answer.tokens_per_second, 1),
                "mean_acceptance_length": round(answer.mean_accepted_length, 2),
            }
            for answer in running[:MAX_RUNNING]
        ],
    }


def _rows(known: Mapping[str, Acceptance]) -> list[dict[str, Any]]:
    return [
        {"name": name, "steps": a.steps, "emitted": a.emitted, "verified": a.verified, "accepted": a.accepted}
        for name, a in known.items()
    ]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
