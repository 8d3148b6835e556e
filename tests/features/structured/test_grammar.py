"""structured_outputs: masks by brute force, real schemas, every combination of engine features, and grammars that do harm."""

import copy
import gc
import itertools
import json
import random
import re
import sys
import time

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoinfer import LLM, BeamSearchParams, NanoinferError, SamplingParams, StructuredOutputsParams
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.features.structured import grammar
from nanoinfer.features.structured.grammar import GrammarCompiler
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.stages import keep_grammatical
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.system.installation import install_command
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.helpers import tiny_models
from tests.helpers.byte_tokenizer import EOS, IM_END, TOKENS, byte_tokenizer
from tests.helpers.sampling_rows import sampling_by
from tests.helpers.structured_cases import ADVERSARIAL, SCHEMAS, adversarial, array, enum, obj
from tests.helpers.tokenizer_files import byte_level, sentencepiece, unigram

pytestmark = pytest.mark.slow

VOCAB_SIZE = 300  # the tokenizer has 266 ids


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE)


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny-qwen3", kv_cache_memory=2**25)


def random_model(path, **overrides):
    """A folder with random weights and the byte tokenizer: a model that writes noise."""
    tiny_models.save("qwen3", path, vocab_size=VOCAB_SIZE, bos_token_id=None, **overrides)
    hf = copy.deepcopy(byte_tokenizer().hf)
    if overrides["eos_token_id"] is None:
        hf.eos_token = None
    hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def noise_path(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("noise"), eos_token_id=EOS)


@pytest.fixture(scope="module")
def noise(noise_path):
    return LLM(noise_path, kv_cache_memory=2**25)


def params(seed=1, max_tokens=40, **answer_format):
    """SamplingParams with a format, or with further parameters in `more`."""
    more = answer_format.pop("more", {})
    return SamplingParams(structured_outputs=StructuredOutputsParams(**answer_format), seed=seed, max_tokens=max_tokens, **more)


def sequence_with(state, **more):
    """A sequence whose prompt is one token, at the beginning of its grammar."""
    return Sequence("r", [0], SamplingParams(**more), 0, 999, {EOS}, constraints=() if state is None else (state,))


def batch_of(*sequences):
    return SamplingBatch.build(list(sequences), VOCAB_SIZE, torch.device("cpu"))


def kept_ids(seq):
    return set(keep_grammatical(torch.zeros(1, VOCAB_SIZE), batch_of(seq))[0].isfinite().nonzero()[:, 0].tolist())


# ---- masks

WORDS = ["a", "at", "ath", "the", "then", "😀", "你", "a€", "\n\t", 'a"\\']
SPECIAL = ["<eos>", "<|im_end|> say"]
BOOLS, ENDS = ["true", "false", 'true,"b":"th"', 'false,"b":"th"'], ["b", "ath"]


def repeated(parts, least, most):
    return ["".join(p) for num in range(least, most + 1) for p in itertools.product(parts, repeat=num)]


BOOL_AND_WORD = obj("", a={"type": "boolean"}, b=enum("th"))
FINITE = {  # a format, and every text that it allows
    "choice": ({"choice": WORDS}, WORDS),
    "regex": ({"regex": "(a|the){1,3}€?"}, [p + end for p in repeated(["a", "the"], 1, 3) for end in ("", "€")]),
    "grammar": (
        {"grammar": 'start: "a" r | "b"\nr: "th" | "t" start'},
        [p + end for p in repeated(["at"], 0, 4) for end in ENDS],
    ),
    "object": ({"json": BOOL_AND_WORD}, ["{}", '{"b":"th"}', *(f'{{"a":{a}}}' for a in BOOLS)]),
    "looks special": ({"choice": SPECIAL}, SPECIAL),
    "looks special in json": ({"json": enum(*SPECIAL, 3)}, [f'"{SPECIAL[0]}"', f'"{SPECIAL[1]}"', "3"]),
    "array": ({"json": array(enum(1, "t"), maxItems=2)}, [f"[{p[1:]}]" for p in repeated([",1", ',"t"'], 0, 2)]),
}


def test_special_tokens_and_tags_of_text_keep_their_ids():
    """As in Qwen3's tokenizer, where both are beyond the vocabulary, the special ones first."""
    hf = copy.deepcopy(byte_tokenizer().hf)
    hf.add_tokens(["<tool_call>", "pair of words"])
    tag, pair = hf.convert_tokens_to_ids(["<tool_call>", "pair of words"])
    assert IM_END < tag < pair
    answer_format = StructuredOutputsParams(regex="(<tool_call>|pair of words|p){2}")
    state = GrammarCompiler(Tokenizer(hf), VOCAB_SIZE).compile(answer_format)
    assert kept_ids(sequence_with(state)) == {ord("<"), ord("p"), tag, pair}
    for token_id in (tag, pair):
        state.advance(token_id)
    assert kept_ids(sequence_with(state)) == {EOS}


def test_a_tokenizer_that_cannot_be_converted_is_refused_in_one_sentence_and_tried_once(monkeypatch):
    tokenizer = Tokenizer(byte_tokenizer().hf)
    tokenizer.backend.decoder = None
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    sentence = r"not supported with this tokenizer, which llguidance cannot read \([^\n]+\); leave it out, or load the model"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=sentence):
            compiler.compile(StructuredOutputsParams(choice=["a"]))
        monkeypatch.setattr(grammar, "_as_text", None)


def unigram_of_characters():
    """In the form that llguidance reads: a normalizer writes the spaces."""
    backend = unigram()
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    backend.normalizer, backend.decoder = sentencepiece().normalizer, sentencepiece().decoder
    return backend


def mask_of(state, vocab_size):
    forbidden = np.empty(vocab_size, np.uint8)
    state.write_forbidden(forbidden, ())
    return forbidden


def answer_of(tokenizer, vocab_size, text):
    """The ids with which a model of so many rows writes the only answer of a grammar."""
    state = GrammarCompiler(tokenizer, vocab_size).compile(StructuredOutputsParams(choice=[text]))
    ids = []
    while not state.is_complete:
        forbidden = mask_of(state, vocab_size)
        ids.append(int(forbidden.argmin()))
        assert forbidden[ids[-1]] == 0, state.error
        state.advance(ids[-1])
    return ids


@pytest.mark.parametrize("rows", ["all", "without added tokens", "without words"])
@pytest.mark.parametrize("make", [byte_level, sentencepiece, unigram_of_characters])
def test_an_answer_has_only_ids_that_have_a_row(make, rows):
    backend = make()
    of_model, text = backend.get_vocab_size(), "say hello there"
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("hello", " there")])
    backend.add_special_tokens(["hell"])
    vocab_size = {"all": backend.get_vocab_size(), "without added tokens": of_model, "without words": of_model - 3}[rows]
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = answer_of(tokenizer, vocab_size, text)
    assert tokenizer.decode(ids).strip() == text
    assert max(ids) < vocab_size


def test_an_added_token_of_any_letters_has_its_own_text_in_a_grammar():
    backend = byte_level()
    backend.add_tokens(["café", "ünder", "Ã¼nder"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    for text in ("café", "a café", "ünder", "Ã¼nder"):
        assert tokenizer.decode(answer_of(tokenizer, backend.get_vocab_size(), text)) == text
    state = GrammarCompiler(tokenizer, backend.get_vocab_size()).compile(StructuredOutputsParams(regex="caf.(x|y)"))
    assert backend.token_to_id("café") in np.flatnonzero(mask_of(state, backend.get_vocab_size()) == 0)


@pytest.mark.parametrize(("answer_format", "words"), FINITE.values(), ids=FINITE)
def test_a_mask_has_exactly_the_tokens_with_which_a_word_of_the_language_can_go_on(compiler, answer_format, words):
    language = [word.encode() for word in words]
    root = compiler.compile(StructuredOutputsParams(**answer_format))
    rng = random.Random(0)
    for _ in range(8):
        state, text = root.copy(), b""
        for _ in range(5):  # the recursive grammar has longer words than these
            expected = {i for i, token in enumerate(TOKENS) if any(word.startswith(text + token) for word in language)}
            if text in language:
                expected.add(EOS)
            allowed = kept_ids(sequence_with(state))
            following = [word for word in language if word.startswith(text)]
            if len({word[: len(text) + 1] for word in following}) == 1 and following[0] != text:
                assert allowed  # one way to go on: llguidance may allow one token of it, the one that the tokenizer takes
                assert allowed <= expected
            else:
                assert allowed == expected, text
            going_on = sorted(allowed - {EOS})
            if not going_on:
                assert state.is_complete
                break
            token_id = rng.choice(going_on)
            state.advance(token_id)
            text += TOKENS[token_id]


def test_only_rows_with_a_grammar_are_masked_and_stop_ids_wait_for_the_end(compiler):
    free, bound = sequence_with(None), sequence_with(compiler.compile(StructuredOutputsParams(regex="a+")), stop_token_ids=[7])
    logits, batch = torch.randn(3, VOCAB_SIZE), batch_of(free, bound, free)
    assert batch.masks_logits
    masked = keep_grammatical(logits.clone(), batch)
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    assert masked[1].isfinite().nonzero()[:, 0].tolist() == [ord("a")]
    assert masked[1, ord("a")] == logits[1, ord("a")]
    bound.constraints[0].advance(ord("a"))
    assert kept_ids(bound) == {ord("a"), EOS, 7}


def test_every_route_of_the_sampler_draws_the_same_tokens(compiler):
    state = compiler.compile(StructuredOutputsParams(regex="[a-z ]{5}"))
    kinds = [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.3}]
    batch = batch_of(*(sequence_with(state, **kind) for kind in kinds), sequence_with(None, top_p=0.9))
    logits = 3 * torch.randn(len(kinds) + 1, VOCAB_SIZE)
    plain, fast = sampling_by(), sampling_by(FewLogits())
    for sampler in (plain, fast):
        drawn = sampler(logits.clone(), batch).read()
        assert not drawn.errors
        assert all(re.fullmatch(b"[a-z ]+", TOKENS[token_id]) for token_id in drawn.token_ids[:-1])
    assert plain(logits.clone(), batch).read() == fast(logits.clone(), batch).read()


# ---- answers

FORMATS = [
    ({"choice": ["yes", "no", "no idea"]}, lambda text: text in ("yes", "no", "no idea")),
    ({"regex": r"[A-Z]{2}-\d{4}( copy)?"}, lambda text: re.fullmatch(r"[A-Z]{2}-\d{4}( copy)?", text)),
    ({"grammar": 'start: "(" start? ")"'}, lambda text: text == "(" * (len(text) // 2) + ")" * (len(text) // 2)),
    ({"grammar": 'root ::= "a" root | "b"'}, lambda text: text == "a" * (len(text) - 1) + "b"),
    ({"json": obj(n={"type": "integer", "maximum": 99, "minimum": 0})}, lambda text: 0 <= json.loads(text)["n"] <= 99),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
]  # fmt: skip


@pytest.mark.parametrize(("answer_format", "is_right"), FORMATS, ids=["choice", "regex", "lark", "gbnf", "json", "json_object"])
def test_a_finished_answer_has_the_format_in_every_kind_of_request(noise, answer_format, is_right):
    kinds = [{"temperature": 0.0}, {"n": 3}, {"top_k": 3, "logprobs": 2}, {"repetition_penalty": 1.2, "logit_bias": {5: 3.0}}]
    given = [params(more=kind, **answer_format) for kind in kinds] + [params(seed=2, **answer_format)]
    outputs = noise.generate(["the"] * len(given), given, use_tqdm=False)
    answers = [answer for output in outputs for answer in output.outputs]
    for answer in answers:
        assert answer.finish_reason in ("stop", "length"), answer.error
        assert answer.finish_reason == "length" or is_right(answer.text), answer.text
    if "json_object" not in answer_format:
        assert sum(answer.finish_reason == "stop" for answer in answers) >= 3
    assert outputs[-1].outputs[0].token_ids == outputs[1].outputs[1].token_ids  # the second of n: what seed + 1 gives


def test_json_is_compact_unless_white_space_is_allowed(noise):
    schema = array({"type": "boolean"}, minItems=2, maxItems=2)
    for is_compact in (True, False):
        given = [params(seed, json=schema, disable_any_whitespace=is_compact) for seed in range(6)]
        texts = [output.outputs[0].text for output in noise.generate(["x"] * len(given), given, use_tqdm=False)]
        assert any(re.search(r"\s", text) for text in texts) != is_compact


@pytest.mark.parametrize(("which", "step"), [("llm", 3), ("noise", 1)])
def test_every_finished_answer_validates(which, step, request):
    """Brackets and quotes are made likely, so that noise comes to an end."""
    model, chosen = request.getfixturevalue(which), SCHEMAS[::step]
    bias = {model.get_tokenizer().encode(letter)[0]: 7.0 for letter in '"}]'}
    given = [params(seed, 100, json=schema, more={"logit_bias": bias}) for seed, schema in enumerate(chosen)]
    answers = [output.outputs[0] for output in model.generate(["Once"] * len(given), given, use_tqdm=False)]
    assert all(answer.finish_reason in ("stop", "length") for answer in answers)
    finished = [(schema, answer) for schema, answer in zip(chosen, answers, strict=True) if answer.finish_reason == "stop"]
    assert len(finished) > 0.3 * len(chosen)
    checker = jsonschema.FormatChecker(
        ["email", "ipv4", "ipv6", "uuid"]
    )  # a date may be February 31: a grammar has no calendar
    for schema, answer in finished:
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))


# ---- the engine's features


def test_preempted_batched_alone_and_speculative_answers_are_equal(noise_path):
    schema = obj(name={"type": "string"}, tags=array({"type": "string"}, minItems=1))
    given = [params(seed, 40, json=schema, more={"min_tokens": 30}) for seed in range(6)]
    answers = []
    for config in (
        {"kv_cache_memory": 2**25},
        {"kv_cache_memory": 2**25, "max_num_seqs": 1},
        {"kv_cache_memory": 80_000, "block_size": 4},
        {"kv_cache_memory": 2**25, "speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}},
        {"kv_cache_memory": 2**25, "async_scheduling": True},
    ):
        outputs = LLM(noise_path, **config).generate(["once upon the time"] * len(given), given, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
        assert (num_preemptions > 0) == ("block_size" in config)
        assert all(answer == answers[0] for answer in answers)


def test_without_eos_the_answer_stops_where_the_grammar_ends(tmp_path):
    model = LLM(random_model(tmp_path, eos_token_id=None), kv_cache_memory=2**24)
    assert not model.engine.eos_token_ids
    given = [params(max_tokens=3, regex="[abc]{3}"), params(max_tokens=50, regex="[abc]{3}"), params(1, 20, regex="[abc]*")]
    *ended, endless = [output.outputs[0] for output in model.generate(["x"] * 3, given, use_tqdm=False)]
    for answer in ended:
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert re.fullmatch("[abc]{3}", answer.text)
    assert endless.finish_reason == "length"  # it may always go on


STOPS = [  # a regular expression, other parameters, and how the answer ends: reason, stop_reason, number of characters
    ("[ab]{4}", {"stop_token_ids": [IM_END], "logit_bias": {IM_END: 100.0}}, ("stop", IM_END, 4)),
    ("[ab]{4}", {"min_tokens": 20}, ("stop", None, 4)),  # EOS is all that is left
    ("[ab]*", {"min_tokens": 20, "logit_bias": {EOS: 100.0}}, ("stop", None, 20)),
    ("[ab]*", {"logit_bias": {EOS: 100.0}}, ("stop", None, 0)),
    ("a*b", {"stop": "aaa", "logit_bias": {ord("a"): 100.0}}, ("stop", "aaa", 0)),
    ("[ab]{50}", {}, ("length", None, 40)),
    ("abc", {"bad_words": [[ord("b")]]}, ("error", None, 1)),
]


def test_stop_ids_stop_strings_min_tokens_and_max_tokens(noise):
    given = [params(3, regex=regex, more=more) for regex, more, _ in STOPS]
    answers = [output.outputs[0] for output in noise.generate(["x"] * len(given), given, use_tqdm=False)]
    assert [(one.finish_reason, one.stop_reason, len(one.text)) for one in answers] == [expected for *_, expected in STOPS]
    assert "mask_bad_words" in answers[-1].error


def test_answers_to_other_requests_do_not_use_up_a_grammars_limit(compiler, monkeypatch):
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 400)
    answer_format, rng = StructuredOutputsParams(regex="(a|b)*a(a|b){14}c"), random.Random(0)

    def error_after_60_tokens(state):
        return follow(state, 60, rng.choices("ab", k=60))[1]

    assert [error_after_60_tokens(compiler.compile(answer_format)) for _ in range(20)] == [None] * 20
    one = compiler.compile(answer_format)
    assert any(error_after_60_tokens(one.copy()) for _ in range(20))  # 20 answers to one request would reach it


# ---- limits while an answer grows

AMBIGUOUS = {"grammar": 'start: "%s" x\nx: "a" | x x | "a" x "a" | x x x' % ("A" * 70)}  # cheap for 70 characters


def clock_with(seconds):
    """A clock of processor time on which everything takes the same time."""
    return (i * seconds for i in itertools.count()).__next__


def follow(state, num, letters, vocab_size=VOCAB_SIZE):
    """Append up to `num` of these letters, while the grammar allows them. Returns how many, and the error."""
    forbidden = np.empty(vocab_size, np.uint8)
    for i in range(num):
        state.write_forbidden(forbidden, ())
        token_id = ord(letters[i % len(letters)])
        if state.error is not None or forbidden[token_id]:
            return i, state.error
        state.advance(token_id)
    return num, None


def test_an_answer_whose_masks_are_over_its_budget_ends_and_others_go_on(noise, compiler, monkeypatch):
    """A ms for each mask and each token: of a budget of 64 * 0.43 ms, 1.57 ms go with a token. 17 tokens leave it below 0."""
    monkeypatch.setattr(time, "thread_time", clock_with(0.001))
    slow, free = params(max_tokens=60, regex="[ab]*", more={"min_tokens": 60}), SamplingParams(max_tokens=60, ignore_eos=True)
    outputs = noise.generate(["x"] * 3, [slow, params(choice=["yes"]), free], use_tqdm=False)
    ended, short, other = (output.outputs[0] for output in outputs)
    assert (ended.finish_reason, len(ended.token_ids)) == ("error", 17)
    assert ended.error.startswith("structured_outputs: the masks of its grammar take more than 0.43 ms a token; write")
    assert (short.text, other.finish_reason, len(other.token_ids)) == ("yes", "length", 60)
    tiny_models.assert_nothing_is_left(noise)
    state = compiler.compile(StructuredOutputsParams(regex="a*"))
    assert [follow(state.copy(), 99, "a")[0] for _ in range(2)] == [17, 17]  # the budget is that of an answer
    large = GrammarCompiler(byte_tokenizer(), 60_000).compile(StructuredOutputsParams(regex="a*"))
    assert follow(large, 99, "a", vocab_size=60_000) == (99, None)  # and grows with the vocabulary: 6.4 ms a token
    monkeypatch.setattr(time, "thread_time", clock_with(0.0002))  # 0.4 ms for a token are within the budget
    assert noise.generate("x", slow, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_an_ambiguous_grammar_is_limited_by_the_items_of_a_row_and_long_lists_of_alternatives_are_not(compiler, monkeypatch):
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    num, error = follow(compiler.compile(StructuredOutputsParams(**AMBIGUOUS)), 400, "A" * 70 + "a" * 330)
    assert 70 < num < 200
    assert re.search(r"5\d\d rules apply at a place, more than 503; write it with fewer ways", error)
    names = [f"p{i}" for i in range(1000)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "additionalProperties": False}
    text = json.dumps(dict.fromkeys(names[:30]), separators=(",", ":"))
    for answer_format, answer in (
        ({"choice": [f"word {i}" for i in range(3000)]}, "word 2999"),
        ({"json": schema}, text),
        ({"grammar": f'start: "x" %json {json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}})}'}, "x" + text),
    ):
        assert follow(compiler.compile(StructuredOutputsParams(**answer_format)), len(answer), answer) == (len(answer), None)


def test_a_grammar_that_needs_more_lexer_states_gets_them_and_the_same_masks(compiler, monkeypatch):
    def masks():
        state = compiler.compile(StructuredOutputsParams(regex="(a|b)*a(a|b){14}c"))
        found = []
        for letter in "abbabaabbb" * 6:
            found.append(mask_of(state, VOCAB_SIZE).tobytes())
            state.advance(ord(letter))
        assert state.error is None
        return found

    expected = masks()
    monkeypatch.setattr(grammar, "FIRST_STATES", 20)
    assert masks() == expected


def test_the_lexer_states_of_all_running_grammars_have_one_limit(compiler, monkeypatch):
    gc.collect()  # what earlier tests have left gives nothing back here
    monkeypatch.setattr(grammar, "FIRST_STATES", 20)
    monkeypatch.setattr(grammar._LexerStates, "_num_left", 1000)
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 800)
    answer_format, text = StructuredOutputsParams(regex="(a|b)*a(a|b){15}c"), "abbabaabbb" * 5
    one, other = compiler.compile(answer_format), compiler.compile(answer_format)
    assert follow(one, 50, text)[1] is None
    num_taken = 1000 - grammar._LexerStates._num_left
    monkeypatch.setattr(grammar._LexerStates, "_num_left", 0)
    num, error = follow(other, 50, text)
    assert num < 50
    assert error == "structured_outputs: 80 lexer states are more than other running grammars leave; try again later"
    compiler.check(answer_format)  # the grammar is not to blame
    del one
    assert grammar._LexerStates._num_left == num_taken > 0
    assert follow(compiler.compile(answer_format), 50, text) == (50, None)


def test_a_grammar_that_has_reached_a_limit_is_remembered_for_a_while_and_128_of_them(compiler, monkeypatch):
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 20)
    hard = StructuredOutputsParams(regex="[ab]*a[ab]{11}")
    compiler.check(hard)
    assert follow(compiler.compile(hard), 50, "abbab")[1].endswith("too many states; repeat fewer times in them")
    with pytest.raises(InvalidValueError, match=r"regex cannot be used: it has just reached a limit \(.* too many states"):
        compiler.check(hard)
    compiler.check(StructuredOutputsParams(regex="[ab]*a[ab]{10}"))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + grammar.REFUSED_SECONDS)
    compiler.check(hard)
    monkeypatch.undo()
    for i in range(128):
        compiler._refuse(StructuredOutputsParams(regex=f"a{i}"), "it costs too much")
    compiler.check(hard)
    assert len(compiler._refused) == 128


# ---- refusals


UNUSABLE = [
    ({"regex": "("}, "regex cannot be used: "),
    ({"regex": ""}, "regex"),
    ({"regex": "x{0}"}, "only an empty answer"),
    ({"regex": r"[^\s\S]"}, "regex cannot be used: no text satisfies it$"),
    ({"json": {"$ref": "#"}}, "json cannot be used: no text satisfies it$"),
    ({"regex": "(?=a)b"}, "regex cannot be used: regex parse error: .* is not supported"),
    ({"json": {"not": {}}}, 'these keywords cannot be enforced: "not"; leave them out'),
    ({"grammar": "start: x"}, 'unknown name: "x"'),
    ({"json": {"type": "nope"}}, "Invalid type: nope"),
    ({"grammar": 'start: a a a\n\n\na: %json {"type": "nope"}'}, "cannot be used: Invalid type: nope$"),
    ({"json": {"uniqueItems": True}}, "uniqueItems"),
    ({"json": {"$ref": "https://example.com/schema"}}, "json cannot be used"),
    ({"regex": "a" * 140_000}, "at most 131072 characters, got 140000"),
    ({"json": {"const": "a" * 9000}}, "each string of json must have at most 8192"),
    ({"choice": ["\ud800"]}, "choice cannot be used"),
    ({"regex": "\ud800"}, "regex cannot be used"),
]


@pytest.mark.parametrize(("given", "says"), UNUSABLE, ids=lambda value: ascii(value)[:40])
def test_a_format_that_cannot_be_used_is_refused_before_any_work(noise, given, says):
    with pytest.raises(InvalidValueError, match=says):
        noise.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(**given)), use_tqdm=False)
    tiny_models.assert_nothing_is_left(noise)


def test_contradictions_and_a_missing_tokenizer_or_extra_are_refused(compiler, monkeypatch):
    answer_format = StructuredOutputsParams(choice=["not seen before"])
    for more, error, says in (
        ({"ignore_eos": True}, InvalidValueError, "ignore_eos cannot be used"),
        ({"allowed_token_ids": [1]}, InvalidValueError, "allowed_token_ids cannot be used"),
        ({"structured_outputs": {"choice": ["a"]}}, InvalidTypeError, "must be StructuredOutputsParams"),
    ):
        with pytest.raises(error, match=says):
            SamplingParams(**{"structured_outputs": answer_format} | more)
    with pytest.raises(NanoinferError, match="structured_outputs"):
        BeamSearchParams(beam_width=2, structured_outputs=answer_format)
    with pytest.raises(InvalidValueError, match="needs a tokenizer"):
        GrammarCompiler(None, VOCAB_SIZE).compile(answer_format)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("structured"))):
        compiler.compile(answer_format)


# ---- grammars that do harm


@pytest.mark.parametrize("num", [len(ADVERSARIAL), pytest.param(1000, marks=pytest.mark.long)])
def test_an_adversarial_grammar_is_refused_or_ends(noise, num, monkeypatch):
    """The second process is stopped after 1.5 s, and this one takes less than 2 s, of a processor that others may use."""
    monkeypatch.setattr(grammar._trial_process, "_max_seconds", 60)
    num_refused = 0
    for name, answer_format in map(adversarial, range(num)):
        used = time.process_time()  # not the time that passes, since a busy machine is no failure
        try:
            [output] = noise.generate("x", params(max_tokens=20, **answer_format), use_tqdm=False)
            assert output.outputs[0].finish_reason in ("stop", "length", "error"), name
            num_refused += output.outputs[0].error is not None
        except (InvalidValueError, InvalidTypeError):
            num_refused += 1
        assert time.process_time() - used < 2, name
    assert 0.1 * num < num_refused < 0.9 * num
    [output] = noise.generate("x", params(choice=["still here"]), use_tqdm=False)
    assert output.outputs[0].text == "still here"
    tiny_models.assert_nothing_is_left(noise)
