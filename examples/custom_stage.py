"""A sampler stage of your own, for every request, and a logits processor, for one request."""

import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.sampling.sampler import STAGES


def keep_top_n_sigma(logits, batch):
    """Drop the tokens more than one standard deviation below the largest logit.

    logits: [batch, vocab], -inf where a stage before this one dropped a token. Source: Tang et al. 2024, arXiv:2411.07641.
    """
    kept = logits.isfinite()
    mean = logits.where(kept, 0).sum(dim=-1, keepdim=True) / kept.sum(dim=-1, keepdim=True)
    sigma = ((logits - mean).where(kept, 0).square().sum(dim=-1, keepdim=True) / kept.sum(dim=-1, keepdim=True)).sqrt()
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) - sigma, -torch.inf)


(exclamation,) = LLM().get_tokenizer().encode("!")


def shout(prompt_ids, output_ids, logits):
    """Make exclamation marks more likely. logits: [vocab]."""
    logits[exclamation] += 15.0
    return logits


for stages in (STAGES, [*STAGES, keep_top_n_sigma]):
    llm = LLM(stages=stages)
    hot = SamplingParams(temperature=3.0, seed=1, max_tokens=20)
    loud = SamplingParams(temperature=0.7, seed=1, max_tokens=20, logits_processors=[shout])
    for output in llm.generate(["Once upon a time"] * 2, [hot, loud], use_tqdm=False):
        print(f"{len(stages)} stages: {output.prompt}{output.outputs[0].text!r}")
