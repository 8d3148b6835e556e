"""Random requests, in four parts. Another seed each time, which is printed, unless one is given. Exit code 1: anything is off.

    python -m tests.fuzz --requests 2000
    python -m tests.fuzz --requests 2000 --seed 1 --part bits --dtype bfloat16 --family gpt2
    python -m tests.fuzz --requests 2000 --part hits --family gemma3_window --adapters 8
    python -m tests.fuzz --requests 60 --part fast --dtype bfloat16

bits    Requests together and then each alone, on a random model of the width of a small real one: tokens and log-probabilities
        have the same bits where the engine says so. There are neither prefix hits nor preemptions, which may change bits.
hits    With batch_invariant, requests with shared prefixes, several answers, beams, drafts and aborts, in caches of few blocks,
        and then each alone without a prefix cache: the same bits. For a tiny model of any family, with windows or states.
        With --adapters, requests have LoRA adapters or none, and the tokens of the model that their adapter is merged into.
fast    Greedy and top_k requests with the screened head and with the drafts of each method, and then without: the same tokens,
        and the same bits of log-probabilities and of the logits that the screened head computes, which must be all that count.
        On the bundled models, and on a random model with GPT-2's vocabulary, where many bfloat16 logits are equal.
api     Requests, streams, beam searches and aborts in text, on engines with random settings, most with too few blocks: every
        output keeps the rules, and no block is lost. With batch_invariant, the bits are those of each alone.
"""

import argparse
import random
import secrets
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from nanoinfer import LLM, BeamSearchParams, NanoinferError, SamplingParams
from nanoinfer.fast.cpu import accelerate, screen
from nanoinfer.fast.cpu.linear import KernelLinear
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.drafts.speculator import Speculator
from tests.helpers import lora_adapters, tiny_models

ONE_LAYER = {"gpt2": {"n_layer": 1}, "qwen3": {"num_hidden_layers": 1}}


def random_params(rng, **given):
    """Sampling parameters of which any is likely to change the tokens. Those that are given stay."""
    params = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
        "top_k": rng.choice([0, 0, 1, 5, 40]),
        "top_p": rng.choice([1.0, 0.9, 0.5]),
        "min_p": rng.choice([0.0, 0.0, 0.05]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
        "seed": rng.randrange(2**32),
        "max_tokens": rng.randrange(1, 13),
        "logprobs": rng.choice([0, 3]),
        "detokenize": False,
    } | given
    return SamplingParams(**params | ({} if params["temperature"] else {"n": 1}))


def random_ids(rng, length, num_ids=tiny_models.VOCAB_SIZE):
    """A prompt, often of so few ids that the text repeats itself."""
    num_ids = rng.choice([3, num_ids])
    return [rng.randrange(num_ids) for _ in range(length)]


def random_request(rng):
    return random_ids(rng, rng.choice([1, 2, 3, rng.randrange(1, 131)])), random_params(rng)


def speculative_config(method, path):
    """Settings with which many drafts are made, and many accepted."""
    if method == "draft_model":
        return {"method": method, "model": str(path), "num_speculative_tokens": 3, "adaptive": False}
    return {"method": method, "prompt_lookup_min": 1, "adaptive": False}


def told_by_answer(answer):
    return answer.token_ids, values_of(answer.logprobs)


def values_of(logprobs):
    return [position and {i: entry.logprob for i, entry in position.items()} for position in logprobs or ()]


# ---- fast

ONE_TO_FOUR = {"num_speculative_tokens": 4, "adaptive": False}


class Successors:
    """A proposer: what followed a token when it last occurred, in any sequence."""

    def __init__(self, config):
        self.next_ids = {}

    def propose(self, sequences, limits):
        drafts = [[] for _ in sequences]
        for seq, limit, draft in zip(sequences, limits, drafts, strict=True):
            self.next_ids.update(pairwise(seq.token_ids))
            while len(draft) < limit and (newest := draft[-1] if draft else seq.token_ids[-1]) in self.next_ids:
                draft.append(self.next_ids[newest])
        return drafts

    def forget(self, seq):
        pass


DRAFTS = {
    "none": None,
    "quantized, 4 bits": {"method": "quantized", "bits": 4, **ONE_TO_FOUR},
    "quantized, 8 bits": {"method": "quantized", "bits": 8, **ONE_TO_FOUR},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, **ONE_TO_FOUR},
    "own": {"method": Successors, **ONE_TO_FOUR},
}


def run_shuffled(llm, requests, rng):
    """The answers, in the requests' order, to requests that arrive in a random order and at random times."""
    order, begun = rng.sample(range(len(requests)), len(requests)), []
    while len(begun) < len(order) or llm.engine.num_unfinished:
        for index in order[len(begun) :][: min(rng.randrange(6), 64 - llm.engine.num_unfinished)]:
            begun.append(llm.engine.add_request(*requests[index]))
        llm.engine.step()
    answers = {index: told_by_answer(request.output.outputs[0]) for index, request in zip(order, begun, strict=True)}
    return [answers[i] for i in range(len(requests))]


def greedy_or_few(rng, num_ids):
    params = random_params(
        rng,
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=rng.choice([1, 2, 5, 40, 256]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        repetition_penalty=1.0,
        max_tokens=rng.randrange(1, 65),
        ignore_eos=True,
        logprobs=rng.choice([None] * 15 + [0]),  # steps with log-probabilities compute all logits
    )
    return random_ids(rng, rng.randrange(1, 40), num_ids), params


@contextmanager
def screened_logits(counts):
    """Let heads of any size be screened for any number of rows, and compare their logits with all logits."""
    plain_heads, compute = {}, screen.ScreenedLinear.largest_logits

    def largest_logits(head, x, k):
        found, expected = compute(head, x, k), plain_heads.setdefault(head, KernelLinear(head))(x)
        is_computed = found != -torch.inf
        smallest = expected.float().topk(k).values[:, -1:]
        counts["rows screened"] += len(x)
        counts["of these with a tie at the k-th"] += int(((expected >= smallest).sum(dim=1) > k).sum())
        counts["logits computed"] += int(is_computed.sum())
        counts["logits left out"] += int((~is_computed).sum())
        integers = torch.int16 if found.dtype.itemsize == 2 else torch.int32
        different = is_computed & (found.view(integers) != expected.view(integers))
        counts["different logits"] += int((different | (~is_computed & (expected >= smallest))).sum())
        return found

    with (
        patch.multiple(screen, MOST_ROWS=64, IDS_PER_CANDIDATE=1),
        patch.object(accelerate, "LEAST_BYTES", 0),
        patch.object(screen.ScreenedLinear, "largest_logits", largest_logits),
    ):
        yield


def compare_paths(model, num_requests, rng, dtype, drafts=DRAFTS):
    """Counts of what was compared on a model, and of what was different."""
    settings = {"dtype": dtype, "kv_cache_memory": 2**26, "enable_prefix_caching": False, "max_num_seqs": 4}
    settings |= {"skip_tokenizer_init": True}
    counts, plain = Counter(), LLM(model, screened_head=False, **settings)
    requests = [greedy_or_few(rng, plain.info.vocab_size) for _ in range(num_requests)]
    expected = run_shuffled(plain, requests, rng)
    with screened_logits(counts):
        for is_screened, method in product((True, False), drafts):
            if not is_screened and drafts[method] is None:
                continue
            llm = LLM(model, screened_head=is_screened, speculative_config=drafts[method], **settings)
            for (ids, logprobs), (other_ids, other_logprobs) in zip(run_shuffled(llm, requests, rng), expected, strict=True):
                counts["tokens"] += len(other_ids)
                counts["log-probabilities"] += len(other_logprobs)
                counts["different tokens"] += sum(one != other for one, other in zip(ids, other_ids, strict=True))
                counts["different log-probabilities"] += logprobs != other_logprobs
            tiny_models.assert_nothing_is_left(llm)
            if isinstance(llm.engine.planner, Speculator):
                counts[f"drafted ({method})"] += llm.engine.planner.counts.num_draft_tokens
                counts[f"accepted ({method})"] += llm.engine.planner.counts.num_accepted_tokens
    return counts


def compare_fast(num_requests, rng, given):
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"vocab_size": 50257, "n_embd": 192, "n_head": 3}
        models = ["tiny-gpt2", "tiny-qwen3", str(tiny_models.save("gpt2", Path(folder), **sizes))]
        found = [compare_paths(model, num_requests, rng, given.dtype) for model in models]
    for name, counts in zip(["tiny-gpt2", "tiny-qwen3", "GPT-2's vocabulary"], found, strict=True):
        print(f"{name} in {given.dtype}:", ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    num_different = sum(count for counts in found for what, count in counts.items() if what.startswith("different"))
    print(f"{sum(counts['tokens'] for counts in found):,} tokens in {given.dtype}, {num_different} differences")
    return not num_different


# ---- bits, hits and api


class Call(NamedTuple):
    kind: str  # request, stream or beams
    prompt: list[int] | str
    params: SamplingParams | BeamSearchParams
    adapter: LoRARequest | None = None


class Running:
    """A request, or a stream that is read at random times and may be left."""

    def __init__(self, llm, call):
        self.deltas, self.stream, self.was_left = [], None, False
        if call.kind == "stream":
            self.stream = llm.stream(call.prompt, call.params)
            self.read()
            self.request_id = self.deltas[0].request_id
        else:
            prompt = call.prompt if isinstance(call.prompt, str) else {"prompt_token_ids": call.prompt}
            self.request = llm.engine.submit(llm.engine.inputs.prepare_prompt(prompt, call.params, lora_request=call.adapter))
            self.request_id = self.request.request_id

    @property
    def output(self):
        return self.request.output if self.stream is None else self.deltas[-1].output

    def read(self):
        self.deltas.append(next(self.stream))
        if self.output is not None:
            assert "".join(delta.text for delta in self.deltas) == self.output.outputs[0].text, self.deltas
            assert [i for delta in self.deltas for i in delta.token_ids] == self.output.outputs[0].token_ids, self.deltas

    def leave(self):
        self.stream.close()
        self.was_left = True


def alone(llm, call):
    """The output of a call without others. Beams that do not fit have none."""
    if call.kind == "beams":
        with suppress(NanoinferError):
            return llm.beam_search(call.prompt, call.params)[0]
        return None
    return llm.generate(call.prompt, call.params, use_tqdm=False, lora_request=call.adapter)[0]


def run_calls(rng, llm, todo):
    """[(call, output)] of calls that begin at random times. Some are aborted, some streams are left, and then told nothing."""
    todo, live, done = todo[::-1], [], []
    while todo or live:
        while todo and len(live) < 20 and rng.random() < 0.5:
            call = todo.pop()
            if call.kind == "beams":
                done.append((call, alone(llm, call)))
            else:
                live.append((call, Running(llm, call)))
        if llm.engine.num_unfinished:
            llm.engine.step()
        for _, running in live:
            if rng.random() < 0.0005:
                llm.abort(running.request_id)
            if running.stream and running.output is None and rng.random() < 0.5:
                running.read()
                if rng.random() < 0.01:
                    running.leave()
        if rng.random() < 0.001:
            llm.reset_prefix_cache()
        done += [(call, running.output) for call, running in live if running.output is not None and not running.was_left]
        live = [(call, running) for call, running in live if running.output is None and not running.was_left]
    tiny_models.assert_nothing_is_left(llm)
    return done


def told_by(output):
    """What must have the same bits: of each answer its ids and log-probabilities, and the prompt's. Of beams the ids."""
    if hasattr(output, "sequences"):
        return [], [(beam.token_ids,) for beam in output.sequences]
    return values_of(output.prompt_logprobs), [told_by_answer(answer) for answer in output.outputs]


def was_aborted(output):
    return any(answer.finish_reason == "abort" for answer in getattr(output, "outputs", ()))


def is_the_same(output, expected):
    """Whether an output tells what it told alone, or the beginning of that if it was aborted. Beams may have had no room."""
    if output is None or not was_aborted(output):
        return output is None or told_by(output) == told_by(expected)
    (prompt, answers), (whole_prompt, whole_answers) = told_by(output), told_by(expected)
    parts = [(prompt, whole_prompt)]
    for one, other in zip(answers, whole_answers, strict=True):
        parts += zip(one, other, strict=True)
    return all(part == whole[: len(part)] for part, whole in parts)


def cramped_engine(rng, path, num_tokens, settings):
    """An engine with random settings, in which a sequence of so many tokens leaves few blocks to others, and these settings."""
    settings = settings | {
        "chunk_size": rng.choice([3, 16, 64]),
        "max_num_batched_tokens": rng.choice([7, 64, 4096]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "enable_prefix_caching": rng.random() < 0.9,
    }
    drafts = {"speculative_config": speculative_config("ngram", path)}
    settings |= drafts if rng.random() < 0.4 else {"async_scheduling": rng.random() < 0.5}
    return tiny_models.cramped(path, num_tokens, rng.choice([0, 10, 100]), **settings), settings


def compare_bits(num_requests, rng, given):
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.save(given.family, Path(folder), **tiny_models.WIDE[given.family], **ONE_LAYER[given.family])
        settings = {"dtype": given.dtype, "kv_cache_memory": 2**27, "enable_prefix_caching": False}
        settings["enforce_eager"] = given.enforce_eager
        llm = plain = LLM(path, **settings)
        if given.speculative:
            llm = LLM(path, speculative_config=speculative_config(given.speculative, path), **settings)

        def new_round():
            return llm, plain, settings, lambda: Call("request", *random_request(rng))

        return check_rounds(f"{given.family} in {given.dtype}", num_requests, rng, new_round)


MOST_SHARED, MOST_OWN, MOST_NEW = 90, 50, 32  # tokens
NUM_AT_A_TIME = 50  # requests on an engine
# The sums differ in their last bits, so that a token may differ where two are nearly as likely.
MERGED, NOT_MERGED = "with the tokens of the merged model", "with other tokens than the merged model"


def call_with_ids(rng, earlier, adapters):
    """A prompt that begins as one of the last ones, which is then among them."""
    first = rng.choice(earlier[-4:])
    shared = first[: rng.choice([MOST_SHARED, rng.randint(0, MOST_SHARED)])]
    earlier.append(shared + random_ids(rng, rng.randint(1, MOST_OWN)))
    if rng.random() < 0.05:
        return Call("beams", earlier[-1], BeamSearchParams(beam_width=rng.choice([2, 3]), max_tokens=rng.randint(1, 10)))
    more = {"n": rng.choice([1, 1, 1, 3]), "max_tokens": rng.randint(1, MOST_NEW)}
    more["prompt_logprobs"] = rng.choice([None] * 9 + [1])
    return Call("request", earlier[-1], random_params(rng, **more), rng.choice([None, *adapters]) if adapters else None)


def save_adapters(path, num):
    """LoRARequests of random adapters beside a checkpoint, each of another rank."""
    for i in range(num):
        shapes = lora_adapters.linear_shapes(path)
        lora_adapters.write_adapter(path / f"adapter{i}", shapes, seed=i, rank=1 + i, r=1 + i, lora_alpha=16)
    return [LoRARequest(f"adapter{i}", 1 + i, str(path / f"adapter{i}")) for i in range(num)]


def compare_hits(num_requests, rng, given):
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.save(given.family, Path(folder))
        adapters, earlier = save_adapters(path, given.adapters), [[]]
        settings = {"dtype": given.dtype, "batch_invariant": True, "enforce_eager": given.enforce_eager}
        merged = {one: LLM(path, lora=one.lora_path, kv_cache_memory=2**24, **settings) for one in adapters}
        if adapters:
            settings |= {"enable_lora": True, "max_lora_rank": len(adapters)}

        def new_round():
            settings["block_size"] = rng.choice([4, 8, 16])
            if adapters:
                settings["max_loras"] = rng.randint(1, len(adapters))
            plain = LLM(path, kv_cache_memory=2**26, enable_prefix_caching=False, **settings)
            llm, more = cramped_engine(rng, path, MOST_SHARED + MOST_OWN + MOST_NEW, settings)
            return llm, plain, more, lambda: call_with_ids(rng, earlier, adapters)

        return check_rounds(f"{given.family} in {given.dtype}", num_requests, rng, new_round, merged=merged)


WORDS = ("Once", " upon", " a time", " Lily", " the fox", ".", " 🦊", "你好", "\n", " said")
MODEL_LEN = 96


def use_api(num_requests, rng, given):
    can_promise = LLM("tiny-qwen3", kv_cache_memory=2**24).batch_independent

    def new_round():
        settings = {
            "block_size": rng.choice([1, 4, 16, 64]),
            "max_model_len": MODEL_LEN,
            "attention_backend": rng.choice(["auto", "auto", "reference"]),
            "batch_invariant": can_promise and rng.random() < 0.5,
        }
        llm, settings = cramped_engine(rng, rng.choice(["tiny-gpt2", "tiny-qwen3"]), MODEL_LEN, settings)
        return llm, llm, settings, lambda: call_with_text(rng)

    return check_rounds("in text", num_requests, rng, new_round, is_promised=False)


def call_with_text(rng):
    kind = rng.choice(["request", "request", "stream", "stream", "beams"])
    prompt = "".join(rng.choice(WORDS) for _ in range(rng.choice([1, 2, 8, 12])))
    max_tokens = rng.choice([1, 2, 10, 40])
    if kind == "beams":
        return Call(kind, prompt, BeamSearchParams(beam_width=rng.choice([1, 2, 5]), max_tokens=max_tokens))
    params = random_params(
        rng,
        n=rng.choice([1, 1, 2, 4]) if kind == "request" else 1,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 1]),
        stop=rng.choice([None, None, ".", [" the", "a"], "<|im_end|>"]),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.7,
        ignore_eos=rng.random() < 0.3,
        bad_words=rng.choice([None, None, ["fox", "the"]]),
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        detokenize=True,
    )
    return Call(kind, prompt, params)


def check_rounds(name, num_requests, rng, new_round, *, is_promised=True, merged=None):
    """Run calls on several engines, check every output, and compare it with that of a plain engine.

    Args:
        new_round: returns an engine, a plain one, the settings of the first and a function that makes a call.
        is_promised: Whether the bits are the same without batch_invariant.
        merged: adapter -> an engine with the model that it is merged into.
    """
    counts, num_different = Counter(), 0
    for start in range(0, num_requests, NUM_AT_A_TIME):
        llm, plain, settings, new_call = new_round()
        is_compared = (is_promised or settings["batch_invariant"]) and plain.batch_independent
        for call, output in run_calls(rng, llm, [new_call() for _ in range(min(NUM_AT_A_TIME, num_requests - start))]):
            is_right = not is_compared or is_the_same(output, expected := alone(plain, call))
            counts["requests"] += 1
            counts["compared"] += is_compared
            if call.kind == "beams":
                counts["beam searches"] += output is not None
            else:
                is_right = is_right and keeps_the_rules(llm, output, call.params)
                counts["aborted"] += was_aborted(output)
                counts["after a hit"] += output.metrics.num_cached_tokens > 0
                counts["preempted"] += output.metrics.num_preemptions > 0
            if call.adapter is not None and is_compared:
                [other] = merged[call.adapter].generate(call.prompt, call.params, use_tqdm=False)
                is_same = [one.token_ids for one in other.outputs] == [one.token_ids for one in expected.outputs]
                counts[MERGED if is_same else NOT_MERGED] += 1
            if not is_right:
                num_different += 1
                print(f"different with {settings}: {call}, {output}")
        tiny_models.assert_nothing_is_left(llm)
        if isinstance(llm.engine.planner, Speculator):
            metrics = llm.engine.planner.counts
            counts["drafts accepted"] += metrics.num_accepted_tokens
            counts["drafts rejected"] += metrics.num_draft_tokens - metrics.num_accepted_tokens
    print(f"{name}, {num_different} differ:", ", ".join(f"{count} {what}" for what, count in counts.items()))
    return not num_different and counts[NOT_MERGED] <= 0.01 * num_requests


def keeps_the_rules(llm, output, params):
    """Whether every answer keeps the rules, whatever came between."""
    return all(one.finish_reason in ("stop", "length", "abort") and is_consistent(llm, one, params) for one in output.outputs)


def is_consistent(llm, answer, params):
    ids, shows_stop = answer.token_ids, params.include_stop_str_in_output
    if len(ids) > params.max_tokens or (answer.logprobs is None) != (params.logprobs is None):
        return False
    if answer.logprobs is not None and len(answer.logprobs) != len(ids):
        return False
    if params.detokenize and answer.stop_reason is None and not (shows_stop and answer.finish_reason == "stop"):
        shown = ids[:-1] if answer.finish_reason == "stop" else ids
        text = llm.engine.tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        if answer.text != text.rstrip("\ufffd"):
            return False
    return shows_stop or params.min_tokens > 0 or not any(string in answer.text for string in params.stop or ())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--part", choices=["bits", "fast", "hits", "api"], help="default: api and bits")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--family", choices=tiny_models.FAMILIES, default="gpt2", help="of bits: gpt2 or qwen3")
    parser.add_argument("--adapters", type=int, default=0, help="of the part hits: LoRA adapters of the requests")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--speculative", choices=["ngram", "draft_model", "quantized"], help="of the part bits: with drafts")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    print(f"--seed {seed}")
    parts = {"api": use_api, "bits": compare_bits, "fast": compare_fast, "hits": compare_hits}
    chosen = ("api", "bits") if given.part is None else (given.part,)
    return 0 if all(parts[name](given.requests, random.Random(seed), given) for name in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
