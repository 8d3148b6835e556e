"""Scripts written for vLLM's offline interface run here with only their imports changed."""

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPTS = sorted(Path(__file__).with_name("vllm_scripts").glob("*.py"))
MODULES = {  # vLLM's -> ours
    "vllm": "nanoinfer",
    "vllm.inputs": "nanoinfer",
    "vllm.sampling_params": "nanoinfer.sampling_params",
    "vllm.v1.metrics.reader": "nanoinfer.engine.metrics",
}

# What each must print: lines that only a right run can print.
SAYS = {
    "generate": [r"Prompt: 'Lily was', Generated text: '.{20}", r"Answers: \['.+', '.+', '.+'\]"],
    "chat": [
        r"Prompt: '<\|im_start\|>system\\nYou tell stories.*Hello.\\nWho are you\?",
        r"Prompt: 'You tell stories.\\nHello",
    ],
    "prefix_caching": ["Same texts: True", r"Cached tokens: \[\d\d, \d\d, \d\d, \d\d\]", "Cached tokens after the reset: 0$"],
    "beam_search": [r"Best:  a kind .* -\d+\.\d+$", "Tokens: Once upon a time, there was a kind", "Tokens: Lily was a"],
    "logits_processor": ["only_exclamation_marks: '!!!", "repeat_the_prompt: 'Once upon a timeOnce upon'"],
    "logprobs": [r"\* rank 1 ' a' 0\.\d+", "Sum: True", "Prompt: None True"],
    "metrics": [r"vllm:generation_tokens \(counter\) = 30", r"vllm:num_requests_running \(gauge\) = 0"],
    "structured_prompts": ["^0 4 6 length", "^2 2 6 length"],
}


def test_every_script_is_known_here():
    assert {path.stem for path in SCRIPTS} == set(SAYS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_vllm_script_runs_with_only_its_imports_changed(path, tmp_path, capsys):
    changed = re.sub(r"(?m)^from (vllm\S*) import", lambda found: f"from {MODULES[found[1]]} import", path.read_text())
    (tmp_path / path.name).write_text(changed)
    runpy.run_path(str(tmp_path / path.name), run_name="__main__")
    printed = capsys.readouterr().out
    for words in SAYS[path.stem]:
        assert re.search(words, printed, flags=re.MULTILINE), printed
