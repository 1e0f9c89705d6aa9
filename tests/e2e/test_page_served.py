"""The live page in front of a real server: what it shows is what the server counted, and a chat is told token by token.
With DSPARK_SCREENSHOTS=folder, pictures of SmolLM2 serving four clients."""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from dspark import LLM
from tests.server import serving
from tests.tiny_folder import tiny_folder

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
expect = sync_api.expect
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("the page's tests need a chromium binary on the PATH", allow_module_level=True)
SCREENSHOTS = "DSPARK_SCREENSHOTS"
SECONDS_OF_LOAD = 100


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_a_chat_with_a_real_server(browser, tmp_path):
    with serving(LLM(str(tiny_folder(tmp_path)), draft="suffix", check=True)) as server:
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(server.url + "/")
        expect(page.locator("#state")).to_have_text(re.compile("Idle|Serving"))
        page.get_by_label("Max tokens").fill("40")
        page.get_by_label("Message", exact=True).fill("aaaa bbbb aaaa bbbb")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator(".turn").last).to_contain_text(re.compile(r"\d+ tokens · "))
        sources = page.locator(".turn .token").evaluate_all("nodes => nodes.map(node => node.className)")
        assert sources and any("target" in name or "corrected" in name for name in sources)
        expect(page.locator("#generated")).to_have_text(str(server.service.metrics.counts.num_generation_tokens))
        page.get_by_label("JSON object").check()
        page.get_by_label("Message", exact=True).fill("a list")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator(".turn").last).to_contain_text("{")
        assert faults == []
        page.close()
        server.settle()


@pytest.mark.skipif(SCREENSHOTS not in os.environ, reason=f"pictures are taken where {SCREENSHOTS} names a folder")
def test_pictures(browser, smollm2):
    image = pytest.importorskip("PIL.Image", reason="pictures are made small with Pillow")
    folder = Path(os.environ[SCREENSHOTS])
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [
        "Write a Python function that sorts a list.",
        "Name the planets.",
        "Correct: I has a apple.",
        "What is a prime?",
    ]
    stop = threading.Event()
    with serving(LLM(str(smollm2), draft="auto"), served_model_name=["smollm2-135m"]) as server:

        def ask(number: int) -> None:
            while not stop.is_set():
                task = ("code", "facts", "editing", "maths")[number]
                body = {
                    "messages": [{"role": "user", "content": prompts[number]}],
                    "max_tokens": 120,
                    "temperature": 0.7,
                }
                body |= {"speculation": {"task": task}}
                if number == 1:
                    body["response_format"] = {"type": "json_object"}
                server.post("/v1/chat/completions", body)

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        page = browser.new_page(viewport={"width": 1240, "height": 860}, reduced_motion="reduce")
        page.goto(server.url + "/")
        page.wait_for_timeout(1000 * SECONDS_OF_LOAD)
        page.get_by_label("Max tokens").fill("90")
        page.get_by_label("Message", exact=True).fill(
            "Say three times, word for word: the quick brown fox jumps over the lazy dog."
        )
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
        page.locator("#message").blur()
        for name, size in (("light", (1240, 860)), ("dark", (1240, 860)), ("narrow", (360, 1480))):
            page.emulate_media(color_scheme="dark" if name == "dark" else "light", reduced_motion="reduce")
            page.set_viewport_size({"width": size[0], "height": size[1]})
            page.wait_for_timeout(1500)
            page.evaluate("scrollTo(0, 0)")
            picture = page.screenshot(full_page=name != "narrow")
            file = folder / f"page-{name}.png"
            image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(file, optimize=True)
            assert file.stat().st_size <= 200_000
        stop.set()
        for client in clients:
            client.join()
        page.close()
