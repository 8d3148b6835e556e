"""A replayed draw gives the tokens of the plain stages, whatever its static inputs held before. Captures are simulated.

execution/test_model_runner.py and end_to_end/test_simulated_device.py have engines with replayed draws.
"""

import random
from itertools import pairwise

import pytest
import torch

from nanoinfer import Recorder, SamplingParams
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.features.structured.words import word_constraints
from nanoinfer.features.tracing import TokenDrawn, TracingObserver
from nanoinfer.features.tracing.stage_trace import TracingSampler
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.routes import HeadRows, RoutedSampler
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.growing import grow
from tests.helpers.sampling_rows import batch_of, sampling_by, the_same

# On a GPU, Triton's kernel does not read tensors of the CPU. end_to_end/test_gpu.py has draws there.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="captures are simulated on a CPU")]

NAN, INF = float("nan"), float("inf")
SUPPORTED = {
    "greedy": {"temperature": 0},
    "greedy with more": {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1e30},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 5},
    "large top_k": {"top_k": 600},
    "top_p": {"top_p": 0.9},
    "little top_p": {"top_p": 1e-6, "temperature": 1.5},
    "all": {"temperature": 0.8, "min_p": 0.01, "top_k": 40, "top_p": 0.95},
}
NOT_SUPPORTED = {
    "allowed_token_ids": [3, 4],
    "bad_words": ((3,),),
    "min_tokens": 2,
    "logit_bias": {3: 5.0},
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "no_repeat_ngram_size": 1,
    "logits_processors": [lambda prompt, output, logits: logits + torch.arange(len(logits))],
    "logprobs": 1,
}


PLAIN = sampling_by()


class SimulatedCapture:
    """A Capture. A replay reads and writes the same tensors as the capture. sizes: rows of each captured graph, in order."""

    def __init__(self):
        self.sizes, self.num_replays = [], 0

    def __call__(self, run):
        out = run().clone()
        self.sizes.append(len(out))

        def replay():
            self.num_replays += 1
            out.copy_(run())

        return replay, out


def sequence(seed=0, **params):
    params = SamplingParams(max_tokens=None, **params)
    constraints = tuple(word_constraints(params, None, 1000))
    return Sequence("r", [1, 2], params, seed, 9999, constraints=constraints, eos_token_ids=frozenset([0]))


def random_steps(vocab_size, num_steps, max_num_rows, groups=SUPPORTED):
    """Steps of any number of rows, of one kind of row or of all. Logits with ties and without."""
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    for step in range(num_steps):
        some = rng.choice([list(groups), list(groups), rng.sample(list(groups), 1)])
        rows = [sequence(rng.getrandbits(64), **groups[rng.choice(some)]) for _ in range(rng.randint(1, max_num_rows))]
        logits = torch.randn(len(rows), vocab_size, generator=generator) * rng.choice([0.1, 1, 5])
        yield (logits * 2).round() if step % 2 else logits, batch_of(rows, vocab_size)


def num_disagreeing(steps, sampler):
    num_rows = 0
    for logits, batch in steps:
        ours, theirs = (s(logits.clone(), batch).read() for s in (sampler, PLAIN))
        assert ours.errors == theirs.errors == {}
        num_rows += sum(a != b for a, b in zip(ours.token_ids, theirs.token_ids, strict=True))
    return num_rows


# ---- the same tokens


@pytest.mark.parametrize(("vocab_size", "num_steps"), [(1, 2), (2, 4), (30, 8), (1000, 2), (5000, 1)])
def test_replayed_draws_are_those_of_the_plain_stages(vocab_size, num_steps):
    """All steps share the static inputs: rows beyond a batch hold the content of earlier steps."""
    capture = SimulatedCapture()
    sampler = sampling_by(SamplerGraphs(5, capture))
    assert num_disagreeing(random_steps(vocab_size, num_steps, 5), sampler) == 0
    assert capture.num_replays == num_steps  # no step ran without a graph


def test_the_columns_of_rows_that_go_on_are_copied_once():
    rows = [sequence(seed, **SUPPORTED[name]) for seed, name in enumerate(("greedy", "all", "top_k", "plain"))]
    graphs, copied, last = SamplerGraphs(len(rows), SimulatedCapture()), [], None
    sampler, generator = sampling_by(graphs), torch.Generator().manual_seed(0)
    for step in range(6):
        used = rows if step != 4 else rows[:3]
        last = SamplingBatch.build(used, 50, torch.device("cpu"), last)
        assert num_disagreeing([(torch.randn(len(used), 50, generator=generator), last)], sampler) == 0
        copied.append(graphs._columns["temperature"]._version)
        for seq in used:
            grow(seq, 1)
    assert [after > before for before, after in pairwise(copied)] == [False, False, False, True, True]


@pytest.mark.parametrize("name", ["temperature", "min_p", "top_k", "top_p", "greedy", "u", "logits"])
def test_the_comparison_notices_a_static_input_that_is_not_filled_again(name, monkeypatch):
    def stale(self, logits, batch, names):
        static_inputs = self._columns | {"logits": self._hidden}
        kept = static_inputs[name].clone() if self._columns else None
        fill(self, logits, batch, names)
        if kept is not None:
            static_inputs[name].copy_(kept)

    fill = SamplerGraphs._fill
    monkeypatch.setattr(SamplerGraphs, "_fill", stale)
    sampler = sampling_by(SamplerGraphs(4, SimulatedCapture()))
    groups = {group: params for group, params in SUPPORTED.items() if name in params} or SUPPORTED
    assert any(num_disagreeing([step], sampler) for step in random_steps(200, 30, 4, groups))


def test_the_rows_beyond_the_batch_do_not_matter():
    graphs = SamplerGraphs(6, SimulatedCapture())
    for step in random_steps(300, 5, 4):
        assert num_disagreeing([step], sampling_by(graphs)) == 0
        num_rows = len(step[0])
        graphs._hidden[num_rows:] = NAN
        for name, worst in {"greedy": True, "temperature": 0.0, "min_p": NAN, "top_p": -1.0, "u": NAN}.items():
            graphs._columns[name][num_rows:] = worst


def test_a_row_without_a_finite_logit_gets_its_own_error():
    logits = torch.randn(4 * len(SUPPORTED), 50, generator=torch.Generator().manual_seed(0))
    logits[0::4], logits[1::4, 7], logits[2::4, 9] = -INF, NAN, INF
    batch = batch_of([sequence(seed, **params) for params in SUPPORTED.values() for seed in range(4)], 50)
    capture = SimulatedCapture()
    ours, theirs = (s(logits.clone(), batch).read() for s in (sampling_by(SamplerGraphs(len(logits), capture)), PLAIN))
    assert capture.num_replays == 1
    assert ours == theirs
    assert len(ours.errors) == 3 * len(SUPPORTED)


def test_drawn_tokens_outlive_the_next_replay():
    """With async_scheduling a step is read after the next is launched."""
    sampler = sampling_by(SamplerGraphs(2, SimulatedCapture()))
    batch = batch_of([sequence(temperature=0)], 3)
    first, second = (sampler(torch.tensor([logits]), batch) for logits in ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]))
    assert (first.read().token_ids, second.read().token_ids) == ([1], [2])


def test_the_rows_of_another_head_are_not_drawn_by_the_graphs_of_the_first():
    """Such as those of a drafter, which shares the routes with its model."""
    graphs, batch = SamplerGraphs(2, SimulatedCapture()), batch_of([sequence(temperature=0)], 3)
    sampler = RoutedSampler([graphs])
    hidden = torch.tensor([[0.0, 1.0, 2.0]])
    for head, expected in ((lambda rows: rows, 2), (lambda rows: -rows, 0)):
        assert sampler(HeadRows(hidden, head), batch).read().token_ids == [expected]
    assert len(graphs.table.graphs) == 2


def test_the_usual_draws_are_captured_beforehand():
    capture = SimulatedCapture()
    graphs = SamplerGraphs(3, capture)
    graphs.prepare(HeadRows(torch.zeros(1, 30), the_same))
    assert capture.sizes == [3] * 5 + [2] * 5 + [1] * 5
    usual = {name: params for name, params in SUPPORTED.items() if "min_p" not in params}
    assert num_disagreeing(random_steps(30, 12, 3, usual), sampling_by(graphs)) == 0
    assert len(capture.sizes) == 15
    assert capture.num_replays == 12


# ---- what is captured


def test_a_size_and_kind_is_captured_on_first_use_after_the_largest_size_of_the_kind():
    capture = SimulatedCapture()
    sampler = sampling_by(SamplerGraphs(5, capture))

    def draw(num_rows, **params):
        sampler(torch.zeros(num_rows, 10), batch_of([sequence(seed, **params) for seed in range(num_rows)], 10))
        sizes, capture.sizes = capture.sizes, []
        return sizes

    assert draw(2, temperature=0) == [5, 2]
    assert draw(2, temperature=0, top_k=3) == []
    assert draw(3, temperature=0) == [4]
    assert draw(5) == [5]
    assert draw(2, temperature=0.5) == [2]
    for kind in ({"min_p": 0.1}, {"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.5, "top_k": 2}):
        assert draw(2, **kind) == [5, 2]
    assert [draw(2), draw(5), draw(4, temperature=0), draw(2, top_p=0.4, temperature=0.3)] == [[]] * 4


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_a_step_with_a_row_that_is_not_supported_runs_without_a_graph(name):
    capture = SimulatedCapture()
    sampler = sampling_by(SamplerGraphs(8, capture))
    more = sequence(1, **{name: NOT_SUPPORTED[name]})
    batch = batch_of([sequence(0), more, sequence(2, temperature=0)], 400)
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    ours, theirs = (s(logits.clone(), batch).read() for s in (sampler, PLAIN))
    assert ours == theirs
    assert capture.sizes == []


def test_too_many_rows_or_users_stages_run_without_a_graph():
    capture = SimulatedCapture()
    sampler = sampling_by(SamplerGraphs(2, capture))
    assert sampler(torch.eye(3), batch_of([sequence(temperature=0)] * 3, 3)).read().token_ids == [0, 1, 2]

    def reverse(logits, batch):
        return -logits

    sampler = sampling_by(SamplerGraphs(2, capture), stages=(*STAGES, reverse))
    assert sampler(torch.tensor([[2.0, 1.0, 3.0]]), batch_of([sequence(temperature=0)], 3)).read().token_ids == [1]
    assert capture.sizes == []


def test_a_draw_that_cannot_be_captured_runs_without_a_graph_and_logs_one_warning(caplog):
    def fail(run):
        raise RuntimeError("CUDA out of memory\nand so on")

    steps = random_steps(30, 40, 20, {"all": SUPPORTED["all"]})
    assert num_disagreeing(steps, sampling_by(SamplerGraphs(20, fail))) == 0
    assert caplog.text.count("the draw of 4 tokens could not be captured as a CUDA graph (CUDA out of memory)") == 1


def test_a_traced_draw_is_not_replayed():
    capture, recorder = SimulatedCapture(), Recorder(stages=True)
    rows = [sequence(seed=1, temperature=0.7)]
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    sampler, observer = RoutedSampler([SamplerGraphs(4, capture)]), TracingObserver(recorder, 4)
    observer.launched = StepPlan((), rows=((rows[0], 0),))
    traced = TracingSampler(sampler, observer)(HeadRows(logits.clone(), the_same), batch_of(rows, 30)).read()
    observer.flush()
    assert capture.num_replays == 0
    assert recorder.of(TokenDrawn)[0].token_id == traced.token_ids[0]
    assert sampler(HeadRows(logits.clone(), the_same), batch_of(rows, 30)).read() == traced
    assert capture.num_replays == 1
