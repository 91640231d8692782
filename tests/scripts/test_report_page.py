"""The page of the report in a real browser: headless Chromium, where it is installed."""

import os
import shutil

import pytest
from synthetic import write_run

from evaluation.report import frame, page

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra test: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

EVIL = "<img src=x onerror=alert(1)>%{x}<b>"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(folder, "rope", seed, kinds=("lengths", "by_position", "ruler"), variants=("yarn",))
        write_run(folder, "alibi", seed, kinds=("lengths", "by_position", "ruler"))
        write_run(folder, "rope", seed, task="recall")
    path = write_run(folder, "cope", name="evil") / "config.yaml"
    path.write_text(path.read_text().replace("name: cope\n", f"name: '{EVIL}'\n"))
    (folder / "report.html").write_text(page.html(frame.load(folder)))
    return folder / "report.html"


@pytest.fixture(scope="module")
def open_page(written):
    """`open_page(width, scheme)`: the page must load nothing and complain of nothing."""
    complaints = []
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=60_000)

        def run(width, scheme="light"):
            opened = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
            opened.set_default_timeout(60_000)
            opened.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
            opened.on("pageerror", lambda error: complaints.append(str(error)))
            opened.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
            opened.on("request", lambda r: complaints.append(r.url) if r.url[:4] in ("http", "ftp:") else None)
            opened.goto(written.as_uri())
            opened.locator(".plot .main-svg").first.wait_for()
            return opened

        yield run
        browser.close()
    assert complaints == []


def test_the_first_screen_answers(open_page):
    opened = open_page(1400)
    top = opened.evaluate(
        "[...document.querySelectorAll('dt, .plot')].map(x => [x.textContent, x.getBoundingClientRect()])"
    )
    places = {text[:8]: box for text, box in top[:5]}
    assert list(places)[:3] == ["Which", "How far", "Far text"]
    assert top[4][1]["bottom"] < 1000  # the chart


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), pytest.param(420, "dark", marks=pytest.mark.slow)])
def test_every_figure_is_drawn_and_fits(open_page, width, scheme):
    opened = open_page(width, scheme)
    for plot in opened.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for()
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    ink = opened.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill")
    assert (sum(map(int, ink[4:-1].split(","))) > 380) == (scheme == "dark")
    assert not opened.locator("img").count()


def test_the_legend_hides_and_dims(open_page):
    opened = open_page(1400)
    plot = opened.locator(".plot").first
    traces = plot.locator(".scatterlayer .trace")
    opacity = "found => found.map(x => x.style.opacity)"
    plot.locator(".legend .legendtoggle").first.hover()
    assert set(traces.evaluate_all(opacity)) == {"", "0.15"}
    opened.locator("h1").hover()
    assert set(traces.evaluate_all(opacity)) == {""}
    before = traces.count()
    plot.locator(".legend .legendtoggle").first.click()
    opened.wait_for_function(
        "n => document.querySelector('.plot').querySelectorAll('.scatterlayer .trace').length < n", arg=before
    )
