"""The page of the report in a real browser: headless Chromium, where it is installed."""

import os
import shutil

import pytest
from synthetic import write_run

from ropewalk.report import frame, page

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
            opened.locator(".panels .save").first.wait_for(state="attached")
            return opened

        yield run
        browser.close()
    assert complaints == []


def test_the_first_screen_answers(open_page):
    opened = open_page(1400)
    assert opened.locator("dt").all_inner_texts()[:2] == ["Which", "How far"]
    assert opened.locator(".panels svg").first.bounding_box()["y"] < 600
    assert opened.locator(".panels svg").nth(1).bounding_box()["x"] > 600  # beside the first


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), pytest.param(420, "dark", marks=pytest.mark.slow)])
def test_every_figure_is_drawn_and_fits(open_page, width, scheme):
    opened = open_page(width, scheme)
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    ink = opened.evaluate("getComputedStyle(document.querySelector('svg .title')).fill")
    assert (sum(map(int, ink[4:-1].split(","))) > 380) == (scheme == "dark")
    for panel in opened.locator("section > figure svg").all():
        assert panel.locator(".curve").count()
        outside = panel.evaluate(
            "s => [...s.querySelectorAll('text')].filter(t => { const b = t.getBBox();"
            " return b.x < 0 || b.y < -1 || b.y + b.height > 440 }).map(t => t.textContent)"
        )
        assert outside == []
    assert not opened.locator("img").count()


def test_chips_hide_lines_and_pointing_dims_the_others(open_page):
    opened = open_page(1400)
    lines = opened.locator(".panels svg").first.locator(".line")
    before = lines.count()
    opened.locator(".chips button").last.click()
    assert opened.locator(".panels svg").first.locator(".line:visible").count() == before - 1
    opened.locator(".chips button").last.click()
    assert opened.locator(".panels svg").first.locator(".line:visible").count() == before
    lines.last.locator("text").hover()
    opened.wait_for_function("getComputedStyle(document.querySelector('.panels svg .line')).opacity < 0.2")


def test_a_click_on_a_head_sorts(open_page):
    opened = open_page(1400)
    table = opened.locator("table").first
    column = 2  # the loss at the longest text
    head = table.locator("thead th").nth(column)
    orders = []
    for _ in range(2):
        head.click()
        cells = table.locator(f"tbody td:nth-child({column + 1})").all_inner_texts()
        orders.append([float(cell.split()[0]) for cell in cells])
    assert orders[0] == sorted(orders[0])
    assert orders[1] == sorted(orders[0], reverse=True)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_figure_can_be_saved(open_page, tmp_path, kind):
    opened = open_page(1400)
    opened.locator(".panels > div").first.hover()
    with opened.expect_download() as waiting:
        opened.locator(".panels .save").first.get_by_text(kind).click()
    waiting.value.save_as(tmp_path / "figure")
    content = (tmp_path / "figure").read_bytes()
    if kind == "png":
        assert content.startswith(b"\x89PNG")
    else:
        assert b'xmlns="http://www.w3.org/2000/svg"' in content
        assert b"var(--" not in content  # it needs no style sheet
