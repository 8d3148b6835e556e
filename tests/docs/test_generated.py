"""What scripts write into pages is what they would write today. `python docs/NAME.py` renews a page."""

import copy
import importlib
import json
import re

import nbformat
import pytest

import nanoinfer
from benchmarks import results
from nanoinfer_course.learn import track
from tests.helpers.scripts import ROOT, load
from tools import address

checkpoints, leaderboard, parameters, scaling = map(load, ("checkpoints", "leaderboard", "parameters", "scaling"))
one_file, structure, header, stated = map(load, ("one_file", "structure", "header", "stated"))
STEMS = sorted(path.stem for path in ROOT.glob("notebooks/[0-9d]*.ipynb"))
PUBLIC = "https://github.com/owner/name"
# page and command: what the command makes of the page's text
GENERATED = {
    "docs/checkpoints.md docs/checkpoints.py": lambda text: checkpoints.with_table(text, checkpoints.read(checkpoints.LINES)),
    "docs/supported.md docs/parameters.py": lambda text: parameters.with_table(text),
    "docs/scaling.md docs/scaling.py": lambda text: scaling.with_figures(text),
    "docs/structure.md docs/structure.py": lambda text: structure.page(),
    "notebooks/README.md notebooks/header.py": lambda text: header.with_tables(text),
    **{f"{page} -m benchmarks.results": results.with_tables for page in results.PAGES},
    **{f"{page} -m tools.address": address.with_blocks for page in address.FILES},
}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", GENERATED)
def test_a_page_is_what_its_script_writes(page):
    name, _, command = page.partition(" ")
    text = read(name)
    assert GENERATED[page](text) == text, f"run: python {command}"


def test_a_figure_that_was_changed_is_written_anew():
    text = read("docs/scaling.md")
    assert scaling.with_figures(scaling.MARKED.sub("stale\n", text)) == text
    for name in results.PAGES:
        text = read(name)
        assert (
            len(results.BLOCK.findall(text)) == len(re.findall(r"python -m benchmarks\.results: ", text)) > 0
        )  # each has its end
        block = results.BLOCK.search(text)
        at = block.end(1) + re.search(r"\d", block[0][len(block[1]) :]).start() - block.start(1) + block.start()
        changed = f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"
        assert results.with_tables(changed) == text != changed


# ---- the address of the repository


@pytest.mark.parametrize("name", address.FILES)
def test_a_file_gets_an_address_and_loses_it_again(name):
    text = address.with_blocks(read(name), None)
    public = address.with_blocks(text, PUBLIC)
    assert "/owner" in public or "owner.github.io" in public
    assert address.with_blocks(public, None) == text != public
    assert len(address.BLOCK.findall(text)) == len(re.findall(r"python -m tools\.address: ", text)) > 0  # each mark has its end
    assert not re.search(r"badge-colab|uvx --torch|git clone|github\.com/(?!owner)\w+/nanoinfer", text)


def test_a_link_of_a_notebook_to_a_file_becomes_public_and_others_stay():
    text = "[a](../docs/faq.md#questions), [b](03_pages.ipynb), [c](../nowhere.md), [d](https://x.org/y/z/blob/main/nowhere.md)"
    public = text.replace("../docs/faq.md", f"{PUBLIC}/blob/main/docs/faq.md")
    assert address.with_links(text, PUBLIC) == public
    assert address.with_links(public.replace("owner", "another"), PUBLIC) == public
    assert address.with_links(public, None) == text


# ---- notebooks


@pytest.mark.parametrize("stem", STEMS)
def test_a_notebook_has_the_header_and_links_that_are_written_and_the_numbers_that_it_states(stem):
    cells = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells
    for cell in cells:
        if cell.cell_type == "markdown":
            assert address.with_links(cell.source) == cell.source, "run: python notebooks/header.py"
    assert cells[0].source == header.with_header(stem, cells[0].source), "run: python notebooks/header.py"
    files = [ROOT / "notebooks" / target for target in re.findall(r"\]\(([^)]+)\)", header.header_of(stem, None))]
    assert len(files) >= 5
    assert [file for file in files if not file.exists()] == []
    assert f"git clone -q {PUBLIC} && pip" in header.header_of(stem, PUBLIC)
    for cell in cells:
        if cell.cell_type == "code":  # a figure is shown with a caption and alternative text, and its code is folded
            assert cell.metadata == (header.FOLDED if re.search(r"\bshow\(", cell.source) else {}), cell.source
            assert "plt.show" not in cell.source
    assert stated.missing_in(nbformat.v4.new_notebook(cells=cells)) == []  # every number in prose is in an output or in code


def test_a_number_that_no_cell_has_is_found():
    def notebook(prose, code="x = 1959  # 0.26", output="12.50 ms"):
        made = nbformat.v4.new_code_cell(code, outputs=[nbformat.v4.new_output("stream", name="stdout", text=output)])
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(prose), made])

    right = "There are 1,959 tokens, 26% of them long, in 12.5 ms, two or 3 at a time (Su et al. 2021), as notebook d5a says."
    assert stated.missing_in(notebook(right)) == []
    wrong = (
        "There are 1,960 tokens, 27% of them, in 12.6 ms. Twenty of `400` are a hundred, which is 8 times, or nine times, .65."
    )
    assert stated.missing_in(notebook(wrong)) == ["1,960", "27%", "12.6", "8 times", ".65", "Twenty", "hundred", "nine times"]
    assert stated.missing_in(notebook("Fine.\n\n## Exercises\n\n1. Try 500.")) == []


def test_the_courses_order_map_and_pictures_have_every_notebook():
    growing = load("growing")
    assert list(header.NOTEBOOKS) == sorted(STEMS, key=lambda stem: (stem[0], int(re.search(r"\d+", stem)[0]), stem))
    numbers = [header.number_of(stem) for stem in header.NOTEBOOKS]
    assert all(set(entry.needs) <= set(numbers[:at]) for at, entry in enumerate(header.NOTEBOOKS.values()))
    assert sorted(re.findall(r"\]\((\S+)\.ipynb\)", read("notebooks/README.md"))) == STEMS
    written = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "notebooks" / "pictures").glob("*.svg")}
    assert written == {header.number_of(stem): growing.picture_of(stem) for stem in STEMS}, "run: python notebooks/header.py"
    assert set(header.known_parts(list(header.NOTEBOOKS)[-1])) == set(growing.PLACES)  # in the end the picture is whole
    tasks = read("notebooks/README.md").split("eight functions of the engine with `nanoinfer learn`:")[1].split(".")[0]
    assert len(set(re.findall(r"`(\w+)`", tasks)) & set(track.NAMES)) == tasks.count("`") / 2 == 8


# ---- the engine in one file


@pytest.mark.parametrize("page", one_file.PAGES)
def test_a_page_has_the_lines_of_the_one_file_and_its_size(page):
    text, sentence = read(page), one_file.pattern(one_file.PAGES[page])
    assert sentence.sub("", one_file.written(page)) == sentence.sub("", text), "run: python docs/one_file.py"
    said, today = (re.findall(r"\d[\d,]+", sentence.search(one)[0]) for one in (text, one_file.written(page)))
    assert [int(number.replace(",", "")) for number in said] == pytest.approx(
        [int(number.replace(",", "")) for number in today], rel=0.05
    )


def test_every_part_of_the_one_file_has_its_row_and_its_chapter():
    numbers = [part.number for part in one_file.parts()]
    assert [int(number) for number, *_ in one_file.ROW.findall(read("one_file/README.md"))] == numbers
    page, lines = one_file.chapters(), read(one_file.FILE).splitlines()
    assert re.findall(r"{ #part-(\d+) }", page) == [str(number) for number in (0, *numbers)]
    code = "\n".join(re.findall(r"^```python linenums=\"\d+\"\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    assert [line for line in code.splitlines() if line] == [line for line in lines if line and not line.startswith("# ---- ")]
    for first, code in re.findall(r'^```python linenums="(\d+)"\n(.*?)\n', page, re.MULTILINE):
        assert lines[int(first) - 1] == code
    part = one_file.parts()[3]
    assert one_file.anchor(f"#L{part.first}-L{part.last}") == "#part-4"
    assert one_file.anchor(None) == one_file.anchor("#L1") == ""


# ---- the other pages


def test_the_api_reference_has_every_public_name_and_the_tables_of_arguments():
    parts = parameters.reference()
    names = [part.removeprefix("::: ").rsplit(".", 1) for part in parts if part.startswith("::: nanoinfer.")]
    assert [name for _, name in names] == nanoinfer.__all__[1:]
    assert [name for module, name in names if not hasattr(importlib.import_module(module), name)] == []
    assert parts[parts.index("::: nanoinfer.sampling_params.SamplingParams") + 1] == parameters.table(nanoinfer.SamplingParams)


def test_a_run_replaces_the_lines_of_the_same_form_and_machine_and_keeps_the_others(monkeypatch, tmp_path):
    line = {"model": "A", "form": "folder", "revision": "1", "date": "2026-01-01", "machine": "X", "equal": "4 of 4"}
    line["perplexity"] = {"float32": 2.0, "int4": 2.126}
    run, lines, page = tmp_path / "run.jsonl", tmp_path / "lines.jsonl", tmp_path / "page.md"
    lines.write_text("".join(json.dumps(line | change) + "\n" for change in ({}, {"machine": "Y"})))
    run.write_text(json.dumps(line | {"revision": "2"}) + "\n")
    page.write_text("before\n<!-- python docs/checkpoints.py -->\nolder\n<!-- end -->\nafter\n")
    monkeypatch.setattr(checkpoints, "LINES", lines)
    monkeypatch.setattr(checkpoints, "PAGE", page)
    checkpoints.main(str(run))
    row = "| form | tokens equal | perplexity |\n|---|---|---|\n| folder | 4 of 4 | float32 2.00, int4 2.13 |"
    tables = "\n\n".join(f"{caption}:\n\n{row}" for caption in ("A, 2, 2026-01-01, X", "A, 1, 2026-01-01, Y"))
    assert page.read_text() == f"before\n<!-- python docs/checkpoints.py -->\n{tables}\n<!-- end -->\nafter\n"


def test_the_leaderboard_is_up_to_date_and_a_line_that_cannot_be_right_is_refused(monkeypatch, tmp_path):
    before = leaderboard.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(leaderboard, "PAGE", tmp_path / "page.md")
    leaderboard.main()
    assert leaderboard.PAGE.read_text(encoding="utf-8") == before, "run: python docs/leaderboard.py"
    entries = [json.loads(line) for line in leaderboard.LINES.read_text(encoding="utf-8").splitlines()]
    ladder, game = (next(entry for entry in entries if entry["kind"] == kind) for kind in ("ladder", "game"))
    assert leaderboard.faults_of_ladder(ladder) == leaderboard.faults_of_game(game) == []
    changes = [
        lambda rungs: rungs.pop(),
        lambda rungs: rungs[7].__setitem__(1, 400.0),
        lambda rungs: rungs[0].__setitem__(2, 0),
    ]
    for change in changes:
        changed = copy.deepcopy(ladder)
        change(changed["rungs"])
        assert len(leaderboard.faults_of_ladder(changed)) == 1
    assert leaderboard.faults_of_game({**game, "goodput": 99.0}) == [f"the goodput is {game['goodput']}, not 99.0"]
    assert "no such trace or choice" in leaderboard.faults_of_game({**game, "trace": "Underload"})[0]


def test_the_formulas_of_scaling_give_the_model_cards_sizes_and_what_one_computes_by_hand():
    cards = {"0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2, "14B": 14.8, "32B": 32.8}  # billion parameters
    assert {name: round(scaling.costs_of(name, 1).sizes.num_weights / 1e9, 1) for name in scaling.MODELS} == cards
    sizes = scaling.costs_of("8B", 1).sizes  # 36 layers, 8 KV heads of 128, hidden 4096
    assert sizes.cache.bytes_per_token(scaling.DTYPE) == 36 * 8 * 128 * 2 * 2 == 147_456
    num_read = (sizes.num_weights - 151_936 * 4096) * 2 + 4096 * 147_456  # one row of the embedding is read
    assert scaling.step_s("8B", 1, num_seqs=1, num_new=1) == pytest.approx(num_read / 4.8e12, rel=1e-3)
    waiting_s = 36 * 2 * (10e-6 + 1.75 * 4096 * 2 / 450e9)
    assert scaling.step_s("8B", 8, num_seqs=1, num_new=1) == pytest.approx(num_read / 4.8e12 / 8 + waiting_s, rel=1e-3)
    sizes = scaling.costs_of("32B", 1).sizes
    left = 141e9 * 0.9 - sizes.num_weights * 2
    assert scaling.num_users(sizes, 1, 4096) == int(left / (4096 * 64 * 8 * 128 * 2 * 2))


# ---- benchmarks/results.jsonl


def line(**changed):
    fields = {"machine": "M", "date": "2026-01-01", "commit": None, "release": results.RELEASE, "model": "GPT-2", "runs": 5}
    fields |= {"dtype": "float32", "workload": "A", "baseline": "vLLM 0.32", "unit": "tokens/s"}
    return results.Speed(**(fields | {"nanoinfer": (20, 19, 21), "other": (10, 9, 11)} | changed))


def test_every_line_of_the_results_is_written_once_and_losing_rows_are_shown():
    lines = results.LINES.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == len(results.read())
    speeds = [one for one in results.read() if isinstance(one, results.Speed)]
    ranges = [measured for one in speeds for measured in (one.nanoinfer, one.other) if measured[1:] != (None, None)]
    assert [one for one in ranges if not one[1] <= one[0] <= one[2]] == []
    ratios = [float(row.split("|")[6].strip(" *")) for row in results.current().splitlines()[2:]]
    assert min(ratios) < 0.9 < 1 < max(ratios)


def test_a_ratio_is_bold_only_if_five_runs_of_each_engine_do_not_overlap():
    assert line().show_ratio() == "**2.00**"
    assert line(unit="ms").show_ratio() == "**0.50**"
    for changed in ({"runs": 4}, {"other": (10, 9, 19)}, {"nanoinfer": (20, None, None)}):
        assert line(**changed).show_ratio() == "2.00"
    assert line(baseline="OpenVINO GenAI 2026.4.1.0-3408-ab01d1771e4").key[-1] == "OpenVINO GenAI"  # in each version
    assert line(baseline="vLLM 0.32.0+cpu").key[-1] == "vLLM"


def test_a_row_that_was_measured_again_moves_to_the_history(monkeypatch):
    old, new = line(), line(date="2026-01-02", baseline="vLLM 0.33")
    monkeypatch.setattr(results, "read", lambda: [old, new])
    assert ("0.33" in results.current(), "0.32" in results.current()) == (True, False)
    assert "vLLM 0.32 | 2026-01-01" in results.history()
    assert "vLLM 0.33" not in results.history()
    assert results.history("the SAMPLER").startswith("## The sampler\n\nZen 5, 2026-11-21, on a busy machine")
