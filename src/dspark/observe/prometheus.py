"""Prometheus: the counts of an engine and its server as metric families, under vLLM's names with our prefix.
It must never count anything itself, or give a label more values than are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from dspark.observe.metrics import Acceptance, EngineMetrics, Gauges, HttpCounts

PREFIX = "dspark:"
ENGINE = "0"

HISTOGRAMS: Mapping[str, str] = {
    "iteration_tokens_total": "Tokens of a step: prompt tokens read and tokens emitted.",
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two deliveries of an answer; one may hold several tokens.",
    "request_time_per_output_token_seconds": "(last token - first token) / (tokens - 1) of a finished answer.",
    "e2e_request_latency_seconds": "From a request's arrival to the end of its answer.",
    "request_queue_time_seconds": "From a request's arrival to its first prompt chunk.",
    "request_prefill_time_seconds": "From the first prompt chunk to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first prompt chunk to the last token.",
    "request_prompt_tokens": "Tokens of the prompt of a finished answer.",
    "request_generation_tokens": "Tokens of a finished answer.",
    "request_params_max_tokens": "max_tokens of finished answers.",
    "request_params_n": "n of finished answers.",
    "step_seconds": "A whole step of the engine.",
    "step_prediction_error_ratio": "|measured / predicted - 1| of the target's phases of a step.",
    "spec_decode_verified_length": "Drafts of a row that the target looked at in a step: the length chosen.",
    "spec_decode_accepted_length": "Drafts of a row that were accepted in a step.",
}


class Exporter(Collector):
    """What /metrics shows. `model_name` is the label that all have; `facts` and `speculation` are shown as labels of
    cache_config_info and spec_decode_info."""

    def __init__(
        self,
        metrics: EngineMetrics,
        http: HttpCounts,
        *,
        model_name: str,
        facts: Mapping[str, Any],
        speculation: Mapping[str, Any],
    ) -> None:
        self.metrics = metrics
        self.http = http
        self.facts = facts
        self.speculation = speculation
        self.base = {"model_name": model_name, "engine": ENGINE}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type), in the format that the Accept header asks for."""
        _, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # Every name here is one that any reader takes. Left to escape what is not, the library takes the colon,
            # which is legal, for such, and Prometheus would read dspark_... in this format alone.
            return openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8), content_type
        return generate_latest(self.registry), content_type

    def collect(self) -> Iterator[Any]:
        """Every family; called by the registry."""
        now = self.metrics.gauges()  # the engine's own: asked before the lock, for which its thread may wait
        with self.metrics.lock:
            return iter([*self._gauges(now), *self._counters(), *self._acceptance(), *self._histograms()])

    def _gauges(self, now: Gauges) -> Iterator[Any]:
        yield self._gauge("num_requests_running", "Answers being made.", now.num_running)
        yield self._gauge("num_requests_waiting", "Answers that wait for a place.", now.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Pages of the KV cache in use, 0 to 1.", now.cache_usage)
        silent = "1 where drafts are allowed and none has held for long: speculation is configured and does nothing."
        yield self._gauge("spec_decode_silent", silent, float(self.metrics.silent))
        yield self._gauge("cache_config_info", "Settings of the engine.", 1, self.facts)
        yield self._gauge("spec_decode_info", "Settings of speculation.", 1, self.speculation)

    def _counters(self) -> Iterator[Any]:
        c = self.metrics.counts
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens read (those found in the prefix cache are not).", c.num_prompt_tokens),
            ("generation_tokens", "Tokens emitted.", c.num_generation_tokens),
            ("num_preemptions", "Answers that had to give back their place.", c.num_preempted),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", c.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", c.prefix_hits),
            ("engine_steps", "Steps of the engine.", c.num_steps),
            ("spec_decode_num_drafts", "Steps of a row in which drafts were verified.", c.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", c.num_drafted),
            ("spec_decode_num_verified_tokens", "Drafted tokens that the target looked at.", c.num_verified),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", c.num_accepted),
            ("step_predicted_seconds", "Foretold time of the target's phases.", c.predicted_seconds),
            ("step_measured_seconds", "Time of the target's phases of the same steps.", c.measured_seconds),
            ("spec_decode_seconds", "Time of steps whose plain time is known.", c.decode_seconds),
            ("spec_decode_plain_seconds", "What plain decoding would have needed for them.", c.plain_seconds),
        ):
            yield self._counter(name, text, {(): value})
        yield self._counter("request_success", "Answers ended.", _keyed(c.finished), ["finished_reason"])
        yield self._counter("step_phase_seconds", "Time by phase of a step.", _keyed(c.seconds_by_phase), ["phase"])
        for name, text, places in (
            ("spec_decode_num_verified_tokens_per_pos", "Drafts looked at, by place in the draft.", c.verified_at),
            ("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place in the draft.", c.accepted_at),
        ):
            values = {(str(place),): number for place, number in enumerate(places)}
            yield self._counter(name, text, values, ["position"])
        responses = {(route, str(status)): number for (route, status), number in list(self.http.responses.items())}
        yield self._counter("http_responses", "Responses of the server.", responses, ["route", "status"])

    def _acceptance(self) -> Iterator[Any]:
        kinds = (
            ("class", "prompt_class", self.metrics.by_class),
            ("drafter", "drafter", self.metrics.by_drafter),
            ("grammar", "grammar", self.metrics.by_grammar),
        )
        for kind, label, known in kinds:
            for name, text in (
                ("steps", "Steps of rows"),
                ("emitted", "Tokens emitted"),
                ("verified", "Drafts looked at"),
                ("accepted", "Drafts accepted"),
            ):
                values = {(key,): _read(acceptance, name) for key, acceptance in known.items()}
                yield self._counter(f"spec_decode_{kind}_{name}", f"{text}, by {label}.", values, [label])

    def _histograms(self) -> Iterator[Any]:
        for name, histogram in self.metrics.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name], labels=list(self.base))
            family.add_metric(list(self.base.values()), histogram.cumulative(), histogram.total)
            yield family

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, Any] | None = None) -> Any:
        shown = self.base | {key: str(value) for key, value in (labels or {}).items()}
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(shown))
        family.add_metric(list(shown.values()), value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[Any, float], labels: list[str] | None = None) -> Any:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self.base, *(labels or [])])
        for key, value in values.items():
            family.add_metric([*self.base.values(), *key], value)
        return family


def _keyed(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): value for key, value in values.items()}


def _read(acceptance: Acceptance, name: str) -> int:
    return int(getattr(acceptance, name))
