"""docs/vllm.md says what becomes of scripts for vLLM, and every entry of its lists is tried out here.

The scripts are written after vLLM's examples. `python tests/end_to_end/test_vllm_scripts.py` writes the generated lists.
"""

import ast
import re
import runpy
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import nanoinfer
from nanoinfer import LLM, AsyncLLM, NanoinferError, SamplingParams
from nanoinfer.compat.vllm.neutral import METHODS, NEUTRAL
from nanoinfer.compat.vllm.placeholders import Placeholder
from nanoinfer.config import CompilationConfig
from nanoinfer.errors import UnsupportedError
from tests.helpers import forked

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "vllm.md"
WING = Path(nanoinfer.__file__).parent / "compat" / "vllm"
SCRIPTS = {path.stem: path for path in sorted(Path(__file__).with_name("vllm_scripts").glob("*.py"))}
EXAMPLES = PAGE.read_text(encoding="utf-8").split("## Names")[0]
# script -> what must be left out of it
ROWS = dict(re.findall(r"^- [^\n]+?: \[(\w+)\]\(.+?\)(?: without `(.+)`)?$", EXAMPLES, re.MULTILINE))
# example -> the hint with which it is refused
NOT_RUN = dict(re.findall(r"^\| (\w+)(?:, .+?)? \| (.+) \|$", EXAMPLES, re.MULTILINE))

# What each script must print: lines that only a right run can print.
SAYS = {
    "async_streaming": [r"^Complete: stream-example-3, in several outputs: True"],
    "automatic_prefix_caching": [r"Cached: False$[\s\S]+Cached: True$"],
    "basic": [r"^Prompt: 'One day, Tom'\nOutput: '.{20}"],
    "beam_search": [r"Best:  a kind .* -\d+\.\d+$", "Tokens: Once upon a time, there was a kind", "Tokens: Lily was a"],
    "chat": [
        r"Prompt: '<\|im_start\|>system\\nYou tell stories.*Hello.\\nWho are you\?",
        r"Prompt: 'You tell stories.\\nHello",
    ],
    "chat_cli": [r"^Prompt: '<\|im_start\|>system\\nYou tell stories.*\nGenerated text: '", "^Answers: 10$"],
    "chat_with_tools": ["^The template has seen the tool: True", "^It has seen the answer: True (length|stop)"],
    "custom_logits_processor": [r"Once upon a time: \[128\]", r"Lily was: \[\d+, \d+", r"Tom had: \[67\]"],
    "custom_req": ["^Prompt: 'Once upon a time', only one token: True$", "^Prompt: 'Lily was', only one token: False$"],
    "embed": [r"Prompt: 'Lily was' \nEmbeddings: \[-?\d.+, \.\.\.\] \(size=\d+\)"],
    "generate": [r"Prompt: 'Lily was', Generated text: '.{20}", r"Answers: \['.+', '.+', '.+'\]"],
    "generate_cli": ["^Prompt: 'Lily was', Tokens: 9, Text: '"],
    "guided_decoding": ["^Choice: (Positive|Negative)$", "^Same ids: True$"],
    "llm_engine": [r"^Request 0: \['.+'\]$", r"^Request 2: \['.+', '.+'\]$"],
    "logits_processor": ["only_exclamation_marks: '!!!", "repeat_the_prompt: 'Once upon a timeOnce upon'"],
    "logprobs": [r"\* rank 1 ' a' 0\.\d+", "Sum: True", "Prompt: None True"],
    "lora": [r"^Base: '.{20}", "^The adapters change the text: True True$"],
    "metrics": [r"vllm:generation_tokens \(counter\) = 30", r"vllm:num_requests_running \(gauge\) = 0"],
    "prefix_caching": ["Same texts: True", r"Cached tokens: \[\d\d, \d\d, \d\d, \d\d\]", "Cached tokens after the reset: 0$"],
    "priority": [r"^Order of the prompts: \[2, 1, 0\]$"],
    "reproducibility": ["^Same texts: True 4$"],
    "reset_kv": ["^Reset: True$", "^Tokens: 16$"],
    "sleep_mode": ["^Same text: True$"],
    "spec_decode": ["^Output tokens: 40$", "^Consistent: True$"],
    "structured_outputs": [
        "^Choice: (Positive|Negative)$",
        r"^Regex: [a-z]{3}@[a-z]{3}\.com$",
        r'^JSON: \{"name":"(duck|fox)","is_kind":(true|false)\}$',
        "^Grammar: the (duck|fox) is (kind|lively)$",
    ],
    "structured_prompts": ["^0 4 6 length", "^2 2 6 length"],
    "tensor_parallel": [r"^Prompt: 'Lily was', Generated text: '.{20}"],
}

# The lines of the examples that do not run.
REFUSED = {
    "classify": "LLM(model='tiny-qwen3', runner='pooling').classify(['Lily was'])",
    "context_extension": "LLM(model='tiny-qwen3', hf_overrides={'rope_parameters': {'rope_type': 'yarn', 'factor': 4.0}})",
    "data_parallel": "LLM(model='tiny-qwen3', data_parallel_size=2)",
    "disaggregated_prefill": "LLM(model='tiny-qwen3', kv_transfer_config=KVTransferConfig(kv_role='kv_both'))",
    "eagle": "LLM(model='tiny-qwen3', speculative_config={'method': 'eagle', 'model': 'x', 'num_speculative_tokens': 2})",
    "lora_with_quantization_inference": "LLM(model='tiny-qwen3', quantization='bitsandbytes', enable_lora=True)",
    "pause_resume": "AsyncLLM('tiny-qwen3').pause_generation(mode='keep')",
    "prompt_embeds": "LLM(model='tiny-qwen3', enable_prompt_embeds=True)",
    "rlhf": "LLM(model='tiny-qwen3').collective_rpc('update_weight', args=('name', 'dtype', 'shape'))",
    "score": "LLM(model='tiny-qwen3').score('Lily', ['Ben', 'Max'])",
    "sharded_state": "LLM(model='tiny-qwen3', load_format='sharded_state')",
    "simple_profiling": "LLM(model='tiny-qwen3').start_profile()",
    "skip_loading_weights": "LLM(model='tiny-qwen3', load_format='dummy')",
    "spec_decode_datasets": "get_samples(None, None)",
    "vision_language": "LLM('tiny-qwen3').generate({'prompt': 'What is this?', 'multi_modal_data': {'image': 1}})",
}


def changed(source: str) -> str:
    return re.sub(r"(?m)^(from|import) vllm\b", r"\1 nanoinfer", source)


def test_every_row_has_a_script_and_every_script_a_row():
    assert set(ROWS) == set(SCRIPTS) == set(SAYS)
    assert set(NOT_RUN) == set(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (i % 3 > 0)) for i, name in enumerate(SCRIPTS)])
def test_a_vllm_script_runs_with_only_its_imports_changed_or_as_its_row_says(name, tmp_path, capsys):
    script, source = tmp_path / "script.py", changed(SCRIPTS[name].read_text(encoding="utf-8"))
    if left_out := ROWS[name]:
        script.write_text(source)
        with pytest.raises(UnsupportedError):
            runpy.run_path(str(script), run_name="__main__")
        assert left_out in source
        source = source.replace(left_out, "")
    script.write_text(source)
    with forked.ranks():
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    for words in SAYS[name]:
        assert re.search(words, printed, flags=re.MULTILINE), printed


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_script_needs_that_is_not_there_is_refused_with_a_hint(name):
    names = {"LLM": LLM, "AsyncLLM": AsyncLLM, "EngineArgs": nanoinfer.EngineArgs}
    for source, imported in (("nanoinfer.config", "KVTransferConfig"), ("nanoinfer.benchmarks.datasets", "get_samples")):
        exec(f"from {source} import {imported}", names)
    with pytest.raises(NanoinferError) as caught:
        eval(REFUSED[name], names)
    assert NOT_RUN[name] in str(caught.value)


# ---- names, methods and arguments: lists that are made from those of the package


def passed_on(path: Path) -> list[str]:
    """The names that a file of compat/ imports, to pass them on."""
    imports = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return sorted(alias.asname or alias.name for node in imports for alias in node.names)


def vllm_names() -> list[tuple[str, str]]:
    """(module, name) of all that a script for vLLM may import from nanoinfer, besides what nanoinfer has by itself."""
    names = passed_on(WING / "names.py")
    found = [("nanoinfer.config" if name.endswith("Config") else "nanoinfer", name) for name in names]
    found += [("nanoinfer.outputs", name) for name in names if name.endswith("RequestOutput")]
    for path in sorted((WING / "modules").rglob("*.py")):
        parts = path.relative_to(WING / "modules").with_suffix("").parts
        found += [(".".join(("nanoinfer", *parts)).removesuffix(".__init__"), name) for name in passed_on(path)]
    return sorted(found)


def what_it_is(module: str, name: str) -> str:
    """Returns: "works", or what the placeholder says when it is called."""
    found = getattr(import_module(module), name)
    if not isinstance(found, Placeholder):
        return "works"
    with pytest.raises(UnsupportedError) as caught:
        found("an argument")
    return str(caught.value).removeprefix(f"{name} is vLLM's: ")


def test_every_name_can_be_imported_and_is_an_object_of_nanoinfer_or_says_what_to_do():
    results = [what_it_is(module, name) for module, name in vllm_names()]
    assert len(results) > 40
    assert 10 < results.count("works") < len(results) - 10
    assert not [result for result in results if "vLLM's" in result]  # each placeholder says its own name


def test_a_placeholder_can_stand_in_an_annotation_and_any_other_use_raises():
    def function(given: CompilationConfig | None, more: "int | CompilationConfig" = 0) -> None:
        pass

    get_type_hints(function)
    function(None)
    assert CompilationConfig is nanoinfer.config.CompilationConfig
    assert not isinstance(function, CompilationConfig)
    assert not hasattr(CompilationConfig, "__fields__")
    with pytest.raises(UnsupportedError, match=r"^CompilationConfig is vLLM's: .*enforce_eager=True"):
        CompilationConfig.level  # noqa: B018
    with pytest.raises(UnsupportedError, match="enforce_eager=True"):

        class Mine(CompilationConfig):
            pass


def test_other_modules_and_names_do_not_exist():
    with pytest.raises(ModuleNotFoundError, match=r"nanoinfer\.utils\.something"):
        import_module("nanoinfer.utils.something")
    with pytest.raises(ImportError, match="cannot import name 'something'"):
        from nanoinfer.utils import something  # noqa: F401
    with pytest.raises(AttributeError, match="has no attribute 'Something'"):
        nanoinfer.config.Something  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"nanoinfer\.v2"):
        import_module("nanoinfer.v2")


def test_a_module_of_the_package_is_found_before_vllms():
    assert import_module("nanoinfer.engine").__file__ == str(WING.parents[1] / "engine" / "__init__.py")
    assert import_module("nanoinfer.engine.arg_utils").EngineArgs is nanoinfer.EngineArgs


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_method_that_is_missing_says_what_to_do(kind):
    llm = kind.__new__(kind)
    for name in METHODS:
        with pytest.raises(
            UnsupportedError, match=re.escape(f"'{kind.__name__}' object has no attribute {name!r}: {METHODS[name]}")
        ):
            getattr(llm, name)
        assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"^'{kind.__name__}' object has no attribute 'generat'$"):
        llm.generat  # noqa: B018


def test_a_method_that_only_llm_has_says_how_an_async_llm_calls_it():
    llm = AsyncLLM.__new__(AsyncLLM)
    for name in ("sleep", "update_weights", "reset_prefix_cache", "get_tokenizer"):
        with pytest.raises(UnsupportedError, match=rf"between_steps\(lambda: async_llm\.llm\.{name}\("):
            getattr(llm, name)


def test_another_name_of_an_argument_is_the_argument():
    assert SamplingParams(guided_decoding=None) == SamplingParams()
    given = nanoinfer.EngineArgs(kv_cache_memory_bytes=2**22)
    assert given == nanoinfer.EngineArgs(kv_cache_memory=2**22)
    with pytest.raises(NanoinferError, match="got kv_cache_memory twice: kv_cache_memory_bytes is another name for it"):
        nanoinfer.EngineArgs(kv_cache_memory=2**22, kv_cache_memory_bytes=2**20)


def test_the_reasoning_config_of_these_tags_is_accepted():
    from nanoinfer.config import ReasoningConfig

    tags = ReasoningConfig(reasoning_start_str="<think>", reasoning_end_str="</think>")
    assert nanoinfer.EngineArgs(reasoning_config=tags) == nanoinfer.EngineArgs()
    other = ReasoningConfig(reasoning_start_str="<think>", reasoning_end_str="Enough.</think>")
    with pytest.raises(UnsupportedError, match="thinking_token_budget is for the text between <think> and </think>"):
        nanoinfer.EngineArgs(reasoning_config=other)
    with pytest.raises(UnsupportedError, match="reasoning_parser='qwen3' is not supported; parse_chat_answer"):
        nanoinfer.EngineArgs(reasoning_parser="qwen3")


def grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """A list with an entry for each first part, and all that goes with it."""
    groups: dict[str, list[str]] = {}
    for first, second in pairs:
        groups.setdefault(first, []).append(f"`{second}`")
    return "\n".join(f"- {first}: {', '.join(dict.fromkeys(group))}" for first, group in groups.items())


def lists() -> dict[str, str]:
    """The generated lists of the page, by the name in their marker."""
    names = [(f"`{module}`", name, what_it_is(module, name) == "works") for module, name in vllm_names()]
    # Each argument once, with what the last of these says of it.
    neutral = {}
    for accepted in NEUTRAL.values():
        neutral |= accepted
    others = [(name, ours) for name, ours in neutral.items() if isinstance(ours, str)]
    values = [(name, accepted[0]) for name, accepted in neutral.items() if not isinstance(accepted, str)]
    return {
        "names": grouped((module, name) for module, name, works in names if works),
        "placeholders": grouped((module, name) for module, name, works in names if not works),
        "methods": grouped((sentence, name) for name, sentence in METHODS.items()),
        "arguments": "\n".join(
            [
                grouped((f"another name for `{ours}`", name) for name, ours in others),
                grouped((", ".join(f"`{value!r}`" for value in accepted), name) for name, accepted in values),
            ]
        ),
    }


def with_lists(text: str) -> str:
    for name, one in lists().items():
        between = rf"(?<=<!-- {name} -->\n)[\s\S]*?(?=<!-- end -->)"
        text, count = re.subn(between, lambda _, one=one: f"\n{one}\n\n", text)
        assert count == 1, name
    return text


def test_the_generated_lists_are_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert with_lists(text) == text, "run: python tests/end_to_end/test_vllm_scripts.py"


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
