"""The page that replays a recording, opened from a file in a real browser.

Its contents are compared with the engine's own state and with the events.
"""

import json
import re
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace

import pytest

from nanoinfer import LLM, BeamSearchParams, Recorder, SamplingParams
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.tracing import (
    BatchBuilt,
    BlocksAllocated,
    BlocksCached,
    BlocksReleased,
    BlocksShared,
    EngineStarted,
    RequestAdded,
    StageApplied,
    StepScheduled,
    StepTimed,
    TokenAppended,
    TokenDrawn,
    TokensDrafted,
)
from nanoinfer_lab.bench.random_models import RANDOM_MODELS
from nanoinfer_lab.simulate.costs import ModelSizes
from tests.helpers.contrast import POOR_CONTRASTS

pytestmark = pytest.mark.slow

PREFIX = (
    "Once upon a time, there was a kind duck named Max. Every morning, he ate three pancakes for breakfast. One Wednesday, he"
)
NASTY = 'Once upon a </script><b>bold</b> <img src="x" onerror="alert(1)">\n\ttab &amp; 🙂'


# ---- recordings


def looking_on(llm):
    """{step: the engine's own state when the model has just computed that step}."""
    seen = {}
    scheduler, manager = llm.engine.scheduler, llm.engine.block_manager
    commit = scheduler.commit

    def commit_and_look(plan):
        commit(plan)
        seen[len(seen)] = SimpleNamespace(
            tables={seq.sequence_id: list(seq.block_table) for seq in scheduler.running if seq.block_table},
            num_tokens={seq.sequence_id: seq.num_computed_tokens for seq in scheduler.running},
            content={block: key for key, block in manager.index.ids.items()},
            num_free=manager.num_free_blocks,
        )

    scheduler.commit = commit_and_look
    return seen


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Four requests of 64 tokens with stages. The third has a prefix cache hit on the first."""
    recorder = Recorder(stages=True)
    llm = LLM(tracer=recorder, block_size=16, kv_cache_memory=2**22)
    seen = looking_on(llm)
    add = lambda prompt, **params: llm.engine.add_request(  # noqa: E731
        llm.get_tokenizer().encode(prompt), SamplingParams(max_tokens=64, **params)
    )
    add(PREFIX, n=2, temperature=1.0, top_k=5, top_p=0.9, min_p=0.001, seed=1)
    add(NASTY, temperature=1.5, top_k=50, top_p=0.95, repetition_penalty=1.2, seed=3)
    for _ in range(4):
        llm.engine.step()
    add(PREFIX + " put on", temperature=0.0)
    add("Lily was", seed=7, stop=["She looked down"])
    while llm.engine.num_unfinished:
        llm.engine.step()
    path = tmp_path_factory.mktemp("viewer") / "recorded.html"
    recorder.to_html(path)
    stages = {}
    for event in recorder.of(StageApplied):
        stages.setdefault((event.sequence_id, event.position), []).append(event)
    draws = {(event.sequence_id, event.position): event for event in recorder.of(TokenDrawn)}
    return SimpleNamespace(recorder=recorder, seen=seen, path=path, stages=stages, draws=draws)


@pytest.fixture(scope="module", params=["async_scheduling", pytest.param("one step after the other", marks=pytest.mark.long)])
def crowded(request, tmp_path_factory):
    """More tokens than the cache holds, so that there are preemptions and evictions. One request is aborted."""
    recorder = Recorder()
    per_block = 2**20 // LLM(block_size=8, kv_cache_memory=2**20).engine.block_manager.num_blocks
    given = {"chunk_size": 16, "async_scheduling": request.param == "async_scheduling"}
    llm = LLM(tracer=recorder, block_size=8, kv_cache_memory=15 * per_block, **given)
    seen = looking_on(llm)
    for i, prompt in enumerate([PREFIX, "Lily was", PREFIX + " put", "Anna", "A fox", PREFIX]):
        params = SamplingParams(seed=i, max_tokens=25, ignore_eos=True, n=2 if i == 2 else 1)
        last = llm.engine.add_request(llm.get_tokenizer().encode(prompt), params)
    for number in range(1000):
        if number == 20:
            llm.abort(last.request_id)
        if not llm.engine.num_unfinished:
            break
        llm.engine.step()
    path = tmp_path_factory.mktemp("viewer") / "crowded.html"
    recorder.to_html(path)
    return SimpleNamespace(recorder=recorder, seen=seen, path=path)


ENGINE = EngineStarted("made", 1_000_000, "cpu", "float32", "cpu", 500, 40, 16, 8, 4096, 512)


def scheduled(step, **num_new_tokens):
    return StepScheduled(step, tuple(num_new_tokens), tuple(num_new_tokens.values()), tuple(num_new_tokens), 0, 10, ())


def batch(sequence_id, positions, *, ids, rows=()):
    """Blocks are 0, 1, 2 ... in order."""
    num = len(positions)
    return BatchBuilt((sequence_id,), (0, num), (positions[-1] + 1,), tuple(ids), tuple(positions), tuple(positions), rows)


def appended(position, token, **rest):
    fields = {"text": token, "held": "", "num_held_ids": 0, "finish_reason": None, "stop_reason": None}
    return TokenAppended("a", position, 7, token, **fields | rest)


MADE = [  # a prompt longer than the table, invisible texts, an id that is still on the device, a last step that failed
    ENGINE,
    StepTimed(4, 0.001, 0.001, 0.01, 0.001, 0.001),  # a step in flight when the recorder was cleared
    RequestAdded("a", "<i>many", tuple(range(250)), tuple(f"<i>{i}" for i in range(250)), {"stop": "('<b>',)"}),
    RequestAdded("b", "", (1,), (), {}),
    RequestAdded("c", "", tuple(range(1100)), tuple(f" {i}" for i in range(1100)), {}),
    BlocksAllocated("a", tuple(range(16))),
    scheduled(5, a=250),
    batch("a", range(250), ids=range(250), rows=(249,)),
    appended(250, ""),
    StepTimed(5, 0.001, 0.001, 0.01, 0.001, 0.001),
    scheduled(6, a=1),
    batch("a", [250], ids=[-1], rows=(0,)),
    appended(251, "�\n", text="", held="<b", num_held_ids=0),
    StepTimed(6, 0.001, 0.001, 0.01, 0.001, 0.001),
    scheduled(7, a=1),
    batch("a", [251], ids=[7], rows=(0,)),
]


# ---- the browser


@pytest.fixture
def show(browser):
    """show(path) opens the page, at its first step. At the end: the console is empty, and only the file was requested."""
    contexts, complaints, requests, expected = [], [], [], []

    def open_page(path, at="#step=0", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        expected.append(path.as_uri())
        page.goto(path.as_uri() + at)
        assert step_of(page) is not None
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert requests == expected


@pytest.fixture
def show_events(show, tmp_path):
    def open_events(events):
        recorder = Recorder()
        recorder.events = list(events)
        recorder.to_html(tmp_path / "made.html")
        return show(tmp_path / "made.html")

    return open_events


def step_of(page):
    """The number of the step that the page shows, in two places."""
    title, label = page.evaluate("[byId('step-title').innerText, byId('step-label').innerText]")  # at once: it may be playing
    step = int(re.fullmatch(r"Step (\d+)", title)[1])
    assert label.startswith(f"{step} (")
    return step


def until(page, condition):
    """Playwright's own wait_for_function evaluates strings, which the page forbids."""
    for _ in range(6000):
        if condition():
            return
        page.wait_for_timeout(20)
    raise AssertionError("waited for two minutes")


def select(page, sequence_id, index):
    go = "([id, i]) => { const s = run.sequences.get(id); goTo(s.tokens[i].step.index, s, s.tokens[i]); }"
    page.evaluate(go, [sequence_id, index])


def tokens_of(run, sequence_id):
    return [event for event in run.recorder.of(TokenAppended) if event.sequence_id == sequence_id]


def as_seen(text):
    """A token as a label shows it."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def percent(p):
    return "0%" if p == 0 else "<0.01%" if p < 0.0001 else f"{p * 100:.{2 if p < 0.1 else 1}f}%"


def texts(page, selector):
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def go_to(page, step):
    page.evaluate(
        "step => { const slider = byId('slider'); slider.value = step; slider.dispatchEvent(new Event('input')); }", step
    )
    assert step_of(page) == step


# ---- the file


def test_the_page_holds_every_event_and_is_small(recorded):
    page = recorded.path.read_text(encoding="utf-8")
    assert len(page.encode()) < 2_000_000
    [line] = [line for line in page.splitlines() if line.startswith("const EVENTS = ")]
    events = json.loads(line.removeprefix("const EVENTS = ").removesuffix(";"))
    expected = json.dumps([{"event": type(event).__name__} | asdict(event) for event in recorded.recorder.events])
    assert events == json.loads(expected, parse_float=lambda digits: float(f"{float(digits):.9g}"))
    assert page.count("</script>") == 1


# ---- moving


def test_it_opens_with_what_ran_and_keys_slider_and_play_move_through_the_steps(recorded, show):
    page = show(recorded.path)
    header = page.inner_text("#facts")
    engine = recorded.recorder.of(EngineStarted)[0]
    for fact in [engine.model, f"{engine.num_parameters:,}", engine.dtype, f"{engine.num_blocks} blocks × 16 tokens"]:
        assert fact in header
    assert re.search(r"requests\s*4\b", header)
    assert re.search(rf"tokens drawn\s*{len(recorded.recorder.of(TokenAppended))}\b", header)
    assert not page.get_by_text("packed into one batch").is_visible()
    page.get_by_text("How to read this page").click()
    assert page.get_by_text("packed into one batch").is_visible()
    last = len(recorded.seen) - 1
    for key, step in [("ArrowLeft", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("Home", 0)]:
        page.keyboard.press(key)
        assert step_of(page) == step
    page.focus("#slider")
    for key, step in [("ArrowRight", 1), ("ArrowRight", 2), ("End", last), ("ArrowLeft", last - 1)]:  # the slider's own
        page.keyboard.press(key)
        assert step_of(page) == step
        assert page.input_value("#slider") == str(step)
    go_to(page, 3)
    page.click("#play")
    until(page, lambda: step_of(page) >= 5)
    assert page.inner_text("#play") == "Pause"
    page.click("#play")
    stopped = step_of(page)
    page.wait_for_timeout(350)  # longer than a step's pace
    assert step_of(page) == stopped
    go_to(page, last - 1)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    until(page, lambda: page.inner_text("#play") == "Play")  # it stops by itself
    assert step_of(page) == last
    page.keyboard.press("Home")
    paces = page.evaluate(
        """() => {
            const paces = [];
            window.setInterval = (_, pace) => paces.push(pace);
            const choose = speed => { byId("speed").value = speed; byId("speed").dispatchEvent(new Event("change")); };
            choose("4"); // not playing yet
            byId("play").click();
            choose("0.25");
            byId("play").click();
            return paces;
        }"""
    )
    assert paces == [300 / 4, 300 / 0.25]
    page.focus("#speed")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert (page.input_value("#speed"), step_of(page)) == ("0.5", 0)  # its keys are its own


def test_keys_and_clicks_select_a_token(recorded, show):
    page = show(recorded.path)
    positions = [event.position for event in tokens_of(recorded, "2")]
    position = lambda: int(re.search(r"position (\d+)", page.inner_text("#token p >> nth=0"))[1])  # noqa: E731
    page.locator("#requests button.owner", has_text=re.compile("^2$")).press("Enter")  # selects, and does not move
    assert step_of(page) == 0
    assert page.locator("[aria-current=true]").inner_text() == "2"
    for key, index in [("n", 0), ("n", 1), ("n", 2), ("p", 1), ("p", 0), ("p", 0), ("n", 1)]:
        page.keyboard.press(key)
        assert position() == positions[index]
    page.keyboard.press("End")
    page.keyboard.press("p")
    last = position()
    page.keyboard.press("n")
    assert (last, position()) == (positions[-2], positions[-1])
    chip = page.locator(".drawn-token >> nth=3")
    chip.press("Space")  # like a click; it does not play
    assert page.inner_text("#play") == "Play"
    assert chip.get_attribute("aria-pressed") == "true"
    width = page.evaluate("WIDTH")
    for sequence_id, step in [("1", 11), ("0.1", 2), ("2", 30)]:
        page.locator(f".track[data-sequence='{sequence_id}']").click(position={"x": (step + 0.5) * width, "y": 8})
        assert step_of(page) == step
        assert f", drawn in step {step}" in page.inner_text("#token p >> nth=0")
        band, track = page.locator("#band").bounding_box(), page.locator(".track >> nth=1").bounding_box()
        assert band["x"] == pytest.approx(track["x"] + step * width, abs=3)
    for request, answer, index in [(0, 1, 17), (3, 0, 4), (2, 0, 0)]:
        answers = page.locator(f"#requests details >> nth={request}").locator("p")
        chip = answers.nth(1 + answer).locator(".drawn-token").nth(index)
        chip.click()
        sequence_id = f"{request}.{answer}" if answer else f"{request}"
        token = tokens_of(recorded, sequence_id)[index]
        assert page.inner_text("#token-title") == f"Token “{as_seen(token.token)}”"
        assert f"id {token.token_id}, position {token.position}, drawn in step {step_of(page)}" in page.inner_text("#token")
        assert chip.get_attribute("aria-pressed") == "true"
        assert page.locator("[aria-pressed=true]").count() == 1
    chip.focus()
    page.keyboard.press("ArrowRight")  # the focus stays, and so does the sequence
    assert page.inner_text("#token p >> nth=0").startswith("2 id ")


def test_a_link_opens_the_page_where_it_was_copied(recorded, show):
    page = show(recorded.path)
    page.locator(".track[data-sequence='0.1']").click(position={"x": 17.5 * page.evaluate("WIDTH"), "y": 8})
    assert page.inner_text("#link") == "#step=17&token=0.1"
    until(page, lambda: page.url.endswith("#step=17&token=0.1"))
    title = page.inner_text("#token-title")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#link", "href") == "#step=16&token=0.1"
    again = show(recorded.path, at="#step=17&token=0.1")
    assert (step_of(again), again.inner_text("#token-title")) == (17, title)
    assert again.locator("[aria-current=true]").inner_text() == "0.1"
    again.evaluate("location.hash = '#step=20&token=3'")  # as by typing
    until(again, lambda: step_of(again) == 20)
    assert again.inner_text("#token .owner") == "3"
    early = show(recorded.path, at="#step=0&token=2")  # before the request was added
    assert early.inner_text("#token") == "No token of sequence 2 was drawn in this step."
    early.keyboard.press("n")
    assert early.inner_text("#token .owner") == "2"


@pytest.mark.parametrize("at", ["", "#step=1000"])
def test_it_opens_on_the_token_of_greatest_entropy(recorded, show, at):
    models = [event for event in recorded.recorder.of(StageApplied) if event.stage == "model"]
    most = max(models, key=lambda event: event.entropy)
    sequence_id, position = most.sequence_id, most.position
    page = show(recorded.path, at=at)
    assert page.inner_text("#token p >> nth=0").startswith(f"{sequence_id} id ")
    assert f"position {position}," in page.inner_text("#token p >> nth=0")
    assert step_of(page) > 0
    page.evaluate("byId('requests').style.maxHeight = '100px'")
    for end, token in [("End", "p"), ("Home", "n")]:  # the text scrolls to the token, the page does not
        page.keyboard.press(end)
        page.keyboard.press(token)
        chip, box = page.locator("#requests [aria-pressed=true]").bounding_box(), page.locator("#requests").bounding_box()
        assert box["y"] <= chip["y"] < chip["y"] + chip["height"] <= box["y"] + box["height"]
    assert page.evaluate("scrollY") == 0


# ---- a step


def test_timeline_step_panel_and_pool_are_those_of_the_engine(crowded, show):
    page = show(crowded.path)
    check_timeline(page, crowded)
    for event, following in pairwise(crowded.recorder.events):
        if isinstance(event, StepScheduled) and event.step % 11 == 0:
            check_step(page, event, following)
    assert check_pool(page, crowded, block_size=8) > 0
    sentences = """() => run.rows.flatMap(sequence => sequence.tokens.map(token => explanationOf(token, sequence)))
        .filter(text => text.includes("again, after a preemption"))"""
    found = page.evaluate(sentences)
    assert found
    assert all(re.match(r"Step \d+ computed \d+ tokens? of prompt and output again, after a preemption", one) for one in found)
    assert "Recorder(stages=True), or nanoinfer explain" in page.inner_text("#token")
    assert page.locator("#stages, #intervals").count() == 0


def check_timeline(page, crowded):
    steps = crowded.recorder.of(StepScheduled)
    num_preempted = sum(len(step.preempted) for step in steps)
    assert num_preempted > 0
    assert page.locator(".track .preempted").count() == num_preempted
    assert page.locator(".track .fork").count() == 1
    assert page.locator(".track .waiting").count() > 0
    endings = sorted(text.removeprefix("■ ") for text in texts(page, ".track .end"))
    assert endings == ["abort"] + ["length"] * 6
    prefills = [sum(num for seq, num in zip(step.sequence_ids, step.num_new_tokens, strict=True) if num > 1) for step in steps]
    assert sum(int(text) for text in texts(page, ".track .prefill") if text not in ("", "1")) == sum(prefills)


def check_step(page, event, following):
    assert isinstance(following, BatchBuilt)
    go_to(page, event.step)
    facts = dict(zip(texts(page, "#step dt"), texts(page, "#step dd"), strict=True))
    assert facts == {
        "running": str(len(event.running)),
        "waiting": str(event.num_waiting),
        "free blocks": f"{event.num_free_blocks} of 15",
        "preempted": ", ".join(f"sequence {name}" for name in event.preempted) or "none",
        "packed tokens": str(sum(event.num_new_tokens)),
    }
    runs = zip(event.sequence_ids, event.num_new_tokens, strict=True)
    assert [re.sub(r"(prefill|decode|dropped) ", "", text) for text in texts(page, ".runs .owner")] == [
        f"{sequence_id}: {num}" for sequence_id, num in runs
    ]
    table = page.evaluate("[...document.querySelectorAll('#batch tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    assert [row[0] for row in table] == [str(i) for i in range(len(following.input_ids))]
    assert [int(row[3]) for row in table] == list(following.positions)
    assert [row[4] for row in table] == [f"{slot // 8}·{slot % 8}" for slot in following.slot_mapping]
    assert {i for i, row in enumerate(table) if row[5]} == set(following.logits_indices)
    starts = following.query_start_loc
    assert [table[start][1] for start in starts[:-1]] == list(following.sequence_ids)


def check_pool(page, run, block_size):
    """Compare every step with the engine's own state. Returns the number of evicted blocks."""
    pools = page.evaluate(
        """run.steps.map(step => {
            goTo(step.index);
            return [byId('pool-counts').textContent, [...document.querySelectorAll('.block')].map(cell => ({
                block: Number(cell.dataset.block), who: cell.querySelector('b').textContent, kind: cell.className.split(' '),
                name: cell.firstChild.textContent, badge: cell.querySelector('.badge').textContent,
                words: cell.getAttribute('aria-description')}))];
        })"""
    )
    assert sorted(run.seen) == list(range(len(pools)))
    before, num_evicted = {}, 0
    for step, (counts, cells) in enumerate(pools):
        seen = run.seen[step]
        owners = {cell["block"]: {} for cell in cells}
        for sequence_id, table in seen.tables.items():
            for index, block in enumerate(table):
                owners[block][sequence_id] = index * block_size
        assert {cell["block"]: set(cell["who"].split()) for cell in cells} == {block: set(its) for block, its in owners.items()}
        held = {block for block, its in owners.items() if its}
        assert {cell["block"] for cell in cells if "held" in cell["kind"]} == held
        assert {cell["block"] for cell in cells if "•" in cell["name"]} == set(seen.content)
        assert {cell["block"] for cell in cells if "cached" in cell["kind"]} == set(seen.content) - held
        assert f": {len(held)} in use, {len(set(seen.content) - held)} free but cached" in counts
        assert run.recorder.of(EngineStarted)[0].num_blocks - len(held) == seen.num_free
        evicted = {block for block, content in before.items() if seen.content.get(block) != content}
        assert {cell["block"] for cell in cells if "evicted" in cell["kind"]} == evicted
        for cell in cells:
            its = owners[cell["block"]]
            assert cell["badge"] == (f"×{len(its)}" if len(its) > 1 else "")
            for sequence_id, start in its.items():
                stop = min(start + block_size, seen.num_tokens[sequence_id])
                assert f"sequence {sequence_id}, positions {start}–{stop - 1}" in cell["words"]
        before, num_evicted = seen.content, num_evicted + len(evicted)
    assert "freed" in page.inner_text("#pool-news")  # after the last step all are free
    return num_evicted


def test_blocks_of_several_kv_groups_have_their_groups_name_and_positions(show_events):
    """Tables of two groups, of which the second has a window. A second sequence begins with the newest two blocks of each."""
    page = show_events(
        [
            ENGINE,
            RequestAdded("a", "", tuple(range(60)), ("x",) * 60, {}),
            BlocksAllocated("a", (0, 1, 2, 3), 0),
            BlocksAllocated("a", (4, 5, 6, 7), 1),
            scheduled(0, a=60),
            batch("a", range(60), ids=range(60), rows=(59,)),
            BlocksCached("a", (0, 1, 2, 4, 5, 6)),
            BlocksReleased("a", (4, 5)),
            appended(60, "x"),
            StepTimed(0, 0.001, 0.001, 0.01, 0.001, 0.001),
            RequestAdded("b", "", tuple(range(50)), ("x",) * 50, {}),
            BlocksShared("b", (0, 1, 2), 0),
            BlocksShared("b", (-1, -1, 6), 1),
            scheduled(1, b=2),
            batch("b", [48, 49], ids=[8, 9], rows=(1,)),
            StepTimed(1, 0.001, 0.001, 0.01, 0.001, 0.001),
        ]
    )
    words = lambda block: page.get_attribute(f".block[data-block='{block}']", "aria-description")  # noqa: E731
    assert "sequence a of KV group 0, positions 16–31" in words(1)
    assert "sequence a of KV group 1, positions 32–47" in words(6)
    assert "free" in words(5)
    assert "sequence a was allocated blocks 4, 5, 6, 7 of KV group 1" in page.inner_text("#pool-news")
    assert "6 in use, 2 free but cached" in page.inner_text("#pool-counts")
    page.evaluate("goTo(1)")
    assert "sequence b of KV group 1, positions 32–47" in words(6)
    assert "sequence b had a prefix cache hit on block 6 of KV group 1" in page.inner_text("#pool-news")


# ---- text and one token


def test_text_can_be_read_searched_and_copied(recorded, show):
    page = show(recorded.path)
    go_to(page, 10)
    page.locator(".block >> nth=0").hover()
    words = page.inner_text("#block-words")
    assert "sequence 0, positions 0–15; sequence 0.1, positions 0–15; sequence 2, positions 0–15; in the prefix cache" in words
    assert "Once upon a time, there was" in words
    page.locator(".block >> nth=1").focus()
    assert page.inner_text("#block-words").startswith("block 1")
    tokens = tokens_of(recorded, "3")
    [held] = [i for i, event in enumerate(tokens) if event.held == "She looked"]
    details = page.locator("#requests details >> nth=3")
    chips = details.locator(".drawn-token")
    assert chips.all_text_contents() == [event.token for event in tokens]
    chips.nth(held).click()
    assert details.locator(".tail").inner_text() == "held back: “She␣looked”, may become a stop string"
    assert chips.nth(held + 1).get_attribute("class") == "token drawn-token later"
    assert "now" in chips.nth(held).get_attribute("class")
    page.keyboard.press("End")
    assert details.locator(".tail").inner_text() == "ended: stop “She␣looked␣down”"
    assert details.locator(".later").count() == 0
    assert page.locator("#requests details >> nth=2").locator(".tail").inner_text() == "ended: length"
    tokens = [event.token for event in tokens_of(recorded, "0")]
    answer = "".join(tokens)
    page.keyboard.press("Home")
    assert "␣" not in page.inner_text("#requests")
    for phrase in ["Once upon a time, there was a kind duck", answer[:60], answer[-60:]]:
        assert page.evaluate("phrase => { getSelection().removeAllRanges(); return find(phrase); }", phrase)
    copied = page.evaluate(
        """() => {
            const chips = document.querySelectorAll("#requests p:nth-of-type(2) .drawn-token");
            getSelection().setBaseAndExtent(chips[0], 0, chips[9], chips[9].childNodes.length);
            return getSelection().toString();
        }"""
    )
    assert copied == "".join(tokens[:10])
    assert page.locator("canvas, svg").count() == 0
    assert page.evaluate("[...document.querySelectorAll('*')].every(e => getComputedStyle(e).userSelect !== 'none')")
    added = recorded.recorder.of(RequestAdded)[1]
    prompt = page.locator("#requests details >> nth=1").locator("p >> nth=0")
    assert prompt.text_content() == "".join(added.tokens)
    assert "</script><b>bold</b>" in prompt.text_content()
    assert page.locator("#requests b").count() == 4  # the headings
    assert page.locator("img").count() == 0
    assert "1 Once upon a </script><b>" in page.locator(".row >> nth=3").text_content()
    page.locator("#requests details >> nth=1").locator(".drawn-token >> nth=0").click()
    assert "repetition_penalty=1.2" in page.inner_text("#stages")


def test_a_notebook_shows_the_page_in_a_frame(recorded, browser, tmp_path):
    complaints = []
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><p>a cell</p>{recorded.recorder._repr_html_()}", encoding="utf-8")
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(notebook.as_uri())
        frame = page.frame_locator("iframe")
        title = frame.locator("#token-title").inner_text()
        frame.locator("#token-title").click()  # then keys belong to the frame
        page.keyboard.press("n")
        assert frame.locator("#token-title").inner_text() != title
        assert not frame.locator("#link").inner_text()
        page.wait_for_timeout(500)  # longer than the delay of the address
        assert page.url == notebook.as_uri()
    assert complaints == []


def test_the_bars_are_the_stages_and_the_intervals_are_the_draw(recorded, show):
    page = show(recorded.path)
    names = set()
    for row, sequence_id in enumerate(["0", "0.1", "1", "3"]):
        tokens = tokens_of(recorded, sequence_id)
        for index in (row, len(tokens) - 1):
            select(page, sequence_id, index)
            key = (sequence_id, tokens[index].position)
            shown = page.locator(".stage")
            assert shown.count() == len(recorded.stages[key])
            for i, stage in enumerate(recorded.stages[key]):
                names.add(stage.stage)
                check_stage(shown.nth(i), stage, tokens[index])
            check_intervals(page, recorded.draws[key])
    assert {"model", "apply_repetition_penalty", "apply_temperature", "keep_min_p", "keep_top_k", "keep_top_p"} <= names
    page.locator("#requests details >> nth=2").locator(".drawn-token >> nth=5").click()
    assert "A greedy row (temperature=0) takes the most probable token" in page.inner_text("#explanation")
    assert page.locator("#intervals .mark").count() == 0


def check_stage(shown, stage, token):
    """Dropped candidates are shown only if they were among the ten most probable."""
    candidates = [one for i, one in enumerate(stage.candidates) if one.after > 0 or i < 10]
    assert shown.locator("h3").inner_text() == stage.stage
    assert f"{stage.num_left} of 1959 tokens left, entropy {stage.entropy:.2f} bits" in shown.locator("p").inner_text()
    if stage.stage != "model" and all(
        abs(one.before - one.after) < 0.0005 and (one.after > 0) == (one.before > 0) for one in stage.candidates
    ):
        assert "no visible change" in shown.locator("p").inner_text()
        assert shown.locator(".text").count() == 0
        return
    assert shown.locator(".text").all_text_contents() == [one.token for one in candidates]
    assert shown.locator(".percent").all_inner_texts() == [percent(one.after) for one in candidates]
    dropped = [one.token for one in candidates if one.after == 0]
    assert shown.locator(".out .text").all_text_contents() == dropped
    assert shown.locator(".drawn .text").all_text_contents() == [token.token]
    assert shown.locator(".cut").count() == stage.stage.startswith("keep_")
    if stage.stage == "keep_top_k":
        assert re.search(r"top_k=(5|50)\b", shown.locator("p").inner_text())
    if dropped:  # the line is between the kept and the dropped ones
        order = shown.evaluate("stage => [...stage.children].slice(2).map(row => row.className.trim())")
        cut = order.index("cut")
        assert not any("out" in name.split() for name in order[:cut])
        assert all("out" in name.split() for name in order[cut + 1 :])


def check_intervals(page, draw):
    assert f"u = {draw.u:.4f} is in its interval [{draw.low:.4f}, {draw.high:.4f})" in page.inner_text("#explanation")
    assert page.inner_text("#intervals .u") == f"u = {draw.u:.4f}"
    assert page.locator("#intervals .part > span").count() == len(draw.intervals)
    box, mark = page.locator("#intervals").bounding_box(), page.locator("#intervals .mark").bounding_box()
    assert (mark["x"] + 1 - box["x"]) / box["width"] == pytest.approx(draw.u, abs=0.003)
    drawn = page.locator("#intervals .drawn").bounding_box()
    assert drawn["x"] - 2 <= mark["x"] + 1 <= drawn["x"] + drawn["width"] + 2


def test_the_explanation_and_the_times_say_what_the_events_say(recorded, show):
    page = show(recorded.path)
    added = {event.request_id: event for event in recorded.recorder.of(RequestAdded)}

    def explanation(sequence_id, index):
        tokens = tokens_of(recorded, sequence_id)
        select(page, sequence_id, index)
        return tokens[index], page.inner_text("#explanation")

    token, text = explanation("0", 0)
    assert text.startswith(f"Step 0 computed {token.position} tokens of a prompt of {token.position} (prefill). The model gave")
    assert "from the row of another answer" in explanation("0.1", 0)[1]
    token, text = explanation("0", 9)
    assert f"decode). The keys and values of the {token.position - 1} tokens before were read from the cache." in text
    for index in range(1, 60, 14):
        token, text = explanation("0", index)
        applied, draw = recorded.stages["0", token.position], recorded.draws["0", token.position]
        removed = {after.stage: before.num_left - after.num_left for before, after in pairwise(applied)}
        for stage, name in [("keep_top_k", "top_k=5"), ("keep_top_p", "top_p=0.9"), ("keep_min_p", "min_p=0.001")]:
            num = removed.get(stage, 0)  # a stage that changes nothing has no event
            assert (f"{name} removed {num:,} token" in text) == (num > 0)
        assert f"{applied[-1].num_left} w" in text
        assert f"u = {draw.u:.4f} is in its interval [{draw.low:.4f}, {draw.high:.4f})" in text
    token, text = explanation("2", 0)  # greedy, with a prefix cache hit
    num_prompt = len(added["2"].prompt_token_ids)
    assert "of the 16 tokens before were read" in text
    assert f"of a prompt of {num_prompt} (prefill)" in text
    assert "A greedy row (temperature=0) takes" in text
    assert explanation("3", len(tokens_of(recorded, "3")) - 1)[1].endswith("It ended the sequence: stop.")
    page.keyboard.press("Home")
    timed = recorded.recorder.of(StepTimed)[0]
    assert timed.trace > 0
    total = 1000 * (timed.schedule + timed.build + timed.forward + timed.sample + timed.advance)
    legend = page.inner_text("#step .legend")
    assert f"total {total:.{2 if total < 10 else 1}f} ms" in legend
    assert "not included: recording the sampler's stages" in legend
    arguments = RANDOM_MODELS["qwen3-0.6b"][1] | {"model_type": "qwen3", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    sizes = ModelSizes.of(arguments)
    ratio = (sizes.attention_weights + sizes.mlp_weights) / sizes.table_weights
    assert f"its layers have {ratio:.1f} times the weights of its LM head" in page.inner_text("#step")
    assert check_pool(page, recorded, block_size=16) == 0


# ---- odd recordings


def test_odd_events_are_shown_as_well_as_can_be(show_events):
    page = show_events(MADE)
    assert step_of(page) == 5  # the recorder may have been cleared before
    assert page.inner_text("#step-label") == "5 (1 of 3)"
    assert page.locator("#batch tbody tr").count() == 200
    assert "50 more" in page.inner_text("#batch")
    assert page.locator(".drawn-token").all_text_contents() == ["#7", "�\n"]  # an empty text is its id
    assert page.inner_text("#token-title") == "Token “#7”"
    page.keyboard.press("ArrowRight")
    assert "(on the device)" in page.inner_text("#batch tbody")
    assert page.inner_text(".tail") == "held back: “<b”, may become a stop string"
    page.keyboard.press("ArrowRight")
    assert "no times" in page.inner_text("#step")
    assert "No token was drawn" in page.inner_text("#token")
    assert page.locator("i:has-text('<i>')").count() == 0
    prompt = page.locator("#requests details >> nth=2").locator("p >> nth=0")
    assert prompt.text_content() == "".join(f" {i}" for i in range(1100))  # the rest of a long prompt is there, too


def test_beam_search_in_the_same_recording_is_passed_over(show, tmp_path):
    recorder = Recorder()
    llm = LLM(tracer=recorder, block_size=16, kv_cache_memory=2**20)
    llm.beam_search(PREFIX, BeamSearchParams(beam_width=3, max_tokens=8))
    with pytest.raises(InvalidValueError, match="no step of generate"):
        recorder.to_html(tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    llm.generate(PREFIX, SamplingParams(max_tokens=4, seed=1), use_tqdm=False)
    recorder.to_html(tmp_path / "page.html")
    page = show(tmp_path / "page.html")
    assert texts(page, "#timeline .owner") == ["0"]
    assert "hit" in page.locator(".block >> nth=0").inner_text()  # what the beams left behind is found
    page.keyboard.press("End")
    assert page.locator(".block.held").count() == 2


def test_drafts_are_rows_of_the_batch_and_their_tokens_can_be_visited(show, tmp_path):
    recorder = Recorder(stages=True)
    speculation = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    llm = LLM(tracer=recorder, block_size=16, speculative_config=speculation)
    [output] = llm.generate([PREFIX + " One"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    recorder.to_html(tmp_path / "drafts.html")
    page = show(tmp_path / "drafts.html", at="", viewport={"width": 390, "height": 900})
    steps = {event.step: event for event in recorder.of(TokensDrafted)}
    assert len(steps) > 3
    num_accepted = 0
    for step, event in steps.items():
        go_to(page, step)
        [draft] = event.draft_token_ids
        facts = dict(zip(texts(page, "#step dt"), texts(page, "#step dd"), strict=True))
        accepted, total = re.fullmatch(r"(\d+) of (\d+) accepted", facts["drafts"]).groups()
        assert (int(total), facts["packed tokens"]) == (len(draft), str(1 + len(draft)))
        rows = texts(page, "#batch tbody tr")
        assert ["accepted" in row for row in rows] == [False] + [i < int(accepted) for i in range(len(draft))]
        assert ["rejected" in row for row in rows] == [False] + [i >= int(accepted) for i in range(len(draft))]
        num_accepted += int(accepted)
        assert page.evaluate("byId('batch').querySelector('.scroll').scrollWidth <= byId('batch').clientWidth")
    assert 0 < num_accepted == 30 - len(recorder.of(StepTimed))
    cells = page.locator(".cell.drafts").all_inner_texts()
    assert (len(cells), sum(int(label or 0) for label in cells)) == (len(steps), num_accepted)
    assert f"{num_accepted} of {sum(len(event.draft_token_ids[0]) for event in steps.values())}" in page.inner_text("#facts")
    assert page.locator(".drawn-token.accepted").count() == num_accepted
    go_to(page, 0)
    sentences = []
    for token in recorder.of(TokenAppended)[1:13]:
        page.keyboard.press("n")
        assert page.inner_text("#token-title") == f"Token “{as_seen(token.token)}”"
        sentences.append(page.inner_text("#explanation"))
    assert any("which was therefore accepted" in sentence for sentence in sentences)
    every = page.evaluate("run.rows.flatMap(sequence => sequence.tokens.map(token => explanationOf(token, sequence)))")
    assert sum("which was therefore accepted" in sentence for sentence in every) == num_accepted
    assert any("differs from it and was rejected" in sentence for sentence in every)
    assert [event.token_id for event in recorder.of(TokenAppended)] == output.outputs[0].token_ids


# ---- looks


@pytest.mark.parametrize("crowded", ["async_scheduling"], indirect=True)
def test_the_body_never_scrolls_sideways_and_every_text_has_enough_contrast(recorded, crowded, show):
    for run in (recorded, crowded):
        page = show(run.path, viewport={"width": 360, "height": 740}, color_scheme="light", reduced_motion="reduce")
        assert page.evaluate("PACE") == 1200
        page.get_by_text("How to read this page").click()
        for width in (360, 860):
            page.set_viewport_size({"width": width, "height": 740})
            for step in (0, len(run.seen) - 1):
                go_to(page, step)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate("byId('timeline').scrollWidth > byId('timeline').clientWidth") or width > 360
            band, panel = page.locator("#band").bounding_box(), page.locator("#timeline").bounding_box()
            assert panel["x"] < band["x"] < panel["x"] + panel["width"]  # the panel has scrolled to the step instead
        for scheme, color in {"light": "rgb(244, 244, 241)", "dark": "rgb(20, 22, 26)"}.items():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == color
            for step in (12, len(run.seen) - 1):
                go_to(page, step)
                count, poor = page.evaluate(POOR_CONTRASTS)
                assert count > 200
                assert poor == []
    page.evaluate("byId('token-title').style.color = 'gray'")
    assert len(page.evaluate(POOR_CONTRASTS)[1]) == 1  # the comparison can fail
