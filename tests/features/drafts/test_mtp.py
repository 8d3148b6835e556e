"""Drafts by the layer for multi-token prediction of a checkpoint: the tokens stay, and the drafts are what it says."""

import random

import pytest
import torch
import transformers
from safetensors.torch import load_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidValueError, UnsupportedError, WeightsError
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import write_requests

SETTINGS = {"dtype": "float32", "block_size": 8, "chunk_size": 32, "kv_cache_memory": 2**22, "seed": 0}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.add_mtp(tiny_models.save("qwen3_5", tmp_path_factory.mktemp("mtp")))


class Oracle:
    """The drafts for a text, computed by transformers' classes, all rows at once."""

    def __init__(self, path):
        tensors = {name.removeprefix("mtp."): x for name, x in load_file(path / "model.safetensors").items() if "mtp." in name}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        config = transformers.AutoConfig.from_pretrained(path)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self.layer = transformers.AutoModelForCausalLM.from_config(config).model.eval()
        names = ("fc", *tiny_models.MTP_FUSED[2:])
        self.fc, self.of_embedding, self.of_hidden = (tensors.pop(f"{name}.weight") for name in names)
        missing, unexpected = self.layer.load_state_dict(tensors, strict=False)
        assert (missing, unexpected) == (["embed_tokens.weight"], [])

    def normed(self, x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * (1 + weight)

    @torch.inference_mode()
    def drafts(self, token_ids, num):
        hidden = self.model.model(torch.tensor([token_ids])).last_hidden_state[0, :-1]
        drafts, least = [], float("inf")
        for _ in range(num):
            embedded = self.model.model.embed_tokens(torch.tensor([*token_ids, *drafts])[1:])
            x = torch.cat((self.normed(embedded, self.of_embedding), self.normed(hidden, self.of_hidden)), -1) @ self.fc.T
            own = self.layer(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            top_two = self.model.lm_head(own)[0].topk(2)
            drafts.append(int(top_two.indices[0]))
            least = min(least, float(top_two.values[0] - top_two.values[1]))
            hidden = torch.cat((hidden, own))
        return drafts, least


def generate(llm, prompts, params, **more):
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    tiny_models.assert_nothing_is_left(llm)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def recorded(llm, monkeypatch):
    """(known ids, drafts) of each proposal."""
    proposer, proposals = llm.engine.planner.proposer, []
    propose = proposer.propose

    def recording(sequences, limits):
        drafts = propose(sequences, limits)
        proposals.extend((list(seq.token_ids), draft) for seq, draft in zip(sequences, drafts, strict=True))
        return drafts

    monkeypatch.setattr(proposer, "propose", recording)
    return proposals


def prompts_of(*lengths):
    return [[random.Random(length).randrange(tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_the_drafts_are_what_the_checkpoint_says_also_after_a_prefix_hit(path, eager, monkeypatch):
    llm, oracle = LLM(path, enforce_eager=eager, speculative_config=MTP, **SETTINGS), Oracle(path)
    proposals = recorded(llm, monkeypatch)
    prompts, params = prompts_of(1, 2, 45), SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    for _ in range(2):
        generate(llm, prompts, params)
    assert len(proposals) > 15
    compared = 0
    for token_ids, drafts in proposals:
        expected, least = oracle.drafts(token_ids, len(drafts))
        if drafts and least > 1e-3:  # else a tie
            assert drafts == expected
            compared += 1
    assert compared > 15


@pytest.mark.slow
def test_requests_with_adapters_have_the_tokens_of_the_merged_models(path, tmp_path):
    requests = [None, *write_requests(path, tmp_path, (4, 4))]
    prompts, params = prompts_of(9, 45, 31), SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    merged = [LLM(path, lora=one and one.lora_path, **SETTINGS) for one in requests]
    expected = [generate(llm, [prompt], params)[0] for llm, prompt in zip(merged, prompts, strict=True)]
    llm = LLM(path, enable_lora=True, max_loras=2, speculative_config=MTP, **SETTINGS)
    for _ in range(2):  # the second time after a prefix hit
        assert generate(llm, prompts, params, lora_request=requests) == expected
    assert len({str(one) for one in expected}) == 3
    assert generate(llm, prompts, params) != expected  # the adapters change the tokens
    assert llm.engine.planner.counts.num_draft_tokens > 0


@pytest.mark.slow
def test_the_tokens_are_those_of_plain_decoding_also_of_preempted_sequences(path):
    prompts = prompts_of(1, 9, 45, 100, 45, 31)
    greedy, drawn = ({"temperature": 0.0}, {"temperature": 0.8, "n": 2})
    params = [SamplingParams(seed=3, max_tokens=25, detokenize=False, **one) for one in (greedy, drawn) * 3]
    expected = generate(LLM(path, **SETTINGS), prompts, params)
    llm = LLM(path, speculative_config=MTP, **SETTINGS | {"kv_cache_memory": 180_000, "max_num_seqs": 4})
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
        assert any(output.metrics.num_preemptions for output in outputs)
    tiny_models.assert_nothing_is_left(llm)
    assert 0 < llm.engine.planner.counts.num_accepted_tokens < llm.engine.planner.counts.num_draft_tokens
    adaptive = LLM(path, speculative_config={"method": "mtp"}, **SETTINGS)
    assert generate(adaptive, prompts, params) == expected
    assert adaptive.engine.planner.proposer.block_manager.num_free_blocks == adaptive.engine.executor.info.num_blocks


def unfused(tensors):
    """The experts of the module by name, as published checkpoints have them."""
    prefix = "mtp.layers.0.mlp.experts."
    gate_up, down = (tensors.pop(f"{prefix}{name}") for name in ("gate_up_proj", "down_proj"))
    for expert in range(len(down)):
        gate, up = gate_up[expert].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
        tensors |= {f"{prefix}{expert}.{name}.weight": x.contiguous() for name, x in parts.items()}
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides", "change", "eager"),
    [
        ("qwen3_5_moe", {}, unfused, False),
        ("qwen3_next", {}, unfused, True),
        ("qwen3_5", {"layer_types": ["full_attention"] * 3}, lambda tensors: tensors, True),
    ],
    ids=["experts", "qwen3_next", "attention in all layers"],
)
def test_other_models_draft_as_well(family, overrides, change, eager, tmp_path):
    path = tiny_models.add_mtp(tiny_models.save(family, tmp_path, **overrides), change)
    prompts, params = prompts_of(9, 45), SamplingParams(temperature=0, max_tokens=15, detokenize=False)
    llm = LLM(path, speculative_config=MTP, enforce_eager=eager, **SETTINGS)
    assert generate(llm, prompts, params) == generate(LLM(path, enforce_eager=eager, **SETTINGS), prompts, params)
    assert llm.engine.planner.counts.num_draft_tokens > 0


def test_what_cannot_draft_is_refused(path, tmp_path):
    without = tiny_models.save("qwen3_5", tmp_path / "without")
    with pytest.raises(UnsupportedError, match=r"names begin with 'mtp\.', and the checkpoint has none: transformers leaves"):
        LLM(without, speculative_config=MTP, **SETTINGS)
    incomplete = tiny_models.add_mtp(
        without, lambda tensors: {name: x for name, x in tensors.items() if name != "mtp.fc.weight"}
    )
    with pytest.raises(WeightsError, match=r"missing: fc\.weight"):
        LLM(incomplete, speculative_config=MTP, **SETTINGS)
    with pytest.raises(InvalidValueError, match=r"method 'mtp', is 'x'; leave it out"):
        LLM(path, speculative_config=MTP | {"model": "x"}, **SETTINGS)
