"""Write the header of every notebook's first cell: what it answers, minutes, prerequisites, picture, links, the Colab badge.

The author writes the title and the introduction. Everything below the line `<!-- header -->` is written here, from the table
`NOTEBOOKS`. Its order is that of the files' names: the course, then the deep dives (d1 to d11). `python notebooks/header.py`
rewrites the cells, and a test compares them. It also folds the cells that draw, and writes the tables of README.md, the map of
the notebooks, and links to files of the repository, as the repository's address says (tools/address.py).
"""

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))
from tools.address import REPOSITORY, colab_of, with_links  # noqa: E402

MARK = "\n\n<!-- header -->\n"
TABLES = "<!-- python notebooks/header.py -->"
FOLDED = {
    "cellView": "form",
    "jupyter": {"source_hidden": True},
    "tags": ["figure"],
}  # a figure's code, in Colab, Jupyter, the site


@dataclass(frozen=True)
class Header:
    """What is known of a notebook.

    Args:
        answers: the questions that a reader can answer afterwards, as a sentence that follows "You will be able to say".
        minutes: reading time, running included.
        sources: the files that it explains, from nanoinfer/ on, or from nanoinfer_lab/ on with this name before.
        parts: what it shows of the engine, by the names in notebooks/growing.py. Those are lit in the picture at its head.
        needs: the numbers of the notebooks to read first.
        former: the number that the file had in version 0.2, if another. The site leads from there to the file's page.
    """

    answers: str
    minutes: int
    sources: tuple[str, ...]
    parts: tuple[str, ...]
    needs: tuple[str, ...] = ()
    former: str = ""


NOTEBOOKS = {
    "00a_attention_primer": Header(
        "what a head, a query, a key and a value are, what softmax, residual, normalisation and MLP do, and what a logit is.",
        40,
        ("models/gpt2.py", "attention/dense.py"),
        ("model", "LM head"),
    ),
    "00b_an_engine_in_60_lines": Header(
        "what a KV cache, a packed batch, continuous batching and a sampler are for, and write each of them in a few lines.",
        45,
        ("engine/llm_engine.py", "scheduling/scheduler.py", "execution/forward_batch.py", "sampling/draw.py"),
        ("scheduler", "batch", "KV cache", "sampler"),
        ("00a",),
    ),
    "01_a_tokens_journey": Header(
        "which parts turn a prompt into the next token, why only the last row meets the head, and what a seed decides.",
        45,
        ("tokenization/tokenizer.py", "models/gpt2.py", "models/layers.py", "sampling/sampler.py"),
        ("tokenizer", "model", "LM head", "sampler", "text"),
        ("00a",),
    ),
    "02_attention_with_and_without_a_kv_cache": Header(
        "why keys and values are kept and queries are not, how many bytes a token of the cache takes, and why GQA helps.",
        40,
        ("attention/kv_cache.py", "attention/reference.py"),
        ("model", "KV cache"),
        ("01",),
    ),
    "03_pages": Header(
        "what internal and external fragmentation are, how a slot mapping is computed, and how blocks are shared and evicted.",
        45,
        ("scheduling/block_manager.py", "attention/kv_cache.py"),
        ("block tables", "KV cache"),
        ("02",),
    ),
    "04_prefill_and_decode": Header(
        "why a decode step of 4 sequences costs far less than 4 steps of 1, where that ends, and what a smaller dtype gains.",
        35,
        ("nanoinfer_lab/bench/roofline.py",),
        ("model", "weights"),
        ("02",),
    ),
    "05_scheduling": Header(
        "what TTFT, TPOT and ITL are, what chunked prefill does to them, what happens when blocks run out, and why it cannot "
        "loop for ever.",
        45,
        ("scheduling/scheduler.py", "scheduling/sequence.py"),
        ("scheduler", "batch"),
        ("03", "04"),
    ),
    "06_serving": Header(
        "what happens to a request in a server, how TTFT, TPOT and goodput change with the load, and why a server refuses "
        "requests.",
        50,
        ("server/async_llm.py", "server/app.py", "server/answers.py", "server/engine_thread.py"),
        ("server",),
        ("05",),
        former="15",
    ),
    "07_the_sampler_stage_by_stage": Header(
        "what a logit is, what each sampling parameter does, why the order of the stages matters, and why three ways of "
        "drawing sample the same distribution.",
        50,
        ("sampling/stages.py", "sampling/draw.py"),
        ("sampler",),
        ("01",),
        former="06",
    ),
    "08_stopping_and_streaming": Header(
        "which rules end a text, and the two reasons for which a stream holds characters back.",
        30,
        ("engine/stopping.py", "tokenization/detokenizer.py"),
        ("text", "stop rules"),
        ("01",),
    ),
    "09_structured_output": Header(
        "how a grammar becomes a mask, why EOS is masked, what a mask costs, and what it does to the probabilities.",
        45,
        ("sampling_params.py", "features/structured/grammar.py", "sampling/batch.py"),
        ("grammar", "sampler"),
        ("07", "08"),
        former="16",
    ),
    "10_speculative_decoding": Header(
        "what speculation costs and saves, why the tokens stay the same, and when it loses.",
        45,
        ("features/drafts/speculator.py", "features/drafts/ngram.py", "features/drafts/draft_model.py"),
        ("drafts", "scheduler"),
        ("02", "04", "07"),
        former="13",
    ),
    "11_many_devices": Header(
        "which matrices are cut along which side, where tensor parallelism communicates, and when replicas are better.",
        45,
        ("features/distributed/sharding.py", "features/distributed/runner.py", "features/distributed/communicator.py"),
        ("devices", "weights"),
        ("00a", "02", "04"),
        former="14",
    ),
    "d1_beam_search": Header(
        "why the likeliest text is not found token by token, how beams share blocks, and when not to use beam search.",
        40,
        ("features/beam_search/search.py",),
        ("beams", "block tables"),
        ("03", "07"),
        former="07",
    ),
    "d2_why_the_same_prompt_can_give_other_bits": Header(
        "why temperature 0 can give different texts in different batches, and what it costs to prevent that.",
        55,
        ("fast/cpu/linear.py", "fast/cpu/dense_linear.cpp", "fast/batch_independence.py"),
        ("kernels",),
        ("05", "07"),
        former="09",
    ),
    "d3_tied_and_untied_heads": Header(
        "what tying the head saves, and what a loader that ignores it breaks.",
        50,
        ("loading/weights.py", "models/gpt2.py"),
        ("LM head", "weights"),
        ("07",),
        former="10",
    ),
    "d4_fast_top_k_and_top_p": Header(
        "how a token is drawn from a large vocabulary without sorting it, and why the result equals the definition's exactly.",
        40,
        ("fast/sampling/few_logits.py", "sampling/stages.py", "fast/cpu/screen.py"),
        ("sampler",),
        ("07", "d2"),
        former="11",
    ),
    "d5a_write_your_own_model": Header(
        "what a model and an attention backend must provide, and how to test them.",
        40,
        ("models/registry.py", "attention/base.py"),
        ("model", "kernels"),
        ("02", "03"),
        former="12a",
    ),
    "d5b_write_your_own_stage": Header(
        "when to write a sampling stage and when a logits processor, and what each of them receives.",
        15,
        ("sampling/sampler.py", "sampling/stages.py"),
        ("sampler",),
        ("07",),
        former="12b",
    ),
    "d5c_write_your_own_scheduler": Header(
        "which decisions a scheduler and a cache make, how to replace each, and why no policy can change a text.",
        25,
        ("scheduling/scheduler.py", "scheduling/block_manager.py", "scheduling/policies.py"),
        ("scheduler", "block tables"),
        ("05",),
        former="12c",
    ),
    "d5d_write_your_own_drafter": Header(
        "what a drafter sees and must promise, why it can share what it has learned, and when a guess is worth its row.",
        25,
        (
            "features/drafts/speculator.py",
            "features/drafts/checked.py",
            "features/drafts/ngram.py",
            "nanoinfer_lab/testing/proposers.py",
        ),
        ("drafts",),
        ("10",),
        former="12d",
    ),
    "d6_a_compiler_for_transformer_layers": Header(
        "how a model file is recorded, fused and run as one list of kernel calls, and which bits stay the same.",
        45,
        ("fast/trace.py", "fast/fuse.py", "fast/cpu/compile.py", "fast/cpu/operations.py", "fast/cpu/program.cpp"),
        ("kernels",),
        ("04", "d2"),
        former="17",
    ),
    "d7_layers_that_keep_less": Header(
        "what a sliding window and a state keep, why a prefix cache goes wrong there, and what a rejected draft costs.",
        65,
        (
            "features/hybrid/block_manager.py",
            "features/hybrid/state_slots.py",
            "features/hybrid/cache.py",
            "features/hybrid/gated_delta.py",
        ),
        ("block tables", "KV cache"),
        ("03", "10"),
        former="18",
    ),
    "d8_reinforcement_learning_with_an_engine": Header(
        "what an advantage, a ratio and a clip are, why the ratio should be exactly 1 before a step, and what breaks it.",
        35,
        ("features/policy/policy.py", "features/policy/functions.py", "features/training/methods.py"),
        ("weights", "sampler", "kernels"),
        ("07", "d2"),
        former="19",
    ),
    "d9_inside_a_gpu_kernel": Header(
        "what a warp, a fragment, a bank and a barrier are, when a kernel has a race, and where a step's time goes.",
        65,
        ("attention/triton.py", "fast/cuda/decode_kernels.py"),
        ("kernels",),
        ("02", "04"),
        former="20",
    ),
    "d10_which_settings_which_machine": Header(
        "how a wish becomes a load and limits, what a simulator of an engine knows and does not, and how to find out how wrong "
        "it is.",
        35,
        ("nanoinfer_lab/simulate/costs.py", "nanoinfer_lab/simulate/simulator.py", "nanoinfer_lab/simulate/calibrate.py"),
        ("scheduler", "server"),
        ("04", "05", "06"),
    ),
    "d11_on_a_gpu": Header(
        "who launches the kernels of a step, what a graph keeps, and when a smaller cache helps more than smaller weights.",
        35,
        ("fast/cuda/graphs.py", "fast/cuda/steady.py", "fast/cuda/decode_kernels.py"),
        ("kernels", "weights", "KV cache"),
        ("03", "04"),
    ),
}

TRACK = {  # the course in three hours: what to read of a notebook, and how many minutes that takes. Tasks follow, see README.md
    "00a_attention_primer": ("sections 1 to 5 and 8", 25),
    "00b_an_engine_in_60_lines": ("all of it", 45),
    "03_pages": ('to the end of "The life of blocks"', 30),
    "05_scheduling": ('to the end of "Chunked prefill", and "When blocks run out"', 25),
    "07_the_sampler_stage_by_stage": ('to the end of "Why three of them?", and "The draw"', 25),
}


def number_of(stem: str) -> str:
    """The number of a notebook, "03" or "d5a"."""
    return stem.split("_")[0]


def title_of(stem: str) -> str:
    """The first line of the notebook without its mark, such as "03 · Where is a sequence's memory?"."""
    notebook = nbformat.read(FOLDER / f"{stem}.ipynb", as_version=4)
    return notebook.cells[0].source.splitlines()[0].removeprefix("# ")


def link_to(stem: str) -> str:
    return f"[{title_of(stem)}]({stem}.ipynb)"


def known_parts(stem: str) -> list[str]:
    """The parts of the engine that this notebook and those before it show, in the order of the course."""
    stems = list(NOTEBOOKS)
    return list(dict.fromkeys(part for one in stems[: stems.index(stem) + 1] for part in NOTEBOOKS[one].parts))


def alt_of(stem: str) -> str:
    """The picture at the head of a notebook in words."""
    return f"The parts of the engine. In this notebook: {', '.join(NOTEBOOKS[stem].parts)}."


def header_of(stem: str, repository: str | None = REPOSITORY) -> str:
    """The Markdown below the mark in the first cell of a notebook."""
    header, order, track = NOTEBOOKS[stem], list(NOTEBOOKS), TRACK.get(stem)
    before = [f"[{number_of(one)}]({one}.ipynb)" for one in order if number_of(one) in header.needs]
    sources = [f"[`{path}`](../{'' if path.startswith('nanoinfer') else 'nanoinfer/'}{path})" for path in header.sources]
    following = order[order.index(stem) + 1 :][:1]
    lines = [
        f"**You will be able to say** {header.answers}",
        f"**Time:** {header.minutes} minutes. **Needs:** {', '.join(before) or 'no other notebook'}, a CPU, no network."
        + (f" [**In three hours**](../notebooks/README.md): {track[0]}, {track[1]} minutes." if track else ""),
        f"![{alt_of(stem)}](pictures/{number_of(stem)}.svg)",
        f"**Sources:** {', '.join(sources)}. **Exercises:** [solutions](../notebooks/solutions/{stem}.py)."
        " **Terms:** [glossary](../docs/glossary.md). **All notebooks:** [map](../notebooks/README.md)."
        + "".join(f" **Next:** [{number_of(one)}]({one}.ipynb)." for one in following),
    ]
    if repository is not None:
        folder = repository.rsplit("/", 1)[1]
        install = f'`!git clone -q {repository} && pip install -q "./{folder}[notebooks]"`, then `%cd {folder}/notebooks`'
        lines.append(
            f"{badge_of(repository, f'{stem}.ipynb')} Colab opens this file alone. Run in a new cell first: {install}."
        )
    return with_links("\n\n".join(lines), repository)


def badge_of(repository: str, notebook: str) -> str:
    picture = "![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)"
    return f"[{picture}]({colab_of(repository, notebook)})"


def with_tables(text: str) -> str:
    """The text of README.md with the tables of the notebooks: question, minutes, what to read first, tasks to write then."""
    tasks = tomllib.loads((FOLDER.parent / "nanoinfer_course" / "learn" / "tasks.toml").read_text(encoding="utf-8"))
    lessons = {name: task["notebook"].partition("#")[0] for name, task in tasks.items() if "notebook" in task}

    def row(stem: str) -> str:
        names = ", ".join(f"`{name}`" for name, lesson in lessons.items() if lesson == stem.partition("_")[2])
        return f"| {link_to(stem)} | {NOTEBOOKS[stem].minutes} | {', '.join(NOTEBOOKS[stem].needs)} | {names} |"

    head = "| question | minutes | needs | tasks |\n|---|---|---|---|"
    course, dives = ([row(stem) for stem in NOTEBOOKS if stem.startswith("d") == is_dive] for is_dive in (False, True))
    lines = ["", "## The course", "", head, *course, "", "## Deep dives", "", head, *dives, "", "<!-- end -->"]
    start, _, rest = text.partition(TABLES)
    return start + "\n".join([TABLES, *lines]) + rest.partition(lines[-1])[2]


def with_header(stem: str, source: str) -> str:
    """The source of a first cell with its header replaced, or added."""
    return source.split(MARK)[0].rstrip() + MARK + header_of(stem)


def main() -> None:
    from growing import picture_of  # needs matplotlib, which the documentation site does not

    for stem in NOTEBOOKS:
        (FOLDER / "pictures" / f"{number_of(stem)}.svg").write_text(picture_of(stem), encoding="utf-8")
        path = FOLDER / f"{stem}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[0].source = with_header(stem, notebook.cells[0].source)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.metadata = FOLDED if re.search(r"\bshow\(", cell.source) else {}
            else:
                cell.source = with_links(cell.source)
        nbformat.write(notebook, path)
    page = FOLDER / "README.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
