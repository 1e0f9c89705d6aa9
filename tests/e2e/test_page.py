"""The live page in a headless Chromium: figures, chat, faults, keyboard, narrow screens, both colour schemes.
It must never need another host, nor a model."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.page_stub import PageStub, Piece, busy_live, idle_live

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
expect = sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("the page's tests need a chromium binary on the PATH", allow_module_level=True)

# Chromium itself writes this for every request that is refused or breaks.
NETWORK_NOISE = "Failed to load resource"
ANSWER = [
    [Piece("The ", "target")],
    [Piece("quick ", "drafted", "suffix"), Piece("brown ", "drafted", "suffix"), Piece("fox ", "bonus")],
    [Piece("jum", "drafted", "dspark"), Piece("ps", "corrected")],
    [Piece("", "drafted", "suffix"), Piece(" 🦊", "target")],
    [Piece("!", "forced")],
]
TEXT = "The quick brown fox jumps 🦊!"


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page_server() -> Iterator[PageStub]:
    yield from PageStub(live=busy_live(), answer=ANSWER).serve()


@pytest.fixture
def page(browser: sync_api.Browser, page_server: PageStub) -> Iterator[sync_api.Page]:
    """Fails its test on an error, a breach of the policy, or a request to another host."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    context.set_default_timeout(10_000)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: faults.append(asked.url) if _foreign(asked.url, page_server.url) else None)
    yield page
    context.close()
    noise = NETWORK_NOISE if page_server.refused else "\0"
    assert [fault for fault in faults if not fault.startswith(noise)] == []


def _foreign(url: str, home: str) -> bool:
    return urlsplit(url).scheme != "data" and urlsplit(url).netloc != urlsplit(home).netloc


def _open(page: sync_api.Page, server: PageStub) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text(re.compile("Serving|Idle|Draining"))


def _ask(page: sync_api.Page, text: str = "Hello") -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def _answered(page: sync_api.Page) -> sync_api.Locator:
    """The last turn, once its answer has ended."""
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    return page.locator(".turn").last


# Figures ------------------------------------------------------------------------------------------------------------


def test_figures_appear(page, page_server):
    _open(page, page_server)
    shown = {
        "#state": "Serving",
        "#model": "smollm2-135m",
        "#drafts": "auto",
        "#policy": "adaptive, up to 8 tokens",
        "#uptime": "2 h 15 min",
        "#speed-now": "412",
        "#speed-plain": "250",
        "#speedup": "1.65×",
        "#saved": "6 min saved so far",
        "#running": "3 of 32",
        "#waiting": "1",
        "#cache": "12%",
        "#generated": "191,704",
        "#guesses": "74% of 13,784",
    }
    for selector, text in shown.items():
        expect(page.locator(selector)).to_have_text(text)
    rows = page.locator("#running-rows tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_have_text(re.compile(r"chatcmpl-19f04d77ce\s*chat\s*0\.4\s*40\s*55\s*128\s*2\.10"))


def test_acceptance_is_conditional_and_its_counts_can_be_read(page, page_server):
    _open(page, page_server)
    bars = page.locator("#bars li")
    expect(bars).to_have_count(8)
    expect(bars.nth(1).locator(".value")).to_have_text("74%")  # 2508 / 3390, not / 4210
    expect(bars.nth(1)).to_have_attribute("title", "Position 2: 2,508 of 3,390 checked guesses accepted")
    expect(bars.nth(1).locator(".sr")).to_have_text("Position 2: 74%, 2,508 of 3,390 checked guesses accepted")
    assert [bar.get_attribute("data-few") is not None for bar in bars.all()] == [False] * 7 + [True]
    page.get_by_text("Counts", exact=True).click()
    expect(page.locator("#position-rows tr").nth(1)).to_have_text(re.compile(r"2\s*3,390\s*2,508\s*74%\s*60%"))


def test_groups_have_accepted_length_and_rate(page, page_server):
    _open(page, page_server)
    code = page.locator("#class-rows tr").nth(1)
    expect(code).to_have_text(re.compile(r"code\s*4\.41\s*83%\s*5,893 / 7,120\s*7,623\s*1,730"))
    expect(page.locator("#drafter-rows tr").nth(2)).to_have_text(re.compile(r"none\s*1\.00\s*–\s*0 / 0\s*835\s*835"))
    expect(page.locator("#grammar-rows tr").nth(1)).to_contain_text("json_object")


def test_an_idle_server_has_empty_states(page, page_server):
    page_server.live = idle_live()
    _open(page, page_server)
    expect(page.locator("#state")).to_have_text("Idle")
    expect(page.locator("#running-empty")).to_have_text(
        "Nothing runs. Send a message below, or a request to /v1/chat/completions."
    )
    expect(page.locator("#running-table")).to_be_hidden()
    expect(page.locator("#bars-empty")).to_be_visible()
    expect(page.locator("#chat-empty")).to_be_visible()
    expect(page.get_by_text("Nothing yet.")).to_have_count(3)
    for selector, text in {"#speed-now": "0", "#speed-plain": "–", "#speedup": "–", "#guesses": "–"}.items():
        expect(page.locator(selector)).to_have_text(text)
    page_server.live = busy_live()
    expect(page.locator("#class-rows tr")).to_have_count(3)
    page_server.live = idle_live()
    expect(page.get_by_text("Nothing yet.")).to_have_count(3)


def test_a_server_without_drafts_says_so(page, page_server):
    page_server.live["speculation"] |= {"method": "none"}
    page_server.live["draining"] = True
    _open(page, page_server)
    expect(page.locator("#state")).to_have_text("Draining")
    expect(page.locator("#drafts")).to_have_text("nothing (plain decoding)")


def test_the_chart_has_lines_and_words(page, page_server):
    _open(page, page_server)
    page_server.live["speed"] |= {"tokens_per_second": 500.0}
    expect(page.locator("#chart-text")).to_contain_text("Tokens per second: latest 500")
    expect(page.locator("#chart-text")).to_contain_text("Without speculation, estimated: latest 250")
    for line in ("#chart-now", "#chart-plain", "#chart-area"):
        assert page.locator(line).get_attribute("d").count("L") >= 1
    expect(page.locator("#chart-top")).to_have_text("600")


def test_polling_rests_while_nobody_looks(page, page_server):
    _open(page, page_server)
    _look(page, hidden=True)
    page.wait_for_timeout(300)
    before = page_server.polls()
    page.wait_for_timeout(1600)
    assert page_server.polls() == before
    page_server.live["speed"] |= {"tokens_per_second": 99.5}
    _look(page, hidden=False)
    expect(page.locator("#speed-now")).to_have_text("99.5", timeout=700)


def _look(page: sync_api.Page, *, hidden: bool) -> None:
    page.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


# Faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ("down", "status"))
def test_an_unreachable_server_is_named_and_found_again(page, page_server, fault):
    _open(page, page_server)
    page_server.down, page_server.live_status = (True, 200) if fault == "down" else (False, 503)
    expect(page.locator("#state")).to_have_text("Unreachable")
    expect(page.locator("#trouble-text")).to_contain_text("Server unreachable")
    expect(page.locator("#trouble-text")).to_contain_text(re.compile(r"Next try in [48] s\. Figures are from \d\d:"))
    expect(page.locator("#speed-now")).to_have_text("412")
    page_server.down, page_server.live_status = False, 200
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#state")).to_have_text("Serving")
    expect(page.locator("#trouble-text")).to_be_hidden()


def test_a_key_is_asked_for_kept_and_sent(page, page_server):
    page_server.key = "sesame"
    page.goto(page_server.url)
    expect(page.locator("#key-text")).to_have_text("This server asks for an API key.")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-text")).to_have_text("The server refused this API key.")
    page.wait_for_timeout(1300)
    assert page_server.polls() == 2
    page.locator("#key").fill("sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("Serving")
    expect(page.locator("#key")).to_be_hidden()
    expect(page.locator("#message")).to_be_focused()
    _ask(page)
    expect(_answered(page).locator(".words")).to_have_text(TEXT)
    assert page_server.asked[-1][1]["Authorization"] == "Bearer sesame"
    page.reload()
    expect(page.locator("#state")).to_have_text("Serving")
    page_server.key = "another"
    expect(page.locator("#state")).to_have_text("Key needed")


def test_a_refused_question_goes_back_to_the_input(page, page_server):
    _open(page, page_server)
    page_server.chat_error = (400, "max_tokens is too large for <this> model")
    _ask(page, "A question")
    expect(_answered(page).locator(".error")).to_have_text("Error: max_tokens is too large for <this> model")
    expect(page.locator("#message")).to_have_value("A question")
    page_server.chat_error = None
    page.keyboard.press("Enter")
    expect(_answered(page).locator(".words")).to_have_text(TEXT)
    assert page_server.bodies()[-1]["messages"] == [{"role": "user", "content": "A question"}]


@pytest.mark.parametrize("fault", ("error", "cut"))
def test_an_answer_that_breaks_keeps_what_came(page, page_server, fault):
    page_server.stream_error, page_server.cut = ("the engine stopped" if fault == "error" else None), True
    _open(page, page_server)
    _ask(page)
    said = {"error": "the engine stopped", "cut": "The connection ended before the answer did."}[fault]
    expect(_answered(page).locator(".error")).to_have_text(f"Error: {said}")
    expect(_answered(page).locator(".words")).to_have_text(TEXT)
    expect(page.locator("#announcer")).to_contain_text(said)


# Chat ---------------------------------------------------------------------------------------------------------------


def test_tokens_stream_and_show_their_source(page, page_server):
    page_server.gate = threading.Event()
    _open(page, page_server)
    _ask(page)
    words = page.locator(".turn").last.locator(".words")
    expect(words).to_have_text("The ")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page_server.gate.set()
    turn = _answered(page)
    expect(words).to_have_text(TEXT)
    tokens = [(node.get_attribute("class"), node.text_content()) for node in words.locator(".token").all()]
    assert tokens == [(f"token {p.source}", p.text) for p in itertools.chain(*ANSWER) if p.text]
    expect(words.locator(".drafted").first).to_have_attribute("title", "drafted by suffix, accepted")
    summary = turn.locator(".summary")
    expect(summary).to_have_text(
        re.compile(
            r"^9 tokens · [\d.]+ s · [\d.,]+ tokens/s · first token after [\d.]+ s · accepted length 2\.10 · "
            r"drafted 44% · corrected 11% · bonus 11% · forced 11% · target 22%$"
        )
    )
    expect(page.locator("#announcer")).to_contain_text(f"Answer: {TEXT}")


def test_the_chats_own_request_is_named_in_the_table(page, page_server):
    page_server.gate = threading.Event()
    page_server.live["running"][0]["id"] = "chatcmpl-own"
    _open(page, page_server)
    own = page.locator("#running-rows th").first
    expect(own).to_have_text("chatcmpl-own")
    _ask(page)
    expect(own).to_have_text("this chat")
    page_server.gate.set()
    expect(own).to_have_text("chatcmpl-own")


def test_sources_differ_in_more_than_colour(page, page_server):
    _open(page, page_server)
    _ask(page)
    words = _answered(page).locator(".words")
    style = "node => getComputedStyle(node).textDecorationLine + ' ' + getComputedStyle(node).textDecorationStyle"
    seen = [
        words.locator(f".{source}").first.evaluate(style)
        for source in ("drafted", "corrected", "bonus", "forced", "target")
    ]
    assert seen == ["underline solid", "underline wavy", "underline double", "underline dotted", "none solid"]
    letter = "node => getComputedStyle(node, '::before').content"
    assert words.locator(".drafted").first.evaluate(letter) == "none"
    page.get_by_label("Mark tokens").check()
    assert words.locator(".drafted").first.evaluate(letter) == '"d"'
    page.get_by_label("Colours").uncheck()
    assert words.locator(".drafted").first.evaluate(style) == "none solid"


def test_requests_carry_the_options_and_the_conversation(page, page_server):
    _open(page, page_server)
    _ask(page, "First")
    _answered(page)
    page.get_by_label("Max tokens").fill("64")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Speculate").uncheck()
    page.get_by_label("JSON object").check()
    _ask(page, "Second")
    expect(_answered(page).locator(".summary")).to_contain_text("speculation off")
    first, second = page_server.bodies()
    common = {
        "model": "smollm2-135m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "token_sources": True,
        "include_metrics": True,
    }
    question = {"role": "user", "content": "First"}
    assert first == common | {"messages": [question], "max_tokens": 256, "temperature": 0}
    assert second == common | {
        "messages": [question, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "Second"}],
        "max_tokens": 64,
        "temperature": 0.7,
        "speculation": False,
        "response_format": {"type": "json_object"},
    }
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#chat-empty")).to_be_visible()
    _ask(page, "Third")
    _answered(page)
    assert page_server.bodies()[-1]["messages"] == [{"role": "user", "content": "Third"}]


@pytest.mark.parametrize("by", ("button", "Escape"))
def test_stop_ends_the_answer_and_the_connection(page, page_server, by):
    page_server.answer = ([Piece("word ", "drafted", "suffix")] for _ in range(2000))
    page_server.chunk_seconds = 0.02
    _open(page, page_server)
    _ask(page)
    expect(page.locator(".words .token").nth(2)).to_be_attached()
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    turn = _answered(page)
    expect(turn.locator(".summary")).to_contain_text("stopped")
    expect(turn.locator(".error")).to_have_count(0)
    expect(page.locator("#message")).to_be_focused()
    assert page_server.hung_up.wait(10)
    page_server.answer = ANSWER
    _ask(page, "Go on")
    _answered(page)
    assert [message["role"] for message in page_server.bodies()[-1]["messages"]] == ["user", "assistant", "user"]


def test_a_stream_may_be_split_anywhere(page, page_server):
    page_server.write_bytes, page_server.newline = 3, "\r\n"
    _open(page, page_server)
    _ask(page)
    expect(_answered(page).locator(".words")).to_have_text(TEXT)
    expect(_answered(page).locator(".error")).to_have_count(0)


def test_content_wins_over_sources_that_do_not_add_up(page, page_server):
    page_server.answer = [[Piece("known "), Piece("unheard of", "dreamt")], [Piece("", None)]]
    _open(page, page_server)
    _ask(page)
    words = _answered(page).locator(".words")
    expect(words).to_have_text("known unheard of")
    expect(words.locator(".token")).to_have_count(1)


def test_markup_from_the_server_is_text(page, page_server):
    evil = '<img src=x onerror="document.title=1"><b>bold</b>'
    live = page_server.live
    live["model"] = live["running"][0]["id"] = live["running"][0]["class"] = evil
    live["acceptance"]["by_class"][0]["name"] = live["acceptance"]["by_drafter"][0]["name"] = evil
    page_server.answer = [[Piece(evil, "drafted", evil)]]
    _open(page, page_server)
    expect(page.locator("#model")).to_have_text(evil)
    expect(page.locator("#running-rows th").first).to_have_text(evil)
    expect(page.locator("#class-rows th").first).to_have_text(evil)
    _ask(page, evil)
    _answered(page)
    assert page.locator(".words").all_text_contents() == [evil, evil]
    assert page.locator("img, b").count() == 0


# Everybody ----------------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(page, page_server):
    _open(page, page_server)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_be_focused()
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    assert page_server.bodies() == []
    for name in ("max-tokens", "temperature", "speculate", "json"):
        page.keyboard.press("Tab")
        expect(page.locator(f"#{name}")).to_be_focused()
        assert page.locator(f"#{name}").evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    page.keyboard.press("Space")
    expect(page.locator("#json")).to_be_checked()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.keyboard.press("Enter")
    expect(_answered(page).locator(".words")).to_have_text(TEXT)
    expect(page.locator("#message")).to_be_focused()
    assert page_server.bodies()[0]["messages"][0]["content"] == "two\nlines"
    page.keyboard.press("Enter")
    assert len(page_server.bodies()) == 1


def test_everything_has_a_name(page, page_server):
    _open(page, page_server)
    for control in page.locator("button, input, textarea, a, summary, [tabindex]").all():
        name = control.evaluate(
            """node => node.labels?.[0]?.textContent || node.getAttribute("aria-label") || node.textContent
                || document.getElementById(node.getAttribute("aria-labelledby"))?.textContent || """
            '""'
        )
        assert name.strip(), control.evaluate("node => node.outerHTML")
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("width", (320, 360, 768, 1216))
def test_no_width_scrolls_the_page_sideways(page, page_server, width):
    page.set_viewport_size({"width": width, "height": 740})
    page_server.live["model"] = "a-model-with-a-very-long-name/" * 5
    page_server.live["totals"] |= {"prompt_tokens": 10**12, "generation_tokens": 10**12, "verified": 10**12}
    page_server.answer = [[Piece("long" * 200, "drafted", "suffix")]]
    _open(page, page_server)
    _ask(page, "wide" * 200)
    _answered(page)
    page.get_by_text("Counts", exact=True).click()
    page.get_by_label("Mark tokens").check()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUT_OF_CARD) == []


OUT_OF_CARD = """() => [...document.querySelectorAll(".card :is(button, input, textarea, h2, .scroll, .log)")]
    .filter((node) => node.getBoundingClientRect().right > node.closest(".card").getBoundingClientRect().right)
    .map((node) => node.outerHTML)"""


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_text_has_contrast_in_both_schemes(page, page_server, scheme):
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    _open(page, page_server)
    _ask(page)
    _answered(page)
    page_server.chat_error = (400, "refused")
    _ask(page)
    _answered(page)
    page.get_by_label("Mark tokens").check()
    page.get_by_text("Counts", exact=True).click()
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    assert page.evaluate(LOW_CONTRAST) == []
    page_server.down = True
    expect(page.locator("#state")).to_have_text("Unreachable")
    assert page.evaluate(LOW_CONTRAST) == []


# Texts whose colour is closer than 4.5:1 to what lies behind them.
LOW_CONTRAST = """() => {
    const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
    const light = (rgb) => rgb.slice(0, 3)
        .map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour[3] !== 0) return colour;
        }
        return [255, 255, 255];
    };
    const bad = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
        const node = text.parentElement;
        if (!text.data.trim() || !node.checkVisibility({ visibilityProperty: true }) || node.closest(".sr")) continue;
        const both = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
        const contrast = (both[0] + 0.05) / (both[1] + 0.05);
        if (contrast < 4.5) bad.push(`${text.data.trim()}: ${contrast.toFixed(2)}`);
    }
    return bad;
}"""


def test_motion_can_be_refused(page, page_server):
    page.emulate_media(reduced_motion="reduce")
    page_server.gate = threading.Event()
    _open(page, page_server)
    _ask(page)
    busy = page.locator(".words[data-busy]")
    expect(busy).to_have_text("The ")
    assert busy.evaluate("node => getComputedStyle(node, '::after').animationName") == "none"
    assert page.locator(".bar").first.evaluate("node => getComputedStyle(node).transitionProperty") != "block-size"
    page_server.gate.set()
    _answered(page)


@pytest.mark.parametrize("width", (360, 1280))
def test_nothing_jumps_when_figures_change(page, page_server, width):
    page.set_viewport_size({"width": width, "height": 740})
    page_server.live = idle_live()
    _open(page, page_server)
    places = [_place(page)]
    page_server.live = busy_live()
    page_server.live["running"] *= 11
    expect(page.locator("#running-rows tr")).to_have_count(33)
    places.append(_place(page))
    page_server.down = True
    expect(page.locator("#state")).to_have_text("Unreachable")
    places.append(_place(page))
    page_server.down, page_server.key = False, "sesame"
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#state")).to_have_text("Key needed")
    places.append(_place(page))
    assert places == places[:1] * 4


def _place(page: sync_api.Page) -> list[Any]:
    parts = ("#speed-title", "#chart", "#running-title", "#chat-title", "#message", "#position-title", "#groups-title")
    return [page.locator(part).evaluate("node => node.getBoundingClientRect().top + scrollY") for part in parts]
