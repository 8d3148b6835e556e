"""Small changes of one_file/engine.py, each of which its tests refuse."""

import sys
from functools import cache

import pytest

from nanoinfer.loading.folders import BUNDLED
from tests.helpers import forked
from tests.one_file import test_cuda, test_schedules
from tests.one_file.compare import answers_of_file, answers_of_package, requests, save
from tests.one_file.module import FILE, load
from tests.one_file.test_answers import STORIES, check_draws

ROOMY = {"block_size": 4, "num_blocks": 200, "chunk_size": 64, "max_num_batched_tokens": 512, "max_num_seqs": 64}
# what is wrong -> (text of the file, the text in its place)
ON_A_CPU = {
    "a chunk begins where the last ended": ("grid - start % grid", "grid"),
    "the oldest is preempted": ("return running[-1]", "return running[0]"),
    "a preempted sequence waits last": ("self.waiting.appendleft(seq)", "self.waiting.append(seq)"),
    "a younger prompt passes one that waits": ("selection.budget = 0  #", "pass  #"),
    "decodes use up the budget": ("num_new_tokens if num_new_tokens > 1 else 0", "num_new_tokens"),
    "the last blocks of a prompt stay longest": (
        "self.blocks.drop(reversed(seq.block_table))",
        "self.blocks.drop(seq.block_table)",
    ),
    "the block that was used last is evicted": ("return next(iter(candidates))", "return list(candidates)[-1]"),
    "a block is looked up as if it were the first": ("keys.append(key := found)", "keys.append(found)"),
    "a block that was taken stays in the prefix cache": ("self.index.remove(block)", "pass"),
    "the last token of a prompt is taken from the cache": (
        "max(len(token_ids) - 1, 0) // self.block_size",
        "len(token_ids) // self.block_size",
    ),
    "a shared block is written": (
        "if self.blocks.ref_counts[table[index]] > 1:",
        "if self.blocks.ref_counts[table[index]] > 2:",
    ),
    "a step lacks the copies of blocks": ("if batch.block_copies:", "if False:"),
    "a query does not see itself": (".tril(seq_len - num_tokens)", ".tril(seq_len - num_tokens - 1)"),
    "slots of another block": ("* block_size + start % block_size,)", "* block_size + (start + 1) % block_size,)"),
    "the draw takes the token before": (", right=True)", ", right=False)"),
    "top-p keeps one token fewer": ("before = cumulative - weights", "before = cumulative"),
    "a presence penalty for the prompt's tokens": ("* (counts.values > 0)", "* (counts.values >= 0)"),
    "min-p is compared before the temperature": (
        "apply_temperature, keep_min_p, keep_top_k",
        "keep_min_p, apply_temperature, keep_top_k",
    ),
    "min_tokens forbids one token too few": ("< seq.params.min_tokens", "< seq.params.min_tokens - 1"),
    "a stop string must be in one piece": ("num_before - len(stop) + 1", "num_before"),
    "the second answer has the first's seed": ("(seed + i) % 2**64", "seed % 2**64"),
    "angles are half as large": ("* self.inv_freq).double()", "* self.inv_freq).double() / 2"),
    "the EOS of config.json alone": (
        'eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", eos)',
        "pass",
    ),
}
ON_A_GPU = {
    "padding in a block of the cache": ("(0, 0, 1, num_blocks * block_size, num_blocks)", "(0, 0, 1, 0, 0)"),
    "a graph keeps the block tables of its capture": (
        "(static if new.ndim == 1 else static[:, : new.shape[1]]).copy_(new)",
        "(static if new.ndim == 1 else new).copy_(new)",
    ),
    "the keys of chunks begin where the queries do": (
        "F.pad(seq_lens[n:].cumsum(0), (1, 0)).int()",
        'self._chunks["cu_seqlens_q"]',
    ),
    "tables of int64": ("metadata.block_tables.int()", "metadata.block_tables"),
    "a copy of memory that is not pinned": ("tensor.pin_memory().to(device", "tensor.to(device"),
}


def changed(old, new):
    source = FILE.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"the file has {source.count(old)} times {old!r}"
    return source.replace(old, new)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A checkpoint, requests and the package's answers."""
    folder, some = save("qwen3_tied", tmp_path_factory.mktemp("qwen3")), requests(24, seed=5)
    return folder, some, answers_of_package(folder, some)


def is_refused(engine, asked):
    """Whether schedules, copies or answers are others: with few and with many blocks, and of stories with stop strings."""
    folder, some, expected = asked
    try:
        check_draws(engine)
        test_schedules.check_cases(engine)
        test_schedules.check_copies(engine)
        test_schedules.check_eviction(engine)
        assert answers_of_file(engine, BUNDLED / "tiny-qwen3", STORIES)[0] == of_stories()
        assert answers_of_file(engine, folder, some)[0] == expected
        assert answers_of_file(engine, folder, some, **ROOMY)[0] == expected
    except (AssertionError, IndexError, KeyError, RuntimeError, ValueError):
        return True
    return False


@cache
def of_stories():
    return answers_of_package(BUNDLED / "tiny-qwen3", STORIES)


@pytest.mark.parametrize("what", [None, *ON_A_CPU])
def test_a_change_is_refused(what, asked):
    engine = load(changed(*ON_A_CPU[what]) if what else None)
    assert is_refused(engine, asked) == (what is not None)


@pytest.mark.slow
def test_other_steps_on_a_gpu_are_refused(tmp_path):
    done = forked.run_function(print_what_passes, tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def print_what_passes(folder):
    """Print the changes with which the steps of the simulated device pass."""
    for number, (what, texts) in enumerate(ON_A_GPU.items()):
        try:
            test_cuda.run_on_simulated_device("qwen3", folder / str(number), changed(*texts))
        except (AssertionError, ValueError) as error:
            print(what, repr(error)[:200], file=sys.stderr)
        else:
            print(what)
