"""An Executor without a model: it counts upwards from each sequence's newest token."""

from types import SimpleNamespace

from nanoinfer.execution.executor import ExecutorInfo, SequenceOutput, StepOutput

VOCAB_SIZE = 1000


class FakeExecutor:
    """tokens_per_step: how many tokens each sequence receives in a step. launched: every plan, in order."""

    batch_independent = True

    def __init__(self, *, num_blocks=16, block_size=4, max_model_len=64, tokens_per_step=1, must_sync=False):
        self.info = ExecutorInfo(VOCAB_SIZE, 64, max_model_len, num_blocks, block_size)
        self.tokens_per_step, self.must_sync = tokens_per_step, must_sync
        self.launched = []

    def launch(self, plan, previous):
        self.launched.append(plan)
        return SimpleNamespace(plan=plan, must_sync=self.must_sync)

    def capture_next(self):
        return False

    def collect(self, step):
        outputs = [self.sample(seq) for seq in dict.fromkeys(seq for seq, _ in step.plan.rows)]
        for item in step.plan.scheduled:
            if item.draft_token_ids:
                outputs = [self.verify(item) if output.sequence is item.sequence else output for output in outputs]
        return StepOutput(outputs, seconds={"build": 0, "forward": 0, "sample": 0})

    def verify(self, item):
        sampled = [(token_id + 1) % VOCAB_SIZE for token_id in (item.sequence.token_ids[-1], *item.draft_token_ids)]
        return SequenceOutput(item.sequence, sampled[: 1 + item.num_accepted(sampled)])

    def sample(self, seq):
        newest = seq.token_ids[-1]
        return SequenceOutput(seq, [(newest + i) % VOCAB_SIZE for i in range(1, self.tokens_per_step + 1)])
