"""Make the gallery of the documentation site: four recorded runs as pages, and a page that says what to look at in each.

`python docs/gallery.py FOLDER` writes them. The runs are those of `nanoinfer explain --demo`, or two runs side by side. Seeds
are fixed, so the pages differ only in times.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer import LLM, Recorder
from nanoinfer.sampling_params import SamplingParams
from nanoinfer_lab.cli.demos import DEMOS, STORY, Demo, Moment


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same prompts, which differ in engine arguments."""

    words: str
    prompts: list[str]
    names: tuple[str, str]
    engines: tuple[dict[str, Any], dict[str, Any]]


COMPARISONS = {
    "batch": Comparison(
        "The same four prompts in one batch and one at a time. The tokens are equal, because a seed belongs to its request. "
        "The batch needs a quarter of the steps, and every step reads the weights once for all of its sequences.",
        ["Once upon a time", "Lily was", "Far away, in a", "Anna had a"],
        ("in a batch", "one at a time"),
        ({}, {"max_num_seqs": 1}),
    ),
    "chunking": Comparison(
        "A long prompt beside a short one, with and without chunked prefill. The tokens are equal. Without chunks one step "
        "computes the whole long prompt, and the short one waits for it. With chunks no step is long.",
        ["Lily was", f"{STORY} {STORY} {STORY}"],
        ("with chunks of 16", "without chunks"),
        ({"chunk_size": 16, "max_num_batched_tokens": 16}, {}),
    ),
}
STAGES = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 5}
RUNS = DEMOS | {
    "sampling": Demo(
        prompts=["Once upon a time, there was a kind fox named"],
        engine={"block_size": 8},
        params=SamplingParams(max_tokens=24, ignore_eos=True, **STAGES),
        find=lambda recorder: [
            Moment(0, "0", "The prompt is computed, and the first token drawn from names that are all likely.")
        ],
    )
}
SINGLE = {
    "sampling": "One story. Below the text are the stages that each token went through, and the random number that drew it.",
    "sharing": "Two prompts begin alike. The second finds blocks of the first in the prefix cache, and computes the rest.",
    "preemption": "Three sequences need more blocks than there are. The youngest is preempted, waits and is recomputed.",
    "drafts": "Speculative decoding: a smaller model guesses five tokens ahead, and one step checks all of them.",
}


def record(prompts: list[str], params: Any, **engine: Any) -> Recorder:
    recorder = Recorder(stages=True)
    llm = LLM(tracer=recorder, dtype="float32", **engine)
    llm.generate(prompts, params, use_tqdm=False)
    return recorder


def record_demo(demo: Demo) -> tuple[Recorder, list[Moment]]:
    recorder = record(demo.prompts, demo.params, kv_cache_memory=demo.kv_cache_memory, **demo.engine)
    return recorder, demo.find(recorder)


def record_pair(comparison: Comparison) -> tuple[Recorder, Recorder]:
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=24, ignore_eos=True) for i in range(len(comparison.prompts))]
    first, second = (
        record(comparison.prompts, params, block_size=8, kv_cache_memory=2**20, **engine) for engine in comparison.engines
    )
    return first, second


def write(folder: Path) -> str:
    """Write a page for each run into the folder. Returns the Markdown of the page that links to them."""
    folder.mkdir(parents=True, exist_ok=True)

    def picture(name: str) -> str:
        return f"[![The replay page of this run](../docs/pictures/gallery-{name}.png)]({name}.html)"

    parts = [
        "# Gallery",
        "Recorded runs of the bundled model. Each opens in the browser and replays every step. `nanoinfer explain` records "
        "your own, and `Recorder.to_comparison` puts two side by side.",
    ]
    for name, words in SINGLE.items():
        recorder, moments = record_demo(RUNS[name])
        recorder.to_html(folder / f"{name}.html")
        links = [f"- [Step {step}]({name}.html#step={step}&token={sequence}): {what}" for step, sequence, what in moments]
        parts += [f"## [{name.capitalize()}]({name}.html)", picture(name), words, "\n".join(links)]
    for name, comparison in COMPARISONS.items():
        first, second = record_pair(comparison)
        first.to_comparison(folder / f"{name}.html", second, names=comparison.names)
        parts += [f"## [{name.capitalize()}, compared]({name}.html)", picture(name), comparison.words]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "index.md").write_text(write(target), encoding="utf-8")
