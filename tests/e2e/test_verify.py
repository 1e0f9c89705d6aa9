"""`dspark verify` as a user runs it: in one process, against servers, interrupted; and what its reports say."""

from __future__ import annotations

import json
import os
import signal

import pytest

from dspark import LLM, SamplingParams
from dspark.bench import endpoint as sides_of_servers
from dspark.bench import verify
from dspark.bench.endpoint import chat_body
from dspark.cli import main
from dspark.quality import sides
from dspark.quality.checks import FAIL, INCONCLUSIVE, PASS, Check, check_identity, gate, score_tasks
from dspark.quality.checks import Scorer as TaskScorer
from dspark.quality.oracle import Finding
from dspark.quality.pairs import UNJUDGED, Pair, remote_ends, remote_judge
from dspark.quality.questions import Question
from dspark.quality.sides import Reply
from tests.server import serving
from tests.tiny_folder import tiny_folder

ROWS = {
    "gsm8k": [{"question": f"{i} + {i}, one two one two", "answer": str(2 * i)} for i in range(3)],
    "mtbench": [{"turns": ["abc abc abc", "?"]}, {"turns": ["hello hello", "?"]}],
    "mmlu": [{"question": "which one, which one", "choices": ["x", "y"], "answer": 1}],
    "jsonschema": [{"id": "j", "schema": {"enum": ["aa", "ab"]}}],
    "humaneval": [{"prompt": "def f():\n", "test": "def check(c):\n    assert c() == 1\n", "entry_point": "f"}],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for task, rows in ROWS.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("target")))


def arguments(folder, data, out, *more):
    words = ["verify", "--model", folder, "--draft", "suffix", "--data", data, "--max-tokens", "12", "--out", str(out)]
    return [*words, "--name", "t", "--policy", "fixed", *more]


def lines_of(out):
    (path,) = out.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_in_one_process(folder, data, tmp_path, capsys):
    assert main(arguments(folder, data, tmp_path, "--samples", "60", "--prefixes", "2", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in document["checks"]}
    assert document["passed"] and checks["same answers"]["verdict"] == PASS
    assert {"ends", "drafts", "score gsm8k", "open answers", "sampled answers"} <= set(checks)
    assert checks["score jsonschema"]["figures"]["plain"] == 1.0 == checks["score jsonschema"]["figures"]["speculative"]
    assert checks["sampled answers"]["verdict"] in (PASS, INCONCLUSIVE)  # of 60 samples little can be said
    lines = lines_of(tmp_path)
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "head" and kinds[-1] == "gate" and lines[0]["git"] and lines[0]["versions"]
    assert kinds.count("pair") == 3 + 6 + 2 + 1 + 1 and kinds.count("sampled") == 2
    (page,), (text,) = tmp_path.glob("*.html"), tmp_path.glob("*.md")
    assert "gate: PASSED" in page.read_text() and "gate: PASSED" in text.read_text()
    assert "<script" not in page.read_text() and "http" not in page.read_text()


def test_a_fault_fails_the_gate(folder, data, tmp_path, capsys, monkeypatch):
    answer = sides.LocalSide.answer

    def spoilt(self, questions):
        replies = answer(self, questions)
        if self.name == "speculative":
            replies[0].tokens[-1] ^= 1
        return replies

    monkeypatch.setattr(sides.LocalSide, "answer", spoilt)
    assert main(arguments(folder, data, tmp_path, "--samples", "0", "--tasks", "gsm8k")) == 1
    printed = capsys.readouterr().out
    assert "gate: NOT PASSED" in printed and "1 faults" in printed


def test_an_interrupted_run_leaves_its_report(folder, data, tmp_path, capsys, monkeypatch):
    answer, asked = sides.LocalSide.answer, []

    def interrupting(self, questions):
        asked.append(questions)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer(self, questions)

    monkeypatch.setattr(sides.LocalSide, "answer", interrupting)
    assert main(arguments(folder, data, tmp_path, "--samples", "0", "--batch", "2")) == 130
    assert "interrupted after 2 of 13" in capsys.readouterr().out
    kinds = [line["kind"] for line in lines_of(tmp_path)]
    assert kinds.count("pair") == 2 and kinds[-1] == "gate" and list(tmp_path.glob("*.html"))


def test_time_that_is_over_ends_the_questions(folder, data, tmp_path, capsys):
    code = main(arguments(folder, data, tmp_path, "--samples", "0", "--batch", "2", "--minutes", "1e-9"))
    assert code == 0 and "(2 of 13 questions in the time given)" in capsys.readouterr().out


@pytest.fixture(scope="module")
def server(folder):
    llm = LLM(folder, draft="suffix", num_speculative_tokens=3, speculative_config=None)
    with serving(llm) as running:
        yield running.url


def remote(data, out, *more):
    words = ["verify", "--data", data, "--max-tokens", "12", "--out", str(out), "--name", "t", "--samples", "40"]
    return [*words, "--tasks", "gsm8k,mmlu,mtbench,jsonschema", "--prefixes", "1", *more]


def test_one_server_with_a_switch(server, data, tmp_path, capsys):
    assert main(remote(data, tmp_path, "--url", f"{server}/v1", "--json", "--judge-url", server)) == 0
    document = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["same answers"]["figures"]["identical"] == 12, document["differences"]
    assert "plain side's samples" in checks["sampled answers"]["text"] and checks["judge"]["verdict"] == PASS
    assert checks["drafts"]["figures"].get("num_verified", 0) >= 0 and "per_request_switch" in str(document["head"])


def test_two_servers(server, data, tmp_path, capsys):
    assert main(remote(data, tmp_path, "--url", server, "--url2", server, "--tasks", "gsm8k")) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 pairs identical" in printed and "does not tell what it drafted" in printed


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tasks", "gsm9k"], "not known"),
        (["--data", "/absent"], "cannot be read"),
        (["--draft", "none"], "nothing to verify"),
        (["--url", "ftp://x", "--draft", "ngram"], "leave --draft"),
        (["--url2", "http://x"], "--url2"),
        (["--margin", "0"], "--margin"),
        (["--samples", "-1"], "--samples"),
        (["--per-task", "0"], "--per-task"),
    ],
)
def test_errors_of_users_are_a_line(folder, data, tmp_path, capsys, more, said):
    assert main([*arguments(folder, data, tmp_path), *more]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_server_that_is_not_there(data, tmp_path, capsys):
    assert main(remote(data, tmp_path, "--url", "http://127.0.0.1:9")) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_a_server_that_goes_away_leaves_a_report(server, data, tmp_path, capsys, monkeypatch):
    ask, asked = sides_of_servers.RemoteSide.answer, []

    def going(self, questions):
        asked.append(questions)
        if len(asked) == 4:
            self.endpoint.url = "http://127.0.0.1:9"
        return ask(self, questions)

    monkeypatch.setattr(sides_of_servers.RemoteSide, "answer", going)
    assert main(remote(data, tmp_path, "--url", server, "--tasks", "gsm8k", "--batch", "2")) == 2
    captured = capsys.readouterr()
    assert "cannot be reached" in captured.err and "interrupted after 2 of 3" in captured.out
    assert [line["kind"] for line in lines_of(tmp_path)].count("pair") == 2


def question(task="gsm8k", **row):
    params = SamplingParams(temperature=0, max_tokens=4, stop=["!"])
    plain = SamplingParams(temperature=0, max_tokens=4)
    return Question(task=task, id="1", messages=(), params=params if row.pop("stops", False) else plain, row=row)


def told(*tokens, gap=0.0, text=None):
    rows = [{token: -0.7, token + "'": -0.7 - gap} for token in tokens]
    return Reply(text="".join(tokens) if text is None else text, tokens=tokens, logprobs=rows, finish_reason="length")


def test_differences_of_servers_are_judged_by_their_own_logprobs():
    judge = remote_judge(bound=0.5)
    seeded = Question(task="t", id="1", messages=(), params=SamplingParams(seed=0, max_tokens=4), row={})
    assert chat_body(seeded, logprobs=False)["seed"] == 0 and "seed" not in chat_body(question(), logprobs=True)
    assert judge(question(), told("a", "b"), told("a", "b")).verdict == "identical"
    assert judge(question(), told("a", "b", gap=0.3), told("a", "b'", gap=0.3)).verdict == "fault"  # not among the told
    near, far = ({"b": -0.7, "b'": -0.7 - gap} for gap in (0.3, 3.0))
    for row, verdict in ((near, "tie"), (far, "fault")):
        first = Reply(text="ab", tokens=["a", "b"], logprobs=[{"a": 0.0}, row])
        second = Reply(text="ab'", tokens=["a", "b'"], logprobs=[{"a": 0.0}, row])
        assert judge(question(), first, second).verdict == verdict
    bare = judge(question(), Reply(text="ab"), Reply(text="ac"))
    assert bare.verdict == UNJUDGED and bare.position == 1
    assert remote_ends(question(stops=True), Reply(text="a!b")) and not remote_ends(question(), Reply(text="a!b"))


def pair(verdict, plain="#### 1", other="#### 1", answer="1"):
    return Pair(
        question=question(answer=answer),
        plain=Reply(text=plain, tokens=[1]),
        other=Reply(text=other, tokens=[1]),
        finding=Finding(verdict=verdict, position=None if verdict == "identical" else 0),
    )


def test_what_cannot_be_judged_is_no_pass():
    assert check_identity([pair("identical")], exact=False).verdict == PASS
    assert check_identity([pair(UNJUDGED)], exact=False).verdict == INCONCLUSIVE
    assert check_identity([pair(UNJUDGED)], exact=True).verdict == FAIL
    assert check_identity([pair("tie")], exact=False).figures["tie_rate_per_1000"] == 1000
    assert check_identity([], exact=False).verdict == INCONCLUSIVE


def test_scores_that_differ_fail_and_small_samples_say_so():
    from dspark.quality.checks import check_scores

    worse = [pair("tie", other="#### 2")] * 20
    (found,) = check_scores(score_tasks(worse, TaskScorer(), margin=0.001), margin=0.001)
    assert found.verdict == FAIL and "McNemar" in found.text
    few = [pair("tie", other="#### 2"), pair("tie")]
    (found,) = check_scores(score_tasks(few, TaskScorer(), margin=0.001), margin=0.001)
    assert found.verdict == INCONCLUSIVE and "questions" in found.text
    same = [pair("identical")] * 3
    (found,) = check_scores(score_tasks(same, TaskScorer(), margin=0.001), margin=0.001)
    assert found.verdict == PASS and "the answers are the same" in found.text


def test_the_gate():
    good, bad, unknown = (Check(name="", verdict=verdict, text="") for verdict in (PASS, FAIL, INCONCLUSIVE))
    assert gate([good, unknown]) and not gate([good, unknown], strict=True)
    assert not gate([good, bad]) and not gate([]) and not gate([unknown])
    assert verify.TASKS.count(",") == 4
