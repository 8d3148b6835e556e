"""`nanoinfer doctor --bits`: compare this machine's answers with the published ones, bit by bit.

In: the bundled models, in float32 on a CPU with compiled kernels. Out: for each model whether tokens and log-probabilities have
the published digest. `python -m nanoinfer.cli.bits` writes the digests of this machine into bits.json.
"""

import hashlib
import json
from pathlib import Path

from nanoinfer.llm import LLM
from nanoinfer.loading.folders import bundled_models
from nanoinfer.sampling_params import SamplingParams

PUBLISHED = Path(__file__).with_name("bits.json")
SAME = "the published bits"
PROMPTS = ["Once upon a time there was a little girl who", "The dog", "One day, a bird saw a big tree and wanted to"]
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
)


def digest(model: str) -> str:
    """Return the digest of the tokens of seeds, and of the log-probabilities of tokens and prompts."""
    llm = LLM(model, dtype="float32", device="cpu")
    found = hashlib.sha256()
    for options in SETTINGS:
        params = SamplingParams(max_tokens=100, seed=7, ignore_eos=True, logprobs=3, prompt_logprobs=3, **options)  # type: ignore[arg-type]
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            [answer] = output.outputs
            entries = [*(output.prompt_logprobs or []), *(answer.logprobs or [])]
            numbers = [[(token_id, entry.logprob) for token_id, entry in (position or {}).items()] for position in entries]
            found.update(json.dumps([list(answer.token_ids), numbers]).encode())
    return found.hexdigest()[:16]


def compare() -> dict[str, str]:
    """Return for each model SAME, or what this machine has instead."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    found = {model: digest(model) for model in published}
    return {
        model: SAME if found[model] == expected else f"other bits: digest {found[model]}, published {expected}"
        for model, expected in published.items()
    }


if __name__ == "__main__":
    digests = {model: digest(model) for model in bundled_models()}
    PUBLISHED.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
