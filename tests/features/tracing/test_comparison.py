"""The page that replays two runs side by side: what it marks as different, and how one run follows the other."""

import re
from types import SimpleNamespace

import pytest

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.tracing import RequestAdded, StepScheduled, TokenAppended
from tests.helpers.contrast import POOR_CONTRASTS

pytestmark = pytest.mark.slow

LONG = (
    "Once upon a time, there was a kind duck named Max. Every morning, he ate three pancakes for breakfast. One Wednesday, he"
)
PROMPTS = [LONG, "Lily was", "Far away, in a", "Lily was"]  # two are equal


def record(prompts=PROMPTS, *, temperature=0.8, n=1, **engine):
    recorder = Recorder()
    llm = LLM(tracer=recorder, block_size=8, kv_cache_memory=2**20, seed=0, **engine)
    params = [
        SamplingParams(temperature=temperature, seed=10 + i, n=n, max_tokens=12, ignore_eos=True) for i in range(len(prompts))
    ]
    llm.generate(prompts, params, use_tqdm=False)
    return recorder


def tokens_of(recorder, sequence_id):
    return {event.position: event for event in recorder.of(TokenAppended) if event.sequence_id == sequence_id}


def different_positions(first, second, name):
    left, right = tokens_of(first, name), tokens_of(second, name)
    return [position for position in left if left[position].token_id != right[position].token_id]


@pytest.fixture(scope="module")
def batch():
    return record()


@pytest.fixture
def show(browser, tmp_path):
    """show(a, b): the comparison of two recorders, with its two frames. At the end: nothing was requested, no complaint."""
    complaints, requests = [], []
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    address = (tmp_path / "page.html").as_uri()

    def open_page(first, second):
        first.to_comparison(tmp_path / "page.html", second, names=("first", "<b>second"))
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        frames = [handle.content_frame() for handle in page.query_selector_all("iframe")]
        for frame in frames:
            while not frame.evaluate("typeof now === 'object' && Boolean(now.step)"):
                page.wait_for_timeout(20)
        return SimpleNamespace(page=page, frames=frames)

    yield open_page
    context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("about:srcdoc")} == {address}


def selected(frame):
    """What a frame shows: (step, sequence, position of the token)."""
    return tuple(frame.evaluate("[now.step.event.step, now.sequence?.id ?? null, now.token?.position ?? null]"))


def until(shown, expected, frame):
    for _ in range(6000):
        if selected(shown.frames[frame]) == expected:
            return
        shown.page.wait_for_timeout(20)
    assert selected(shown.frames[frame]) == expected


def test_a_batch_beside_the_same_prompts_one_at_a_time(show, batch):
    alone = record(max_num_seqs=1)
    shown = show(batch, alone)
    assert len(batch.of(StepScheduled)) < len(alone.of(StepScheduled)) / 3
    assert [frame.locator(".differs").count() for frame in shown.frames] == [0, 0]  # a seed's tokens, in any batch
    assert shown.page.locator("h2").all_inner_texts() == ["first", "<b>second"]
    # Aligned by token: step 4 of the batch draws the token of sequence 2 that the other run draws much later.
    position = len(alone.of(RequestAdded)[2].prompt_token_ids) + 4
    shown.frames[0].locator("#requests button.owner", has_text=re.compile("^2$")).click()
    shown.frames[0].evaluate("goTo(4)")
    until(shown, (4, "2", position), 0)
    appended = [(event.sequence_id, event.position) for event in alone.of(TokenAppended)]
    until(shown, (appended.index(("2", position)), "2", position), 1)  # alone, every step draws one token
    shown.frames[1].locator(".drawn-token >> nth=3").click()  # and back: a token of sequence 0
    until(shown, (3, "0", len(batch.of(RequestAdded)[0].prompt_token_ids) + 3), 0)
    # Aligned by step
    shown.page.select_option("#align", "step")
    shown.frames[0].evaluate("goTo(7)")
    until(shown, (7, "0", len(batch.of(RequestAdded)[0].prompt_token_ids) + 7), 1)


def test_a_chunked_prompt_is_aligned_by_what_was_computed(show, batch):
    chunked = record(chunk_size=8, max_num_batched_tokens=16)
    shown = show(batch, chunked)
    num_prompt = len(batch.of(RequestAdded)[0].prompt_token_ids)
    shown.frames[0].locator("#requests button.owner", has_text=re.compile("^0$")).click()
    shown.frames[0].evaluate("goTo(0)")
    steps = enumerate(chunked.of(StepScheduled))
    last = next(i for i, step in steps if i and "0" in step.sequence_ids and i >= num_prompt // 8)
    until(shown, (last, "0", num_prompt), 1)  # the last of the chunks, which draws the same token
    shown.frames[1].evaluate("goTo(1, run.sequences.get('0'))")
    until(shown, (0, "0", num_prompt), 0)  # the one step that computed it


def test_it_opens_at_the_first_token_that_differs_and_marks_all_of_them_in_both_runs(show):
    cold, warm = record(temperature=0.7, n=2), record(temperature=1.5, n=2)
    shown = show(cold, warm)
    names = sorted({event.sequence_id for event in cold.of(TokenAppended)})
    firsts = {name: positions[0] for name in names if (positions := different_positions(cold, warm, name))}
    assert len(firsts) > 3  # so the marks are seen
    name, first = next(iter(firsts.items()))
    for side, recorder in enumerate((cold, warm)):
        step = next(i for i, event in enumerate(recorder.of(StepScheduled)) if name in event.sequence_ids)
        until(shown, (step + first - min(tokens_of(cold, name)), name, first), side)
    marked = "id => run.sequences.get(id).tokens.filter(t => otherText(t) !== undefined).map(t => t.position)"
    select = "([id, at]) => { const s = run.sequences.get(id), t = s.byPosition.get(at); goTo(t.step.index, s, t); }"
    for frame, other in zip(shown.frames, (warm, cold), strict=True):
        for name in names:
            assert frame.evaluate(marked, name) == different_positions(cold, warm, name)
        for name, first in firsts.items():
            frame.evaluate(select, [name, first])
            text = tokens_of(other, name)[first].token.replace(" ", "␣")
            assert f"The other run has “{text}” here." in frame.inner_text("#explanation")
    for scheme in ("light", "dark"):
        shown.page.emulate_media(color_scheme=scheme)
        for frame, least in ((shown.page, 5), *((frame, 100) for frame in shown.frames)):
            count, poor = frame.evaluate(POOR_CONTRASTS)
            assert count >= least
            assert poor == []


def test_answers_to_different_prompts_are_not_compared(show):
    shown = show(record(["Lily was", "Anna"]), record(["Far away", "Lily was", "Lily was"]))
    shown.frames[0].locator(".drawn-token >> nth=3").click()  # of the prompt that both have
    until(shown, (3, "0", 5), 0)
    until(shown, (3, "1", 5), 1)
    shown.frames[0].locator(".drawn-token >> nth=13").click()  # of Anna, which the other run does not have
    shown.page.wait_for_timeout(200)
    assert selected(shown.frames[1])[1] != "0"


def test_an_empty_recorder_is_refused(batch, tmp_path):
    with pytest.raises(InvalidValueError, match="no step of generate"):
        batch.to_comparison(tmp_path / "page.html", Recorder())
    assert not (tmp_path / "page.html").exists()
