"""Compile StructuredOutputsParams to a grammar over token ids, which says which ids may follow.

In: the parameters of a request. Out: a GrammarState for each of its answers. llguidance (extra [structured]) does the work.

A grammar is a program that comes with a request. It is refused if it is too large, not valid, or too expensive.
llguidance limits most of what a grammar costs, but not all: a few take minutes, or overflow the stack of the process. So each
new grammar is first tried in a process that can be stopped (helper_process.py), whose code is at the end of this file.

A grammar may become expensive later, between everyone's steps. So each answer has a budget of processor time for its masks, and
all running grammars have a number of lexer states together. A server refuses a grammar that has just reached a limit.
"""

import copy
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.errors import TRY_LATER, InvalidValueError, QueueFullError, UnsupportedError, first_line
from nanoinfer.features.structured.json_schema import enforceable
from nanoinfer.features.structured.params import StructuredOutputsParams
from nanoinfer.scheduling.sequence import Constraint
from nanoinfer.system.helper_process import HelperProcess, serve
from nanoinfer.system.installation import install_command
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 2**17  # characters of a schema, a regular expression, all choices, or a grammar
MAX_KEPT = 128  # the number of grammars that need no second trial
MAX_WAIT_SECONDS = 2.0  # the longest wait for the trials of other grammars
TRIAL_SECONDS, TRIAL_BYTES = 1.5, 2**30  # limits of a trial: processor seconds, memory
MAX_STOPPED_SECONDS = 4.0  # a trial process that has neither replied nor ended after this time is killed
TRIAL_TOKENS, TRIAL_TOKEN_SECONDS = 64, 0.05
# Processor time of an answer for each token, and more for each id of the vocabulary, which a mask examines. Ordinary masks take
# 10 us for 2,000 ids, and 50 us to 3 ms for 150,000. Time that is left is kept for later tokens, up to that of BUDGET_TOKENS.
TOKEN_SECONDS, TOKEN_SECONDS_PER_ID, BUDGET_TOKENS = 4e-4, 1e-7, 64
TOKEN_SECONDS_PER_ITEM = 1e-5  # more for each item beyond BASE_ITEMS: 1,000 optional integers take 13 ms a token
REFUSED_SECONDS = 60.0  # how long a server refuses a grammar that has reached a limit
# Lexer states: those of each grammar, and what all running grammars may have more. Of 200 ordinary schemas, 2 need over 1,000.
FIRST_STATES, MAX_RUNNING_STATES = 2_000, 400_000
MAX_REBUILD_SECONDS = 0.01  # a grammar that takes longer to compile is never compiled again between steps, to have more states
# Items of a row of the parser. The time for a row grows with their second or third power: 500 take 8 ms, 2,000 take 0.4 s.
BASE_ITEMS, ITEMS_PER_PROPERTY, MAX_ITEMS = 500, 5, 5_000

# What llguidance may spend on a grammar's lexer and on a mask. It counts in its own unit, of which a us takes 14 to 50.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,  # and more for many alternatives
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

_ALTERNATIVES = re.compile(r'"(?:properties|anyOf|oneOf)": ?(?=[{\[])')
_LISTING = re.compile(r"\n *\d+ \| ")
# llguidance's words for what a user can change, and ours.
_WORDS = (
    ("NoExtensionBias", "no text satisfies it"),
    (r"parser error: Too many items .*", "too many rules apply to one token; write it with less recursion or longer strings"),
    (
        r"Parser Error: Current row has (\d+) items; max is (\d+).*",
        r"\1 rules apply at a place, more than \2; write it with fewer ways to read a text, lists as list: item | list item",
    ),
    (r"lexer error: too many (states|expressions).*", r"its regular expressions have too many \1; repeat fewer times in them"),
    (r"^(?:at )?\d+\(\d+\): (?:invalid regex .*? \(in regex\)|failed to compile JSON schema): ", ""),
    (r"Unimplemented keys: \[(.*)\]", r"these keywords cannot be enforced: \1; leave them out"),
    (" <non-verbose/>", ""),
)
_TAG = re.compile(r"<[!-~]*>")
_TOKEN_ID = re.compile(r"<\[\d+\]>")  # a token in a grammar, such as a marker of gpt-oss's format
_END = "<|end of the grammar|>"
_SAMPLE = ' {"a":\n\t[1,  "é€😀"]}\n'


class _LexerStates:
    """A part of the lexer states that all running grammars have in addition to their FIRST_STATES. Its end gives it back."""

    _lock = RLock()
    _num_left = MAX_RUNNING_STATES

    def __init__(self, num: int) -> None:
        """Raises: QueueFullError if so many are not left."""
        self.num = 0
        with self._lock:
            if num > self._num_left:
                raise QueueFullError(f"{num} lexer states are more than other running grammars leave; {TRY_LATER}")
            type(self)._num_left -= num
            self.num = num

    def __del__(self) -> None:
        with self._lock:
            type(self)._num_left += self.num


@dataclass(frozen=True, slots=True)
class _Request:
    """What the answers to a request have in common."""

    make_matcher: Callable[[int], "LLMatcher"]  # takes the most lexer states
    end_id: int  # the id that llguidance has for EOS
    token_seconds: float  # the budget of an answer for each token
    most_seconds: float  # the most that is kept for later tokens
    refuse: Callable[[str], None]  # called with the reason if an answer reaches a limit


class GrammarState(Constraint):
    """The state of an answer in its grammar."""

    has_mask = True

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._seconds_left = math.inf
        self._refusal = ""  # why there are no more lexer states
        self._states: _LexerStates | None = None
        self._num_states = min(FIRST_STATES, _LIMITS["max_lexer_states"])
        start = time.thread_time()
        self._matcher = request.make_matcher(self._num_states)
        if time.thread_time() - start > MAX_REBUILD_SECONDS:
            self._grow(_LIMITS["max_lexer_states"])

    def copy(self) -> "GrammarState":
        """Return a copy with a whole budget. Copies share the lexer and its states, until one needs more."""
        state = super().copy()
        state._token_ids, state._matcher = list(self._token_ids), self._matcher.deep_copy()
        state._seconds_left = self._request.most_seconds
        return state

    def advance(self, token_id: int) -> None:
        start = time.thread_time()
        self._token_ids.append(token_id)
        self._matcher.consume_token(token_id)
        left = min(self._seconds_left + self._request.token_seconds, self._request.most_seconds)
        self._seconds_left = left - (time.thread_time() - start)

    def _grow(self, num: int) -> None:
        """Replace the matcher by one with more lexer states, which has read the same tokens."""
        try:
            self._states, self._num_states = _LexerStates(num), num
        except QueueFullError as error:
            self._refusal = str(error)
            return
        self._matcher = self._request.make_matcher(num)
        self._matcher.consume_tokens(self._token_ids)

    @property
    def _lacks_states(self) -> bool:
        has_more = self._num_states < _LIMITS["max_lexer_states"]
        return has_more and self._matcher.is_error() and "too many states" in self._matcher.get_error()

    def write_forbidden(self, forbidden: np.ndarray, stop_ids: Iterable[int]) -> None:
        """Write the mask of the next token. stop_ids may follow if the answer may end here."""
        start = time.thread_time()
        mask = self._matcher.compute_bitmask()
        while self._lacks_states and not self._refusal:
            self._grow(min(4 * self._num_states, _LIMITS["max_lexer_states"]))
            mask = self._matcher.compute_bitmask()
        self._seconds_left -= time.thread_time() - start
        if error := self.error:
            forbidden[:] = 1
            if not self._lacks_states:
                self._request.refuse(error.partition(": ")[2])
            return
        bits = np.frombuffer(mask, dtype=np.uint8)
        forbidden[:] = np.unpackbits(~bits, bitorder="little", count=len(forbidden))
        forbidden[self._request.end_id : self._request.end_id + 1] = 1  # the model may lack this id
        forbidden[list(stop_ids)] = not self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed further, such as a limit that was reached. None: tokens can follow."""
        if self._matcher.is_error():
            reason = self._refusal if self._lacks_states else _reason(self._matcher)
        elif self._seconds_left < 0 and not self._matcher.is_stopped():
            milliseconds = 1000 * self._request.token_seconds
            reason = f"the masks of its grammar take more than {milliseconds:.2g} ms a token; write fewer ways to read a text"
        else:
            return None
        return f"structured_outputs: {reason}"


class GrammarCompiler:
    """Compiles grammars for one tokenizer. It may be called by any thread: llguidance compiles without Python's lock.

    The tokenizer is converted at the first call, which takes a second for 152k ids and holds Python's lock.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._converted: tuple[LLTokenizer, int] | None = None
        self._refusal = ""  # why the tokenizer cannot be converted
        self._refused: dict[StructuredOutputsParams, tuple[float, str]] = {}  # until when, and why

    def compile(self, params: StructuredOutputsParams) -> GrammarState:
        """Return the GrammarState at the start of an answer, which shares nothing with others. After the trial it takes 0.5 to
        5 ms.

        A grammar that is not valid or too expensive is refused, and so is a new grammar while too many others wait for a trial.
        """
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            hint = install_command("structured")
            raise UnsupportedError(f"structured_outputs requires llguidance, which is not installed; {hint}") from error
        tokenizer, end_id = self._convert()
        grammar = _tried_grammar(params)
        limits = _limits(grammar)

        def make_matcher(num_states: int) -> LLMatcher:
            most = LLParserLimits(**limits | {"max_lexer_states": num_states})
            return LLMatcher(tokenizer, grammar, log_level=0, limits=most)

        seconds = TOKEN_SECONDS + TOKEN_SECONDS_PER_ID * self._vocab_size
        more = TOKEN_SECONDS_PER_ITEM * (limits["max_items_in_row"] - BASE_ITEMS)
        most, refuse = max(seconds + more, BUDGET_TOKENS * seconds), partial(self._refuse, params)
        request = _Request(make_matcher, end_id, token_seconds=seconds + more, most_seconds=most, refuse=refuse)
        grammar_state = GrammarState(request)
        forbidden = np.empty(self._vocab_size, dtype=np.uint8)
        grammar_state.write_forbidden(forbidden, ())  # the first mask takes longest, and here it delays no other request
        if refusal := grammar_state.error or ("only an empty answer is allowed" if forbidden.all() else ""):
            error_class = QueueFullError if refusal.endswith(TRY_LATER) else InvalidValueError
            raise error_class(f"{params.kind} cannot be used: {refusal}")
        return grammar_state.copy()

    def check(self, params: StructuredOutputsParams) -> None:
        """Check that no answer has reached a limit of this grammar lately. Raises: InvalidValueError."""
        until, reason = self._refused.get(params, (0.0, ""))
        if time.monotonic() < until:
            raise InvalidValueError(f"{params.kind} cannot be used: it has just reached a limit ({reason})")

    def _refuse(self, params: StructuredOutputsParams, reason: str) -> None:
        self._refused.pop(params, None)
        self._refused[params] = time.monotonic() + REFUSED_SECONDS, reason
        for oldest in list(self._refused)[:-MAX_KEPT]:
            del self._refused[oldest]

    def _convert(self) -> "tuple[LLTokenizer, int]":
        """Convert the tokenizer for llguidance. Returns its EOS too, an added token, since a model may have none or several."""
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            raise InvalidValueError(
                "structured_outputs needs a tokenizer, which this checkpoint lacks; load the model with one"
            )
        with self._lock:
            if self._converted is None and not self._refusal:
                backend = copy.deepcopy(self._tokenizer.backend)
                backend.add_special_tokens([_END])
                num_ids = max(self._vocab_size, *(1 + token_id for token_id in backend.get_vocab().values()))
                end_id = backend.get_vocab()[_END]
                try:
                    as_text = _as_text(backend.to_str(), self._vocab_size, self._tokenizer.own_texts)
                    converted = LLTokenizer(as_text, n_vocab=num_ids, eos_token=end_id)
                    # If a grammar allows only one text, llguidance encodes it, and allows the first of its tokens.
                    if converted.decode_str(converted.tokenize_str(_SAMPLE)) == _SAMPLE:
                        self._converted = converted, end_id
                    else:
                        self._refusal = "which changes the text"
                except Exception as error:  # llguidance knows fewer kinds of decoders and models than tokenizers does
                    self._refusal = f"which llguidance cannot read ({first_line(error)})"
            if self._converted is None:
                raise UnsupportedError(
                    f"structured_outputs is not supported with this tokenizer, {self._refusal}; leave it out, or load the "
                    "model with another tokenizer"
                )
            return self._converted


def _as_text(tokenizer_json: str, vocab_size: int, own_texts: dict[str, str]) -> str:
    """Return the tokenizer with all tags as plain text: Qwen3's <tool_call> as well as the names of special tokens.

    llguidance takes an added token that looks like a tag for a special token, which no text of a grammar can contain. And
    when it encodes a text that contains the name of a special token, it would offer that token instead of the text. So it would
    with an id that the model lacks, which is from vocab_size on. own_texts: as in Tokenizer.
    """
    tokenizer = json.loads(tokenizer_json)
    added, model = tokenizer["added_tokens"], tokenizer["model"]
    vocab = model["vocab"]
    hidden = {token["id"] for token in added if token["special"] or own_texts.get(token["content"]) in vocab}

    def name(text: str, token_id: int) -> str:
        if text != _END and (token_id in hidden or token_id >= vocab_size):
            return f"<|token {token_id} of the grammar|>"
        return own_texts.get(text, text)

    if isinstance(vocab, list):  # Unigram's, where positions are ids
        model["vocab"] = [[name(text, token_id), score] for token_id, (text, score) in enumerate(vocab)]
    else:
        ids = vocab | {token["content"]: token["id"] for token in added}  # otherwise a token would get another id
        model["vocab"] = {name(text, token_id): token_id for text, token_id in ids.items()}
        unknown, prefix = model.get("unk_token"), model.get("continuing_subword_prefix") or ""
        model["unk_token"] = name(unknown, ids.get(unknown, 0))
        lost = ids.keys() - model["vocab"].keys()
        if lost and "merges" in model:
            model["merges"] = [(a, b) for a, b in model["merges"] if lost.isdisjoint((a, b, a + b.removeprefix(prefix)))]
        is_text = {token["id"] for token in added if token["content"] in own_texts or _TAG.fullmatch(token["content"])} - hidden
        added[:] = [token for token in added if token["id"] >= vocab_size or token["id"] not in is_text]
    for token in added:
        token["content"] = name(token["content"], token["id"])
    return json.dumps(tokenizer)


@lru_cache(MAX_KEPT)  # errors are not cached, since a busy machine may be their cause
def _tried_grammar(params: StructuredOutputsParams) -> str:
    """Return the parameters as a grammar that the trial process has tried."""
    grammar = _grammar(params)
    refusal = _trial_process.ask(json.dumps(_TOKEN_ID.sub("<[255]>", grammar)))  # the trial's tokens are bytes
    if refusal is None:
        refusal = f"the grammar takes more than {TRIAL_SECONDS} s, or too much memory"
    if refusal:
        raise InvalidValueError(f"{params.kind} cannot be used: {refusal}")
    return grammar


def _grammar(params: StructuredOutputsParams) -> str:
    """Return the parameters as a grammar in llguidance's own notation."""
    from llguidance import LLMatcher, grammar_from

    kind = params.kind
    text = '{"type": "object"}' if params.json_object else json.dumps(params.choice) if params.choice else getattr(params, kind)
    if len(text) > MAX_CHARACTERS:
        raise InvalidValueError(f"{kind} must have at most {MAX_CHARACTERS} characters, got {len(text)}")
    if kind in ("json", "json_object"):
        schema = enforceable("json", json.loads(text), whitespace_flexible=not params.disable_any_whitespace)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    try:
        return grammar_from(kind, text)  # type: ignore[arg-type]
    except ValueError as error:  # for example a GBNF grammar that cannot be converted
        raise InvalidValueError(f"{kind} cannot be used: {first_line(error)}") from error


@lru_cache(MAX_KEPT)
def _limits(grammar: str) -> dict[str, Any]:
    """Return llguidance's limits. Each alternative and each optional property may need a few items of a row."""
    num_properties = 0
    for found in _ALTERNATIVES.finditer(grammar):
        with suppress(ValueError, RecursionError):  # not JSON, but a text in a grammar
            num_properties = max(num_properties, len(json.JSONDecoder().raw_decode(grammar, found.end())[0]))
    max_items = min(BASE_ITEMS + grammar.count("|") + ITEMS_PER_PROPERTY * num_properties, MAX_ITEMS)
    return _LIMITS | {"max_items_in_row": max_items, "step_max_items": max(20 * max_items, _LIMITS["step_max_items"])}


def _reason(matcher: "LLMatcher") -> str:
    """Return the matcher's error on one line, or "". It omits llguidance's listing of the grammar, part of which we wrote."""
    reason = " ".join(_LISTING.split(matcher.get_error())[0].split())
    for pattern, words in _WORDS:
        reason = re.sub(pattern, words, reason)
    return reason[:300]


# ---- in the trial process


def _prepare() -> Callable[[bytes], str]:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer = LLTokenizer("byte")

    def reply(request: bytes) -> str:
        """Compile a grammar and follow it for some random bytes. Returns why it is refused, or "" if it is not."""
        grammar = json.loads(request)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_limits(grammar)))
        rng = random.Random(0)
        for _ in range(TRIAL_TOKENS):
            if matcher.is_stopped():
                break
            start = time.process_time()
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            if time.process_time() - start > TRIAL_TOKEN_SECONDS:
                return f"a token of it takes more than {TRIAL_TOKEN_SECONDS} s"
            if allowed := [byte for byte in range(256) if bits >> byte & 1]:
                matcher.consume_token(rng.choice(allowed))
        return _reason(matcher)

    return reply


_trial_process = HelperProcess(__name__, "new grammars", max_wait=MAX_WAIT_SECONDS, max_seconds=MAX_STOPPED_SECONDS)

if __name__ == "__main__":
    serve(_prepare, max_seconds=TRIAL_SECONDS, max_bytes=TRIAL_BYTES)
