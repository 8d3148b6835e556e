"""The interactive parts of the site: their data, formulas, markers in notebooks, and looks in a real browser."""

import ast
import re
from collections import Counter
from itertools import pairwise

import nbformat
import pytest
import torch

from nanoinfer import SamplingParams
from nanoinfer.attention.cache_sizes import bytes_per_block
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.contrast import POOR_CONTRASTS
from tests.helpers.scripts import ROOT, load

gallery, interactive, game = map(load, ("gallery", "interactive", "scheduler_game"))
MARKER = re.compile(r'<figure class="interactive" ([^>]+)>')
SOURCE = (ROOT / "docs" / "interactive.js").read_text(encoding="utf-8")


# ---- the scheduler game


@pytest.fixture(scope="module", autouse=True)
def two_traces():
    """Leave four traces out: every choice in all six takes ten seconds. In the second of these, requests are preempted."""
    first, _, preempting, *_ = game.make_traces()
    interactive.DATA["game"].cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(game, "make_traces", lambda: [first, preempting])
        yield
    interactive.DATA["game"].cache_clear()


@pytest.fixture(scope="module")
def data(two_traces):
    return interactive.DATA["game"]()


@pytest.mark.slow
def test_an_outcome_depends_on_the_choices_alone_and_every_request_ends_after_its_answer(data):
    num_preemptions = 0
    for trace, shown in zip(game.make_traces(), data["traces"], strict=True):
        for choice in (game.USUAL, game.CHOICES[-1]):
            assert game.play(trace, choice) == shown["outcomes"][shown["of"][game.CHOICES.index(choice)]]
        for outcome in shown["outcomes"]:
            good = 0
            for request, (first, pause, spans) in zip(shown["requests"], outcome["requests"], strict=True):
                arrival, _, _, first_ms, pause_ms, _ = request
                kinds = [kind for _, kind in spans]
                assert spans[0][0] == arrival
                assert kinds.count(game.ENDS) == 1
                assert (kinds[-2:], spans[-1][0] <= outcome["ms"]) == ([game.WRITES, game.ENDS], True)
                assert all(a < b for (a, _), (b, _) in pairwise(spans))
                good += first <= first_ms and pause <= pause_ms
            assert outcome["good"] == good
            assert outcome["goodput"] == pytest.approx(good / outcome["ms"] * 1000, abs=0.06)
            num_preemptions += outcome["preemptions"]
    assert num_preemptions > 0


# ---- the markers in notebooks


def markers():
    for path in sorted((ROOT / "notebooks").glob("[0-9d]*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for i, cell in enumerate(cells):
            if cell.cell_type == "markdown":
                for found in MARKER.finditer(cell.source):
                    yield path.stem, dict(re.findall(r'data-([\w]+)="([^"]*)"', found[1])), cell.source, cells[i + 1 :]


MARKERS = list(markers())


def text_of(cell):
    outputs = cell.get("outputs", [])
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)


def test_every_marker_can_be_brought_to_life():
    kinds = Counter(marker["kind"] for _, marker, _, _ in MARKERS)
    assert kinds == {"predict": kinds["predict"], "replay": 5, "calculator": 4, "sampler": 1}
    assert kinds["predict"] >= 6
    for stem, marker, source, after in MARKERS:
        for picture in re.findall(r'src="([^"]+)"', source):
            assert (ROOT / "notebooks" / picture).exists(), stem
        if marker["kind"] == "predict":
            found = next(match for match in (re.search(marker["find"], text_of(cell)) for cell in after) if match)
            truth = float(found[1].replace(",", ""))
            choices = [float(one) for one in marker.get("choices", "").split("|") if one]
            assert truth > 0, stem
            assert len(choices) in (0, 3)
        elif marker["kind"] == "replay":
            assert marker["run"] in gallery.SINGLE, stem
        elif marker["kind"] == "calculator":
            assert f"    {marker['formula']}: {{\n      fields:" in SOURCE, stem


@pytest.mark.slow
def test_a_replay_opens_where_the_demo_says_and_its_caption_says_what_the_page_shows():
    replays = [(marker, source) for _, marker, source, _ in MARKERS if marker["kind"] == "replay"]
    moments = {run: gallery.record_demo(gallery.RUNS[run])[1][0] for run in {marker["run"] for marker, _ in replays}}
    assert len(moments) == 4
    for marker, source in replays:
        moment = moments[marker["run"]]
        assert marker["at"] == f"step={moment.step}&token={moment.sequence_id}", marker["run"]
        assert moment.description in source, marker["run"]


# ---- in a browser


@pytest.fixture
def show(browser, tmp_path):
    pages = []

    def open_page(body, *, scheme="default", width=1280):
        path = tmp_path / "page.html"
        path.write_text(interactive.page_of(body, scheme=scheme), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        pages.append(page)
        page.goto(path.as_uri())
        return page

    errors = []
    yield open_page
    for page in pages:
        page.close()
    assert errors == []


def figure(kind, inside="", **attributes):
    named = "".join(f' data-{name}="{value}"' for name, value in attributes.items())
    return f'<figure class="interactive" data-kind="{kind}"{named}>{inside}</figure>'


def cell_with(name):
    """The functions of a name in the notebooks' cells, by the name."""
    for path in sorted((ROOT / "notebooks").glob("[0-9d]*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code" and f"def {name}(" in cell.source:
                functions = [node for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef)]
                scope = {}
                exec(compile(ast.Module(functions, []), path.name, "exec"), scope)
                return scope[name]
    raise AssertionError(name)


@pytest.mark.slow
def test_the_sliders_leave_the_tokens_that_the_engines_stages_leave(show):
    context = interactive.DATA["sampler"]()["contexts"][0]
    logits = torch.tensor(context["logits"])
    page = show("")
    sampled = "([logits, parameters]) => interactive.sample(logits, parameters)"
    for temperature, top_k, top_p, min_p in [
        (0.3, 0, 0.9, 0.0),
        (1.4, 20, 0.8, 0.02),
        (2.0, 0, 0.95, 0.1),
        (1.0, 3, 0.01, 1.0),
    ]:
        parameters = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        batch = SamplingBatch.build(
            [Sequence("r", [0], parameters, seed=0, max_num_tokens=9)], len(logits), torch.device("cpu")
        )
        row = logits.unsqueeze(0).clone()
        for stage in (stages.apply_temperature, stages.keep_min_p, stages.keep_top_k, stages.keep_top_p):
            row = stage(row, batch)
        asked = {"temperature": temperature, "topK": top_k, "topP": top_p, "minP": min_p}
        shown = torch.tensor(page.evaluate(sampled, [context["logits"], asked]), dtype=torch.float32)
        assert torch.equal(shown > 0, row[0].softmax(-1) > 0), asked
        assert torch.allclose(shown, row[0].softmax(-1), atol=1e-5)
    greedy = page.evaluate(sampled, [[1.0, 3.0, 3.0], {"temperature": 0, "topK": 0, "topP": 1, "minP": 0}])
    assert greedy == [0, 1, 0]


@pytest.mark.slow
def test_the_calculators_have_the_formulas_of_the_engine_and_the_notebooks(show):
    page = show("")
    compute = lambda name, *values: page.evaluate("([name, values]) => interactive.formulas[name](values)", [name, values])  # noqa: E731
    sizes = {"num_layers": 28, "num_kv_heads": 8, "head_dim": 128}
    per_token = bytes_per_block(block_size=1, dtype=torch.bfloat16, **sizes)
    assert compute("kv", *sizes.values(), 2, 4096) == {"perToken": per_token, "all": 4096 * per_token}
    bend = cell_with("batch_of_the_bend")
    for rate, bandwidth, num_bytes in ((989, 3350, 2), (0.2, 30, 4)):
        assert compute("bend", rate, bandwidth, num_bytes)["batch"] == pytest.approx(
            bend(rate * 1e12, bandwidth * 1e9, num_bytes)
        )
    speed = cell_with("speed")
    for a, c in ((0.6, 0.05), (0.6, 0.4), (0.0, 0.1), (1.0, 0.0)):
        shown = compute("speculation", a, c, 3)
        assert shown["speeds"] == pytest.approx([speed(a, c, k) for k in range(13)])
        assert (shown["speed"], shown["best"]) == (pytest.approx(speed(a, c, 3)), max(range(13), key=lambda k: speed(a, c, k)))
    empty = []
    for num_tokens in range(1, 65):
        manager = BlockManager(num_blocks=8, block_size=16)
        seq = Sequence("r", list(range(num_tokens)), SamplingParams(), seed=0, max_num_tokens=128)
        manager.allocate(seq, num_tokens)
        shown = compute("waste", 16, num_tokens, 128)
        empty.append(16 * len(seq.block_table) - num_tokens)
        assert (shown["empty"], shown["reserved"]) == (empty[-1], pytest.approx(1 - num_tokens / 128))
        assert shown["share"] == pytest.approx(empty[-1] / (16 * len(seq.block_table)))
    assert sum(empty) / len(empty) == compute("waste", 16, 1, 128)["mean"]


@pytest.mark.slow
def test_a_slider_moves_with_the_keyboard_and_says_what_it_did(show):
    page = show(figure("sampler") + figure("calculator", "<p>Why?</p>", formula="speculation"))
    assert page.locator("figure.alive").count() == 2
    assert page.get_by_text("Why?").is_visible()
    status = page.locator("p[role=status]").first
    assert status.inner_text().startswith("1,959 of 1,959 tokens left")
    page.get_by_label("top_k").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert status.inner_text().startswith("3 of 1,959 tokens left")
    assert page.locator(".name.out").count() == interactive.NUM_SHOWN - 3
    page.get_by_label("temperature").fill("0")
    assert status.inner_text() == "1 of 1,959 tokens left, entropy 0.00 bits."
    page.get_by_label("k, drafts").fill("0")
    assert page.locator("p[role=status]").nth(1).inner_text().startswith("1 times the speed of plain decoding with k = 0.")
    assert page.locator("input:not(label input), select:not(label select)").count() == 0


def cells(marker, output):
    return (
        f'<div><div class="jp-Cell">{marker}</div><div class="jp-Cell"><div class="jp-Cell-outputWrapper">nothing</div></div>'
        f'<div class="jp-Cell"><div class="jp-Cell-outputWrapper" id="output">{output}</div></div></div>'
    )


@pytest.mark.slow
def test_a_prediction_comes_before_its_measurement(show):
    marker = figure("predict", "<p>How many?</p>", find=r"takes ([\d.,]+) times", unit="times")
    page = show(cells(marker, "it takes 1,003.5 times"))
    assert not page.locator("#output").is_visible()
    assert page.get_by_text("nothing").is_visible()
    page.get_by_label("Your guess").fill("500")
    page.keyboard.press("Enter")
    assert page.locator("#output").is_visible()
    assert page.locator(".text").all_inner_texts() == ["500 times", "1,004 times"]
    assert page.locator("p[role=status]").inner_text() == "Off by a factor of 2. The output below has the measurement."
    page = show(cells(figure("predict", "<p>How many?</p>", find=r"takes ([\d.]+) ms", choices="1|4|9"), "takes 3.5 ms"))
    page.get_by_role("button", name="4").click()
    assert page.locator("p[role=status]").inner_text().startswith("Close.")
    page.reload()
    page.get_by_role("button", name="Just show it").click()
    assert page.locator("#output").is_visible()
    page = show(cells(marker, "it takes 2 times").removesuffix("</div>") + '<div class="celltag_figure">bars</div></div>')
    assert not page.get_by_text("bars").is_visible()
    page.get_by_label("Your guess").fill("0")
    page.keyboard.press("Enter")
    assert page.locator("p[role=status]").inner_text().startswith("Off by 2 times. ")
    assert page.get_by_text("bars").is_visible()
    page = show(cells(marker, "no number"))  # a question without a measurement stays a question
    assert page.locator("form").count() == 0
    assert page.locator("#output").is_visible()


@pytest.mark.slow
def test_a_replay_is_a_page_of_the_gallery(browser, tmp_path):
    for folder in ("docs", "gallery", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "interactive.js").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "gallery" / "sharing.html").write_text("<p>the replay", encoding="utf-8")
    inside = '<img src="picture.png" alt="two sequences"><figcaption>words</figcaption>'
    body = figure("replay", inside, run="sharing", at="step=1") + '<script src="../docs/interactive.js"></script>'
    (tmp_path / "notebooks" / "page.html").write_text(body, encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "notebooks" / "page.html").as_uri())
    assert page.locator("iframe").get_attribute("title") == "two sequences"
    assert page.locator("iframe").get_attribute("src") == (tmp_path / "gallery" / "sharing.html").as_uri() + "#step=1"
    assert page.frame_locator("iframe").get_by_text("the replay").is_visible()
    assert page.locator("img").count() == 0
    page.close()


@pytest.mark.slow
def test_the_game_shows_the_outcome_of_the_choices(show, data):
    page = show(figure("game"))
    for number, trace in enumerate(data["traces"]):
        page.get_by_label("Trace").select_option(str(number))
        page.get_by_role("button", name="Run").click()
        if number == 0:
            usual = trace["outcomes"][trace["of"][game.CHOICES.index(game.USUAL)]]
            assert page.locator("p[role=status]").inner_text().startswith(f"{usual['goodput']:.2f} good requests per second")
        scores = page.locator("li").all_inner_texts()
        assert [score.endswith("not played") for score in scores] == [i > number for i in range(len(scores))]
        page.get_by_role("button", name="Show the best").click()
        best = max(outcome["goodput"] for outcome in trace["outcomes"])
        status = page.locator("p[role=status]").inner_text()
        assert status.startswith(f"{best:.2f} good requests per second")
        chosen = tuple(values[int(page.get_by_label(label).input_value())] for label, values in game.QUESTIONS.items())
        outcome = trace["outcomes"][trace["of"][game.CHOICES.index(chosen)]]
        assert outcome["goodput"] == best
        assert page.locator("svg rect").count() == sum(len(spans) - 1 for _, _, spans in outcome["requests"])
        num_bad = page.locator("svg text.bad").count()
        assert num_bad == len(trace["requests"]) - outcome["good"]
        page.get_by_text("Every request").click()
        assert page.locator("tbody tr").count() == len(trace["requests"])
        assert page.locator("li").all_inner_texts() == scores  # what was only shown is not played
    page.get_by_role("button", name="Run").click()
    assert page.locator("li").last.inner_text() == f"{data['traces'][-1]['name']}: 100% of the best"


@pytest.mark.slow
def test_the_tasks_are_a_list_in_which_the_passed_ones_are_marked_and_a_text_each(show):
    page, tasks = show(figure("tasks")), interactive.DATA["tasks"]()["tasks"]
    page.evaluate(f"localStorage['nanoinfer passed {tasks[0]['name']}'] = 'yes'")
    page.reload()
    page.locator(".tasks button").last.wait_for()
    listed = page.locator(".tasks button").all_inner_texts()
    assert [text.startswith("✓ ") for text in listed] == [True] + [False] * (len(tasks) - 1)
    assert page.locator("p[role=status]").inner_text() == f"1 of {len(tasks)} passed."
    assert page.locator("h2").inner_text().startswith(tasks[1]["name"])  # the first that has not passed
    page.locator(".tasks button", has_text="held_text").click()
    text = page.locator("figure").inner_text()
    assert "self is the text of one answer so far" in text
    assert "nanoinfer learn" not in text
    assert page.locator("figure li", has_text="With several stop strings").count() == 1
    page.evaluate("localStorage.clear()")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["slate", pytest.param("default", marks=pytest.mark.long)])
def test_every_part_fits_and_can_be_read(show, scheme):
    parts = [figure("calculator", formula=name) for name in ("kv", "bend", "waste", "speculation")]
    parts += [figure(kind) for kind in ("sampler", "game", "tasks")]
    parts += [cells(figure("predict", find=r"([\d.]+)", choices="1|2|3"), "2")]
    page = show("".join(parts), scheme=scheme)
    page.get_by_label("top_k").fill("3")
    page.get_by_role("button", name="Run").first.click()
    page.get_by_text("Every request").click()
    page.get_by_text("Write the order yourself").click()
    page.evaluate("document.querySelectorAll('.jp-Cell + .jp-Cell').forEach(cell => cell.remove())")  # has no style here
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        count, poor = page.evaluate(POOR_CONTRASTS)
        assert count > 100
        assert poor == []
    page.evaluate("document.querySelector('figcaption').style.color = 'gray'")
    assert len(page.evaluate(POOR_CONTRASTS)[1]) == 1  # the comparison can fail
