"""EngineMetrics and the Prometheus exposition: scripted steps, exact counts.
It must never assert a time that a real clock measured."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from dspark.observe.metrics import (
    MAX_LABELS,
    OTHER,
    REASONS,
    SILENT_AFTER,
    WINDOW,
    EngineMetrics,
    Gauges,
    Histogram,
    HttpCounts,
)
from dspark.observe.prometheus import HISTOGRAMS, Exporter
from dspark.params import SamplingParams
from dspark.types import TARGET_PHASES
from tests.fake_steps import PHASES, FakeClock, busy_metrics, feed, row_step, sequence, stats_of
from tests.fakes import ScriptedDrafter, add, junk, make_engine, random_prompts, run
from tests.tiny_models import tiny_model

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
BASE = {"model_name": "tiny", "engine": "0"}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def exporter(metrics: EngineMetrics, http: HttpCounts | None = None) -> Exporter:
    speculation = {"method": "suffix", "policy": "adaptive"}
    return Exporter(metrics, http or HttpCounts(), model_name="tiny", facts={"page_size": 16}, speculation=speculation)


def samples_of(families: Iterable[Any]) -> Samples:
    """(name, labels but those that all have) -> value."""
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels.items() >= BASE.items(), sample
            key = (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in BASE)))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def scrape(metrics: EngineMetrics, http: HttpCounts | None = None) -> Callable[..., float]:
    """Reads one sample of the exposition."""
    found = samples_of(read_text(exporter(metrics, http).render()[0].decode()))
    return lambda name, **labels: found["dspark:" + name, tuple(sorted(labels.items()))]


# -- counts


def scripted() -> EngineMetrics:
    """Two answers, three steps: 3 of 4 checked and 2 held, then 2 of 2 and none, then no drafts."""
    clock = FakeClock(1.0)
    metrics = EngineMetrics(clock=clock)
    one, two = sequence(0, prompt_class="chat", arrival=0.5), sequence(1, num_prompt=9, arrival=0.75)
    one.num_prefix_hits = 3
    feed(
        metrics, [row_step(one, drafted=4, verified=3, accepted=2, at=1.0)], prompt_tokens=4, predicted=0.04, plain=0.3
    )
    clock.now = 1.5
    rows = [row_step(one, drafted=2, source="dspark", at=1.5), row_step(two, allowed=False, at=1.5)]
    feed(metrics, rows, prompt_tokens=9, preempted=1, seconds=dict.fromkeys(PHASES, 0.125))
    clock.now = 3.5
    feed(metrics, [row_step(one, at=3.5, end="length"), row_step(two, at=3.5, end="stop")], predicted=0.1)
    return metrics


def test_scripted_steps_give_exact_counters() -> None:
    read = scrape(scripted())
    expected = {
        "prompt_tokens": 13,
        "generation_tokens": 3 + 1 + 1 + 1 + 1,
        "num_preemptions": 1,
        "prefix_cache_queries": 4 + 9,
        "prefix_cache_hits": 3,
        "engine_steps": 3,
        "spec_decode_num_drafts": 2,
        "spec_decode_num_draft_tokens": 6,
        "spec_decode_num_verified_tokens": 5,
        "spec_decode_num_accepted_tokens": 2,
        "step_predicted_seconds": 0.14,
        "step_measured_seconds": 2 * 5 * 0.01,
        "spec_decode_seconds": 0.08,
        "spec_decode_plain_seconds": 0.3,
    }
    assert {name: pytest.approx(read(f"{name}_total")) for name in expected} == expected
    assert [read("spec_decode_num_verified_tokens_per_pos_total", position=str(j)) for j in range(3)] == [2, 2, 1]
    assert [read("spec_decode_num_accepted_tokens_per_pos_total", position=str(j)) for j in range(3)] == [1, 1, 0]
    assert {reason: read("request_success_total", finished_reason=reason) for reason in REASONS} == {
        "stop": 1,
        "length": 1,
        "abort": 0,
        "error": 0,
    }
    assert read("step_phase_seconds_total", phase="run") == pytest.approx(0.01 + 0.125 + 0.01)
    assert len(TARGET_PHASES) == 5, "measured seconds are of these phases"


def test_acceptance_is_counted_by_class_drafter_and_grammar() -> None:
    read = scrape(scripted())
    for kind, label, name, expected in (
        ("class", "prompt_class", "chat", (3, 5, 5, 2)),
        ("class", "prompt_class", "none", (2, 2, 0, 0)),
        ("drafter", "drafter", "suffix", (1, 3, 3, 2)),
        ("drafter", "drafter", "dspark", (1, 1, 2, 0)),
        ("drafter", "drafter", "none", (3, 3, 0, 0)),
        ("grammar", "grammar", "none", (5, 7, 5, 2)),
    ):
        counted = [read(f"spec_decode_{kind}_{part}_total", **{label: name}) for part in PARTS]
        assert counted == list(expected), (kind, name)


PARTS = ("steps", "emitted", "verified", "accepted")


def test_times_of_answers_are_observed_where_they_belong() -> None:
    read = scrape(scripted())
    for name, count, total in (
        ("time_to_first_token_seconds", 2, 0.5 + 0.75),
        ("inter_token_latency_seconds", 3, 0.5 + 2.0 + 2.0),
        ("e2e_request_latency_seconds", 2, 3.0 + 2.75),
        ("request_queue_time_seconds", 2, 0.5 + 0.75),
        ("request_prefill_time_seconds", 2, 0.0),
        ("request_decode_time_seconds", 2, 2.5 + 2.0),
        ("request_inference_time_seconds", 2, 2.5 + 2.0),
        ("request_time_per_output_token_seconds", 2, 2.5 / 4 + 2.0 / 1),
        ("request_prompt_tokens", 2, 4 + 9),
        ("request_generation_tokens", 2, 5 + 2),
        ("request_params_max_tokens", 2, 200),
        ("request_params_n", 2, 2),
        ("iteration_tokens_total", 3, (4 + 3) + (9 + 2) + 2),
        ("step_seconds", 3, 0.08 + 1.0 + 0.08),
        ("step_prediction_error_ratio", 2, 0.25 + 0.5),
        ("spec_decode_verified_length", 5, 5),
        ("spec_decode_accepted_length", 5, 2),
    ):
        assert read(f"{name}_count") == read(f"{name}_bucket", le="+Inf") == count, name
        assert read(f"{name}_sum") == pytest.approx(total), name


def test_histograms_are_cumulative_with_bounds_inside() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 100):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 4), ("5.0", 5), ("+Inf", 7)]
    assert histogram.total == pytest.approx(114.6)
    read = scrape(scripted())
    assert [read("spec_decode_verified_length_bucket", le=f"{n}.0") for n in range(5)] == [3, 3, 4, 5, 5]


def test_every_histogram_has_a_text() -> None:
    assert set(HISTOGRAMS) == set(EngineMetrics().histograms)


def test_counters_are_sums_over_positions_classes_drafters_and_grammars() -> None:
    rng, metrics = random.Random(3), EngineMetrics(clock=FakeClock())
    seqs = [sequence(i, prompt_class=rng.choice(("", "a", "b"))) for i in range(7)]
    for _ in range(200):
        rows = []
        for seq in rng.sample(seqs, 3):
            drafted = rng.randint(0, 20)
            verified = rng.randint(0, drafted)
            source = rng.choice(("suffix", "dspark"))
            accepted = rng.randint(0, verified)
            rows.append(row_step(seq, drafted=drafted, verified=verified, accepted=accepted, source=source))
        feed(metrics, rows)
    assert sums_agree(samples_of(read_text(exporter(metrics).render()[0].decode())))


def sums_agree(found: Samples) -> bool:
    """Whether the parts of one exposition add up."""

    def total(name: str) -> float:
        return sum(value for (key, _), value in found.items() if key == f"dspark:{name}")

    verified, accepted = (total(f"spec_decode_num_{kind}_tokens_total") for kind in ("verified", "accepted"))
    sums = [
        (verified, total("spec_decode_num_verified_tokens_per_pos_total")),
        (accepted, total("spec_decode_num_accepted_tokens_per_pos_total")),
        (verified, total("spec_decode_verified_length_sum")),
        (accepted, total("spec_decode_accepted_length_sum")),
    ]
    for kind in ("class", "drafter", "grammar"):
        sums += [(verified, total(f"spec_decode_{kind}_verified_total"))]
        sums += [(accepted, total(f"spec_decode_{kind}_accepted_total"))]
        sums += [(total("spec_decode_verified_length_count"), total(f"spec_decode_{kind}_steps_total"))]
    return all(one == other for one, other in sums)


def test_an_engine_and_its_metrics_count_alike() -> None:
    runner = tiny_runner()
    engine = make_engine(runner, drafter=ScriptedDrafter(junk(vocab_size=runner.vocab_size)))
    metrics = EngineMetrics()
    engine.sinks.append(metrics.on_step)
    engine.row_sinks.append(metrics)
    run(engine, random_prompts(5, vocab_size=runner.vocab_size), SamplingParams(temperature=0, max_tokens=12))
    totals, counts = engine.totals, metrics.counts
    assert counts.num_steps == totals.num_steps and counts.num_prompt_tokens == totals.num_prompt_tokens
    assert counts.num_generation_tokens == totals.num_output_tokens == totals.record.num_emitted
    assert counts.num_drafted == totals.record.num_drafted > 0
    assert (counts.verified_at, counts.accepted_at) == (totals.record.verified_at, totals.record.accepted_at)
    assert counts.seconds_by_phase == pytest.approx(totals.seconds)
    assert sum(counts.finished.values()) == 5 and not metrics.open


def tiny_runner() -> Any:
    from dspark.model.runner import build_runner

    return build_runner(tiny_model("llama"), path="torch")


# -- bounds


def test_a_thousand_tasks_are_bounded_and_none_is_lost() -> None:
    metrics = EngineMetrics(clock=FakeClock())
    for i in range(1000):
        feed(metrics, [row_step(sequence(i, prompt_class=f"task-{i}"), drafted=2, accepted=1, end="stop")])
    assert len(metrics.by_class) == MAX_LABELS + 1 and OTHER in metrics.by_class
    assert sum(found.steps for found in metrics.by_class.values()) == 1000
    assert metrics.by_class[OTHER].accepted == 1000 - MAX_LABELS
    found = samples_of(read_text(exporter(metrics).render()[0].decode()))
    assert len([key for key in found if key[0] == "dspark:spec_decode_class_steps_total"]) == MAX_LABELS + 1
    feed(metrics, [row_step(sequence(1000, prompt_class="task-0"), end="stop")])
    assert metrics.by_class["task-0"].steps == 2, "who has a place keeps it"


def test_the_exposition_does_not_grow_with_answers() -> None:
    def lines(num_answers: int) -> int:
        metrics = EngineMetrics(clock=FakeClock())
        for i in range(num_answers):
            feed(metrics, [row_step(sequence(i), drafted=2, accepted=1, end="stop")])
        return len(exporter(metrics).render()[0].splitlines())

    assert lines(2) == lines(300)


@pytest.mark.parametrize("name", ("\ud800", 'a"b\\c\nd', "{}", "Übersetzung 翻訳", " "))
def test_no_name_of_a_class_spoils_the_exposition(name: str) -> None:
    metrics = EngineMetrics(clock=FakeClock())
    feed(metrics, [row_step(sequence(0, prompt_class=name), end="stop")])
    shown = name.replace("\ud800", "?")
    for accept, read in (("", read_text), (OPENMETRICS, read_openmetrics)):
        found = samples_of(read(exporter(metrics).render(accept)[0].decode()))
        assert found["dspark:spec_decode_class_steps_total", (("prompt_class", shown),)] == 1


# -- ends


def test_what_ends_between_steps_leaves_nothing_open() -> None:
    metrics = EngineMetrics(clock=FakeClock(5.0))
    begun, waiting = sequence(0), sequence(1, arrival=2.0)
    feed(metrics, [row_step(begun, at=5.0)])
    assert list(metrics.open) == [0] and [row.id for row in metrics.running()] == ["r0"]
    for seq in (begun, waiting):
        seq.finish_reason = "abort"
        metrics.aborted(seq)
    assert not metrics.open and not metrics.running()
    assert metrics.counts.finished == {**dict.fromkeys(REASONS, 0), "abort": 2}
    read = scrape(metrics)
    assert read("e2e_request_latency_seconds_sum") == 5.0 + 3.0
    assert read("request_queue_time_seconds_count") == 1, "what never began was in the queue for no known time"


def test_an_answer_whose_step_fails_after_its_end_is_counted_once() -> None:
    metrics = EngineMetrics(clock=FakeClock())
    seq, other = sequence(0), sequence(1)
    metrics(row_step(seq, end="stop"))
    for failed in (seq, other):  # the engine's recover() ends all that ran, with no on_step
        metrics.aborted(failed)
    assert metrics.counts.finished == {**dict.fromkeys(REASONS, 0), "stop": 1, "abort": 1}
    assert not metrics.open and not metrics.ended
    feed(metrics, [row_step(sequence(2), end="stop")])
    assert not metrics.ended, "ids are kept for a step at most"


def test_an_engine_that_recovers_counts_every_answer_once() -> None:
    class Failing(ScriptedDrafter):
        def observe(self, rows: Any, verdicts: Any, taps: Any = None) -> None:
            if any(row.num_output == 5 for row in running):
                raise RuntimeError("after an answer has ended")

    runner, metrics = tiny_runner(), EngineMetrics()
    engine = make_engine(runner, drafter=Failing(lambda row, limit: []))
    engine.sinks.append(metrics.on_step)
    engine.row_sinks.append(metrics)
    params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for number in (5, 9)]
    running = [add(engine, [3, 4, 5], each, seq_id=number) for number, each in enumerate(params)]
    with pytest.raises(RuntimeError, match="has ended"):
        while engine.has_work:
            engine.step()
    engine.recover(RuntimeError("it failed"))
    assert not engine.has_work and [seq.finish_reason for seq in running] == ["length", "error"]
    assert metrics.counts.finished == {**dict.fromkeys(REASONS, 0), "length": 1, "error": 1}
    assert scrape(metrics)("request_generation_tokens_count") == 2 and not metrics.open


def test_running_tells_of_begun_answers() -> None:
    clock = FakeClock(0.0)
    metrics = EngineMetrics(clock=clock)
    seq = sequence(0, prompt_class="chat")
    feed(metrics, [row_step(seq, drafted=3, accepted=2, at=0.0)])
    clock.now = 2.0
    [row] = metrics.running()
    assert (row.id, row.prompt_class, row.num_prompt, row.num_tokens) == ("r0", "chat", 4, 3)
    assert (row.seconds, row.tokens_per_second, row.mean_accepted_length) == (2.0, 1.0, 3.0)


# -- speeds


def test_speed_is_of_the_last_seconds() -> None:
    clock = FakeClock(0.0)
    metrics = EngineMetrics(clock=clock)
    assert metrics.speed().tokens_per_second == 0.0 and metrics.speed().speedup is None
    seq = sequence(0)
    for _ in range(10):  # 2 tokens a second, by steps of half a second that plain decoding would make in 0.75
        clock.now += 0.5
        feed(metrics, [row_step(seq)], seconds=0.5, plain=0.75)
    speed = metrics.speed()
    assert speed.tokens_per_second == pytest.approx(2.0) and speed.speedup == pytest.approx(1.5)
    assert speed.plain_tokens_per_second == pytest.approx(2.0 / 1.5)
    clock.now += WINDOW / 2  # idle
    assert metrics.speed().tokens_per_second == pytest.approx(6 / 5.5)  # ends at 2.5, 3.0, ... 5.0; begun at 2.0
    clock.now += WINDOW
    assert metrics.speed() == EngineMetrics().speed()


def test_no_speedup_where_a_plain_time_is_not_known() -> None:
    clock = FakeClock(1.0)
    metrics = EngineMetrics(clock=clock)
    feed(metrics, [row_step(sequence(0))], plain=0.1)
    feed(metrics, [row_step(sequence(1))], plain=None)
    assert metrics.speed().speedup is None and metrics.speed().plain_tokens_per_second is None
    free = EngineMetrics(clock=clock)
    feed(free, [row_step(sequence(0))], seconds=0.0, plain=0.1)
    assert free.speed().speedup is None, "a step of no measured time says nothing"


# -- silence


def test_silence_is_steps_that_may_draft_and_nothing_that_holds() -> None:
    metrics, seq = EngineMetrics(clock=FakeClock()), sequence(0)
    for _ in range(2 * SILENT_AFTER):
        metrics(row_step(seq, allowed=False))
    assert not metrics.silent, "plain decoding is no silence"
    for _ in range(SILENT_AFTER - 1):
        metrics(row_step(seq))
    assert not metrics.silent and scrape(metrics)("spec_decode_silent") == 0
    metrics(row_step(seq, drafted=2, accepted=0))
    assert metrics.silent and scrape(metrics)("spec_decode_silent") == 1
    metrics(row_step(seq, drafted=2, accepted=1))
    assert not metrics.silent


# -- the exposition


def test_both_formats_hold_the_same_and_are_valid() -> None:
    metrics, http = busy_metrics()
    shown = exporter(metrics, http)
    text, text_type = shown.render()
    opened, open_type = shown.render(OPENMETRICS)
    assert text_type.startswith("text/plain") and open_type.startswith("application/openmetrics-text")
    assert opened.endswith(b"# EOF\n")
    assert samples_of(read_text(text.decode())) == samples_of(read_openmetrics(opened.decode()))


@pytest.mark.parametrize(
    "accept",
    (
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4",
        "application/openmetrics-text;version=1.0.0;escaping=values",
        "text/plain;version=1.0.0;escaping=underscores",
        "text/html, */*",
    ),
)
def test_names_are_the_same_whatever_is_accepted(accept: str) -> None:
    metrics, http = busy_metrics()
    body, content_type = exporter(metrics, http).render(accept)
    is_open = content_type.startswith("application/openmetrics-text")
    assert is_open == ("openmetrics" in accept) == body.endswith(b"# EOF\n")
    read = read_openmetrics if is_open else read_text
    expected = samples_of(read_text(exporter(metrics, http).render()[0].decode()))
    assert samples_of(read(body.decode())) == expected


def test_every_family_has_a_help_text_and_when_busy_a_sample() -> None:
    families = list(read_openmetrics(exporter(*busy_metrics()).render(OPENMETRICS)[0].decode()))
    assert len(families) == len({family.name for family in families})
    for family in families:
        assert family.documentation.endswith("."), family.name
        assert family.samples, family.name


def test_settings_are_labels_and_http_counts_are_shown() -> None:
    metrics, http = busy_metrics()
    http.count("/health", 200)
    read = scrape(metrics, http)
    assert read("cache_config_info", page_size="16") == 1
    assert read("spec_decode_info", method="suffix", policy="adaptive") == 1
    assert read("http_responses_total", route="/health", status="200") == 2
    assert (read("num_requests_running"), read("num_requests_waiting")) == (2, 1)
    assert read("kv_cache_usage_perc") == 0.25


def test_the_gauges_are_asked_without_the_lock() -> None:
    def gauges() -> Gauges:
        assert not metrics.lock.locked()
        return Gauges(num_running=3)

    metrics = EngineMetrics(gauges)
    assert scrape(metrics)("num_requests_running") == 3


def test_reading_while_the_engine_writes_sees_whole_steps() -> None:
    metrics, errors = EngineMetrics(), []

    def write() -> None:
        try:
            for i in range(300):
                seq = sequence(i, prompt_class=f"task-{i % 90}")
                for end in (None, "stop"):
                    feed(metrics, [row_step(seq, drafted=i % 9, accepted=min(i % 9, i % 3), end=end)])
        except Exception as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    num_reads = 0
    while writer.is_alive() or not num_reads:
        assert sums_agree(samples_of(read_text(exporter(metrics).render()[0].decode())))
        metrics.speed()
        metrics.running()
        num_reads += 1
    writer.join()
    assert not errors and metrics.counts.num_steps == 600 and not metrics.open


def test_the_sums_can_disagree() -> None:
    metrics, _ = busy_metrics()
    metrics.counts.verified_at[0] += 1
    assert not sums_agree(samples_of(read_text(exporter(metrics).render()[0].decode())))


def test_a_batch_counts_what_its_rows_do() -> None:
    rows = [row_step(sequence(0), drafted=3, verified=2, accepted=1), row_step(sequence(1))]
    stats = stats_of(rows)
    assert (stats.num_drafted, stats.num_verified, stats.num_accepted, stats.num_emitted) == (3, 2, 1, 3)
