"""A mistake in a command of the lab is one sentence that names what is wrong and what is allowed."""

import shlex

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app

NOBODY = "http://127.0.0.1:1"
POLICIES = "nanoinfer.scheduling.policies"
MISTAKES = [  # (a command, words of the sentence)
    ("bench throughput --workload A,Z", "workload must be some of A, B16, B64, C, D, E, F, with commas between them, got 'Z'"),
    ("bench throughput --workload A --num-prompts 1", "give --workload, or --num-prompts for a workload of your own, not both"),
    ("bench throughput --random-model gpt5", "--random-model must be one of gpt2,"),
    ("bench throughput --random-model gpt2 --model tiny-gpt2", "give a model or a --random-model, not both, got 'tiny-gpt2'"),
    ("bench throughput --model tiny-gpt2 --workload C", "workload C needs 1024 tokens at a time, but --max-model-len is 512; "),
    ("bench throughput --input-len 4", "describe a workload of your own; give --num-prompts, too"),
    ("bench throughput --random-model gpt2 --dtype int3", "dtype must be one of auto, float32"),
    ("bench throughput --trace calls.jsonl --input-len 5", "--trace gives the lengths and the arrivals"),
    ("bench serve", "give the --url of a server; `nanoinfer serve` starts one"),
    (f"bench serve --url {NOBODY}", f"no server answers at {NOBODY}/v1 ("),
    (f"bench serve --url {NOBODY}", "; start one with `nanoinfer serve`, or correct the URL"),
    ("bench serve --url localhost:8000", "the URL must be such as http://127.0.0.1:8000 or https://host/v1"),
    ("bench serve --url http://host:port", "the URL must be such as"),
    ("bench serve --url 'http://a/\nb'", "the URL must be such as"),
    (f"bench serve --url {NOBODY} --api-key 'a\nb'", "the API key has characters"),
    (f"bench serve --url {NOBODY} --goodput ttft", "goodput must be such as ttft:200"),
    (f"bench serve --url {NOBODY} --input-len 9", "give --num-prompts, too"),
    ("simulate --hardware laptop --sweep max_seqs=3", "--sweep has no option 'max_seqs'; did you mean --max-num-seqs?"),
    ("simulate --hardware laptop --sweep max_num_seqs=a", "--sweep --max-num-seqs must be JSON, got 'a'"),
    ("simulate --hardware laptop --sweep max_num_seqs=0", "--max-num-seqs must be >= 1, got 0"),
    ("simulate --find ttft --goodput ttft:1", "--find must be goodput, with the limits of --goodput and one workload"),
    ("simulate --find goodput", "--find must be goodput, with the limits of --goodput and one workload"),
    ("check-scheduler builtins:dict", "must be a subclass of Scheduler, of BlockManager, or one of each, got dict"),
    (f"check-scheduler {POLICIES}:PriorityScheduler {POLICIES}:DeadlineScheduler", "or one of each, got PriorityS"),
    ("check-scheduler --html .", "cannot write .: it is a folder; give another path"),
    ("check-scheduler nowhere:Mine", "must be a class or its name"),
    ("check-scheduler --world num_request=2", "--world has no 'num_request'; did you mean num_requests?"),
    ("check-scheduler --world num_blocks=many", "--world must be NAME=NUMBER, got 'num_blocks=many'"),
    ("explain", "give a prompt or --demo"),
    ("explain --demo magic", "--demo must be one of preemption, sharing, stop-string, chunked, drafts, got 'magic'"),
    ("explain Lily --demo sharing --top-k 5 --model x", "leave out prompts, --model, --top-k"),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(command, words):
    result = CliRunner().invoke(app, shlex.split(command))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert words in result.stderr
