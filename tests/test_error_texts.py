"""The error texts of every parameter, as Python, HTTP and the command line have them, are those of error_texts.json.

`python tests/test_error_texts.py` writes the file anew, whose differences are then read before they are committed. A value
that is accepted is not in it.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import nanoinfer
from nanoinfer.cli import options
from nanoinfer.cli.main import app
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

FILE = Path(__file__).with_name("error_texts.json")
VALUES = ("None", "True", "0", "-3", "0.5", "1e400", "10**30", "'x'", "[-1]", "['']", "{'a': 1}")
JSON_VALUES = ("true", "-3", "0.5", "'x'", "[]", "[-1]", "['']", "{'1': 'a'}")
CONTRADICTIONS = {
    "SamplingParams": (
        "n=2, temperature=0", "min_tokens=5, max_tokens=4", "min_tokens=17", "stop='a', detokenize=False",
        "structured_outputs=StructuredOutputsParams(regex='a'), ignore_eos=True",
        "structured_outputs=StructuredOutputsParams(regex='a'), allowed_token_ids=[1]", "bad_words=['a', [2, -1]]",
        "logit_bias={1: 1e3}", "allowed_token_ids=[3, True]", "logits_processors=[lambda: 1]", "tempreature=1", "best_of=2",
        "do_sample=True", "use_beam_search=True", "num_beams=4", "guided_json={}", "max_new_tokens=5",
    ),
    "BeamSearchParams": ("width=3", "early_stopping='always'", "max_token=3"),
    "StructuredOutputsParams": ("", "json={}, regex='a'", "json='x'", "json='1'", "json=dict", "choice=[]", "jsn={}"),
    "EngineArgs": (
        "quantization='int8', dtype='float16'", "tokenizer='a', skip_tokenizer_init=True", "max_loras=2", "max_lora_rank=8",
        "prefix_cache_dir='a', enable_prefix_caching=False",
        "scheduling_policy='priority', scheduler_cls=dict", "scheduler_cls='a.B'", "logits_processors=[dict]",
        "lora={'a': 1e9}",
        "speculative_config={'method': 'ngram'}, async_scheduling=True",
        "speculative_config={'method': 'ngram'}, stages=[print]",
        "speculative_config={'method': 'x'}", "speculative_config={'method': 'a:B'}", "speculative_config={'method': dict}",
        "speculative_config={'method': 'ngram', 'model': 'x'}",
        "speculative_config={'method': 'draft_model'}", "speculative_config={'method': 'ngram', 'x': 1}",
        "speculative_config={'method': 'ngram', 'num_speculative_tokens': 65}",
        "speculative_config={'method': 'ngram', 'num_speculative_tokens': 0}",
        "speculative_config={'method': 'ngram', 'num_speculative_tokens': 'x'}",
        "speculative_config={'method': 'ngram', 'adaptive': 1}",
        "speculative_config={'method': 'ngram', 'prompt_lookup_min': 0}",
        "speculative_config={'method': 'ngram', 'prompt_lookup_max': 1}",
        "max_num_seq=3", "pipeline_parallel_size=2", "'tiny-qwen3', 'tiny-gpt2'", "gpu_memory_utilization=0", "swap_space=3",
        "temperature=0",
    ),
    "AsyncEngineArgs": ("max_num_queued_requests=-1", "max_num_queued_requests='x'", "streaming=1", "stream=True"),
}  # fmt: skip
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
ENGINE = (
    "dtype|x", "quantization|x", "device|x", "attention-backend|x", "scheduling-policy|x",
    "scheduler-cls|x", "scheduler-cls|math.pi", "block-manager-cls|math.pi", "kv-cache-dtype|x", "max-model-len|0",
    "kv-cache-memory|0", "kv-cache-memory|x", "prefix-cache-size|0", "speculative-config|{", "speculative-config|{}",
    "speculative-config|1",
)  # fmt: skip
SERVER = ("enable-lora-update", "lora-modules|a=b", "api-key|", "cache-salt-by-key", "enable-lora|--lora-modules|a")
TEXTS = ("-3", "0", "1e30", "nan")
# What is another library's text, or that of a value that is accepted.
IS_NOT_OURS = re.compile(r"no server answers|Input should|is not a valid|0x[0-9a-f]{8}")


def of_python(call: str) -> str | None:
    """The error of a constructor's call."""
    names = {name: getattr(nanoinfer, name) for name in ("EngineArgs", "AsyncEngineArgs")}
    names |= {kind.__name__: kind for kind in (SamplingParams, BeamSearchParams, StructuredOutputsParams)}
    try:
        made = eval(call, names)
        if hasattr(made, "to_config"):
            made.to_config()
    except NanoinferError as error:
        return f"{type(error).__name__}: {error}"
    return None


def of_http(body: str) -> str | None:
    """The error of a body, "CompletionRequest {...}", in JSON with ' for "."""
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException

    from nanoinfer.server import protocol
    from nanoinfer.server.errors import validation_message

    name, _, text = body.partition(" ")
    try:
        request = getattr(protocol, name)(**json.loads(text.replace("'", '"')))
        request.check_unknown_fields()
        protocol.to_sampling_params(request, SamplingParams())
    except ValidationError as error:
        return validation_message([one | {"loc": ("body", *one["loc"])} for one in error.errors()])[0]
    except HTTPException as error:
        return str(error.detail)
    except NanoinferError as error:
        return str(error)
    return None


def of_commands(line: str) -> str | None:
    """The error of a command line, whose words are separated by a bar."""
    words = line.split("|")
    with pytest.MonkeyPatch.context() as patch:
        if "-m" not in words:  # a sampling parameter is refused without a model, too
            patch.setattr(options, "load_llm", lambda *_, **__: SimpleNamespace(get_default_sampling_params=SamplingParams))
        result = CliRunner().invoke(app, words, prog_name="nanoinfer")
    return None if result.exit_code == 0 else re.sub(r"\s+", " ", result.stderr.rpartition("error: ")[2]).strip()


KINDS: dict[str, Callable[[str], str | None]] = {"Python": of_python, "HTTP": of_http, "commands": of_commands}


def calls() -> Iterator[tuple[str, str]]:
    """What is tried: kind, call."""
    from nanoinfer.server import protocol

    for name, kind in (
        ("SamplingParams", SamplingParams), ("BeamSearchParams", BeamSearchParams),
        ("StructuredOutputsParams", StructuredOutputsParams), ("EngineArgs", nanoinfer.EngineArgs),
    ):  # fmt: skip
        for field in kind.__dataclass_fields__:
            given = "beam_width=4, " if name == "BeamSearchParams" and field != "beam_width" else ""
            given = "regex='a', " if field == "disable_any_whitespace" else given
            if field not in ("model", "tracer"):
                yield from (("Python", f"{name}({given}{field}={value})") for value in VALUES)
    for name, contradictions in CONTRADICTIONS.items():
        yield from (("Python", f"{name}({arguments})") for arguments in contradictions)
    for name, given in (("CompletionRequest", "'prompt': 'a'"), ("ChatCompletionRequest", "'messages': [{'role': 'user'}]")):
        for field in getattr(protocol, name).model_fields:
            if f"'{field}'" not in given:
                yield from (("HTTP", f"{name} {{{given}, '{field}': {value}}}") for value in JSON_VALUES)
    for name in SAMPLING:
        option = name.replace("_", "-")
        yield from (("commands", f"generate|a|--{option}|{text}") for text in TEXTS)
    yield from (("commands", f"generate|a|-m|tiny-qwen3|--{option}") for option in ENGINE)
    yield from (("commands", f"serve|-m|tiny-qwen3|--port|0|--{option}") for option in SERVER)


def write() -> None:
    texts: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for kind, call in calls():
        if (text := KINDS[kind](call)) and not (IS_NOT_OURS.search(text) and kind != "HTTP"):
            texts[kind][call] = text
    FILE.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_every_error_text_is_the_recorded_one(kind):
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[kind]
    assert {call: KINDS[kind](call) for call in recorded} == recorded


if __name__ == "__main__":
    write()
