"""The interface between bookkeeping and tensors: an engine needs no more of an executor than its protocol says, and no
torch."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.execution.executor import ExecutorInfo, SequenceOutput, StepOutput


class Smallest:
    """Nothing but what Executor and InFlight name. Answers every row with its token plus 1."""

    __slots__ = ()
    info = ExecutorInfo(vocab_size=100, max_position_embeddings=64, max_model_len=64, num_blocks=8, block_size=4)
    batch_independent = True

    def launch(self, plan, previous):
        return SimpleNamespace(plan=plan, must_sync=False)

    def capture_next(self):
        return False

    def collect(self, step):
        return StepOutput([SequenceOutput(seq, [seq.token_ids[-1] + 1]) for seq, _ in step.plan.rows])


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_runs_on_what_the_protocol_names(is_async):
    engine = LLMEngine(Smallest(), EngineConfig(async_scheduling=is_async))
    request = engine.add_request([5, 6], SamplingParams(max_tokens=3, detokenize=False))
    for _ in range(20):
        engine.step()
    assert request.output.outputs[0].token_ids[0] == 7
    assert len(request.output.outputs[0].token_ids) == 3


def test_the_seam_imports_no_torch():
    code = "import sys; import nanoinfer.execution.executor, nanoinfer.engine.llm_engine; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
