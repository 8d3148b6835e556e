"""What a run of the covering array computes, and what it must give: the answers of the features one at a time.

The expected answers come from a plain engine: the model's file as it is, one request at a time, with nothing that should change
no token. What changes tokens is said there in another way: merged weights for an adapter, allowed_token_ids for a grammar of
digits, logit_bias for a stage of one's own, one request with its own seed for each of n answers.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from nanoinfer import LLM, BeamSearchParams, NanoinferError, SamplingParams, StructuredOutputsParams
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.own_code.logits_processors import LogitsProcessor
from nanoinfer.sampling.sampler import STAGES
from tests.features.covering import FACTORS, Run
from tests.helpers import tiny_models, tool_cases
from tests.helpers.lora_adapters import linear_shapes, write_adapter

# On each of two ranks rows have whole groups of 64 numbers, so that quantization="int4" rounds them as one rank does.
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODELS = {
    "full attention": ("qwen3", {}),
    "sliding windows": ("gemma3_window", {"num_hidden_layers": 3}),
    "attention sinks": ("gpt_oss_window", {"num_hidden_layers": 2}),
    "states": ("qwen3_5", {}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 128}),
}
HARMONY = (
    "{% for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKS = [f"<|{name}|>" for name in ("im_start", "im_end", "start", "end", "message", "channel", "constrain", "call", "return")]
MARKS += ["<think>", "</think>", "<tool_call>", "</tool_call>"]
STRICT = [tool | {"function": tool["function"] | {"strict": True}} for tool in tool_cases.TOOLS]

SEED = 11
NUM_TOKENS = 6  # of an answer
TEMPERATURE = 0.2  # of the answers with n > 1
PREFIX = [i * i % 60 + 3 for i in range(1, 34)]  # four blocks of 8 tokens, longer than the windows of 24
CANDIDATES = [[*PREFIX, *(3 + (7 * i + k * k) % 60 for k in range(4 + 3 * (i % 4)))] for i in range(400)]
TOWNS = (
    "Oslo Rome Paris Lima Cairo Delhi Quito Accra Seoul Turin Lyon Kyoto Bonn Bern Riga Nice Minsk Split Graz Malmo "
    "Ghent Porto Cork Pisa Brno Lodz Vigo Basel Genoa Omsk Perth Dakar Hanoi Osaka Busan Cusco Davos Derby Dover Essen"
).split()
CITIES = [f"{direction}{town}" for direction in ("", "North ", "South ", "East ", "West ") for town in TOWNS]
ADAPTERS = ("one", None, "two")  # the adapters of a run's requests
PRIORITIES = (2, 0, 1)
# Noise that is more than the dtype and the kernels of rounded weights round, in standard deviations of the embeddings.
SHAKES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2, "int8": 3e-2, "int4": 3e-2}
NUM_SHAKES = 2
# What an engine on a device is given: steps that Triton's interpreter computes in seconds.
SHORT = {"max_num_batched_tokens": 16, "chunk_size": 16, "max_model_len": 32, "cudagraph_capture": "first_use"}
DEVICES: dict[str, dict] = {"cpu": {}, "sim": SHORT | {"device": "sim"}, "cuda": SHORT | {"device": "cuda"}}
BIAS = 4.0  # of every third token id, by stages and processors of one's own


class Question(NamedTuple):
    """A request: its prompt's place in CANDIDATES or CITIES, and the name of its adapter."""

    number: int
    adapter: str | None


class Answer(NamedTuple):
    """One of the answers to a request. scores: log-probabilities, if they were asked for."""

    token_ids: list[int]
    scores: list[float]


def prefer(logits: torch.Tensor, batch: object = None) -> torch.Tensor:
    """A stage of the sampler: every third token id is more likely."""
    logits[:, ::3] += BIAS
    return logits


class Preferring(LogitsProcessor):
    """prefer() with vLLM's signature."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return prefer(logits)


class Checkpoints:
    """Tiny checkpoints with a tokenizer and two adapters for each model, each written when it is first asked for.

    changes: for a name of MODELS, what its config has in other sizes. first: of a prompt, the tokens before it are left out.
    num_tokens: of an answer.
    """

    def __init__(
        self, folder: Path, changes: dict[str, dict] | None = None, first: int = 0, num_tokens: int = NUM_TOKENS
    ) -> None:
        self.folder, self.changes, self.first, self.num_tokens = folder, changes or {}, first, num_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(tool_cases.BUNDLED)
        self.tokenizer.add_tokens([mark for mark in MARKS if mark not in self.tokenizer.get_vocab()], special_tokens=True)
        vocab = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        self.digits = [i for i, token in enumerate(vocab) if token.isascii() and token.isdigit()]

    def path(self, model: str) -> Path:
        path = self.folder / model.replace(" ", "-")
        if not path.exists():
            family, sizes = MODELS[model]
            sizes = WIDTHS | {"max_position_embeddings": 1024, "vocab_size": len(self.tokenizer)} | sizes
            sizes |= self.changes.get(model, {})
            tiny_models.save(family, path, **sizes)
            if model == "states":
                tiny_models.add_mtp(path)
            self.tokenizer.chat_template = HARMONY if model == "attention sinks" else tool_cases.TEMPLATE
            self.tokenizer.save_pretrained(path)
            shapes = {module: shape for module, shape in linear_shapes(path).items() if not module.startswith("mtp.")}
            for seed, name in enumerate(filter(None, ADAPTERS)):
                write_adapter(path / name, shapes, seed=seed, lora_alpha=16)
        return path

    def adapter(self, model: str, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, ADAPTERS.index(name) + 1, str(self.path(model) / name))

    def new_folder(self) -> str:
        return tempfile.mkdtemp(dir=self.folder)


def settings(checkpoints: Checkpoints, run: Run, cache_folder: str | None = None) -> dict:
    """The arguments of LLM for the features of a run."""
    drafts = {
        "drafts: n-gram": {"method": "ngram", "prompt_lookup_min": 1},
        "drafts: dense model": {"method": "draft_model", "model": str(checkpoints.path("full attention"))},
        "drafts: model of this kind": {"method": "draft_model", "model": str(checkpoints.path(run["model"]))},
        "drafts: MTP": {"method": "mtp"},
        "drafts: quantized": {"method": "quantized"},
    }
    chosen = {
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
        "adapter per request": {"enable_lora": True, "max_loras": 2},
        "prefix_cache_dir": {"prefix_cache_dir": cache_folder},
        "async scheduling": {"async_scheduling": True},
        "two ranks": {"tensor_parallel_size": 2},
        "eager": {"enforce_eager": True},
        "batch_invariant": {"batch_invariant": True},
        "chunked prompts": {"chunk_size": 16},
        "priority": {"scheduling_policy": "priority", "max_num_seqs": 2},
        "own stages": {"stages": [prefer, *STAGES]},
        "own processors": {"logits_processors": [Preferring]},
        **DEVICES,
    }
    given = {"dtype": run["dtype"], "kv_cache_memory": 2**23, "block_size": 8, "max_num_seqs": 8, "seed": 0}
    for value in run.values():
        given |= chosen.get(value, {})
    if run["drafts"]:
        given["speculative_config"] = drafts[run["drafts"]] | {"num_speculative_tokens": 3, "adaptive": False}
    return given


def ask(
    checkpoints: Checkpoints, llm: LLM, run: Run, questions: list[Question], others: dict | None = None
) -> list[list[Answer]]:
    """Return all answers to each question. The questions are asked together.

    others: Parameters of the requests in place of those that a run's features give.
    """
    requests: dict = {}  # arguments of generate(), chat() or beam_search()
    params: dict = {"max_tokens": 3 if run["search"] or run["calls"] else checkpoints.num_tokens}
    if run["policy"]:
        requests["priority"] = list(PRIORITIES[: len(questions)])
    if run["adapters"]:
        requests["lora_request"] = [checkpoints.adapter(run["model"], question.adapter) for question in questions]
    if run["calls"] == "required calls":
        requests |= {"tools": tool_cases.TOOLS, "tool_choice": "required"}
    elif run["calls"]:
        requests["tools"] = STRICT
    if run["form"]:
        params["structured_outputs"] = StructuredOutputsParams(regex="[0-9]{64}")
    if run["number"]:
        params |= {"n": 2, "temperature": TEMPERATURE}
    prompts = [CANDIDATES[question.number][checkpoints.first :] for question in questions]
    if run["search"]:
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=2, **params), **requests)
        return [[Answer(beam.tokens, [beam.cum_logprob]) for beam in output.sequences] for output in found]
    sampling = SamplingParams(**{"temperature": 0.0, "seed": SEED, "logprobs": 1} | params | (others or {}))
    if run["calls"]:
        chats = [[{"role": "user", "content": f"How warm is {CITIES[question.number]}?"}] for question in questions]
        outputs = llm.chat(chats, sampling, use_tqdm=False, **requests)
    else:
        outputs = llm.generate(prompts, sampling, use_tqdm=False, **requests)
    answers = [output.outputs for output in outputs]
    assert {one.finish_reason for several in answers for one in several} <= {"stop", "length"}
    return [[Answer(one.token_ids, scores_of(one.logprobs)) for one in several] for several in answers]


def scores_of(logprobs: list[dict]) -> list[float]:
    return [entry.logprob for position in logprobs for entry in position.values()]


def computed(checkpoints: Checkpoints, run: Run, questions: list[Question]) -> tuple[list[list[Answer]], int]:
    """A run's answers, and how many tokens were found in prefix_cache_dir.

    With prefix_cache_dir there is a second engine, which finds the blocks of the first one and must give the same answers.
    """
    cache_folder = checkpoints.new_folder() if run["disk"] else None
    given, num_found = settings(checkpoints, run, cache_folder), 0
    try:
        with LLM(checkpoints.path(run["model"]), **given) as llm:
            answers = ask(checkpoints, llm, run, questions)
            tiny_models.assert_nothing_is_left(llm)
        if run["disk"]:
            with LLM(checkpoints.path(run["model"]), **given) as llm:
                again = ask(checkpoints, llm, run, questions)
                assert [[one.token_ids for one in several] for several in again] == [
                    [one.token_ids for one in several] for several in answers
                ]  # a hit skips the first cuts of a prompt, which may change the last bits of scores
                num_found = llm.engine.block_manager.store.counts["external_prefix_cache_hits"]
    finally:
        if cache_folder is not None:
            shutil.rmtree(cache_folder)
    return answers, num_found


def refusal(checkpoints: Checkpoints, run: Run) -> str | None:
    """The error with which the engine refuses a run, or None."""
    try:
        computed(checkpoints, run, [Question(0, ADAPTERS[0])])
    except NanoinferError as error:
        return str(error).replace(str(checkpoints.folder), "FOLDER")
    return None


class Oracle:
    """The answers of the features one at a time, by plain engines that are loaded once each."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._engines: dict[tuple, LLM] = {}
        self._expected: dict[tuple, list[list[int]] | None] = {}

    def questions(self, run: Run) -> tuple[list[Question], list[list[list[int]]]]:
        """Return a question for each of ADAPTERS, and the tokens of its answers, which hinge on no rounding."""
        questions, answers = [], []
        numbers = iter(range(len(CITIES if run["calls"] else CANDIDATES)))
        for name in ADAPTERS:
            adapter = name if run["adapters"] else None
            of_adapter = (Question(number, adapter) for number in numbers)
            found = next(((one, tokens) for one in of_adapter if (tokens := self.expected(run, one)) is not None), None)
            assert found is not None, "the answers of all candidates hinge on roundings"
            questions.append(found[0])
            answers.append(found[1])
        return questions, answers

    def expected(self, run: Run, question: Question) -> list[list[int]] | None:
        """The tokens of each answer to a question. None: a rounding may change them.

        Kernels add in another order, and multiply rounded weights by rounded inputs, so eager and compiled models must agree.
        """
        asked = [run[factor] for factor in ("model", "dtype", "quantization", "calls", "form", "search", "number", "stages")]
        is_split = bool(run["quantization"] and run["ranks"])  # a rank rounds its own part of the weights
        key = (*asked, is_split, question)
        if key not in self._expected:
            llm = self._engine(run, question.adapter, "eager")
            tokens = self._tokens(llm, run, question)
            is_clear = tokens == self._tokens(self._engine(run, question.adapter, ""), run, question)
            size = SHAKES[run["quantization"] or run["dtype"]] * (3 if is_split else 1)
            with shaken(llm, size):
                is_clear = is_clear and all(self._tokens(llm, run, question) == tokens for _ in range(NUM_SHAKES))
            self._expected[key] = tokens if is_clear else None
        return self._expected[key]

    def _engine(self, run: Run, adapter: str | None, execution: str) -> LLM:
        """A plain engine. An adapter is merged into the weights, but not if these are rounded."""
        key = (run["model"], run["dtype"], run["quantization"], adapter, execution)
        if key not in self._engines:
            plain = only(run, "model", "dtype", "quantization") | {"execution": execution}
            more: dict = {"enable_prefix_caching": False}
            if adapter is not None and run["quantization"]:
                more["enable_lora"] = True
            elif adapter is not None:
                more["lora"] = self._checkpoints.path(run["model"]) / adapter
            self._engines[key] = LLM(self._checkpoints.path(run["model"]), **settings(self._checkpoints, plain) | more)
        return self._engines[key]

    def _tokens(self, llm: LLM, run: Run, question: Question) -> list[list[int]]:
        plain = only(run, "model", "calls", "search")
        if question.adapter is not None and run["quantization"]:
            plain["adapters"] = run["adapters"]
        others: dict = {}
        if run["form"] and run["calls"] != "required calls":  # where a call is required there is no message to have the form
            others["allowed_token_ids"] = self._checkpoints.digits
        if run["stages"] and not run["search"]:  # nothing is drawn in a beam search
            others["logit_bias"] = dict.fromkeys(range(0, llm.info.vocab_size, 3), BIAS)
        draws = [others | {"temperature": TEMPERATURE, "seed": SEED + i} for i in range(2)] if run["number"] else [others]
        answers = [ask(self._checkpoints, llm, plain, [question], draw)[0] for draw in draws]
        return [answer.token_ids for several in answers for answer in several]


def only(run: Run, *factors: str) -> Run:
    """The run with the first values of the other factors."""
    return {factor: run[factor] if factor in factors else values[0] for factor, values in FACTORS.items()}


@contextmanager
def shaken(llm: LLM, size: float) -> Iterator[None]:
    """Add noise to the embeddings of an eager model. size: of the noise, in standard deviations of the embeddings."""
    generator = torch.Generator().manual_seed(0)

    def shake(module: torch.nn.Module, inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        return embedded + size * embedded.std() * torch.randn(embedded.shape, generator=generator).to(embedded.dtype)

    modules = llm.engine.executor.runner.model.modules()
    [embedding] = [module for module in modules if isinstance(module, torch.nn.Embedding)]
    hook = embedding.register_forward_hook(shake)
    try:
        yield
    finally:
        hook.remove()


def answers_alone(checkpoints: Checkpoints, run: Run, questions: list[Question]) -> list[list[Answer]]:
    """The answers of a run without what only changes how they are computed, each question alone."""
    factors = ("model", "dtype", "quantization", "adapters", "invariance", "form", "calls", "search", "number", "stages")
    alone = only(run, *factors)
    with LLM(checkpoints.path(run["model"]), **settings(checkpoints, alone)) as llm:
        return [ask(checkpoints, llm, alone, [question])[0] for question in questions]
