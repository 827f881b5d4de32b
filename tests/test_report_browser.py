"""The report in a real browser: it renders, asks nobody, and its controls do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparse_eval.report import write_report
from sparse_eval.results import Journal
from tests.browser import CHROMIUM, Browser
from tests.factories import recall_rows

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

SIZES = [(1366, 900, False), (390, 844, True)]
ROWS_SHOWN = (
    "[...document.querySelectorAll('table.headline tbody tr')].filter(r => !r.hidden).length"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    Journal(folder).append(recall_rows(num_samples=2, num_layers=6, num_kv_heads=1))
    return write_report(folder)


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.mark.parametrize(("width", "height", "dark"), SIZES)
def test_it_renders_without_errors_and_asks_nobody(browser, page, width, height, dark):
    browser.open(page, width=width, height=height, dark=dark)
    browser.wait("document.querySelectorAll('#bytes .scatterlayer .trace').length === 4")
    assert browser.js("document.querySelectorAll('#share .scatterlayer .trace').length") == 5
    assert browser.errors == []
    asked = [url for url in browser.requests if not url.startswith("data:")]  # pictures inside
    assert asked == [page.resolve().as_uri()]
    assert browser.js("document.documentElement.scrollWidth") <= width
    background = browser.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark


def test_controls_change_what_is_shown(browser, page):
    browser.open(page, width=1366, height=900)
    assert browser.js(ROWS_SHOWN) == 5  # full, and four policies at the middle budget
    browser.js("document.querySelector('#budgets button:last-child').click()")
    assert browser.js(ROWS_SHOWN) == 17
    browser.js("document.querySelector('#legend button').click()")
    browser.wait("document.querySelectorAll('#share .scatterlayer .trace').length === 4")
    browser.js("at('metric').value = 'output_error'; at('metric').onchange({target: at('metric')})")
    browser.wait("document.querySelector('#share .ytitle').textContent.includes('output error')")
    browser.js("document.querySelector('#layer-heat button.cell').click()")
    assert browser.js("at('layer').value") == "2"
    browser.wait("document.querySelector('#share .xtitle').textContent.includes('this layer')")
    assert browser.errors == []


def test_tables_sort_by_a_click_and_back(browser, page):
    browser.open(page, width=1366, height=900)
    rows = "[...document.querySelectorAll('table.headline tbody tr')]"
    column = f"{rows}.map(r => Number(r.children[5].dataset.sort))"
    click = "document.querySelector('table.headline th[data-key=tokens_read] button').click()"
    browser.js(click)
    first = browser.js(column)
    assert first == sorted(first, reverse=True) and len(set(first)) > 1
    browser.js(click)
    assert browser.js(column) == sorted(first)


def test_pointing_tells_the_numbers(browser, page):
    browser.open(page, width=1366, height=900)
    browser.wait("document.querySelectorAll('#share .scatterlayer .point').length > 0")
    browser.point_at("#share .scatterlayer .trace .point")
    browser.wait("!at('tip').hidden")
    told = browser.js("at('tip').textContent")
    assert told.startswith("quest at 256 tokens") and "n = 2" in told and "KiB" in told
    browser.js("scrollTo(0, 0)")
    browser.wait("at('tip').hidden")
    browser.point_at("#margin-heat .cell.loss")
    browser.wait("!at('tip').hidden")
    assert "margin" in browser.js("at('tip').textContent")


def test_losing_cells_open_on_demand(browser, page):
    browser.open(page, width=1366, height=900)
    shown = "[...document.querySelectorAll('#losing tbody tr')].filter(r => !r.hidden).length"
    lost = browser.js("setting().margins.quest.filter(c => c.margin < 0).length")
    assert lost > 0 and browser.js(shown) == min(8, lost)
    (counted,) = re.findall(r"in (\d+) of", browser.js("at('losses-sum').textContent"))
    assert browser.js("at('more').textContent").startswith(f"Show all {counted} losing cells")
    browser.js("choose({main: 'window'})")
    assert "window" in browser.js("at('losses-sum').textContent")
