"""The dashboard, the alerts and docs/monitoring.md name what the exposition has.
They must never name a metric or a label that no server shows, nor leave one out where all are listed."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dspark.observe.prometheus import Exporter
from tests.fake_steps import busy_metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to all that it reads."""
OURS = {"alertname", "alertstate", "severity"}
BUILT_IN = {"up": SCRAPED, "ALERTS": SCRAPED | OURS | {"model_name", "engine"}}
"""Series that Prometheus makes itself."""
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset", "inf"}
NAME = r"[A-Za-z_:][A-Za-z0-9_:]*"


# -- what there is


@functools.cache
def exposition() -> str:
    metrics, http = busy_metrics()
    speculation = {"method": "suffix", "policy": "adaptive"}
    shown = Exporter(metrics, http, model_name="tiny", facts={"page_size": 16}, speculation=speculation)
    return shown.render()[0].decode()


@functools.cache
def series() -> dict[str, set[str]]:
    """Every name that can be asked for, with its labels."""
    found = {name: set(labels) for name, labels in BUILT_IN.items()}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            found.setdefault(sample.name, set(SCRAPED)).update(sample.labels)
    return found


# -- what a query asks for


def parts_of(expr: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """The query without strings, ranges and Grafana's variables, and its (name, labels asked for)."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    bare = re.sub(r"\$\w+", "0", bare)
    selectors = []
    for match in re.finditer(rf"({NAME})\s*\{{([^}}]*)\}}", bare):
        selectors.append((match[1], re.findall(rf"({NAME})\s*(?:=~|!~|!=|=)", match[2])))
    return re.sub(r"\{[^}]*\}", "", bare), selectors


def names_of(expr: str) -> set[str]:
    """The metrics that a query asks for."""
    bare, _ = parts_of(expr)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    found = {match[0] for match in re.finditer(rf"(?<![\w.:]){NAME}(?![\w:])(?!\s*\()", bare)}
    return {name for name in found if name.lower() not in WORDS}


def inside(text: str, start: int) -> str:
    """What the parenthesis that opens at `start` holds."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            return text[start + 1 : end]
    raise AssertionError(f"a parenthesis is not closed in {text}")


def faults_of(expr: str) -> list[str]:
    """What is wrong with a query."""
    names, known = names_of(expr), series()
    faults = [f"no metric {name}" for name in names - set(known)]
    if faults or not names:
        return faults or [f"no metric in {expr}"]
    bare, selectors = parts_of(expr)
    for name, labels in selectors:
        faults += [f"{name} has no label {label}" for label in set(labels) - known[name]]
    for match in re.finditer(r"\b(?:by|without)\s*\(([^)]*)\)\s*(?=\()", bare):
        for name in names_of(inside(bare, match.end())):
            faults += [f"{name} has no label {label}" for label in set(listed(match[1])) - known[name]]
    everywhere = set().union(*(known[name] for name in names))
    for match in re.finditer(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", bare):
        faults += [f"no metric of the query has the label {label}" for label in set(listed(match[1])) - everywhere]
    for label in re.findall(r'label_replace\(.*,\s*"(\w+)",\s*"[^"]*",\s*"(?:\w+)",\s*"[^"]*"\)', expr):
        faults += [] if label in everywhere else [f"no metric of the query has the label {label}"]
    return faults


def listed(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


# -- what is asked


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "dspark.json").read_text())


def panels() -> list[dict[str, Any]]:
    found = []
    for panel in dashboard()["panels"]:
        found += [panel, *panel.get("panels", [])]
    return found


def targets() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel, target


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> dict[str, str]:
    """Every query, by where it stands."""
    found = {f"panel {panel['title']}, {target['refId']}": target["expr"] for panel, target in targets()}
    for variable in dashboard()["templating"]["list"]:
        if (
            match := re.fullmatch(rf"label_values\(({NAME}), ({NAME})\)", str(variable.get("definition", "")))
        ) is not None:
            found[f"variable {variable['name']}"] = f"count by ({match[2]}) ({match[1]})"
    return found | {f"alert {rule['alert']}": rule["expr"] for rule in rules()}


# -- the tests


def test_queries_ask_for_what_is_there() -> None:
    asked = queries()
    assert len(asked) > 60
    faults = {where: found for where, expr in asked.items() if (found := faults_of(expr))}
    assert not faults, faults


@pytest.mark.parametrize(
    ("expr", "fault"),
    (
        ("rate(dspark:tokens_imagined_total[5m])", "no metric dspark:tokens_imagined_total"),
        ("rate(dspark:generation_tokens[5m])", "no metric dspark:generation_tokens"),
        ("dspark:step_seconds", "no metric dspark:step_seconds"),
        ("sum(rate(dspark:generation_tokens_total[5m])) / sum(dspark:absent) > 0.5", "no metric dspark:absent"),
        ("level:recorded_elsewhere:rate5m > 1", "no metric level:recorded_elsewhere:rate5m"),
        ('dspark:generation_tokens_total{tenant="a"}', "dspark:generation_tokens_total has no label tenant"),
        ("sum by (phase) (rate(dspark:engine_steps_total[1m]))", "dspark:engine_steps_total has no label phase"),
        ("dspark:engine_steps_total / on (moon) up", "no metric of the query has the label moon"),
        ("1 + 1", "no metric in 1 + 1"),
    ),
)
def test_a_name_that_nobody_shows_is_found(expr: str, fault: str) -> None:
    assert fault in faults_of(expr)


def test_names_are_read_out_of_queries() -> None:
    expr = (
        'histogram_quantile(0.95, sum by (le) (rate(a:b_bucket{x=~"c|d{2}", y!="e"}[$__rate_interval]))) * 1e6\n'
        "and on (job, z) f:g > 0 or vector(0) unless ignoring (q) group_left h offset 5m"
    )
    assert names_of(expr) == {"a:b_bucket", "f:g", "h"}
    assert parts_of(expr)[1] == [("a:b_bucket", ["x", "y"])]


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel, target in targets():
        used = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target.get("legendFormat", "")))
        kept = {label for words in re.findall(r"\bby\s*\(([^)]*)\)", target["expr"]) for label in listed(words)}
        assert used <= kept, (panel["title"], used - kept)


def test_the_dashboard_shows_every_family() -> None:
    asked = set().union(*(names_of(expr) for where, expr in queries().items() if where.startswith("panel")))
    for family in text_string_to_metric_families(exposition()):
        assert asked & {sample.name for sample in family.samples}, f"no panel asks for {family.name}"


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    taken: dict[tuple[int, int], str] = {}
    for panel in found:
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= 24 and place["h"] > 0, panel["title"]
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


def test_every_panel_tells_its_formula() -> None:
    for panel in panels():
        about = panel.get("description", "")
        assert about.strip() if panel["type"] == "row" else "=" in about, panel["title"]


def test_the_dashboard_can_be_provisioned() -> None:
    board = dashboard()
    assert board["id"] is None and board["uid"] and board["title"]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and "__inputs" not in board
    for panel, target in targets():
        assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}", panel["title"]
        used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range", "1"}
        assert used <= set(variables), panel["title"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert [row["type"] for row in source["datasources"]] == ["prometheus"]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/dspark.yml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    mounts = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["grafana"]["volumes"]
    assert f"./grafana/dspark.json:{folder}/dspark.json:ro" in mounts


def test_the_alerts_stand_in_the_dashboard() -> None:
    shown = {target["expr"]: panel for panel, target in targets()}
    found = rules()
    assert {rule["alert"] for rule in found} == {
        "SpeculationLoses",
        "NothingDrafted",
        "NothingAccepted",
        "QueueGrows",
        "ServerDown",
        "HighErrorRate",
    }
    timeline = next(panel for panel in panels() if panel["type"] == "state-timeline")["targets"][0]["expr"]
    for rule in found:
        panel = shown[f"count({rule['expr'].strip()}) or vector(0)"]
        assert panel["title"] == rule["alert"] and f"after {rule['for']}." in panel["description"]
        assert rule["alert"] in timeline
        assert rule["labels"]["severity"] in ("warning", "critical")
        for text in ("summary", "description"):
            labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"][text]))
            assert labels <= set().union(*(series()[name] for name in names_of(rule["expr"])))


def test_prometheus_reads_the_server_that_compose_starts() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    [job] = config["scrape_configs"]
    assert job["job_name"] == "dspark" and all((DEPLOY / name).is_file() for name in config["rule_files"])
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert host in services and services[host]["ports"][0].endswith(f":{port}:{port}")
    assert f'"--port", "{port}"' in (DEPLOY / "Dockerfile").read_text()
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_images_are_pinned_and_no_password_is_in_the_file() -> None:
    text = (DEPLOY / "docker-compose.yml").read_text()
    for name, service in yaml.safe_load(text)["services"].items():
        assert "build" in service or re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name
        for key, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET|TOKEN|KEY", key) or re.fullmatch(r"\$\{\w+:(\?.*|-)\}", value), key


def test_the_image_installs_what_the_package_offers_and_runs_as_nobody_special() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[([\w,]+)\]", text):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", project, re.MULTILINE), f"pyproject.toml has no extra {name}"
    for names in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in names.split())
    assert re.search(r"^USER (?!root)", text, re.MULTILINE) and "/health" in text
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


# -- the page


def documented() -> dict[str, tuple[str, set[str]]]:
    """name -> (type, labels) of the tables of docs/monitoring.md."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in (ROOT / "docs" / "monitoring.md").read_text().splitlines():
        if (
            match := re.match(r"\| `(dspark:[\w:]+)` \| (counter|gauge|histogram) \| ([^|]*) \| .+ \|$", line)
        ) is not None:
            assert match[1] not in found, f"{match[1]} stands there twice"
            found[match[1]] = (match[2], set(re.findall(r"`(\w+)`", match[3])))
    return found


def test_the_page_lists_exactly_what_there_is() -> None:
    expected: dict[str, tuple[str, set[str]]] = {}
    settings = {"dspark:cache_config_info", "dspark:spec_decode_info"}
    for family in text_string_to_metric_families(exposition()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = set().union(*(sample.labels for sample in family.samples)) - {"model_name", "engine", "le"}
        expected[name] = (family.type, set() if name in settings else labels)
    assert {name: row for name, row in documented().items() if name not in settings} == {
        name: row for name, row in expected.items() if name not in settings
    }
    assert settings <= set(documented()) and all(documented()[name][0] == "gauge" for name in settings)


def test_the_page_names_no_other_metric() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    known = set(series()) | set(documented())
    named = set(re.findall(r"dspark:[a-z][a-z0-9_]*", text))
    assert named and named <= known, named - known


@pytest.mark.parametrize("rule", [rule["alert"] for rule in rules()] if (DEPLOY / "alerts.yml").exists() else [])
def test_the_page_tells_of_every_alert(rule: str) -> None:
    assert f"`{rule}`" in (ROOT / "docs" / "monitoring.md").read_text()


# -- Prometheus itself

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*words: str | Path) -> str:
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_accepts_the_files(tmp_path: Path) -> None:
    promtool("check", "config", DEPLOY / "prometheus.yml")
    promtool("check", "rules", DEPLOY / "alerts.yml")
    everything = tmp_path / "queries.yml"  # the dashboard's, as rules: promtool reads them all at once
    values = {"$__rate_interval": "1m", "$__range": "1h", "$model_name": ".*", "$dollars_per_hour": "1.5"}
    records = []
    for number, (_, target) in enumerate(targets()):
        expr = target["expr"]
        for name, value in values.items():
            expr = expr.replace(name, value)
        records.append({"record": f"panel:query:{number}", "expr": expr})
    everything.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    assert f"{len(records)} rules" in promtool("check", "rules", everything)


BASE = 'job="dspark", instance="a:8000", model_name="m", engine="0"'
MINUTES = 30


def rises(name: str, each: float, **labels: str) -> dict[str, str]:
    """A counter that grows by `each` a minute."""
    more = "".join(f', {key}="{value}"' for key, value in labels.items())
    return {"series": f"dspark:{name}{{{BASE}{more}}}", "values": f"0+{each}x{MINUTES}"}


def stays(name: str, value: float, **labels: str) -> dict[str, str]:
    """A gauge."""
    return rises(name, 0, **labels) | {"values": f"{value}+0x{MINUTES}"}


UP = {"series": 'up{job="dspark", instance="a:8000"}', "values": f"1+0x{MINUTES}"}
GOOD = {
    "plain": rises("spec_decode_plain_seconds_total", 60),
    "spent": rises("spec_decode_seconds_total", 40),
    "emitted": rises("generation_tokens_total", 600),
    "drafted": rises("spec_decode_num_draft_tokens_total", 300),
    "verified": rises("spec_decode_num_verified_tokens_total", 200),
    "accepted": rises("spec_decode_num_accepted_tokens_total", 100),
    "silent": stays("spec_decode_silent", 0),
    "info": stays("spec_decode_info", 1, method="suffix", policy="adaptive"),
    "waiting": stays("num_requests_waiting", 3),
    "fine": rises("http_responses_total", 100, route="/v1/completions", status="200"),
    "failed": rises("http_responses_total", 1, route="/v1/completions", status="500"),
    "health": rises("http_responses_total", 60, route="/health", status="503"),
    "ended": rises("request_success_total", 100, finished_reason="stop"),
    "broken": rises("request_success_total", 1, finished_reason="error"),
    "up": UP,
}
BAD: dict[str, dict[str, dict[str, str] | None]] = {
    "SpeculationLoses": {"plain": rises("spec_decode_plain_seconds_total", 38)},
    "NothingDrafted": {"drafted": rises("spec_decode_num_draft_tokens_total", 0)},
    "NothingDrafted (silent)": {"silent": stays("spec_decode_silent", 1)},
    "NothingAccepted": {"accepted": rises("spec_decode_num_accepted_tokens_total", 0)},
    "QueueGrows": {"waiting": rises("num_requests_waiting", 2) | {"values": f"1+2x{MINUTES}"}},
    "ServerDown": {"up": UP | {"values": f"0+0x{MINUTES}"}},
    "ServerDown (absent)": {"up": None},
    "HighErrorRate": {"failed": rises("http_responses_total", 10, route="/v1/completions", status="500")},
    "HighErrorRate (answers)": {"broken": rises("request_success_total", 10, finished_reason="error")},
}
QUIET: dict[str, dict[str, dict[str, str] | None]] = {
    "nothing is wrong": {},
    "idle, whatever the flag says": {
        name: GOOD[name] | {"values": f"7+0x{MINUTES}"} for name in ("plain", "spent", "emitted", "drafted", "accepted")
    }
    | {"verified": GOOD["verified"] | {"values": f"7+0x{MINUTES}"}, "silent": stays("spec_decode_silent", 1)},
    "plain decoding": {
        "info": stays("spec_decode_info", 1, method="none", policy="adaptive"),
        "drafted": rises("spec_decode_num_draft_tokens_total", 0),
        "verified": rises("spec_decode_num_verified_tokens_total", 0),
        "accepted": rises("spec_decode_num_accepted_tokens_total", 0),
        "plain": rises("spec_decode_plain_seconds_total", 0),
        "spent": rises("spec_decode_seconds_total", 0),
    },
    "a queue that empties": {"waiting": GOOD["waiting"] | {"values": "9 8 7 6 5 4 3 2 1 0 9 8 7 6 5 4 3 2 1 0 9 8 7"}},
}


@needs_promtool
@pytest.mark.parametrize("case", [*BAD, *QUIET])
def test_alerts_fire_when_they_should_and_not_else(case: str, tmp_path: Path) -> None:
    changes = {**BAD, **QUIET}[case]
    shown = [found for name in GOOD if (found := changes.get(name, GOOD[name])) is not None]
    expected = case.partition(" (")[0] if case in BAD else None
    (tmp_path / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
    minute = f"{MINUTES - 5}m"
    tests = [
        {
            "interval": "1m",
            "input_series": shown,
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": minute,
                    "exp_samples": [{"labels": f'{{alertname="{expected}"}}', "value": 1}] if expected else [],
                }
            ],
        }
    ]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    promtool("test", "rules", tmp_path / "tests.yml")
