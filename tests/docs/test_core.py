"""The core, what a token passes on a CPU, is small enough to read in an evening. README says how many lines it has."""

import re
from pathlib import Path

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent
# In the order of a token's journey, from LLM.generate on a Qwen checkpoint to the RequestOutput.
CORE = """
    llm.py sampling_params.py config.py outputs.py errors.py
    engine/factory.py engine/llm_engine.py engine/guards.py engine/inputs.py engine/request.py engine/stopping.py
    tokenization/tokenizer.py tokenization/detokenizer.py
    scheduling/sequence.py scheduling/step_plan.py scheduling/scheduler.py scheduling/block_manager.py
    execution/executor.py execution/uniproc_executor.py execution/forward_batch.py execution/model_runner.py
    execution/memory.py
    models/checkpoint.py models/registry.py models/loader.py models/weights.py models/layers.py models/qwen.py
    attention/base.py attention/kv_cache.py attention/cpu.py devices/transfer.py
    sampling/batch.py sampling/stages.py sampling/sampler.py sampling/draw.py
""".split()


def test_the_core_is_under_4000_lines_and_readme_says_the_number():
    num_lines = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in CORE)
    assert num_lines < 4000
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    said = re.search(r"core, what a\s+token passes on a CPU, is ([\d,]+) lines", readme)
    assert said, "README must say how many lines the core has"
    assert int(said[1].replace(",", "")) == num_lines
