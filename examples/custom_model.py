"""A model of your own: here GPT-2 with its logits capped softly, as Gemma 2's are, on the weights of tiny-gpt2.

A model that shares no code with a bundled one is a file like nanoinfer/models/gpt2.py. Notebook d5a writes one.
"""

import json
import shutil
import tempfile
from pathlib import Path

from nanoinfer import LLM, SamplingParams, register_model
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.models.gpt2 import GPT2LMHeadModel

CAP = 5.0


class CappedGPT2(GPT2LMHeadModel):
    def compute_logits(self, hidden):  # [.., hidden] -> [.., vocab], between -CAP and CAP
        return CAP * (super().compute_logits(hidden) / CAP).tanh()


register_model("CappedGPT2", CappedGPT2)

with tempfile.TemporaryDirectory() as folder:
    shutil.copytree(Checkpoint.open("tiny-gpt2").path, folder, dirs_exist_ok=True)
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | {"architectures": ["CappedGPT2"]}))
    params = SamplingParams(seed=1, max_tokens=20, logprobs=0)
    for model in ("tiny-gpt2", folder):
        answer = LLM(model).generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
        name = "as it was" if model == "tiny-gpt2" else "capped"
        print(f"{name}: {answer.text!r}, log-probability {answer.cumulative_logprob:.1f}")
