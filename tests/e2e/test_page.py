"""The page at /, in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")
for extra in ("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(extra)

from slipstream import LLM, SamplingParams
from tests.support.server import ENGINE, REPO, RunningServer, served_models, until

PAGE = REPO / "slipstream" / "server" / "page"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return served_models(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def server(models: dict[str, str]) -> Iterator[RunningServer]:
    words = (models["target"], "--draft", models["draft"], "--run-ahead", "2", "--admin-port", "0", *ENGINE)
    with RunningServer(*words, key="sesame") as running:
        yield running
        running.idle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser: Any, server: RunningServer) -> Iterator[Any]:
    """Makes a page; at its end nothing was asked of anybody else, and no script has failed."""
    contexts: list[Any] = []
    asked: list[str] = []
    wrong: list[str] = []

    def make(**options: Any) -> Any:
        credentials = {"username": "anybody", "password": "sesame"}
        contexts.append(browser.new_context(http_credentials=credentials, **options))
        page = contexts[-1].new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.meant = wrong.clear  # after an error that the test itself asked for
        page.goto(f"{server.admin.base_url}")
        page.locator("#health[data-state=ok]").wait_for()
        return page

    yield make
    for context in contexts:
        context.close()
    origin = str(server.admin.base_url)
    assert asked and [url for url in asked if not url.startswith((origin, "data:"))] == []
    assert wrong == []


def test_the_files_are_short_and_name_no_other_place() -> None:
    for name in ("index.html", "page.css", "page.js"):
        text = (PAGE / name).read_text()
        assert len(text.splitlines()) < 500, name
        links = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) - {"http://www.w3.org/2000/svg"}
        assert not links and "innerHTML" not in text and "eval(" not in text, name


def test_the_page_needs_the_key_and_may_load_nothing_foreign(server: RunningServer) -> None:
    assert server.http.get("/").status_code == 404, "it moved to the admin port"
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        answer = server.admin.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
        assert server.admin.get(path, headers={"authorization": ""}).status_code == 401


def ask(page: Any, prompt: str, tokens: int, drafts: str = "") -> str:
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.check("#raw")
    page.select_option("#drafts", drafts)
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.locator(f"#answer-text:has-text('{tokens} tokens,')").wait_for()
    return page.inner_text("#answer-text")


def test_an_answer_streams_with_its_accepted_drafts_coloured(opened: Any, models: dict[str, str]) -> None:
    page = opened()
    with LLM(models["target"], dtype="float64", device="cpu") as llm:
        [want] = llm.generate(["w5 w9"], SamplingParams(temperature=0, max_tokens=24))
    assert len(want.outputs[0].token_ids) == 24, "choose a prompt that does not end early"
    said = ask(page, "w5 w9", 24)
    assert page.locator("#answer").text_content() == want.outputs[0].text
    accepted = int(re.search(r"(\d+) of \d+ drafts accepted", said)[1])
    coloured = " ".join(page.locator("#answer .accepted").all_text_contents()).split()
    assert 3 < accepted == len(coloured) < 24
    colour = "e => getComputedStyle(e).color"
    assert len({page.locator(f"#answer .{name}").first.evaluate(colour) for name in ("accepted", "own")}) == 2

    ask(page, "w5 w9", 23, drafts="off")
    assert page.locator("#answer .accepted").count() == 0


def test_numbers_and_timeline_move(opened: Any, server: RunningServer) -> None:
    page = opened()
    ask(page, "w5 w9 w31", 60)
    page.locator("#positions meter").first.wait_for()
    assert page.locator("#positions meter").count() == 3
    assert all(0 < meter.evaluate("e => e.value") <= 1 for meter in page.locator("#positions meter").all())
    page.locator("#frames rect.device").first.wait_for(state="attached")
    page.check("input[name=launches][value='8']")
    until(lambda: page.locator("#frames rect.device").count() == 8, 10)
    assert page.locator("#rows tr").count() == 8
    assert re.search(r"8 launches, \d+ tokens in .*busy [\d.]+ % and idle [\d.]+ %", page.inner_text("#frames-text"))
    page.check("#hold")
    assert float(page.locator("#tiles dd").nth(3).inner_text()) > 1.2, "τ since the start"
    assert page.locator("#speed polyline").get_attribute("points").count(" ") >= 1


def test_escape_stops_an_answer(opened: Any, server: RunningServer) -> None:
    page = opened()
    aborted = server.idle()["counters"].get("finished_abort", 0)
    page.fill("#prompt", "w5")
    page.fill("#tokens", "500")
    page.check("#raw")
    page.click("#send")
    page.locator("#answer span").first.wait_for(state="attached")
    page.keyboard.press("Escape")
    page.locator("#answer-text:has-text('stopped')").wait_for()
    assert server.idle()["counters"]["finished_abort"] == aborted + 1
    page.fill("#tokens", "4000")
    page.click("#send")
    page.locator("#answer-text:has-text('failed: max_tokens=4000')").wait_for()
    page.meant()


def test_a_phone_in_the_dark(opened: Any) -> None:
    """No sideways scrolling at 320 pixels; dark and light differ; text keeps a contrast of 4.5 in both."""
    seen = {}
    for scheme in ("light", "dark"):
        page = opened(viewport={"width": 320, "height": 640}, color_scheme=scheme)
        page.click("details summary")
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        seen[scheme] = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        for name in ("text", "soft", "accepted"):
            back = "accepted-back" if name == "accepted" else "back"
            value = "n => getComputedStyle(document.documentElement).getPropertyValue('--' + n)"
            assert contrast(page.evaluate(value, name), page.evaluate(value, back)) >= 4.5, (scheme, name)
    assert seen["light"] != seen["dark"]


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of two colours #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_keyboard_reaches_everything(opened: Any) -> None:
    page = opened()
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(e => e.id || e.className || e.name)(document.activeElement)"))
    assert {"skip", "launches", "hold", "prompt", "tokens", "temperature", "drafts", "raw", "send", "answer"} <= reached
    named = page.evaluate(
        "[...document.querySelectorAll('input,select,textarea,button')].filter("
        "e => !(e.labels && e.labels.length) && !e.textContent.trim()).length"
    )
    assert named == 0, "a control without a name"
