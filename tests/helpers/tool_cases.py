"""Tools, and a checkpoint whose tokenizer and chat template know them as Qwen3's do."""

import json
from pathlib import Path

from transformers import AutoTokenizer

import nanoinfer
from tests.helpers import tiny_models

BUNDLED = Path(nanoinfer.__file__).parent / "loading/bundled/tiny-qwen3"
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
QUESTION = [{"role": "user", "content": "How warm is Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "night"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def check_call(name: str, arguments: str) -> None:
    """Whether a call satisfies the schemas of TOOLS."""
    values = json.loads(arguments)
    if name == "weather":
        assert values.keys() == {"city", "days"}
        assert values["city"] in ("Oslo", "Rome")
        assert 0 <= values["days"] <= 9
    else:
        assert (name, values) == ("night", {})


def save_checkpoint(path: Path, max_position_embeddings: int = 1024) -> Path:
    """A checkpoint with random weights. Qwen3's tags are tokens, and the template is like Qwen3's."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATE
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": max_position_embeddings}
    tiny_models.save("qwen3", path, **shape, eos_token_id=2)
    tokenizer.save_pretrained(path)
    return path
