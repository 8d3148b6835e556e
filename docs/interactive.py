"""Data for the interactive parts of the documentation site, and the Python that some of them run.

interactive.js reads the data from the page that has the part.

A part is `<figure class="interactive" data-kind="KIND">` in a notebook or on a page. DATA has a function for each kind that
needs more than its marker says.
"""

import io
import json
import re
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import annotated_types
import browser
import scheduler_game
import torch
import typing_extensions

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer

CONTEXTS = ("Once upon a time, there was a", "Once upon a time, there was a kind fox named Leo. He loved to")
NUM_SHOWN = 12
FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
FIGURE = re.compile(r'<figure class="interactive" data-kind="([\w-]+)"[^>]*>')


def sampler_data() -> dict[str, Any]:
    """The bundled model's logits after some texts, and the texts of the likeliest tokens."""
    checkpoint = Checkpoint.open("tiny-gpt2")
    model, tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint.path)
    contexts = []
    with torch.no_grad():
        for prompt in CONTEXTS:
            ids = torch.tensor(tokenizer.encode(prompt))
            logits = model.compute_logits(model(ids, torch.arange(len(ids)), DenseAttention())[-1])
            tokens = {i: tokenizer.token_text(i) for i in logits.topk(NUM_SHOWN).indices.tolist()}
            contexts.append({"prompt": prompt, "logits": [round(one, 3) for one in logits.tolist()], "tokens": tokens})
    return {"contexts": contexts}


DATA: dict[str, Callable[[], Any]] = {
    "sampler": cache(sampler_data),
    "game": cache(lambda: scheduler_game.game_data() | {"order": browser.ORDER}),
    "tasks": browser.tasks,
}


def with_data(page: str) -> str:
    """The HTML of a page with the data of its interactive parts inserted behind their markers."""

    def insert(marker: re.Match[str]) -> str:
        if marker[1] not in DATA:
            return marker[0]
        text = json.dumps(DATA[marker[1]](), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        return f'{marker[0]}<script type="application/json">{text}</script>'

    return FIGURE.sub(insert, page)


def python_archive() -> bytes:
    """A zip archive of the three packages' Python files, of what they need without torch, and of browser.py with its game."""
    patterns = ("docs/browser.py", "docs/scheduler_game.py", "nanoinfer*/**/*.py", "nanoinfer*/**/*.toml")
    roots = {path: ROOT for pattern in patterns for path in ROOT.glob(pattern)}
    types = Path(annotated_types.__file__).parent
    roots |= dict.fromkeys([*types.glob("*.py"), Path(typing_extensions.__file__)], types.parent)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, root in sorted(roots.items()):
            archive.write(path, path.relative_to(root))
    return file.getvalue()


def page_of(body: str, *, scheme: str = "default") -> str:
    """A page with interactive parts and nothing else, for tests and pictures. scheme: "default", or "slate", which is dark."""
    style, script = (FOLDER.joinpath(name).read_text(encoding="utf-8") for name in ("site.css", "interactive.js"))
    head = f'<!doctype html><meta charset="utf-8"><title>nanoinfer</title><style>html {{font: 125% sans-serif}} {style}</style>'
    return f'{head}<body data-md-color-scheme="{scheme}">{with_data(body)}<script>{script}</script>'
