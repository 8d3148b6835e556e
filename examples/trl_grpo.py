"""TRL's GRPOTrainer with nanoinfer as its sampler. First: pip install trl==1.16.0

`rollout_func` is TRL's hook for its generation step, and gets a prompt once for each answer of its group. The prompts and the
rule are those of grpo.py. TRL computes with transformers, so its ratios before a step are 1 up to rounding only.
"""

import os
import tempfile

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # the hook may change, hence the version above

from datasets import Dataset
from grpo import PROMPTS, old_logprobs, reward
from trl import GRPOConfig, GRPOTrainer

from nanoinfer import LLM, SamplingParams
from nanoinfer.loading.checkpoint import Checkpoint

SETTINGS = {"use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none", "logging_steps": 1}
path, llm = str(Checkpoint.open("tiny-qwen3").path), LLM("tiny-qwen3", dtype="float32", seed=0)


def generate(prompts, trainer):
    llm.update_weights(trainer.model.named_parameters())
    outputs = llm.generate(prompts, SamplingParams(max_tokens=200, logprobs=0), use_tqdm=False)
    answers = {"prompt_ids": [one.prompt_token_ids for one in outputs], "logprobs": [x.tolist() for x in old_logprobs(outputs)]}
    return answers | {"completion_ids": [one.outputs[0].token_ids for one in outputs]}


def rule(prompts, completions, **_):
    return [reward(prompt + text) for prompt, text in zip(prompts, completions, strict=True)]


with tempfile.TemporaryDirectory() as folder:
    steps, size = int(os.environ.get("ROUNDS", "30")), 8 * len(PROMPTS)
    args = GRPOConfig(folder, max_steps=steps, per_device_train_batch_size=size, learning_rate=5e-4, **SETTINGS)
    data = Dataset.from_dict({"prompt": PROMPTS * steps})
    GRPOTrainer(path, rule, args, data, rollout_func=generate).train()
