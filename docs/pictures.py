"""Draw the pictures of README, the gallery and the lecturer's page: screenshots of replay pages, one diagram for each lesson.

`python docs/pictures.py` writes them to docs/pictures/. The screenshots need Playwright and Chromium. The diagrams have the
style of the notebooks.
"""

import io
import re
import shutil
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from PIL import Image

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import StepTimed

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
import gallery
import interactive
from drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, arrow, box, canvas, label, row, svg

FOLDER = Path(__file__).with_name("pictures")
SCALE = 0.45  # inches per unit: small, so that the text is large on a slide
ALTS = re.findall(
    r"!\[(.*)\]\(pictures/(lesson-\d)\.svg\)", Path(__file__).with_name("teaching.md").read_text(encoding="utf-8")
)
VIEWPORT = {"width": 1280, "height": 1000}  # of the replay page, drawn 820 pixels wide
# The steps of the animation, and the sequence whose token is shown: at 29 sequence 2 is preempted, at 40 it comes back.
REPLAYED = [(0, 0), (2, 0), (4, 0), (6, 0), (9, 0), (14, 0), (20, 0), (28, 0), (29, 0), (34, 1), (40, 2), (45, 2)]
NUM_COLOURS = 200
PROMPTS = ["Once upon a time, there was a kind duck", "Lily was", "Once upon a time, there was a kind duck named Max"]


def screenshots() -> None:
    """The replay page in both colour schemes, step after step, and the gallery's pages, small."""
    from playwright.sync_api import sync_playwright

    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)
    recorders = []
    for _ in range(20):  # other programs make a run slower, and none makes it faster: the fastest one is shown
        recorders.append(Recorder(stages=True))
        llm = LLM(tracer=recorders[-1], block_size=8, dtype="float32", kv_cache_memory=2**18)
        llm.generate(PROMPTS, params, use_tqdm=False)
    recorder = min(recorders, key=time_in_steps)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_path = Path(folder) / "replay.html"
        recorder.to_html(page_path)
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = chromium.new_page(viewport=VIEWPORT, color_scheme=scheme, device_scale_factor=820 / VIEWPORT["width"])
            frames = []
            for step, sequence in REPLAYED:
                page.goto(f"{page_path.as_uri()}#step={step}&token={sequence}")
                if not frames:
                    page.get_by_text("The packed batch").click()  # closes the table
                frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
            animate(frames, FOLDER / f"replay-{scheme}.gif")
        text = gallery.write(Path(folder))
        page = chromium.new_page(viewport={"width": 1100, "height": 640}, device_scale_factor=0.75)
        for name in (*gallery.SINGLE, *gallery.COMPARISONS):
            moment = re.search(rf"{name}\.html(#[^)]+)", text)  # the first one of a single run
            page.goto((Path(folder) / f"{name}.html").as_uri() + (moment[1] if moment else ""))
            page.screenshot(path=FOLDER / f"gallery-{name}.png")
        draw_interactive(chromium, Path(folder))
        chromium.close()


def time_in_steps(recorder: Recorder) -> float:
    """The seconds that the page shows: of all steps, without what the recording of the sampler's stages takes."""
    return sum(time.schedule + time.build + time.forward + time.sample + time.advance for time in recorder.of(StepTimed))


def draw_interactive(chromium: Any, folder: Path) -> None:
    """The interactive parts of the site, for readers without scripts."""
    path = folder / "interactive.html"
    page = chromium.new_page(viewport={"width": 860, "height": 600})
    for kind in ("sampler", "game"):
        path.write_text(interactive.page_of(f'<figure class="interactive" data-kind="{kind}"></figure>'), encoding="utf-8")
        page.goto(path.as_uri())
        if kind == "sampler":
            for label, value in {"temperature": 1.4, "top_k": 20, "top_p": 0.8}.items():
                page.get_by_label(label).fill(str(value))
        else:
            page.get_by_role("button", name="Run").click()
        page.locator("figure").screenshot(path=FOLDER / f"{kind}.png")


def animate(frames: list[Image.Image], path: Path) -> None:
    """Write a GIF that repeats. All frames have the colours of the last one, so that only what changes is stored."""
    colours = frames[-1].quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    first, *others = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    first.save(path, save_all=True, append_images=others, duration=900, loop=0, optimize=True)


def save(name: str, caption: str) -> None:
    """With the alternative text of the page that shows it."""
    alt = next(alt for alt, picture in ALTS if picture == name)
    (FOLDER / f"{name}.svg").write_text(svg(plt.gcf(), caption, alt), encoding="utf-8")
    plt.close()


def draw_engine() -> None:
    """Lesson 1: one step of the loop."""
    ax = canvas(20, 6.4, scale=SCALE)
    names = ["tokenizer", "scheduler", "batch", "model", "sampler", "detokenizer"]
    fills = [GREY, ORANGE, ORANGE, BLUE, GREEN, GREY]
    results = [
        "token ids",
        "which sequences,\nwhich blocks",
        "packed ids,\nslots",
        "logits",
        "one token id\nper sequence",
        "text",
    ]
    boxes = [
        box(ax, 0.3 + 3.3 * i, 3, name, width=2.4, height=1.2, fill=fill)
        for i, (name, fill) in enumerate(zip(names, fills, strict=True))
    ]
    for left, right in pairwise(boxes):
        arrow(ax, left.right, right.left)
    for one, words in zip(boxes, results, strict=True):
        label(ax, one.top[0] + (0.9 if words == "logits" else 0), 2.2, words)  # beside the arrow to the cache
    arrow(ax, boxes[4].top, boxes[1].top, bend=0.25)
    label(ax, 10, 5.9, "the token joins its sequence: the next step")
    cache = box(ax, 9.9, 0.2, "KV cache", width=3, height=1, fill=PURPLE)
    arrow(ax, boxes[3].bottom, cache.top)
    arrow(ax, cache.top, boxes[3].bottom)
    save("lesson-1", "One step of the engine. Everything between tokenizer and detokenizer happens once per step.")


def draw_pages() -> None:
    """Lesson 2: two sequences share a prefix in a pool of blocks, and steps mix prefill and decode."""
    ax = canvas(21, 7.4, scale=SCALE)
    label(ax, 1.6, 6.9, "block tables")
    label(ax, 8.4, 6.9, "pool of blocks")
    texts = [["Once", "upon", "a", "time"], ["there", "was", "a", "kind"], ["duck", "", "", ""], ["fox", "named", "Leo", ""]]
    fills = [[GREEN] * 4, [GREEN] * 4, [BLUE, (BLUE, 0.08), (BLUE, 0.08), (BLUE, 0.08)], [ORANGE] * 3 + [(ORANGE, 0.08)]]
    blocks = [
        row(ax, 6.2, 5.2 - 1.5 * i, words, width=1.2, fill=fill)
        for i, (words, fill) in enumerate(zip(texts, fills, strict=True))
    ]
    for number, first in enumerate(blocks):
        label(ax, 11.3, first[0].y + 0.5, str(number))
    for name, table, y, fill in [("A", (0, 1, 2), 5.2, BLUE), ("B", (0, 1, 3), 2.4, ORANGE)]:
        label(ax, 0.5, y - 0.2, name)
        for i, block in enumerate(table):
            entry = box(ax, 1.2, y - 0.8 * i, str(block), width=0.8, height=0.8, fill=GREEN if block < 2 else fill)
            arrow(ax, entry.right, blocks[block][0].left, colour=GREEN if block < 2 else fill)
    label(ax, 8.6, 0.2, "green: shared by both (prefix cache)")
    label(ax, 16.6, 6.9, "tokens computed in each step")
    plan = [("A", 0, [4, 4, 1], 3), ("B", 2, [3], 3), ("C", 4, [4, 3], 0)]  # first step, prompt tokens, steps of decode
    for i, (name, first_step, chunks, num_decodes) in enumerate(plan):
        y = 5.2 - 1.4 * i
        label(ax, 13.2, y + 0.5, name)
        row(ax, 13.6, y, [""] * first_step, fill="none")
        row(ax, 13.6 + first_step, y, [str(num) for num in chunks], fill=RED)
        row(ax, 13.6 + first_step + len(chunks), y, ["1"] * num_decodes, fill=GREY)
    label(ax, 16.6, 1.6, "red: prefill, in chunks of 4\ngrey: decode, one token")
    save(
        "lesson-2",
        "A computes its prompt of 9 tokens in chunks. B has 11, finds 8 of them in the blocks 0 and 1, and computes only 3.",
    )


def normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def draw_sampling() -> None:
    """Lesson 3: probabilities after each stage, and the draw."""
    ax = canvas(20, 6.6, scale=SCALE)
    shares = [0.4, 0.3, 0.15, 0.1, 0.05]
    stages = {"model": shares}
    stages["temperature = 0.7"] = shares = normalised([share ** (1 / 0.7) for share in shares])
    stages["top_k = 3"] = shares = normalised([*shares[:3], 0, 0])
    num_kept = next(k for k in range(1, 6) if sum(shares[:k]) >= 0.8)  # the token that crosses top_p stays
    stages["top_p = 0.8"] = shares = normalised([*shares[:num_kept], *[0] * (5 - num_kept)])
    tokens = ["duck", "fox", "goat", "frog", "tree"]
    for i, (name, parts) in enumerate(stages.items()):
        x = 0.8 + 4.9 * i
        label(ax, x + 1.6, 6.2, name)
        for j, (token, share) in enumerate(zip(tokens, parts, strict=True)):
            y = 5.2 - 0.72 * j
            label(ax, x + 0.5, y + 0.25, token, ha="right")
            if share:
                box(ax, x + 0.7, y, "", width=4 * share, height=0.5, fill=GREEN if i == 3 else BLUE)
            label(ax, x + 0.8 + 4 * share, y + 0.25, f"{share:.0%}", ha="left")
        if i:
            arrow(ax, (x - 1.4, 6.2), (x - 0.4, 6.2))
    start, width, u = 3, 14, 0.5
    for token, share, fill in zip(tokens, shares, (GREEN, ORANGE, BLUE, RED, GREY), strict=True):
        if share:
            box(ax, start, 0.9, token, width=width * share, fill=fill)
        start += width * share
    arrow(ax, (3 + width * u, 0.1), (3 + width * u, 0.9), colour=RED)
    label(ax, 3.2 + width * u, 0.4, f"u = {u}: the token whose interval contains it is drawn", ha="left")
    save("lesson-3", "Each stage changes the probabilities. At the end a random number picks a token.")


def draw_serving() -> None:
    """Lesson 4: many clients, one engine; drafts; ranks."""
    ax = canvas(20, 6.8, scale=SCALE)
    clients = [box(ax, 0.2, 5 - 1.5 * i, f"client {i + 1}", width=2.2, fill=GREY) for i in range(3)]
    server = box(ax, 3.8, 3, "server\nqueue, limits", width=2.8, height=1.6, fill=ORANGE)
    engine = box(ax, 8, 3, "engine\none thread", width=2.6, height=1.6, fill=BLUE)
    for one in clients:
        arrow(ax, one.right, server.left)
    arrow(ax, server.right, engine.left)
    arrow(ax, engine.bottom, server.bottom, bend=-0.35)
    label(ax, 6.9, 1.5, "tokens, as they are drawn")
    label(ax, 15.6, 6.4, "speculative decoding: one step, several tokens")
    row(ax, 12.2, 4.8, ["a", "kind", "duck", "ran"], width=1.6, fill=[GREEN, GREEN, GREEN, RED])
    label(ax, 18.8, 5.3, "drafts", ha="left")
    label(ax, 15.6, 4.3, "accepted where the sampled token is the same")
    label(ax, 15.6, 3.2, "tensor parallelism: each rank has a part of every matrix")
    ranks = [box(ax, 12.4 + 3.6 * i, 1.4, f"rank {i}", width=2.6, height=1.1, fill=PURPLE) for i in range(2)]
    arrow(ax, ranks[0].right, ranks[1].left)
    arrow(ax, ranks[1].left, ranks[0].right)
    label(ax, 15.6, 0.8, "all-reduce twice per layer")
    save("lesson-4", "What lies around and beyond one engine: a server, drafts, several devices.")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (draw_engine, draw_pages, draw_sampling, draw_serving, screenshots):
        draw()
