"""The documentation site that `make docs` has built: its search answers, its parts live. Skipped where there is no site."""

import http.server
import re
import threading
from functools import partial
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
WORDS = (
    "preemption,roofline,prefix caching,paged attention,scheduler,temperature,top_p,beam search,quantization,tensor parallel,"
    "chunked prefill,KV cache,LLM.generate,SamplingParams,json schema"
).split(",")
# The messages of Material's search worker: 0 sets it up, 1 is its answer, 2 asks, 3 is the result.
ASK = """async queries => {
    const index = await (await fetch("search/search_index.json")).json();
    const worker = new Worker(JSON.parse(document.getElementById("__config").textContent).search);
    const answer = type => new Promise((resolve, reject) => {
        worker.onmessage = ({data}) => data.type === type && resolve(data.data);
        worker.onerror = ({message}) => reject(message);
    });
    let next = answer(1);
    worker.postMessage({type: 0, data: {...index, options: {suggest: false}}});
    await next;
    const found = {};
    for (const query of queries) {
        next = answer(3);
        worker.postMessage({type: 2, data: query});
        found[query] = await next.then(({items}) => items.map(([first]) => first.location), message => message);
    }
    return found;
}"""

PAGES = ["", "notebooks/00a*/", "notebooks/00b*/", "notebooks/03*/", "notebooks/04*/", "notebooks/05*/", "notebooks/d1_*/"]
PAGES += ["docs/scheduler_game/", "docs/tasks/", "docs/usage/", "gallery/"]
# What a page shows beside its text, unless a box of its own scrolls it.
TOO_WIDE = """() => [...document.querySelectorAll("figure, img, svg, iframe, .jp-Cell, .admonition")]
    .filter(one => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll, .md-typeset__scrollwrap"))
    .map(one => one.outerHTML.slice(0, 100))"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    if not (SITE / "search" / "search_index.json").exists():
        pytest.skip("no site in build/site; make docs builds it")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=SITE))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_search_answers_words_and_all_their_beginnings(address, browser):
    page = browser.new_page()
    page.goto(address)
    beginnings = {word[:num].strip() for word in WORDS for num in range(1, len(word) + 1)}
    found = page.evaluate(ASK, sorted(beginnings))
    page.close()
    assert {query: what for query, what in found.items() if not isinstance(what, list)} == {}
    assert [word for word in WORDS if not found[word]] == []
    assert any(location.startswith("notebooks/03_") for location in found["paged attention"][:3])


def test_every_page_is_in_llms_txt_and_every_link_leads_to_a_page(address):
    text = (SITE / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\)$", text, re.MULTILINE)
    pages = [path for path in SITE.rglob("index.html") if 'http-equiv="refresh"' not in path.read_text(encoding="utf-8")[:50]]
    assert sorted((SITE / link).resolve() for link in links) == sorted(path.parent.resolve() for path in pages)
    assert text.startswith("# nanoinfer\n\n> ")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_have_no_error_and_nothing_wider_than_the_page(address, browser, scheme, width):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    assert len(PAGES) == 11
    for pattern in PAGES:
        [folder] = SITE.glob(pattern) if pattern else [SITE]
        name = folder.relative_to(SITE).as_posix()
        page.goto(f"{address}{name}/")
        page.evaluate("document.querySelectorAll('[loading=lazy]').forEach(one => (one.loading = 'eager'))")
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(TOO_WIDE) == [], name
        has_prompts = page.locator(".jp-InputPrompt:visible, .jp-OutputPrompt:visible").count() > 0
        assert has_prompts == (width > 704 and name.startswith("notebooks/")), name
    page.evaluate("document.querySelector('.md-content img').style.cssText = 'position: relative; left: 95vw; width: 50vw'")
    assert len(page.evaluate(TOO_WIDE)) > 0  # the measure can fail
    page.close()
    assert errors == []


def test_a_task_and_an_order_of_the_readers_own_run_in_the_browser(address, browser):
    if not (SITE / "python").exists():
        pytest.skip("npm did not fetch Pyodide")
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))

    def run(code, awaited):
        """Run code in the open field, and wait for the words."""
        page.locator("textarea:visible").fill(code)
        page.get_by_role("button", name="Run").last.click()
        page.locator("pre[role=status]").filter(has_text=awaited).wait_for()

    page.goto(f"{address}docs/tasks/")
    assert not [url for url in asked if "pyodide" in url]  # only what runs Python loads it
    first, other = page.locator(".tasks button", has_text="next_chunk"), page.locator(".tasks button", has_text="allocate")
    first.click()
    run("def next_chunk(self, seq, start):\n    return 1", "expected")
    run("def next_chunk(self, seq, start):\n    return 1 +", "line 2: ")
    run("while True:\n    pass", "Running")
    other.click()
    first.click()  # the page lives while the function does not end
    right = "grid = self.config.chunk_grid\n    return min(seq.num_tokens - start, grid - start % grid)"
    run(f"def next_chunk(self, seq, start):\n    {right}", "passed")
    page.reload()
    assert first.inner_text().startswith("✓ ")
    first.click()
    assert right in page.locator("textarea").input_value()  # the browser has kept it
    page.goto(f"{address}docs/scheduler_game/")
    page.get_by_text("Write the order yourself", exact=True).click()
    run("def order_waiting(self, waiting):\n    return waiting", "timeline")
    assert page.locator("li").filter(has_text="of the best").count() == 1
    page.close()
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []


def test_every_interactive_part_lives_and_asks_no_other_server(address, browser):
    page = browser.new_page()
    outside, errors, num_parts = [], [], 0
    page.on("request", lambda request: request.url.startswith((address, "data:", "blob:")) or outside.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    for path in sorted(SITE.rglob("index.html")):
        if '<figure class="interactive"' in path.read_text(encoding="utf-8"):
            page.goto(f"{address}{path.parent.relative_to(SITE).as_posix()}/")
            num = page.locator("figure.interactive").count()
            assert page.locator("figure.alive").count() == num > 0
            num_parts += num
    page.close()
    assert num_parts > 15
    assert (outside, errors) == ([], [])


def test_the_navigation_has_its_parts_a_former_address_leads_on_and_folds_are_closed(address, browser):
    page = browser.new_page()
    page.goto(address)
    for name in ("Learn", "Use", "Understand", "Project", "Appendix"):
        page.locator(".md-tabs").get_by_role("link", name=name, exact=True).click()
        assert page.locator(".md-tabs__item--active").inner_text().strip() == name
    page.goto(address + "notebooks/07_beam_search/")
    page.wait_for_url("**/notebooks/d1_beam_search/")
    page.goto(address + "notebooks/03_pages/")
    folds = page.locator("details.fold > summary").all_text_contents()  # also of folded ones, in every browser
    assert folds == ["the code of this figure"] * 5 + ["the answers", "the code of this figure"]
    question = page.get_by_text("How can a block be found by its tokens?")
    assert not question.is_visible()
    page.get_by_text("the answers", exact=True).click()
    assert question.is_visible()
    page.close()
