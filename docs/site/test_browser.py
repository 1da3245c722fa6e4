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
    """Serve the site without log lines."""

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
        # containers run as root, which Chromium refuses inside its sandbox
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Open a page; fail on errors of its scripts, on requests to other servers and on missing files."""
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


OPERATIONS = sorted(path.relative_to(SITE).as_posix() for path in SITE.glob("packages/*/src/*/ops/**/index.html"))


@pytest.mark.parametrize("uri", OPERATIONS)
def test_all_equations_of_an_operation_are_typeset(visit, uri):
    page = visit(uri)
    assert page.locator(".arithmatex:not(:has(.katex))").count() == 0
    assert page.locator(".katex-error").count() == 0
    equations = page.locator(".arithmatex")
    assert equations.count() == 0 or equations.first.bounding_box()["height"] > 10


@pytest.mark.parametrize("uri", ["index.html", "packages/nha/index.html", "docs/oryx.html", "docs/speed.html"])
def test_every_picture_of_a_page_shows(visit, uri):
    page = visit(uri)
    pictures = page.locator("article img")
    assert pictures.count() > 0
    for i in range(pictures.count()):
        pictures.nth(i).scroll_into_view_if_needed()
        assert pictures.nth(i).evaluate("async (image) => (await image.decode(), image.naturalWidth)") > 0


def test_no_line_of_code_is_clipped_on_the_home_page(visit):
    page = visit("index.html", {"width": 1300, "height": 900})
    for block in page.locator("article pre > code").all():
        assert block.evaluate("(code) => code.scrollWidth - code.clientWidth") <= 1


def test_search_finds_an_operation(visit):
    page = visit("index.html")
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("chunk_gated_delta_rule")
    page.locator(".md-search-result__item a").first.wait_for()
    links = page.locator(".md-search-result__item a").evaluate_all("(all) => all.map((link) => link.href)")
    assert any("ops/gated_delta_rule/" in link for link in links)


def test_a_click_sorts_a_table_by_number(visit):
    page = visit("docs/choose.html")
    table = page.locator("article table", has_text="parameters").first
    head = table.locator("th", has_text="parameters").first
    column = head.evaluate("(head) => head.cellIndex")
    read = (
        f"(table) => [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[{column}].textContent.replaceAll(",
        ", )))",
    )
    head.click()
    rising = table.evaluate(read)
    assert len(rising) > 2
    assert rising == sorted(rising)
    head.click()
    assert table.evaluate(read) == rising[::-1]


PAGES = ("index.html", "docs/choose.html", "mixers.html", "packages/lte/index.html", "arena/index.html")


@pytest.mark.parametrize("uri", PAGES)
def test_a_page_fits_a_phone(visit, uri):
    page = visit(uri, PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.locator("article h1").first.is_visible()
