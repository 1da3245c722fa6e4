"""The built site in a real browser: search, equations, pictures and tables, on a desk and on a phone."""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
SITE = Path(__file__).parents[2] / "build" / "site"
BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site and says nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    if not (SITE / "index.html").is_file():
        pytest.fail("there is no site to try; build it: uvx nox -s docs")
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.fail("there is no browser; install chromium, or name one by CHROMIUM=PATH")
    with sync_api.sync_playwright() as playwright:
        # whoever builds a site in a container is root there
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Opens a page, of a width; fails on errors of its scripts and on what it takes from elsewhere or does not find."""
    pages, wrong = [], []

    def asked(request):
        if not request.url.startswith((address, "data:", "blob:")):
            wrong.append(request.url)

    def answered(response):
        # mkdocs looks for versions of the site, which has none
        if response.status >= 400 and "versions.json" not in response.url:
            wrong.append(f"{response.status} {response.url}")

    def visit(uri, viewport=DESK):
        page = browser.new_page(viewport=viewport)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", asked)
        page.on("response", answered)
        page.goto(address + uri)
        page.wait_for_load_state("networkidle")
        pages.append(page)
        return page

    yield visit
    for page in pages:
        page.close()
    assert wrong == []


OPERATIONS = sorted(path.relative_to(SITE).as_posix() for path in SITE.glob("operations/*.html"))


@pytest.mark.parametrize("uri", OPERATIONS)
def test_all_equations_of_an_operation_are_typeset(visit, uri):
    page = visit(uri)
    assert page.locator(".equation:not(:has(.katex))").count() == 0
    assert page.locator(".katex-error").count() == 0


def test_an_equation_is_seen_and_says_what_it_was_written_as(visit):
    page = visit("operations/gated_delta_rule.html")
    equation = page.locator(".equation").first
    assert equation.bounding_box()["height"] > 10
    assert equation.get_attribute("aria-label").startswith("S_t = e^{g_t} S_{t−1}")


@pytest.mark.parametrize("uri", ["index.html", "papers/nha.html", "papers/oryx.html", "speed.html"])
def test_every_picture_of_a_page_shows(visit, uri):
    page = visit(uri)
    pictures = page.locator("article img")
    assert pictures.count() > 0
    for i in range(pictures.count()):
        pictures.nth(i).scroll_into_view_if_needed()
        assert pictures.nth(i).evaluate("async (image) => (await image.decode(), image.naturalWidth)") > 0


def test_search_finds_an_operation(visit):
    page = visit("index.html")
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("chunk_gated_delta_rule")
    page.locator(".md-search-result__item a").first.wait_for()
    links = page.locator(".md-search-result__item a").evaluate_all("(all) => all.map((link) => link.href)")
    assert any("operations/gated_delta_rule.html" in link for link in links)


def test_a_click_sorts_a_table_by_number(visit):
    page = visit("operations/ssd.html")
    table = page.locator("article table", has_text="forward, ms").first
    head = table.locator("th", has_text="forward, ms").first
    column = head.evaluate("(head) => head.cellIndex")
    read = f"(table) => [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[{column}].textContent))"
    head.click()
    rising = table.evaluate(read)
    assert len(rising) > 2
    assert rising == sorted(rising)
    head.click()
    assert table.evaluate(read) == rising[::-1]


PAGES = ("index.html", "choose.html", "operations/ssd.html", "mixers/oryx.html", "papers/lte.html", "arena/index.html")


@pytest.mark.parametrize("uri", PAGES)
def test_a_page_fits_a_phone(visit, uri):
    page = visit(uri, PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.locator("article h1").first.is_visible()
