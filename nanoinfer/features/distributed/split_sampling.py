"""Sample from logits that are split over ranks. The tokens are those of the full rows, which no rank needs to have.

Each rank holds an interval of the vocabulary. All ranks call `sample` in the same step, and each returns all token ids. Logits
are compared and integers are added (sampling/draw.py), so the result does not depend on the number of ranks. What each rank
sends:

    round  what                                       for rows with           bytes per row
    1      its largest logit and the id               anything                8
           its candidates, which are its largest      top_k, top_p            8 per candidate
           logits, with their ids
    2      the sum of its integer weights             top_p alone, neither    8
    3      the token id, if the threshold of the      neither                 8
           draw lies in its interval
    4      all its logits                             undecided candidates    4 per id of its interval

A rank has as many candidates as the largest top_k, and 32 more, or at least 256 if a row has only top_p. Rows that the
candidates do not decide are those that fast/sampling/few_logits.py runs stage by stage. Rounds that no row needs are skipped.
For 64 rows over 151,936 ids each of two ranks sends 132 KB in a step with top_p, 37 KB with top_k = 40 and 1.5 KB otherwise, in
place of 19 MB (benchmarks/history.jsonl). It suits ranks on CPUs or joined by a network. NVLink moves the 19 MB in less than
0.1 ms, while the host would have to wait for the GPU to know whether round 4 takes place.

In: logits after every stage before the temperature.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.fast.sampling import few_logits
from nanoinfer.features.distributed.communicator import Communicator
from nanoinfer.features.distributed.sharding import VocabularyHead
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import integer_weights, thresholds
from nanoinfer.system.transfer import on_device

SCRATCH_BYTES = 2**20  # on a CPU, the bytes of logits at a time, so that a pass finds in the cache what the previous pass wrote

Shard = Float[Tensor, "batch local_vocab"]
Ids = Int[Tensor, " batch"]
Largest = Float[Tensor, " batch"]  # the largest logit of each full row


def sample(hidden: Float[Tensor, "batch hidden"], batch: SamplingBatch, head: VocabularyHead) -> Ids:
    """Choose the tokens of these hidden rows together with the other ranks, each of which uses its part of the head."""
    return sample_shard(head.local(hidden).float(), batch, head.vocab_size, head.communicator)


def sample_shard(logits: Shard, batch: SamplingBatch, vocab_size: int, communicator: Communicator) -> Ids:
    """Choose a token id per row, greedily or by the draw. The id of a row whose largest logit is not finite is -1.

    The ids are the same on every rank, and equal Sampler's. GPUs must be of the same kind, with the same torch, to compute exp
    alike.

    Args:
        logits: the logits of the ids from rank * local_vocab on, in fp32. Columns beyond the vocabulary hold -inf.
        batch: the batch of all rows, equal on every rank. Its columns, row_groups and u are read.
        vocab_size: the number of ids of the model, at most size * local_vocab.
    """
    groups = batch.row_groups
    num_candidates = max(
        batch.max_top_k + few_logits.TIE_MARGIN if groups.top_k_rows else 0,
        few_logits.NUM_TRIED if groups.top_p_rows else 0,
    )
    if 2 * num_candidates >= logits.shape[-1]:  # the logits take no more bytes than the candidates with their ids
        token_ids, largest = few_logits.sample(gather_rows(logits, vocab_size, communicator), batch)
        return torch.where(largest.isfinite(), token_ids, -1)
    token_ids, largest, candidates, ids = _gather_largest(logits, batch, num_candidates, communicator)
    is_undecided = torch.zeros_like(token_ids, dtype=torch.bool)
    num_top_k, num_top_p = len(groups.top_k_rows), len(groups.top_p_rows)
    if groups.top_k_rows:
        rows = _index(groups.top_k_rows, logits)
        listed = candidates[:num_top_k], ids[:num_top_k]
        token_ids[rows], is_undecided[rows] = few_logits.decide_few(*listed, batch.only_rows(rows))
    if groups.top_p_rows or groups.other_rows:
        rows = _index(groups.top_p_rows + groups.other_rows, logits)
        chunks = _weights_in_chunks(logits[rows], batch.only_rows(rows), largest[rows])
        sums = communicator.all_gather(torch.cat([weights.sum(dim=-1) for weights, _ in chunks]))  # [size, rows]
    if groups.top_p_rows:
        rows = _index(groups.top_p_rows, logits)
        total = sums[:, :num_top_p].sum(dim=0)
        listed = candidates[num_top_k:], ids[num_top_k:]
        token_ids[rows], is_undecided[rows] = few_logits.decide_top_p(*listed, total, batch.only_rows(rows))
    if groups.other_rows:
        rows = _index(groups.other_rows, logits)
        token_ids[rows] = _draw(logits[rows], batch.only_rows(rows), largest[rows], sums[:, num_top_p:], communicator)
    undecided = (is_undecided & largest.isfinite()).nonzero().squeeze(-1)
    if len(undecided):
        full = gather_rows(logits[undecided], vocab_size, communicator)
        token_ids[undecided] = few_logits.sample_plainly(full, batch.only_rows(undecided))
    return torch.where(largest.isfinite(), token_ids, -1)


def gather_rows(logits: Shard, vocab_size: int, communicator: Communicator) -> Float[Tensor, "batch vocab"]:
    """Send the logits themselves, and return the full rows."""
    return communicator.all_gather(logits).transpose(0, 1).flatten(1)[:, :vocab_size].contiguous()


def _gather_largest(
    logits: Shard, batch: SamplingBatch, num_candidates: int, communicator: Communicator
) -> tuple[Ids, Largest, Float[Tensor, "listed size columns"], Int[Tensor, "listed size columns"]]:
    """Gather the candidates of all ranks (round 1), in one message of 32-bit words.

    Returns:
        The argmax (the lowest id of equal maxima) and the maximum of every full row, then the candidates of each rank and their
        ids, first for the rows with top_k and then for those with only top_p.
    """
    rows = batch.row_groups.top_k_rows + batch.row_groups.top_p_rows
    argmax, largest = few_logits.first_largest(logits)
    candidates, ids = few_logits.largest_columns(logits[_index(rows, logits)], num_candidates)
    words = torch.cat([part.flatten().view(torch.int32) for part in (largest, argmax.int(), candidates, ids.int())])
    gathered = communicator.all_gather(words)  # [size, words]
    offsets = torch.arange(communicator.size, device=logits.device).unsqueeze(-1) * logits.shape[-1]
    sizes = [len(largest), len(argmax), candidates.numel(), ids.numel()]
    all_largest, all_argmax, all_candidates, all_ids = gathered.split(sizes, dim=-1)
    all_ids = all_ids + offsets
    largest, owner = all_largest.view(torch.float32).max(dim=0)  # the first of equal maxima
    argmax = (all_argmax + offsets).gather(0, owner.unsqueeze(0)).squeeze(0)
    shape = (communicator.size, len(rows), num_candidates)
    return (
        argmax,
        largest,
        all_candidates.view(torch.float32).reshape(shape).transpose(0, 1),
        all_ids.reshape(shape).transpose(0, 1),
    )


def _draw(
    logits: Shard, batch: SamplingBatch, largest: Largest, sums: Int[Tensor, "ranks batch"], communicator: Communicator
) -> Ids:
    """Draw from all weights (round 3). The rank whose interval of cumulative weights holds the threshold finds the id."""
    ends = sums.cumsum(dim=0)
    threshold = thresholds(ends[-1], batch.u) - (ends - sums)[communicator.rank]  # counted from this rank's first weight
    rows = ((threshold >= 0) & (threshold < sums[communicator.rank])).nonzero().squeeze(-1)
    token_ids = torch.full_like(threshold, -1)
    for weights, chunk in _weights_in_chunks(logits[rows], batch.only_rows(rows), largest[rows]):
        columns = torch.searchsorted(weights.cumsum(dim=-1), threshold[rows[chunk]].unsqueeze(-1), right=True)
        token_ids[rows[chunk]] = columns.squeeze(-1) + communicator.rank * logits.shape[-1]
    return communicator.all_gather(token_ids).amax(dim=0)


def _weights_in_chunks(
    logits: Shard, batch: SamplingBatch, largest: Largest
) -> Iterator[tuple[Int[Tensor, "some local_vocab"], slice]]:
    """Yield draw.integer_weights after temperature and min_p, some rows at a time, with the slice of these rows."""
    num_at_a_time = max(SCRATCH_BYTES // (logits.shape[-1] * 4) if logits.device.type == "cpu" else len(logits), 1)
    for start in range(0, len(logits), num_at_a_time):
        rows = slice(start, start + num_at_a_time)
        some = batch.only_rows(rows)
        columns = torch.cat((logits[rows], largest[rows].unsqueeze(-1)), dim=-1)  # the weights are relative to the largest
        yield integer_weights(stages.keep_min_p(stages.apply_temperature(columns, some), some))[:, :-1], rows


def _index(row_numbers: tuple[int, ...], logits: Shard) -> Int[Tensor, " rows"] | slice:
    """Return an index of these rows that copies nothing in the usual step, in which these are all rows."""
    if row_numbers == tuple(range(len(logits))):
        return slice(None)
    return on_device(torch.tensor(row_numbers, dtype=torch.int64), logits.device)
