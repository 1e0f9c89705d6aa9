"""The benchmark on a scripted engine: known figures, fair turns, comparisons, reports and the command."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark.bench import command
from dspark.bench.command import with_history
from dspark.bench.data import load_rows
from dspark.bench.harness import Answer, BenchSettings, EngineParticipant, run_bench
from dspark.bench.report import json_lines, markdown_report, text_report
from dspark.bench.summary import ALL, MEAN, summarise
from dspark.bench.variants import parse_variant, parse_variants
from dspark.config import EngineConfig
from dspark.plan.history import History
from dspark.provenance import command_line, git_state, scrub
from dspark.types import CompletionOutput, RequestOutput, SpeculationRecord, TokenLogprob

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts"


# -- a scripted engine: known speeds and counts, no clock


class FakeTokenizer:
    def encode(self, text):
        return [ord(letter) % 64 for letter in text]

    def apply_chat_template(self, messages, *, add_generation_prompt):
        assert add_generation_prompt
        return self.encode("<" + "".join(message["content"] for message in messages) + ">")


class FakeLLM:
    """Answers are a function of the prompt; decoding `speed` tokens/s by the variant's draft length."""

    def __init__(self, log=None, speculation=None, config=None, wrong=None):
        self.tokenizer = FakeTokenizer()
        self.log = [] if log is None else log
        self.speculation = speculation
        self.engine_config = config or EngineConfig()
        self.wrong = wrong or {}
        self.stats = SimpleNamespace(seconds={})
        self.num_built = itertools.count()

    def variant(self, *, speculation, **engine):
        config = dataclasses.replace(self.engine_config, **engine)
        self.log.append(("built", speculation.method, config))
        return FakeLLM(self.log, speculation, config, self.wrong)

    def info(self):
        return {"model": "fake", "dtype": "bfloat16", "device": "cpu", "where": "/home/someone/models/fake"}

    def reset_stats(self):
        self.stats = SimpleNamespace(seconds={})

    def generate(self, prompts, params):
        params = params if isinstance(params, list) else [params] * len(prompts)
        self.stats.seconds = {"run": 0.5, "draft": 0.25}
        return [self._one(prompt, one) for prompt, one in zip(prompts, params, strict=True)]

    def _one(self, prompt, params):
        method = self.speculation.method if self.speculation else "base"
        self.log.append((method, tuple(prompt), params.max_tokens, params.seed))
        if len(prompt) > 1000:
            return RequestOutput(
                request_id="r", prompt=None, prompt_token_ids=prompt, outputs=[], error="prompt too long"
            )
        tokens = [(sum(prompt) + i) % 50 for i in range(min(11, params.max_tokens))]
        if method in self.wrong:
            tokens[self.wrong[method]] = 63
        speed = {"none": 10.0, "ngram": 15.0, "suffix": 20.0}.get(method, 5.0) * (1 + len(prompt) % 3)
        record = SpeculationRecord()
        if method != "none":
            record.add(drafted=4, verified=4, accepted=2, emitted=3)
            record.add(drafted=4, verified=2, accepted=0, emitted=1)
        logprobs = [[TokenLogprob(token_id=t, logprob=-1.0, rank=1) for t in (tokens[0], 63)]]
        answer = CompletionOutput(
            index=0, text="", token_ids=tokens, finish_reason="length", stop_reason=None,
            logprobs=logprobs if params.logprobs else None, speculation=record,
        )  # fmt: skip
        timings = {"arrival": 1.0, "first_token": 3.0, "finished": 3.0 + (len(tokens) - 1) / speed}
        return RequestOutput(request_id="r", prompt=None, prompt_token_ids=prompt, outputs=[answer], timings=timings)


class FakePeer:
    name = "hf"

    def answer(self, prompt, params):
        return Answer(tokens=[1] * 11, first_seconds=1.0, decode_seconds=2.0, num_first=3)


def rows_of(tmp_path, *texts):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"task": text[0], "prompt": text}) for text in texts))
    return load_rows([path])


def bench(tmp_path, drafts="none,ngram,suffix", *, texts=("a1", "a22", "b333", "b4444"), llm=None, **options):
    settings = BenchSettings(**{"max_tokens": 32, "repeat": 2} | options.pop("settings", {}))
    return run_bench(llm or FakeLLM(), parse_variants(drafts), rows_of(tmp_path, *texts), settings=settings, **options)


# -- the run


def test_known_speeds_give_known_figures(tmp_path):
    result = bench(tmp_path, peers=[FakePeer()])
    summary = summarise(result)
    assert summary.tasks == ["a", "b", ALL, MEAN] and summary.variants == ["none", "ngram", "suffix", "hf"]
    for task in summary.tasks:
        assert summary.cells[task, "ngram"].speedup == pytest.approx(1.5)
        assert summary.cells[task, "suffix"].interval == pytest.approx((2.0, 2.0), abs=1.0)
        assert summary.cells[task, "none"].speedup is None
    cell = summary.cells[ALL, "ngram"]
    assert cell.accepted_length == 2.0 and cell.first_seconds == 2.0 and cell.num_tokens == 4 * 2 * 11
    assert cell.record.num_accepted == 4 * 2 * 2
    assert cell.phases == {"run": 0.5 * 8, "draft": 0.25 * 8}
    assert summary.cells[ALL, "hf"].tokens_per_second == 4.0
    lengths = [
        len(FakeTokenizer().apply_chat_template([{"content": t}], add_generation_prompt=True)) for t in ("a1", "a22")
    ]
    assert summary.cells["a", "none"].tokens_per_second == pytest.approx(sum(10 * (1 + n % 3) for n in lengths) / 2)


def test_participants_take_turns_and_nobody_is_always_first(tmp_path):
    llm = FakeLLM()
    bench(tmp_path, llm=llm, settings={"repeat": 3})
    measured = [entry[0] for entry in llm.log if entry[0] != "built" and entry[2] == 32]
    turns = [tuple(measured[i : i + 3]) for i in range(0, len(measured), 3)]
    assert len(turns) == 12 and all(sorted(turn) == ["ngram", "none", "suffix"] for turn in turns)
    prompts = [entry[1] for entry in llm.log if entry[0] != "built" and entry[2] == 32]
    assert all(len(set(prompts[i : i + 3])) == 1 for i in range(0, len(prompts), 3))
    assert {turn[0] for turn in turns} == {"none", "ngram", "suffix"}
    first_prompt = [turns[i][0] for i in (0, 4, 8)]
    assert len(set(first_prompt)) == 3


def test_each_repetition_has_fresh_engines_without_prefix_reuse(tmp_path):
    llm = FakeLLM()
    bench(tmp_path, llm=llm, settings={"repeat": 3})
    built = [entry for entry in llm.log if entry[0] == "built"]
    assert [entry[1] for entry in built] == ["none", "ngram", "suffix"] * 3
    assert not any(config.prefix_reuse for *_, config in built)
    warmed = [entry for entry in llm.log if entry[0] == "suffix" and entry[2] != 32]
    assert len(warmed) == 3 and all(
        entry[1] not in {e[1] for e in llm.log if e[0] != "built" and e[2] == 32} for entry in warmed
    )


def test_a_prompt_refused_once_is_left_out_for_all(tmp_path):
    result = bench(tmp_path, texts=("a1", "b" * 1400))
    summary = summarise(result)
    assert list(result.refused) == [1] and "b" not in summary.tasks
    assert "prompt too long" in text_report(result, summary)
    with pytest.raises(ValueError, match="every prompt was refused"):
        bench(tmp_path, texts=("b" * 1400,))


def test_sampled_runs_seed_each_prompt_and_are_not_judged(tmp_path):
    llm = FakeLLM()
    result = bench(tmp_path, llm=llm, settings={"temperature": 0.8}, judge=lambda *_: pytest.fail("judged"))
    seeds = {(entry[1], entry[3]) for entry in llm.log if entry[0] != "built" and entry[2] == 32}
    assert len(seeds) == 4 and result.differences == []


def test_differences_are_judged_against_the_reference_of_the_same_engine(tmp_path):
    calls = []

    def judge(prompt, plain, other, exact):
        calls.append(exact)
        verdict = "identical" if list(plain) == list(other) else "fault"
        return SimpleNamespace(verdict=verdict, text=f"{verdict} at token 2")

    result = bench(tmp_path, "none,suffix,ngram:exact", llm=FakeLLM(wrong={"suffix": 2}), judge=judge)
    summary = summarise(result)
    assert summary.cells[ALL, "suffix"].verdicts == {"fault": 8}
    assert summary.cells["a", "ngram:exact"].verdicts == {"identical": 4}
    assert summary.cells[ALL, "none"].verdicts == {"identical": 4}  # plain against its own first repetition
    assert {d.reference for d in result.differences if d.variant == "ngram:exact"} == {"none:exact"}
    assert set(calls) == {True, False}
    assert "0/8, 8 faults" in text_report(result, summary)


def test_settings_and_empty_selection_are_checked(tmp_path):
    for field in ("repeat", "max_tokens"):
        with pytest.raises(ValueError, match=field):
            BenchSettings(**{field: 0})
    with pytest.raises(ValueError, match="selection is empty"):
        run_bench(FakeLLM(), parse_variants("none"), [], settings=BenchSettings())


def test_engine_overrides_of_a_variant_win():
    llm = FakeLLM()
    EngineParticipant(llm, parse_variant("suffix:exact"))
    config = llm.log[0][2]
    assert config.exact and config.max_num_seqs == 1 and not config.prefix_reuse


# -- provenance and reports


def test_no_path_of_the_machine_reaches_a_result(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    argv = [
        "/usr/local/bin/dspark",
        "bench",
        "--data",
        "/data/secret/x.jsonl",
        f"--out={tmp_path}/out",
        "--drafts",
        "none,/m/d",
    ]
    assert command_line(argv) == "dspark bench --data .../x.jsonl --out=out --drafts none,.../d"
    assert scrub({"a": ["/x/y", 1, None, True], "b": Path("/x/z"), "c": "n/a"}) == {
        "a": [".../y", 1, None, True], "b": ".../z", "c": "n/a",
    }  # fmt: skip


def test_git_state(tmp_path):
    assert git_state(tmp_path) is None

    def git(*words):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git_state(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and not clean["dirty"]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "new.jsonl").write_text("{}")
    assert not git_state(tmp_path)["dirty"]
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["dirty"]


def test_reports_agree_with_the_summary(tmp_path):
    result = bench(tmp_path)
    summary = summarise(result)
    head = {"command": "dspark bench", "date": "d", "cpu": "c", "num_cpus": 2, "threads": 2, "device": "cpu",
            "git": None, "versions": {}, "config": {}}  # fmt: skip
    records = [json.loads(line) for line in json_lines(result, summary, head=head)]
    assert records[0]["kind"] == "head" and all(record["run"] == "d dspark bench" for record in records)
    assert sum(record["kind"] == "answer" for record in records) == 4 * 2 * 3
    figures = {(r["task"], r["variant"]): r for r in records if r["kind"] == "figures"}
    assert figures[ALL, "ngram"]["speedup"] == pytest.approx(1.5)
    page = markdown_report(result, summary, title="t", head=head, plot="t.png")
    assert "![speedup by task](t.png)" in page and "accepted_at[j] / verified_at[j]" in page
    for text in (page, text_report(result, summary)):
        assert "1.50 [" in text and "fresh drafters" in text and "store of `suffix`" in text


# -- the command


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def run_command(tmp_path, monkeypatch, *words, wrong=None):
    monkeypatch.setattr(command, "load_llm", lambda args, *, progress: FakeLLM(wrong=wrong))
    data = tmp_path / "in.jsonl"
    data.write_text("\n".join(json.dumps({"task": "t", "prompt": text}) for text in ("one", "three")))
    args = parse(
        "--model", "/m/fake", "--data", str(data), "--out", str(tmp_path / "out"), "--max-tokens", "20", *words
    )
    return command.run(args, argv=["dspark", "bench", "--model", "/m/fake"])


def test_command_writes_its_files_and_prints_tables(tmp_path, monkeypatch, capsys):
    assert run_command(tmp_path, monkeypatch, "--drafts", "ngram,loop", "--repeat", "2", "--exact-check") == 0
    written = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert written == [".jsonl", ".md", ".png"]
    out, err = capsys.readouterr()
    assert "speedup against none" in out and "no fault" in err and "repetition 2/2" in err
    (results,) = (tmp_path / "out").glob("*.jsonl")
    head = json.loads(results.read_text().splitlines()[0])
    assert head["command"] == "dspark bench --model .../fake" and "/home" not in results.read_text()
    assert head["versions"]["python"] and head["config"]["variants"]["ngram"]["model"] == "fake"
    run_command(tmp_path, monkeypatch, "--drafts", "ngram")
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 2, "a result is never overwritten"


def test_command_prints_json(tmp_path, monkeypatch, capsys):
    assert run_command(tmp_path, monkeypatch, "--drafts", "suffix", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {figure["variant"] for figure in document["figures"]} == {"none", "suffix"}


def test_exact_check_fails_on_any_difference_in_exact_mode_only(tmp_path, monkeypatch, capsys):
    wrong = {"suffix": 0}  # the scripted target calls token 63 an exact tie with its first choice
    assert run_command(tmp_path, monkeypatch, "--drafts", "suffix", "--exact-check", wrong=wrong) == 0
    assert run_command(tmp_path, monkeypatch, "--drafts", "suffix:exact", "--exact-check", wrong=wrong) == 1
    assert run_command(tmp_path, monkeypatch, "--drafts", "suffix:exact", wrong=wrong) == 0
    assert "more than rounding explains" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafts", "ngram@x"], "no number of tokens"),
        (["--repeat", "0"], "repeat"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "0.5", "--exact-check"], "temperature 0"),
        (["--peer", "hf", "--concurrency", "2"], "one prompt at a time"),
        (["--exact-check", "--rate", "2"], "one prompt at a time"),
        (["--concurrency", "2,x"], "'x' is no number"),
        (["--concurrency", "0"], "at least 1"),
        (["--concurrency", "2,2"], "named twice"),
        (["--rate", "-1"], "above 0"),
        (["--rate", "1", "--burstiness", "0"], "burstiness"),
        (["--slo", "ttft=1"], "are for a load"),
        (["--floor", "2@50"], "are for a load"),
        (["--floor", "two@50", "--rate", "1"], "no number: give N@TOKENS_PER_SECOND"),
        (["--floor", "0@50", "--rate", "1"], "no floor: give N@TOKENS_PER_SECOND"),
        (["--history", "/absent.json"], "absent.json"),
        (["--slo", "speed=1", "--rate", "1"], "ttft=SECONDS"),
        (["--slo", "tpot=0", "--rate", "1"], "ttft=SECONDS"),
        (["--concurrency", "50"], "50 clients for"),
        (["--tasks", "nope"], "nope"),
        (["--drafts", "none", "--repeat", "1", "--exact-check"], "compared nothing"),
    ],
)
def test_bad_options_are_one_line(tmp_path, monkeypatch, words, message):
    with pytest.raises(ValueError, match=message) as caught:
        run_command(tmp_path, monkeypatch, *words)
    assert "\n" not in str(caught.value)


def test_a_history_is_for_the_adaptive_variants(tmp_path):
    path = str(tmp_path / "h.json")
    History().save(path)
    variants = with_history(parse_variants("suffix,ngram:fixed,dspark"), path)
    assert [(v.name, v.speculation.history) for v in variants] == [
        ("none", None), ("suffix", path), ("ngram:fixed", None), ("dspark", path),
    ]  # fmt: skip
    assert with_history(variants, None) == variants


def test_the_parser_loads_nothing_heavy():
    code = (
        "import argparse, sys; from dspark.bench import command; command.add_arguments(argparse.ArgumentParser());"
        "print([m for m in ('torch', 'numpy', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_peer_measures_like_the_engine():
    """A tiny random transformers model: greedy tokens of all three peers agree, the first delivery is counted."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from dspark.bench.peers import PROMPT_LOOKUP_TOKENS, HfPeer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=63, pad_token_id=63, bos_token_id=62,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    peers = [
        HfPeer("hf", model, threads=1),
        HfPeer("hf-lookup", model, threads=1, options={"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}),
        HfPeer("hf-assisted", model, threads=1, options={"assistant_model": model}),
    ]
    params = BenchSettings(max_tokens=12).params(0)
    threads = torch.get_num_threads()
    answers = [peer.answer([1, 2, 3, 1, 2], params) for peer in peers]
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens and 1 <= len(answers[0].tokens) <= 12
    assert answers[0].num_first == 1 and answers[2].num_first >= 2, "a model drafting for itself delivers a block"
    assert all(answer.first_seconds > 0 and answer.decode_seconds >= 0 for answer in answers)
    assert torch.get_num_threads() == threads
