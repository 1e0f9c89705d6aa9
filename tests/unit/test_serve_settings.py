"""`dspark serve`: flags, [server] tables and what is refused before a model is loaded."""

from __future__ import annotations

import socket

import pytest

from dspark.cli import USER_ERROR, main
from dspark.config import Config, ServerConfig, load_config


@pytest.fixture
def asked(monkeypatch):
    """What the server is asked to do, instead of doing it."""
    from dspark.serve import server

    found: list[tuple[str, Config]] = []
    monkeypatch.setattr(server, "run", lambda model, config, **rest: found.append((model, config)))
    return found


def test_flags_beat_the_table_and_the_table_the_defaults(asked, tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text(
        '[server]\nport = 9000\nmax_queue = 5\nserved_model_name = ["a", "b"]\n[engine]\nmax_num_seqs = 4\n'
    )
    argv = ["serve", "some-model", "--config", str(file), "--port", "9001", "--api-key", "k1", "k2", "--seed", "3"]
    assert main([*argv, "--max-num-batched-tokens", "64", "--no-page"]) == 0
    [(model, config)] = asked
    assert model == "some-model"
    assert (config.server.port, config.server.max_queue, config.server.page) == (9001, 5, False)
    assert config.server.served_model_name == ("a", "b") and config.server.api_key == ("k1", "k2")
    assert (config.engine.max_num_seqs, config.engine.max_num_batched_tokens, config.engine.seed) == (4, 64, 3)
    monkeypatch.setenv("DSPARK_API_KEY", "hidden")
    assert main(["serve", "m"]) == 0 and asked[-1][1].server.api_key == ("hidden",)
    assert main(["serve", "m", "--api-key", "own"]) == 0 and asked[-1][1].server.api_key == ("own",)


def test_vllms_speculative_config_means_the_same(asked):
    value = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    assert main(["serve", "m", "--speculative-config", value]) == 0
    speculation = asked[0][1].speculation
    assert (speculation.method, speculation.num_speculative_tokens, speculation.prompt_lookup_max) == ("ngram", 3, 2)


def test_a_chat_template_is_a_file_or_the_text_itself(asked, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    for given in (str(file), "{{ messages }}"):
        assert main(["serve", "m", "--chat-template", given]) == 0
        assert asked[-1][1].server.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--port", "99999"], "port"),
        (["--port", "x"], "--port"),
        (["--ssl-keyfile", "k.pem"], "ssl_certfile"),
        (["--max-queue", "-1"], "max_queue"),
        (["--shutdown-grace", "0"], "shutdown_grace"),
        (["--request-timeout", "nan"], "request_timeout"),
        (["--root-path", "v1"], "root_path"),
        (["--reasoning-end", ""], "reasoning_end"),
        (["--tool-call-parser", "none such"], "--tool-call-parser"),
        (["--chat-template", "absent.jinja"], "absent.jinja"),
        (["--model", "other"], "other"),
        (["--set", "server.speed=3"], "speed"),
    ],
)
def test_what_is_wrong_is_one_line(asked, capsys, argv, word):
    assert main(["serve", "m", *argv]) == USER_ERROR
    out, err = capsys.readouterr()
    assert not out and word in err and len(err.splitlines()) == 1 and not asked


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        argv = ["serve", "/absent", "--port", str(taken.getsockname()[1])]
        assert main(argv) == USER_ERROR
    assert "another --port" in capsys.readouterr().err.splitlines()[-1]
    assert main(["serve", "/absent", "--host", "256.1.1.1"]) == USER_ERROR
    assert "host" in capsys.readouterr().err.splitlines()[-1]
    assert main(["serve", "/absent", "--port", "0", "--ssl-keyfile", "a.pem", "--ssl-certfile", "a.pem"]) == USER_ERROR
    assert "a.pem" in capsys.readouterr().err.splitlines()[-1]


def test_settings_are_read_from_a_table(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[server]\napi_key = 'one'\n")
    assert load_config(file).server == ServerConfig(api_key=["one"])
    with pytest.raises(ValueError, match="api_key"):
        ServerConfig(api_key=[""])
