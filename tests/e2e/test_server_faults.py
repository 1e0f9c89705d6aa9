"""Faults that clients, operators and our own mistakes may bring into a server: each hits nobody else, and is told."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from dspark import LLM
from dspark.config import ServerConfig, SpeculationConfig
from dspark.serve.parts import Parts
from dspark.serve.tools import ToolCallStream
from tests.server import serving
from tests.tiny_folder import tiny_folder

CHAT = [{"role": "user", "content": "hi there"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def alone(folder):
    return LLM(folder)


def serve(alone, **settings):
    engine = {k: settings.pop(k) for k in ("max_num_seqs",) if k in settings}
    return serving(alone.variant(speculation=SpeculationConfig(), **engine), **settings)


def raw_post(running, body, **more):
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps(body).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.connect((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    raw.sendall(f"{head}Content-Length: {more.get('length', len(body))}\r\n\r\n".encode() + body)
    return raw


def test_a_number_that_is_no_float_does_not_end_the_engine(alone):
    with serve(alone) as running:
        for name in ("max_tokens", "min_tokens"):
            body = b'{"prompt": "x", "ignore_eos": true, "max_tokens": null, "%s": 1%s}' % (name.encode(), b"0" * 400)
            with ThreadPoolExecutor(4) as pool:
                ask = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
                others = [pool.submit(httpx.post, running.url + "/v1/completions", json=ask, timeout=20) for _ in "ab"]
                huge = [
                    pool.submit(httpx.post, running.url + "/v1/completions", content=body, headers=JSON, timeout=20)
                    for _ in "ab"
                ]
                assert {h.result().status_code for h in huge} <= {200, 400}
                assert {o.result().status_code for o in others} == {200}
        assert running.get("/health").status_code == 200


LINKS = 8000
REFERENCES = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(LINKS)} | {f"a{LINKS}": {"type": "string"}}
RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(LINKS)) + f'r{LINKS}: "a"\n'


@pytest.mark.parametrize(
    "field, value",
    [
        ("guided_grammar", RULES),
        ("guided_json", {"$ref": "#/$defs/a0", "$defs": REFERENCES}),
    ],
)
def test_a_deep_grammar_does_not_kill_the_process(folder, tmp_path, field, value):
    (tmp_path / "body.json").write_text(json.dumps({"prompt": "x", "max_tokens": 2, field: value}))
    code = (
        "import sys, httpx; from dspark import LLM; from tests.server import serving\n"
        "with serving(LLM(sys.argv[1])) as r:\n"
        "    head = {'content-type': 'application/json'}\n"
        "    x = httpx.post(r.url + '/v1/completions', content=open(sys.argv[2]).read(), headers=head, timeout=60)\n"
        "    assert x.status_code in (200, 400), x.text\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder, str(tmp_path / "body.json")], timeout=120)
    assert done.returncode == 0  # -11: SIGSEGV


def test_a_step_that_fails_behind_a_row_that_ended_still_answers_it(alone):
    with serve(alone) as running:
        engine, done = running.service.llm.engine, []

        def sink(stats):
            if not done and any(group.ended for group, _ in running.service.engine.boxes.values()):
                done.append(1)
                raise RuntimeError("planted")

        engine.sinks.append(sink)
        ask = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(running.url + "/v1/completions", json=ask, timeout=8).status_code in (200, 500)


def test_an_engine_thread_that_is_killed_leaves_nobody_waiting(alone, monkeypatch):
    with serve(alone) as running:
        engine = running.service.llm.engine

        def killed(*_, **__):
            raise SystemExit

        monkeypatch.setattr(engine.runner, "forward", killed)
        assert httpx.post(running.url + "/v1/completions", json={"prompt": "x"}, timeout=8).status_code in (500, 503)


@pytest.mark.parametrize(
    "style, begin", [("hermes", '<tool_call>\n{"name": "w", "arguments": '), ("llama3", '{"name": "w", "parameters": ')]
)
def test_arguments_that_were_cut_are_told(style, begin):
    whole = Parts(style=style)
    whole.push(begin + '{"city": "Ro')
    whole.finish()
    assert whole.message()["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'
    parts, sent = Parts(style=style), ""
    for piece in (begin, '{"city": ', '"Ro'):
        parts.push(piece)
        if piece == '"Ro':
            parts.finish()  # as Choice.piece does with the last output
        sent += "".join(call["function"].get("arguments", "") for call in parts.delta().get("tool_calls", []))
    assert sent == '{"city": "Ro'


@pytest.mark.parametrize("limit", (None, 1.0))
def test_a_reader_that_never_reads_does_not_keep_its_place(alone, monkeypatch, limit):
    import tests.server as module

    plain = module.bind

    def small(host, port):
        listener = plain(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(module, "bind", small)
    settings = {"request_timeout": limit, "send_timeout": 1.0, "shutdown_grace": 1}
    with serve(alone, max_num_seqs=1, max_queue=0, **settings) as running:
        raw = raw_post(
            running,
            {
                "prompt": "h",
                "max_tokens": 450,
                "logprobs": 20,
                "token_sources": True,
                "ignore_eos": True,
                "stream": True,
            },
        )
        time.sleep(1)
        end = time.monotonic() + 10
        while running.service.llm.engine.rows and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(3)
        status = running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code
        raw.close()
        assert status == 200


@pytest.mark.parametrize(
    "values",
    (
        {"messages": 1},
        {"self": 1},
        {"truncation": True, "max_length": -1},
        {"truncation": "only_second", "max_length": 1},
    ),
)
def test_template_values_that_break_it_are_refused(alone, values):
    with serve(alone) as running:
        answer = running.post(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "chat_template_kwargs": values}
        )
        assert answer.status_code == 400, answer.text


def test_template_values_cannot_ask_for_padding(alone):
    with serve(alone) as running:
        values = {"padding": "max_length", "max_length": 100}
        answer = running.post(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "chat_template_kwargs": values}
        )
        assert answer.status_code == 400 and "chat_template_kwargs" in answer.text


def test_deep_arguments_and_deep_ebnf_are_refused(alone):
    with serve(alone) as running:
        call = {"function": {"name": "a", "arguments": "[" * 900 + "]" * 900}}
        answer = running.post(
            "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
        )
        assert answer.status_code == 400
        answer = running.post(
            "/v1/completions", {"prompt": "x", "guided_grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000}
        )
        assert answer.status_code == 400


def test_a_client_that_leaves_in_its_body_is_no_fault_of_ours(alone, caplog):
    with serve(alone) as running:
        raw = raw_post(running, {"prompt": "x"}, length=500)
        time.sleep(0.3)
        raw.close()
        time.sleep(0.5)
        assert 'status="500"' not in running.get("/metrics").text


def test_more_bad_words_than_can_be_read_in_a_moment_are_refused(alone):
    with serve(alone) as running:
        ask = {"prompt": "x", "max_tokens": 1, "bad_words": [f"w{i}" for i in range(30_000)]}
        assert running.post("/v1/completions", ask).status_code == 400


@pytest.mark.timeout(120)
def test_reading_calls_takes_time_in_proportion():
    """By the cube of the spaces, or the square of the arguments, this would take hours."""
    stream = ToolCallStream("mistral")
    stream.push("[TOOL_CALLS]" + " " * 50_000)
    stream = ToolCallStream("hermes")
    stream.push('<tool_call>\n{"name": "w", "arguments": {"x": "')
    for _ in range(100_000):
        stream.push("abcd")
    stream.push('"}}\n</tool_call>')
    stream.finish()
    assert stream.calls[0].whole and len(stream.calls[0].arguments) > 400_000


def test_as_many_choices_as_are_promised_are_taken(alone):
    with serve(alone) as running:
        words = [f"word {i}" for i in range(10_000)]
        answer = running.post("/v1/completions", {"prompt": "x", "max_tokens": 20, "guided_choice": words})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] in words


def test_a_signal_at_the_ready_line_ends_the_server(folder):
    code = (
        "import os, signal, sys; from dspark.config import Config, ServerConfig; from dspark.serve.server import run\n"
        "run(sys.argv[1], Config(server=ServerConfig(port=0)), ready=lambda *_: os.kill(os.getpid(), signal.SIGTERM))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, folder], timeout=25).returncode == 0


def test_a_root_path_keeps_health_open(alone):
    with serve(alone, root_path="/api", api_key=["k"]) as running:
        assert running.get("/health").status_code == 200


def test_a_key_is_in_no_error():
    with pytest.raises(ValueError) as refusal:
        ServerConfig(api_key=["topsecret", ""])
    assert "topsecret" not in str(refusal.value)


def test_client_certificates_are_asked_for(tmp_path):
    import ssl

    from dspark.serve.server import _tls

    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split()
    try:
        subprocess.run(
            [*command, "-keyout", tmp_path / "k.pem", "-out", tmp_path / "c.pem"], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    files = {"ssl_keyfile": str(tmp_path / "k.pem"), "ssl_certfile": str(tmp_path / "c.pem")}
    assert "ssl_cert_reqs" not in _tls(ServerConfig(**files))
    found = _tls(ServerConfig(**files, ssl_ca_certs=files["ssl_certfile"]))
    assert found["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    with pytest.raises(ValueError, match="PEM"):
        _tls(ServerConfig(ssl_keyfile=__file__, ssl_certfile=__file__))
    with pytest.raises(ValueError, match="ssl_certfile"):
        ServerConfig(ssl_ca_certs=__file__)


def test_prompt_logprobs_are_told_or_refused(alone):
    with serve(alone) as running:
        ask = {"prompt": ["ab", "cde"], "max_tokens": 1, "prompt_logprobs": 1}
        answer = running.post("/v1/completions", ask)
        assert answer.status_code == 400 or len(answer.json()["choices"][1]["prompt_logprobs"]) == 3
        answer = running.post("/v1/completions", ask | {"prompt": "ab", "stream": True})
        assert answer.status_code == 400 or "prompt_logprobs" in answer.text


def test_offsets_of_an_echo_are_places_in_its_text(alone):
    with serve(alone) as running:
        choice = running.post(
            "/v1/completions", {"prompt": "é中", "max_tokens": 0, "echo": True, "logprobs": 0}
        ).json()["choices"][0]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1] or choice["logprobs"]["text_offset"] == [
            0,
            1,
            1,
            2,
            2,
        ]


@pytest.mark.parametrize(
    "body, param, says",
    [
        ({"prompt": "x", "temperature": -1}, "temperature", "temperature"),
        ({"prompt": "x", "n": 0}, "n", "n="),
        ({"prompt": ["x"] * 257}, "prompt", "256"),
        ({"prompt": [1, 2.5]}, "prompt", "integer"),
        ({"prompt": "x", "logit_bias": {"--1": 1}}, "logit_bias", "logit_bias"),
        ({"prompt": "x", "model": "none"}, "model", "none"),
    ],
)
def test_refusals_name_the_field(alone, body, param, says):
    with serve(alone) as running:
        error = running.post("/v1/completions", body).json()["error"]
        assert error["param"] == param and says in error["message"], error
