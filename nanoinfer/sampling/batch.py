"""What each row of a step asked of the sampler, as tensors: the stages read nothing else.

In: the sequences of a plan's rows. Out: a SamplingBatch. A field is None where no row uses its parameter, so that a stage
nobody asked for costs nothing; where some row does, the others carry the value that leaves their logits as they are.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.sequence import Sequence

_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Per-row parameters, [batch] each. Greedy rows carry temperature 1 and the off values, and take the argmax at the end."""

    greedy: Bool[Tensor, "batch"] | None  # None: no row is greedy
    all_greedy: bool
    temperature: Float[Tensor, "batch"] | None
    min_p: Float[Tensor, "batch"] | None
    top_k: Int[Tensor, "batch"] | None  # the vocabulary's size where it is off
    top_p: Float[Tensor, "batch"] | None  # float64, to be compared with integer sums
    seeds: Int[Tensor, "batch"]  # 64 bits, read as unsigned
    positions: Int[Tensor, "batch"]  # index of the token to draw, in prompt + output
    banned_rows: Int[Tensor, "banned"] | None  # min_tokens: EOS and stop ids of rows that are too short to end
    banned_ids: Int[Tensor, "banned"] | None

    @classmethod
    def build(cls, sequences: list[Sequence], vocab_size: int, device: torch.device) -> "SamplingBatch":
        params = [seq.params for seq in sequences]
        greedy = [p.is_greedy for p in params]

        def column(values: list, off: float | int, dtype: torch.dtype) -> Tensor | None:
            values = [off if is_greedy else value for value, is_greedy in zip(values, greedy, strict=True)]
            return torch.tensor(values, dtype=dtype, device=device) if any(value != off for value in values) else None

        banned = [
            (row, token_id)
            for row, seq in enumerate(sequences)
            if seq.num_output_tokens < seq.params.min_tokens
            for token_id in seq.stop_ids
        ]
        # Clamped where fp32 would make a temperature 0 or infinite: dividing by either makes NaN.
        temperatures = [min(max(p.temperature, _TINY), _HUGE) for p in params]
        return cls(
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            temperature=column(temperatures, 1.0, torch.float32),
            min_p=column([p.min_p for p in params], 0.0, torch.float32),
            top_k=column([min(p.top_k or vocab_size, vocab_size) for p in params], vocab_size, torch.int64),
            top_p=column([p.top_p for p in params], 1.0, torch.float64),
            seeds=torch.tensor([_as_signed(seq.seed) for seq in sequences], dtype=torch.int64, device=device),
            positions=torch.tensor([len(seq.token_ids) for seq in sequences], dtype=torch.int64, device=device),
            banned_rows=torch.tensor([row for row, _ in banned], device=device) if banned else None,
            banned_ids=torch.tensor([token_id for _, token_id in banned], device=device) if banned else None,
        )


def _as_signed(seed: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return seed - 2**64 if seed >= 2**63 else seed
