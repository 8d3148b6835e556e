"""A grammar with a memory: it writes texts, gives the probability of any text, and finds the place where a text leaves it.

In: rules (rules.txt) and a cast (__init__.py). The grammar defines every possible text, so that the
probability of a text is exact, unlike in a real corpus. This file does not know what the texts are about.

A rule is a list of alternatives, and every mention of a rule draws anew. A member of the cast is drawn once per text, at
its first mention, and stays: the hero of the first sentence is the hero of the last. A blank in an alternative is

    {trait}      a rule or a member of the cast         {hero.his}    an attribute of what was drawn
    {a trait}    with "a" or "an" in front, by sound    {Hero.he}     with a capital letter, as in {A trait}

The k-th alternative of a rule is drawn with weight 1 / sqrt(k). Earlier alternatives are more likely, as some words are in
any language. The candidates for a member of the cast are equally likely.

Writing and reading take the same steps. `Grammar._options` lists everything one blank can become, each with its
probability. `write` draws one. `read` tries all and keeps those that agree with the text.
"""

import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Memory = dict[str, Any]  # member of the cast -> what was drawn for it
Cast = dict[str, Callable[[Memory], Iterable[Any]]]  # member of the cast -> the candidates, given what was drawn so far

BLANK = re.compile(r"\{(?:([aA]) )?(\w+)(?:\.(\w+))?\}")


class Blank(NamedTuple):
    """A blank that is still to be filled. The modifiers apply to the first word of what fills it."""

    name: str
    attribute: str | None = None
    capital: bool = False
    article: bool = False


Symbols = tuple[str | Blank, ...]  # text and blanks, in order


class Option(NamedTuple):
    """One thing that a blank can become: the probability, the symbols, and the memory after this choice."""

    probability: float
    symbols: Symbols
    memory: Memory


@dataclass(frozen=True)
class Reading:
    """What `Grammar.read` finds. Log-probabilities are in nats.

    The difference that one more word makes to log_prob_of_beginning is the true log-probability of that word. If the text
    leaves the grammar within a word, the expected words are those that begin with the letters before it.
    """

    log_prob: float  # the log-probability of exactly this text, or -inf if the grammar cannot write it
    log_prob_of_beginning: float  # the log-probability that a text begins with this text
    num_chars: int  # the number of first characters with which a text of the grammar can begin
    expected: tuple[str, ...]  # the words that could be there, sorted, or () if the grammar can write the whole text
    memory: Memory  # the cast up to num_chars, in one of the derivations that reach it

    @property
    def is_complete(self) -> bool:
        """Whether the grammar can write exactly this text."""
        return self.log_prob > -math.inf


class Grammar:
    """A grammar of rules and a cast.

    Args:
        rules: name -> the alternatives, separated by line breaks or "|" and stripped. No rule may lead back to itself, or
            reading would not end.
        cast: name -> a function from the memory to the candidates.

    Raises:
        ValueError: a rule is empty, or has a blank or a brace that means nothing.

    >>> grammar = Grammar({"start": "{Name} ran. | {Name} ran, and {name} fell."}, {"name": lambda memory: ["ann", "bob"]})
    >>> round(math.exp(grammar.read("Ann ran.", "start").log_prob), 3)  # 1 / (1 + 1 / sqrt(2)), times one of two names
    0.293
    >>> grammar.read("Ann ran, and bob fell.", "start").expected
    ('ann',)
    """

    def __init__(self, rules: dict[str, str], cast: Cast) -> None:
        self.rules = {name: _weigh(alternatives) for name, alternatives in rules.items()}
        self.cast = cast
        for name, options in self.rules.items():
            if not options:
                raise ValueError(f"rule {name!r} has no alternative")
            for symbol in (symbol for _, symbols in options for symbol in symbols):
                if isinstance(symbol, str):
                    if "{" in symbol or "}" in symbol:
                        raise ValueError(f"rule {name!r}: {symbol!r} has a brace that is not part of a blank")
                elif symbol.name not in cast and (symbol.attribute or symbol.name not in rules):
                    wanted = "in the cast, as an attribute needs" if symbol.attribute else "a rule and not in the cast"
                    raise ValueError(f"rule {name!r}: blank {symbol.name!r} is not {wanted}")

    def write(self, rng: random.Random, start: str, memory: Memory | None = None) -> str:
        """Draw one text from the rule `start`. memory: members of the cast that are set beforehand."""
        memory, written = memory or {}, ""
        todo: list[str | Blank] = [Blank(start)]
        while todo:
            symbol = todo.pop()
            if isinstance(symbol, str):
                written += symbol
            else:
                options = self._options(symbol, memory)
                (option,) = rng.choices(options, [option.probability for option in options])
                memory = option.memory
                todo += reversed(option.symbols)
        return written

    def read(self, text: str, start: str, memory: Memory | None = None) -> Reading:
        """Follow every derivation of the text from the rule `start`, as far as each agrees with it. memory: as in `write`."""
        whole, beginning = [], []  # log-probabilities of derivations
        num_chars, furthest = 0, memory or {}
        rests: set[str] = set()  # the words, or rests of words, that could follow num_chars
        live: list[tuple[Symbols, int, Memory, float]] = [((Blank(start),), 0, memory or {}, 0.0)]
        while live:
            symbols, position, memory, log_prob = live.pop()
            if not symbols:
                if position == len(text):
                    whole.append(log_prob)
                    beginning.append(log_prob)
                    continue
                word = ""  # the text continues where this derivation ends
            elif isinstance(symbols[0], Blank):
                for option in self._options(symbols[0], memory):
                    further = log_prob + math.log(option.probability)
                    live.append(((*option.symbols, *symbols[1:]), position, option.memory, further))
                continue
            else:
                word = symbols[0]
            agreed = position + _common_length(word, text, position)
            if agreed == position + len(word) and symbols:
                live.append((symbols[1:], agreed, memory, log_prob))
            elif agreed == len(text):
                beginning.append(log_prob)  # the text ends within this word
            if agreed > num_chars:
                num_chars, rests, furthest = agreed, set(), memory
            if agreed == num_chars and (agreed < position + len(word) or not symbols):
                rests.add(word[agreed - position :])
        begun = text[:num_chars].rpartition(" ")[2]  # for example "Mi", if "Mia" was read but "Milo" expected
        expected = () if whole else tuple(sorted({(begun + rest).partition(" ")[0] for rest in rests}))
        log_prob, log_prob_of_beginning = (float(np.logaddexp.reduce(log_probs)) for log_probs in (whole, beginning))
        return Reading(log_prob, log_prob_of_beginning, num_chars, expected, furthest)

    def _options(self, blank: Blank, memory: Memory) -> list[Option]:
        """List everything the blank can become. The probabilities sum to one."""
        if blank.name in self.rules:
            return [Option(p, _modified(symbols, blank), memory) for p, symbols in self.rules[blank.name]]
        if blank.name in memory:
            return [Option(1.0, _modified((_word(memory[blank.name], blank),), blank), memory)]
        candidates = list(self.cast[blank.name](memory))
        return [
            Option(1 / len(candidates), _modified((_word(who, blank),), blank), {**memory, blank.name: who})
            for who in candidates
        ]


def read_rules(path: Path) -> dict[str, str]:
    """Read the rules of a Grammar: each a line with its name and indented lines with its alternatives. "#" begins a comment."""
    rules: dict[str, list[str]] = {}
    alternatives: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            alternatives.append(line.strip())
        elif line and not line.startswith("#"):
            alternatives = rules[line] = []
    return {name: "\n".join(lines) for name, lines in rules.items()}


def _weigh(alternatives: str) -> list[tuple[float, Symbols]]:
    """Split a rule into alternatives, as (probability, symbols)."""
    texts = [text.strip() for text in re.split(r"[|\n]", alternatives) if text.strip()]
    weights = [1 / math.sqrt(k) for k in range(1, len(texts) + 1)]
    return [(weight / sum(weights), _symbols(text)) for weight, text in zip(weights, texts, strict=True)]


def _symbols(template: str) -> Symbols:
    symbols: list[str | Blank] = []
    position = 0
    for match in BLANK.finditer(template):
        article, name, attribute = match.groups()
        capital = (article or name)[0].isupper()
        symbols += [template[position : match.start()], Blank(name.lower(), attribute, capital, article is not None)]
        position = match.end()
    return tuple(symbol for symbol in (*symbols, template[position:]) if symbol)


def _modified(symbols: Symbols, blank: Blank) -> Symbols:
    """Apply the blank's modifiers to the first of the symbols that fill it."""
    if not (blank.capital or blank.article):
        return symbols
    first, *rest = symbols
    if isinstance(first, Blank):
        return (first._replace(capital=first.capital or blank.capital, article=first.article or blank.article), *rest)
    if blank.article:
        # By sound, not by letter: "honest" begins with a vowel sound.
        first = f"an {first}" if first[0] in "aeiou" or first.startswith("honest") else f"a {first}"
    return (first[0].upper() + first[1:] if blank.capital else first, *rest)


def _word(who: object, blank: Blank) -> str:
    return str(getattr(who, blank.attribute) if blank.attribute else who)


def _common_length(word: str, text: str, position: int) -> int:
    if text.startswith(word, position):
        return len(word)
    return next((i for i, letter in enumerate(word) if not text.startswith(letter, position + i)))
