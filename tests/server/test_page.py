"""The web page at /, in a real browser: what it shows, and what reaches the engine."""

import json
import re

import pytest

from nanoinfer import AsyncLLM, SamplingParams
from tests.helpers.contrast import POOR_CONTRASTS
from tests.helpers.http_server import serving
from tests.helpers.limited_steps import limited_steps

pytestmark = pytest.mark.slow

NASTY = '<img src="x" onerror="document.title = 1">\n<b>bold</b> &amp;\n```html\n<i>code</i>\n```\nafter'


def base_llm():
    async_llm = AsyncLLM("tiny-qwen3", seed=0)
    async_llm.engine.tokenizer.hf.chat_template = None
    return async_llm


@pytest.fixture
def visit(browser):
    """visit(server) opens its page. At the end: the console has nothing but statuses, and only the server was called."""
    contexts, complaints, urls, servers = [], [], [], []

    def open_page(server, **options):
        context = browser.new_context(**{"viewport": {"width": 900, "height": 800}} | options)
        contexts.append(context)
        servers.append(server.url)

        def watch(page):
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: urls.append(request.url))

        context.on("page", watch)
        page = context.new_page()
        page.goto(server.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in complaints if not text.startswith("Failed to load resource: the server responded")] == []
    assert all(url.removeprefix("blob:").startswith(tuple(servers)) for url in urls)


def set_parameters(page, **values):
    if not page.locator("#panel").evaluate("panel => panel.open"):
        page.click("#panel > summary")
    for name, value in values.items():
        page.fill(f"[name={name}]", str(value))


def send(page, text):
    page.fill("#input", text)
    page.press("#input", "Enter")


def send_again(page):
    """Send the last message again, unchanged, which replaces its answer."""
    page.locator(".user .edit").last.click()
    page.press("#input", "Enter")


def finished(page):
    """Wait until nothing runs. Returns the last answer's text, whether a text is in it or in the text box."""
    page.locator("#send:not([hidden])").wait_for()
    return page.locator(".assistant .content").last.text_content()


def answer_with(page, *events, status=200):
    """Answer the page's next requests with these server-sent events."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    kind = "text/event-stream"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body, content_type=kind))


def chunk(finish_reason=None, **delta):
    return {"id": "chatcmpl-x", "choices": [{"delta": delta, "finish_reason": finish_reason, "token_ids": [1, 2]}]}


def test_the_page_allows_its_own_script_only(guarded, server):
    policies = []
    for running in (guarded, server, server):
        response = running.get("/")
        policies.append(response.headers["content-security-policy"])
        [nonce] = re.findall(r"script-src 'nonce-([\w-]{22})'; ", policies[-1])
        assert re.findall("^<script.*", response.text, re.MULTILINE) == [f'<script nonce="{nonce}">']
        assert "default-src 'none'" in policies[-1]
    assert len(set(policies)) == 3


def test_messages_parameters_and_clicked_examples_reach_the_engine(server, visit, llm):
    page = visit(server)
    given = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 9, "seed": 3, "min_p": 0.01}
    given |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    set_parameters(page, **given, stop="zebra\nqueen", system="Tell stories.")
    page.fill("#input", "Once")
    page.press("#input", "Shift+Enter")
    page.keyboard.type("more")
    page.press("#input", "Enter")
    messages = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": "Once\nmore"}]
    for question in (None, "And then?"):
        if question is not None:
            send(page, question)
            messages.append({"role": "user", "content": question})
        [expected] = llm.chat(messages, SamplingParams(**given, stop=["zebra", "queen"]), use_tqdm=False)[0].outputs
        assert finished(page) == expected.text
        messages.append({"role": "assistant", "content": expected.text})
        note = page.locator(".assistant .note").last.inner_text()
        assert re.match(rf"{len(expected.token_ids)} tokens · [\d.]+ tokens/s · first after [\d.]+ s · ", note)
        assert note.endswith(f"finish reason: {expected.finish_reason}")
    assert page.locator(".turn .content").all_text_contents() == [message["content"] for message in messages[1:]]
    page.click("#new")
    assert page.locator(".turn").count() == 0
    assert page.input_value("[name=system]") == "Tell stories."
    assert "tells short stories for children" in page.inner_text("#intro")
    page.get_by_text("Tell me a story about Tom").click()
    messages = [messages[0], {"role": "user", "content": "Tell me a story about Tom"}]
    [expected] = llm.chat(messages, SamplingParams(**given, stop=["zebra", "queen"]), use_tqdm=False)[0].outputs
    assert finished(page) == expected.text
    assert not page.locator("#intro").is_visible()


def test_a_stream_grows_and_stop_frees_its_blocks(server, visit):
    page = visit(server)
    set_parameters(page, seed=1, max_tokens=400)
    manager = server.async_llm.engine.block_manager
    with limited_steps(server.async_llm.engine, 2) as steps:  # so that no answer can end by itself
        send(page, "Hello")
        server.wait_until_busy()
        length = 0
        for _ in range(4):
            for i in range(10_000):  # the next step only after two seconds: a page on a busy machine is behind the engine
                if (now := len(page.locator(".assistant .content").text_content())) > length:
                    break
                steps.allow(i % 200 == 0)
                page.wait_for_timeout(10)
            assert now > length
            length = now
        assert server.num_unfinished() == 1
        send(page, "Another")  # not before the answer has ended
        page.click("#stop")
        server.wait_until_idle()
        assert manager.num_free_blocks == manager.num_blocks
        assert len(finished(page)) >= length
        assert page.inner_text(".assistant .note").endswith("finish reason: stopped")
        assert page.input_value("#input") == "Another"
        for i, end in enumerate((lambda: page.keyboard.press("Escape"), lambda: page.click("#new"))):
            send(page, "Again")
            page.locator(f".assistant >> nth={i + 1}").wait_for()
            assert page.locator(".edit:enabled").count() == 0
            end()
            server.wait_until_idle()
            page.locator("#send:not([hidden])").wait_for()
        assert page.locator(".turn").count() == 0


def test_errors_are_shown_as_sentences(server, visit):
    page = visit(server)
    set_parameters(page, top_p=7, max_tokens=3)
    send(page, "Hello")
    finished(page)
    expected = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "top_p": 7})
    assert page.locator(".error:visible").inner_text() == expected.json()["error"]["message"]
    assert page.locator(".copy:visible").count() == 1  # the message's. The answer has no text
    set_parameters(page, top_p="")
    send_again(page)
    assert finished(page) != ""
    assert page.locator(".error:visible").count() == 0
    for events, status, sentence in (
        ([chunk(content="half"), {"error": {"message": "the engine failed"}}], 200, "the engine failed"),
        ([chunk(content="half")], 200, "The connection ended before the answer did."),
        ([], 502, "The server answered with status 502."),
    ):
        answer_with(page, *events, status=status)
        send_again(page)
        assert finished(page) == "half" * bool(events)
        assert page.locator(".error:visible").inner_text() == sentence


def test_a_key_is_asked_for_and_kept_in_this_tab(guarded, visit):
    page = visit(guarded)
    set_parameters(page, max_tokens=5)
    send(page, "Hello")
    page.get_by_text("This server requires an API key.").wait_for()
    page.press("#key", "Escape")
    finished(page)
    assert "a valid API key is required" in page.locator(".error:visible").inner_text()
    send_again(page)
    for key, words in (("wrong", "requires an API key"), ("second", "did not accept this key")):
        page.get_by_text(words).wait_for()
        page.fill("#key", key)
        page.press("#key", "Enter")
    assert finished(page) != ""
    page.reload()
    send(page, "Hello")
    assert finished(page) != ""
    assert page.locator("dialog:visible").count() == 0


MARKDOWN = """\
# A *title*
Plain **bold** and _slanted_, `a * b * c` and snake_case_names, 2 * 3 * 4, ~~gone~~ \\*kept\\*.

1. one
   - inner [link](https://example.org/a_b)
   ```python
   x = "# no heading"
   ```

2. two
> quoted
> more

| a | b |
|---|---|
| 1 | `x` |

---
[bad](javascript:alert(1)) ![picture](https://example.org/p.png) <b>no</b>
~~~
unclosed"""


SHOWN = [
    "<h3>A <em>title</em></h3>Plain <strong>bold</strong> and <em>slanted</em>, <code>a * b * c</code> and ",
    "snake_case_names, 2 * 3 * 4, <del>gone</del> *kept*.\n",
    '<ol start="1"><li>one\n<ul><li>inner ',
    '<a href="https://example.org/a_b" target="_blank" rel="noopener noreferrer">link</a></li></ul>',
    '<pre tabindex="0">x = "# no heading"\n</pre></li><li>two</li></ol><blockquote>quoted\nmore</blockquote>',
    '<div class="table" tabindex="0"><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>x</code></td></tr>',
    "</table></div><hr>[bad](javascript:alert(1)) ![picture](https://example.org/p.png) &lt;b&gt;no&lt;/b&gt;\n",
    '<pre tabindex="0">unclosed</pre>',
]
DEEP = [sign * 5000 for sign in ("> ", "- ", "*", "**a ", "`", "[")]
ADVERSARIAL = [f"{DEEP[0]}a", f"{DEEP[1]}a", f"{DEEP[2]}a", DEEP[3], f"x{DEEP[4]}", f"{DEEP[5]}](https://x)"]


def test_markdown_becomes_elements_that_load_nothing_markup_stays_text_and_a_message_is_edited(server, visit):
    page = visit(server)
    answer_with(page, chunk(reasoning_content="<b>hm</b>"), chunk(content=NASTY[:30]), chunk("stop", content=NASTY[30:]))
    send(page, NASTY)
    finished(page)
    for role in ("user", "assistant"):
        shown = page.locator(f".{role} .content")
        assert page.locator(f".{role} :is(img, b, i, script)").count() == 0
        assert shown.locator("pre").text_content() == "<i>code</i>\n"
        assert shown.text_content() == NASTY.replace("```html\n", "").replace("```\n", "")
    thoughts = page.locator(".assistant .reasoning")
    assert thoughts.inner_text() == "Reasoning"
    thoughts.locator("summary").click()
    assert thoughts.inner_text() == "Reasoning\n<b>hm</b>"
    assert page.locator(".user .reasoning:visible").count() == 0
    assert page.title() == "tiny-qwen3 · nanoinfer"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".assistant .copy")
    assert page.evaluate("navigator.clipboard.readText()") == NASTY
    page.unroute_all()

    answer_with(page, *(chunk(content=MARKDOWN[i : i + 7]) for i in range(0, len(MARKDOWN), 7)), chunk("stop", content=""))
    send(page, "Hello")
    finished(page)
    assert page.locator(".assistant .content").last.inner_html().replace(' class=""', "") == "".join(SHOWN)
    page.unroute_all()
    for adversarial in ADVERSARIAL:
        answer_with(page, chunk("stop", content=adversarial))
        send(page, "Hello")
        assert len(finished(page)) > 0
        assert page.locator(".assistant .note").last.inner_text().endswith("finish reason: stop")
        page.unroute_all()

    answer_with(page, chunk("stop", content="fine"))
    num_turns = page.locator(".turn").count()
    page.fill("#input", "a draft")
    page.locator(".edit").first.click()
    assert page.input_value("#input") == NASTY
    page.keyboard.press("Escape")
    assert page.input_value("#input") == "a draft"
    assert page.locator(".turn").count() == num_turns
    page.locator(".user .edit").last.click()
    page.locator(".edit").first.click()
    page.fill("#input", "First, changed")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press("#input", "Enter")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "First, changed"}]
    assert finished(page) == "fine"
    assert page.locator(".turn .content").all_text_contents() == ["First, changed", "fine"]
    assert page.locator(".editing").count() == 0


def test_a_base_model_continues_the_text_and_another_model_has_no_examples(visit, tool_server):
    assert not visit(tool_server).locator("#intro").is_visible()
    with serving(base_llm) as running:
        page = visit(running)
        set_parameters(page, seed=5, max_tokens=8)
        text = "Once upon a time"
        params = SamplingParams(temperature=0.7, seed=5, max_tokens=8)
        page.locator("#intro button").first.click()
        finished(page)
        page.click("#new")
        page.fill("#input", text)
        for _ in range(2):
            page.press("#input", "Enter")
            page.locator(".note:has-text('finish reason')").wait_for()
            text += running.async_llm.llm.generate(text, params, use_tqdm=False)[0].outputs[0].text
            finished(page)
            assert page.input_value("#input") == text
        page.click("#new")
        assert page.input_value("#input") == ""


SCHEMES = [pytest.param("light", "rgb(244, 244, 241)", marks=pytest.mark.long), ("dark", "rgb(20, 22, 26)")]


@pytest.mark.parametrize(("scheme", "color"), SCHEMES)
def test_the_page_is_readable_and_narrow_enough_for_a_telephone(guarded, visit, scheme, color):
    page = visit(guarded, color_scheme=scheme, viewport={"width": 360, "height": 640})
    set_parameters(page, seed=3)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == color
    long = "x" * 300
    answer_with(page, chunk(reasoning_content=long), chunk("stop", content=f"{long}\n```\n{long}\n```\n"))
    send(page, long)
    finished(page)
    page.unroute_all()
    page.click(".assistant summary")
    send(page, "Hello")
    page.locator("#key-dialog[open]").wait_for()
    found = [page.evaluate(POOR_CONTRASTS)]  # with the dialog
    page.press("#key", "Escape")
    finished(page)
    assert page.locator(".error:visible").count() == 1
    for open_panel in (True, False):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("byId('log').scrollWidth <= byId('log').clientWidth")
        box = page.locator("#send").bounding_box()
        assert (box["x"] + box["width"] <= 360, box["y"] + box["height"] <= 640) == (True, True)
        found.append(page.evaluate(POOR_CONTRASTS))
        if open_panel:
            page.click("#panel > summary")
    assert sum(count for count, _ in found) > 40
    assert [poor for _, poor in found] == [[]] * 3
