"""The page of the report in a real browser: headless Chromium, where it is installed."""

import dataclasses
import os
import shutil

import pytest
from synthetic import write_run

from evaluation import page
from evaluation.compare import arrange, compare

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra test: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

EVIL = "<script>alert(1)<!--script>%{x}<b>"


@pytest.fixture(scope="module")
def browser():
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=120_000)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("rope", "yarn", "alibi"):
        for seed in (0, 1):
            write_run(folder, f"pe={name}", seed=seed)
    for seed in (0, 1):
        write_run(folder, "pe=nope", "eval.lengths=[1,2]", seed=seed, task="flip_flop")
    path = write_run(folder, "pe=cope", name=EVIL) / "config.yaml"
    path.write_text(path.read_text().replace("name: cope", f"name: '{EVIL}'"))
    page.write(compare([folder]), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def opened(browser, written):
    """The page on a desktop; every test leaves it as it found it. It must load nothing and complain of nothing."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    opened.set_default_timeout(120_000)
    complaints, requests = [], []
    opened.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(written.as_uri())
    yield opened
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def column(opened, number, table="s0t0"):
    """The values of the visible rows."""
    return opened.evaluate(
        """([id, i]) => [...document.querySelectorAll(`[data-id=${id}] tbody tr:not([hidden])`)]
           .map(row => row.cells[i].dataset.value)""",
        [table, number],
    )


def chart(opened, title):
    """A figure, drawn."""
    found = opened.locator("figure.chart:not([hidden])", has=opened.locator(f"[aria-label='{title}']")).first
    found.scroll_into_view_if_needed()
    found.locator(".main-svg").first.wait_for()
    return found


def lines(opened, title):
    return opened.evaluate(
        "plot => plot.data.map(trace => trace.name)", chart(opened, title).locator(".plot").element_handle()
    )


def test_sort_by_keyboard(opened):
    assert [float(v) for v in column(opened, 6)] == sorted(float(v) for v in column(opened, 6))
    heading = opened.locator("[data-id=s0t0] thead button").nth(2)
    for order, reverse in (("ascending", False), ("descending", True)):
        heading.focus()
        opened.keyboard.press("Enter")
        values = [float(v) for v in column(opened, 2)]
        assert len(values) == 5  # the readings of four encodings
        assert values == sorted(values, reverse=reverse)
        assert heading.locator("..").get_attribute("aria-sort") == order
    opened.locator("[data-id=s0t0] thead button").nth(6).click()


def test_the_other_quantity(opened):
    """The cells, the column that orders them and the figure are those of the quantity that is chosen."""

    def shown():
        ordered = opened.locator("[data-id=s0t0] th[aria-sort=ascending]:visible").inner_text().split()
        cells = opened.locator("[data-id=s0t0] tbody tr:visible").first.locator("td:visible").all_inner_texts()
        unit = chart(opened, "Loss against context length").locator(".ytitle")
        return ordered, cells[1:6], unit.text_content()

    opened.evaluate("sessionStorage.clear()")
    opened.reload()
    order, bits, unit = shown()
    assert (order[0], unit) == ("2,048", "bits per byte")
    opened.locator(".unit").first.select_option("1")
    assert shown()[0] == order
    assert shown()[2] == "loss in nats per token"
    assert len(shown()[1]) == 5
    assert not set(shown()[1]) & set(bits)
    opened.locator(".unit").first.select_option("0")
    assert shown() == (order, bits, unit)


def test_filter_by_encoding(opened):
    chip = opened.locator("input[name=encoding][value=yarn]")
    chip.focus()
    opened.keyboard.press("Space")
    assert not [label for label in column(opened, 0) if label.startswith("yarn")]
    assert "alibi" in lines(opened, "Loss against context length")
    assert not [name for name in lines(opened, "Loss against context length") if name.startswith("yarn")]
    assert chart(opened, "Frequencies of the rotary encodings").locator(".js-line").count() == 1  # rope's
    opened.locator("#none").click()
    assert column(opened, 0) == []
    assert opened.locator("figure.chart:visible").count() == 0
    opened.locator("#every").click()
    assert len(column(opened, 0)) == 5


def test_filter_by_seed_and_data(opened):
    opened.locator("select[name=seed]").select_option("1")
    assert set(column(opened, 1)) == {"1"}
    assert len(column(opened, 0)) == 4  # one run has no such seed
    assert all(name.endswith(", seed 1") for name in lines(opened, "Loss by position"))
    opened.locator("select[name=seed]").select_option("each")
    assert sorted(set(column(opened, 1))) == ["0", "1"]
    opened.locator("select[name=seed]").select_option("")
    opened.locator("select[name=data]").select_option(label="flip_flop, trained at 256 tokens")
    assert opened.locator("section.results:visible h2").all_inner_texts() == ["flip_flop, trained at 256 tokens"]
    opened.locator("select[name=data]").select_option("")


def test_hover_shows_values(opened):
    figure = chart(opened, "Loss against context length")
    point = figure.locator(".scatterlayer .point").first.bounding_box()
    opened.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    words = figure.locator(".hoverlayer .hovertext").first.text_content()
    expected = opened.evaluate("plot => plot.data[0].y[0].toFixed(3)", figure.locator(".plot").element_handle())
    assert expected in words
    assert "128 tokens" in words
    opened.mouse.move(0, 0)


def test_names_are_shown_as_they_are(opened):
    figure = chart(opened, "Loss against context length")
    index = opened.evaluate(
        "plot => plot.data.findIndex(t => t.name.includes('alert'))", figure.locator(".plot").element_handle()
    )
    point = figure.locator(".scatterlayer .trace").nth(index).locator(".point").last.bounding_box()
    opened.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    assert EVIL in figure.locator(".hoverlayer .hovertext").first.text_content()
    assert EVIL in opened.locator("[data-id=s0t0] tbody").inner_text()
    opened.mouse.move(0, 0)


def test_difference_of_two_runs(opened):
    for name in opened.locator("select[name=a] option").all_inner_texts():
        opened.locator("select[name=a]").select_option(label=name)
        assert opened.locator("#config tr", has_text="name").nth(0).inner_text().split("\t")[1].strip() == name
    opened.locator("select[name=a]").select_option(label="rope-code-s0")
    assert "model.dim128" in opened.locator("#config").inner_text().replace("\t", "").replace(" ", "")
    opened.locator("select[name=b]").select_option(label="rope-code-s1")
    assert [row.split() for row in opened.locator("#config tr").all_inner_texts()] == [
        ["seed", "0", "1"],
        ["name", "rope-code-s0", "rope-code-s1"],
    ]
    opened.locator("select[name=b]").select_option("")


def test_both_themes(opened):
    def colours():
        plot = chart(opened, "Loss against context length").locator(".xtick text").first
        return [
            opened.evaluate(
                "element => getComputedStyle(element).backgroundColor", opened.locator("body").element_handle()
            ),
            opened.evaluate("element => getComputedStyle(element).fill", plot.element_handle()),
        ]

    light = colours()
    opened.emulate_media(color_scheme="dark")
    dark = colours()
    assert light[0] == "rgb(255, 255, 255)"
    assert all(a != b for a, b in zip(light, dark, strict=True))
    opened.locator("#theme").click()
    assert colours() == light
    opened.reload()  # it is remembered
    assert colours() == light
    opened.locator("#theme").click()
    assert colours() == dark
    opened.emulate_media(color_scheme="light")
    opened.locator("#theme").click()


def test_narrow_screen(opened):
    opened.set_viewport_size({"width": 375, "height": 800})
    for title in ("Loss against context length", "Error on train"):
        assert chart(opened, title).bounding_box()["width"] <= 375
    assert opened.evaluate("document.documentElement.scrollWidth") <= 375
    opened.set_viewport_size({"width": 1280, "height": 900})


def test_print(opened):
    opened.emulate_media(media="print", color_scheme="dark")
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not opened.locator(".filters").is_visible()
    for plot in opened.locator("figure.chart:visible .plot").all():
        assert plot.locator(".main-svg").first.bounding_box()["width"] == 340
    white = "element => getComputedStyle(element).backgroundColor"
    assert opened.evaluate(white, opened.locator("body").element_handle()) == "rgb(255, 255, 255)"
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    opened.emulate_media(media="screen", color_scheme="light")


def test_a_live_page_loads_itself_anew(browser, written, tmp_path):
    out, comparison = tmp_path / "live.html", compare([written.parent])
    page.write(comparison, out, live=True)
    opened = browser.new_page()
    opened.set_default_timeout(120_000)
    opened.add_init_script(  # the test says when time is up
        f"const own = setInterval; setInterval = (f, ms) => ms === {1000 * page.RELOAD} ? (look = f) : own(f, ms)"
    )
    opened.goto(out.as_uri())
    assert opened.locator(".live").is_visible()
    opened.locator("input[name=encoding][value=yarn]").focus()
    opened.keyboard.press("Space")
    opened.evaluate("look()")  # not under the reader's hand
    assert opened.locator(".live").is_visible()
    page.write(comparison, out)
    opened.wait_for_timeout(3500)
    with opened.expect_navigation():
        opened.evaluate("look()")
    assert opened.locator(".live").count() == 0
    assert not opened.locator("input[name=encoding][value=yarn]").is_checked()  # the reader's choice is kept
    opened.close()


def test_500_runs_open_in_3_seconds(browser, written, tmp_path):
    few = [run for run in compare([written.parent]).runs if run.encoding in ("rope", "yarn", "alibi")]
    many = [
        dataclasses.replace(
            run, path=run.path / str(i), config=run.config | {"seed": i % 5, "optim.lr": 1 / (1 + i // 5)}
        )
        for i in range(166)
        for run in few[::2]
    ]
    page.write(arrange(many), tmp_path / "report.html")
    opened = browser.new_page()
    opened.set_default_timeout(120_000)
    session = opened.context.new_cdp_session(opened)
    session.send("Performance.enable")
    opened.goto((tmp_path / "report.html").as_uri())
    assert opened.locator("#config option, select[name=a] option").count() >= 498
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    assert metrics["ProcessTime"] < 3  # processor time: other programs may hold the machine
    opened.close()
