"""`dspark bench --url` and `dspark tune --url` against `dspark serve`: what is measured is what the server did."""

from __future__ import annotations

import json

import pytest

from dspark import LLM
from dspark.cli import main
from tests.server import serving
from tests.tiny_folder import tiny_folder


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    speculation = {"method": "ngram", "policy": "fixed", "num_speculative_tokens": 4}
    llm = LLM(str(folder), speculative_config=speculation, max_num_seqs=4, max_model_len=256)
    with serving(llm) as running:
        yield running


@pytest.fixture
def data(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"abcabcabcabc {i}", "task": "loop"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_bench_counts_what_the_server_counts(server, data, capsys):
    words = ["--data", data, "--concurrency", "1,4", "--repeat", "1", "--max-tokens", "40", "--json"]
    assert main(["bench", "--url", server.url, *words]) == 0
    one, four = json.loads(capsys.readouterr().out)["figures"]
    for figures in (one, four):
        assert figures["counters"]["engine"] == "dspark"
        assert 4 < figures["num_tokens"] <= 160 and figures["counters"]["accepted"] <= figures["num_tokens"]
        assert sum(figures["counters"]["accepted_at"]) == figures["counters"]["accepted"]
    assert one["num_tokens"] == four["num_tokens"], "greedy answers do not depend on company"
    assert one["accepted_length"] >= 1
    server.settle()


def test_tune_says_no_more_than_the_server_has_tried(server, data, capsys):
    words = ["--data", data, "--concurrency", "1,4", "--max-tokens", "40", "--json"]
    assert main(["tune", "--url", server.url, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "dspark"
    for gains in found["foretold"].values():
        assert gains["0"] == 1.0 and max(map(int, gains)) <= 4
    assert set(found["best"].values()) <= {0, 1, 2, 3, 4} and found["proposal"]
