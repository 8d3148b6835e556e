"""From the logits to the drawn ids nothing makes the host wait for a GPU: shown on "meta", where values cannot be read."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from nanoinfer import SamplingParams
from nanoinfer.fast.sampling import few_logits
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.features.logprobs import token_logprobs
from nanoinfer.features.logprobs.token_logprobs import _listed_and_likeliest
from nanoinfer.features.structured.words import BadWords, NGrams
from nanoinfer.sampling import sampler
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.sampling_rows import sampling_by

META = torch.device("meta")
VOCAB_SIZE = 5000
EVERYTHING = {  # one parameter of each stage, in a row of its own
    "allowed_token_ids": range(30),
    "min_tokens": 5,
    "logit_bias": {7: 2.0},
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logits_processors": [lambda prompt, output, logits: logits * 2],
    "temperature": 0.5,
    "min_p": 0.1,
    "top_k": 4,
    "top_p": 0.9,
    "logprobs": 3,
}


class OnlyPinnedCopies(TorchDispatchMode):
    """What reaches the device from the host must be a copy that does not block, or a single number."""

    may_copy = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        out = func(*args, **kwargs)
        to_meta = any(isinstance(leaf, torch.Tensor) and leaf.device == META for leaf in tree_leaves(out))
        from_host = [t for t in tensors if t.device != META and t.ndim]
        assert not (to_meta and from_host) or (self.may_copy and kwargs.get("non_blocking")), func
        return out


class NoCopies(OnlyPinnedCopies):
    """Inside a CUDA graph's recording not even those."""

    may_copy = False


@pytest.fixture(autouse=True)
def no_values(monkeypatch):
    """On "meta", tokens cannot be copied to the host, and Triton launches nothing. Pinned memory needs a GPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for module in (sampler, token_logprobs):
        monkeypatch.setattr(module, "HostCopy", lambda *tensors: tensors)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda *_, **__: None)


def sequences():
    params = [SamplingParams(**{name: value}) for name, value in EVERYTHING.items()]
    params += [SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_p=0.8, top_k=20), SamplingParams()]
    rest = {"eos_token_ids": frozenset([0]), "constraints": (BadWords(((3,),)), NGrams(1))}
    return [Sequence("r", [1, 2, 2], its, seed, 99, **rest) for seed, its in enumerate(params)]


@pytest.mark.parametrize("routes", [(), (few_logits.FewLogits(),)])
@pytest.mark.parametrize("options", [{}, {"logprobs_mode": "processed"}, {"stages": (*STAGES, lambda logits, batch: logits)}])
def test_a_step_in_which_everything_is_asked_for_is_sampled_without_waiting(routes, options):
    rows = sequences()
    with OnlyPinnedCopies():
        batch = SamplingBatch.build(rows, VOCAB_SIZE, META)
        sampled = sampling_by(*routes, **options)(torch.empty(len(rows), VOCAB_SIZE, device=META), batch)
    assert sampled.token_ids.shape == (len(rows),)
    entries = ("allowed", "bad_words", "min_tokens", "logit_bias", "token_counts", "repeated_ngrams")
    assert all(getattr(batch, name) is not None for name in entries)  # everything was
    assert all(getattr(batch, name) is not None for name in ("temperature", "top_k", "top_p"))


@pytest.mark.parametrize("params", [[{"temperature": 0}], [{}, {"top_k": 9, "temperature": 0.3}, {"top_p": 0.9, "min_p": 0.1}]])
def test_what_is_recorded_of_the_draw_asks_the_host_for_nothing(params):
    def record(run):
        with NoCopies():
            out = run()
        recorded.append(len(out))
        return lambda: None, out

    recorded = []
    rows = [Sequence("r", [1], SamplingParams(**its), 0, 99) for its in params]
    with OnlyPinnedCopies():
        batch = SamplingBatch.build(rows, VOCAB_SIZE, META)
        sampled = sampling_by(SamplerGraphs(4, record))(torch.empty(len(rows), VOCAB_SIZE, device=META), batch)
    assert sampled.token_ids.shape == (len(rows),)
    assert recorded == [4] + [1] * (len(rows) == 1)


@pytest.mark.parametrize("num_top", [0, 5, VOCAB_SIZE])
def test_log_probabilities_are_found_without_waiting(num_top):
    logprobs, tokens = torch.empty(8, VOCAB_SIZE, device=META), torch.empty(8, 1, dtype=torch.int64, device=META)
    with OnlyPinnedCopies():
        ids, values, ranks = _listed_and_likeliest(logprobs, tokens, num_top)
    assert ids.shape == values.shape == ranks.shape == (8, num_top + 1)


@pytest.mark.parametrize(
    "wait",
    [
        lambda ids: ids[ids > 0],
        lambda ids: ids.tolist(),
        lambda ids: ids if ids.any() else None,
        lambda ids: ids[torch.tensor([0, 1])],
        lambda ids: ids.copy_(torch.ones(4)),
    ],
)
def test_the_stand_in_notices(wait):
    ids = torch.empty(4, dtype=torch.int64, device=META)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), OnlyPinnedCopies():
        wait(ids)


def test_the_stand_in_notices_a_copy_inside_a_recording():
    ids = torch.tensor([1, 2])
    with OnlyPinnedCopies():
        ids.to(META, non_blocking=True)
    with pytest.raises(AssertionError), NoCopies():
        ids.to(META, non_blocking=True)
