"""Tests of `dspark bench --url` and `dspark tune --url` against a scripted server."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest

from dspark.bench import advice, tune
from dspark.bench.advice import Facts, batch_table, expect, line, proposal
from dspark.bench.remote import Counters, RemoteServer, is_loopback, read_counters
from dspark.cli import main
from tests import fake_openai
from tests.fake_openai import Script, serving, vllm_metrics

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def data(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Question {i}", "task": "a"}) + "\n" for i in range(4)))
    return str(path)


def test_tokens_are_those_the_server_counts_and_pieces_are_timed():
    script = Script(pieces=4, tokens=12)
    with serving(script) as url:
        answer = RemoteServer(url=url + "/v1/", key="k").stream("tiny", HELLO, max_tokens=12, temperature=0.5)
    assert answer.num_tokens == 12 and len(answer.times) == 4 and len(answer.gaps) == 3
    assert list(answer.times) == sorted(answer.times) and answer.text == "word " * 4
    (body,) = script.asked
    assert body["messages"] == HELLO and body["temperature"] == 0.5 and body["stream"] is True
    assert script.keys == ["Bearer k"]


def test_metrics_of_every_server():
    text = vllm_metrics(drafts=2, drafted=8, accepted=(2, 1))(3) + "\n" + vllm_metrics(drafts=1, accepted=(1, 0))(1)
    found = read_counters(text)
    assert (found.engine, found.drafts, found.accepted) == ("vllm", 7, 10)
    assert list(found.accepted_at) == [7, 3]
    sglang = read_counters('sglang:spec_accept_length{model_name="m"} 2.5\n')
    assert (sglang.engine, sglang.accepted_length, sglang.accepted) == ("sglang", 2.5, None)
    tgi = read_counters("tgi_request_count 3\ntgi_request_skipped_tokens_sum 40\ntgi_request_skipped_tokens_count 3\n")
    assert (tgi.engine, tgi.accepted) == ("tgi", 40)
    assert read_counters("llamacpp:tokens_predicted_total 5\n").engine == "llama.cpp"
    assert read_counters("<html>\nvllm:x{ nonsense\n") == Counters(accepted_at=[])


def test_only_loopback_unless_allowed():
    assert is_loopback("localhost") and is_loopback("::1") and is_loopback("127.3.2.1")
    assert not is_loopback("example.org") and not is_loopback("10.0.0.1")
    with pytest.raises(ValueError, match="--allow-remote"):
        RemoteServer(url="http://10.0.0.1:8000")
    RemoteServer(url="http://10.0.0.1:8000", allow_remote=True)


def test_what_the_server_refuses_is_told(data, capsys):
    with serving(Script(status=503)) as url:
        assert main(["bench", "--url", url, "--data", data]) == 2
    assert "503" in capsys.readouterr().err
    assert main(["bench", "--url", "http://127.0.0.1:9", "--data", data]) == 2
    assert "is the server up?" in capsys.readouterr().err


def test_bench_of_a_server_with_counters(data, capsys):
    script = Script(metrics=vllm_metrics())
    with serving(script) as url:
        assert main(["bench", "--url", url, "--data", data, "--concurrency", "1,2", "--repeat", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, two = found["figures"]
    assert (one["concurrency"], two["concurrency"]) == (1, 2)
    assert one["num_tokens"] == 48 and one["counters"]["accepted"] == 24
    assert one["accepted_length"] == 2.0  # 48 tokens in 24 passes
    assert len(script.asked) == 9  # and one to warm up
    assert "127.0.0.1" not in json.dumps(found["provenance"])


def test_llama_cpp_tells_with_the_answer(data, capsys):
    script = Script(tokens=12, timings={"draft_n": 10, "draft_n_accepted": 6})
    with serving(script) as url:
        assert main(["bench", "--url", url, "--data", data, "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert "llama.cpp" in out and "2.00" in out


# --- what is foretold -----------------------------------------------------------------------------------------------


def run_of(requests: int, *, row: float, survival=(0.8, 0.6, 0.5, 0.4), share: float = 1.0) -> Facts:
    """A step that costs 1 + row seconds a packed row."""
    mean = float(len(survival))
    rows = requests * (1 + share * mean)
    return Facts(requests=requests, rows=rows, seconds=1 + row * rows, share=share, survival=survival, mean_length=mean)


def test_free_rows_want_long_drafts_dear_ones_none():
    free = expect([run_of(n, row=0.0001) for n in (1, 8)])
    dear = expect([run_of(n, row=5.0) for n in (1, 8)])
    assert free.best(1) == free.best(8) == 4 and dear.best(8) == 0
    assert free.gains[1][4] == pytest.approx(1 + 2.3, rel=0.01)


def test_more_requests_want_shorter_drafts():
    found = expect([run_of(n, row=0.05) for n in (1, 4, 16, 64)])
    best = [found.best(n) for n in (1, 4, 16, 64)]
    assert best == sorted(best, reverse=True) and best[0] > best[-1]


def test_gains_are_exact_for_a_line():
    found = expect([run_of(n, row=0.1) for n in (1, 4)])
    assert found.gains[4][2] == pytest.approx((1 + 1.4) * (1 + 0.1 * 4) / (1 + 0.1 * 4 * 3))


def test_steps_of_one_size_are_refused():
    with pytest.raises(ValueError, match="--concurrency"):
        line([(4.0, 1.0), (4.0, 1.1)])


def test_the_table_is_what_vllm_takes():
    table = batch_table({1: 8, 4: 4, 8: 4, 32: 0})
    assert table == [[1, 2, 8], [3, 20, 4], [21, 32, 0]]
    assert batch_table({1: 3}) == [[1, 1, 3]]
    ends = [last for _, last, _ in table]
    assert table[0][0] == 1 and [first for first, _, _ in table[1:]] == [end + 1 for end in ends[:-1]]


@pytest.mark.parametrize(
    ("best", "engine", "words"),
    [
        ({1: 0, 8: 0}, "vllm", "leave speculation off"),
        ({1: 3, 8: 3}, "vllm", '"num_speculative_tokens": 3'),
        ({1: 8, 8: 2}, "vllm", advice.VLLM_TABLE),
        ({1: 2, 8: 0}, "tgi", "--speculate 2 (TGI is in maintenance"),
        ({1: 0}, "tgi", "--speculate 0"),
        ({1: 3}, "sglang", "--speculative-num-steps 3"),
        ({1: 3}, "llama.cpp", "--draft-max 3"),
    ],
)
def test_proposals_are_in_the_servers_words(best, engine, words):
    assert words in proposal(best, engine=engine)


def test_tune_foretells_from_counters(data, capsys):
    script = Script(metrics=vllm_metrics(), pause=0.001)
    with serving(script) as url:
        assert main(["tune", "--url", url, "--data", data, "--concurrency", "1,4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "vllm" and set(found["foretold"]) == {"1", "4"}
    assert set(found["foretold"]["1"]) == {"0", "1", "2", "3"}, "nothing is said beyond what was tried"


def test_tune_without_counters_says_what_to_do(data, capsys):
    with serving(Script()) as url:
        assert main(["tune", "--url", url, "--data", data, "--concurrency", "1,2"]) == 2
    assert "--command" in capsys.readouterr().err


# --- restarts -------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_tune_starts_each_candidate_and_finds_the_quickest(data, capfd):
    port = free_port()
    command = shlex.join([sys.executable, str(Path(fake_openai.__file__)), str(port), "{k}"])
    words = ["--data", data, "--concurrency", "1", "--command", command, "--lengths", "0,2,4", "--json"]
    assert main(["tune", "--url", f"http://127.0.0.1:{port}", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [one["k"] for one in found["measured"]] == [0, 2, 4] and found["best"] == {"1": 4}
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "a server was left running"


def test_a_server_that_ends_is_told(data, capfd):
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('out of memory')", "{k}"])
    port = free_port()
    words = ["--data", data, "--concurrency", "1", "--command", command]
    assert main(["tune", "--url", f"http://127.0.0.1:{port}", *words]) == 2
    error = capfd.readouterr().err
    assert "ended with status 1" in error and "out of memory" in error


def test_a_running_server_is_not_taken_for_the_one_started(data, capsys):
    with serving(Script()) as url:
        words = ["--data", data, "--concurrency", "1", "--command", "true {k}"]
        assert main(["tune", "--url", url, *words]) == 2
    assert "answers at" in capsys.readouterr().err


def test_off_leaves_the_option_out():
    words = tune.command_words("serve m --speculative-config {speculative_config} -x", 3, {"method": "ngram"})
    assert json.loads(words[3]) == {"method": "ngram", "num_speculative_tokens": 3}
    assert tune.command_words("serve m --speculative-config {speculative_config} -x", 0, {}) == ["serve", "m", "-x"]
    assert tune.command_words("serve --speculate={k}", 0, {}) == ["serve"]
    with pytest.raises(ValueError, match="neither"):
        tune.command_words("serve m", 2, {})
