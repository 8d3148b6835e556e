"""Solutions of notebook d5a."""

import dataclasses
import tempfile

import torch
import transformers
from definitions import definitions

from nanoinfer import LLM, register_backend, register_model
from nanoinfer.attention.dense import DenseAttention, causal_attention
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.models.qwen import QwenConfig, QwenForCausalLM

notebook = definitions("d5a_write_your_own_model")


# Exercise 1: Llama as a child of Qwen2
class MyLlamaConfig(QwenConfig):
    @classmethod
    def from_hf(cls, config):
        known = QwenConfig.from_hf(config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
        return dataclasses.replace(known, qkv_bias=False)


class MyLlama(QwenForCausalLM):
    Config = MyLlamaConfig


register_model("MyLlama", MyLlama)  # "LlamaForCausalLM" would replace the package's own
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)).eval()
ids = torch.arange(10)
with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    theirs.config.architectures = ["MyLlama"]
    theirs.save_pretrained(folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.config["architectures"] = ["MyLlama"]
    ours = load_model(checkpoint)
    logits = ours.compute_logits(ours(ids, torch.arange(10), DenseAttention()))
    difference = (logits - theirs(ids.unsqueeze(0)).logits[0]).abs().max().item()
print(f"{type(ours).__name__}: logits differ from transformers' by {difference:.0e}")
assert type(ours) is MyLlama
assert difference < 1e-4


# Exercise 2: attention sinks
class SinkBackend(notebook.WindowBackend):
    num_sinks = 0  # how many of the first tokens every query sees, besides its window

    def attend(self, cache, metadata, layer, q, k, v):
        cache.write(layer, metadata.slot_mapping, k, v)
        out, starts = torch.empty_like(q), metadata.query_start_loc_cpu
        for i, seq_len in enumerate(metadata.seq_lens_cpu):
            keys, values = cache.gather(layer, metadata.block_tables[i], seq_len)
            for row in range(starts[i], starts[i + 1]):
                end = seq_len - (starts[i + 1] - 1 - row)
                seen = [*range(min(self.num_sinks, max(end - self.window, 0))), *range(max(end - self.window, 0), end)]
                out[row] = causal_attention(q[row : row + 1], keys[seen], values[seen])[0]
        return out


register_backend("sinks", SinkBackend)
SinkBackend.window = 64
num_right = {}
for SinkBackend.num_sinks in (4, 16):
    llm = LLM(device="cpu", attention_backend="sinks", kv_cache_memory=2**24)
    num_right[SinkBackend.num_sinks] = notebook.right_stories(llm, 0.7, num=4)
    print(f"window 64 and the first {SinkBackend.num_sinks:2} tokens: right stories of 4: {num_right[SinkBackend.num_sinks]}")
# Four sinks change nothing: this small model was not trained to park attention on the first tokens. The first sixteen contain
# the hero's kind and name, and these are what the end of a story needs from its beginning.
assert num_right[16] > num_right[4]
