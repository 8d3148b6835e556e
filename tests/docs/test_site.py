"""The documentation site that `make docs` has built: its search answers, its parts live. Skipped where there is no site."""

import http.server
import json
import threading
from functools import partial
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
WORDS = [
    *(
        "preemption",
        "print",
        "argsort",
        "prefix caching",
        "paged attention",
        "scheduler",
        "sampling",
        "temperature",
        "top_p",
        "logprobs",
    ),
    *("beam search", "speculative", "quantization", "int8", "tensor parallel", "chunked prefill", "KV cache", "block", "seed"),
    *("LLM.generate", "SamplingParams", "max_tokens", "chat template", "json schema"),
]
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
    const counts = {};
    for (const query of queries) {
        next = answer(3);
        worker.postMessage({type: 2, data: query});
        counts[query] = await next.then(({items}) => items.length, message => message);
    }
    return counts;
}"""


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
    counts = page.evaluate(ASK, sorted(beginnings))
    page.close()
    assert len(WORDS) == 24
    assert {query: count for query, count in counts.items() if not isinstance(count, int)} == {}
    assert [word for word in WORDS if counts[word] < 1] == []
    assert json.loads((SITE / "search" / "search_index.json").read_text())["docs"]


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


@pytest.mark.parametrize("name", ["Learn", "Use", "Understand", "Project", "Appendix"])
def test_the_navigation_has_its_parts(address, browser, name):
    page = browser.new_page()
    page.goto(address)
    page.locator(".md-tabs").get_by_role("link", name=name, exact=True).click()
    assert page.locator("h1").count() == 1
    assert page.locator(".md-tabs__item--active").inner_text().strip() == name
    page.close()


def test_a_former_address_leads_to_the_notebook_and_its_folds_are_closed(address, browser):
    page = browser.new_page()
    page.goto(address + "notebooks/07_beam_search/")
    page.wait_for_url("**/notebooks/d1_beam_search/")
    page.goto(address + "notebooks/03_pages/")
    folds = page.locator("details.fold > summary").all_inner_texts()
    assert folds == ["the code of this figure"] * 5 + ["the answers", "the code of this figure"]
    question = page.get_by_text("How can a block be found by its tokens?")
    assert not question.is_visible()
    page.get_by_text("the answers").click()
    assert question.is_visible()
    page.close()
