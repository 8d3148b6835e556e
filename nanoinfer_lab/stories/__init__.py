"""The stories that tiny-qwen3 and tiny-gpt2 learned from: the cast, and writing and reading a story.

A story is an opening, something about the hero, a day, a plot, and an ending. rules.txt has the sentences, and grammar.py says
how to read their blanks. Every sentence was written for nanoinfer. Only a model that attends to the earlier
text can get these right:

- The first sentence names the hero. Only pronouns follow, for 60 tokens or more, until the name returns. The last name in a
  story is the hero's again.
- Hero and friend never share a pronoun, so "she" and "he" are never ambiguous.
- A present is found with its new owner. What is lost, counted or promised keeps its colour and its number.

grammar.py gives the exact probability of any text, and the place where a text stops being a story. So a model can be compared
with the truth. tools/stories in the repository trained the two models (loading/bundled) and measured them.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from nanoinfer_lab.stories.grammar import Cast, Grammar, Memory, Reading, read_rules


@dataclass(frozen=True)
class Character:
    """Somebody with a name, and the pronouns that go with it."""

    name: str
    he: str
    him: str
    his: str

    def __str__(self) -> str:
        return self.name


SHE = [Character(name, "she", "her", "her") for name in "Lily Anna Mia Ruby Daisy Bella Rosie Zoe Emma Nora Ivy Clara".split()]
HE = [Character(name, "he", "him", "his") for name in "Tom Sam Max Oscar Finn Pip Leo Ben Jack Milo Hugo Felix".split()]
HEROES = {character.name: character for character in SHE + HE}

FOLDER = Path(__file__).parent
PLACES = {name: spots.split("\n") for name, spots in read_rules(FOLDER / "places.txt").items()}  # spots for hiding
KINDS = "child rabbit fox bear mouse cat dog duck owl squirrel hedgehog frog pony lamb penguin goat".split()
COLORS = "red blue green yellow orange purple pink white black golden silver brown gray striped".split()
TOYS = """ball kite drum scarf bell book boat doll whistle lantern bucket puzzle balloon ribbon marble mitten crown flute
robot wagon trumpet umbrella mask button hat""".split()
FRUIT = "apples pears plums cherries berries nuts peaches grapes cookies carrots".split()
SKILLS = "whistle dance sing juggle skip paint swim read skate climb knit count".split()
ANIMALS = "crow turtle sheep pigeon cow donkey beaver toad bee goose".split()
FLOWERS = "rose tulip daisy sunflower lily violet poppy".split()
STONES = "stones sticks boxes bricks boards logs".split()
NUMBERS = "one two three four five six seven eight nine ten".split()


def value(number: object) -> int:
    return NUMBERS.index(str(number)) + 1


# Each part of a story -> the candidates for it, given the parts that are drawn already.
CAST: Cast = {
    "hero": lambda m: SHE + HE,
    "kind": lambda m: KINDS,
    "friend": lambda m: HE if m["hero"] in SHE else SHE,
    "friend_kind": lambda m: KINDS,
    "place": lambda m: PLACES,
    "spot": lambda m: PLACES[m["place"]],
    "color": lambda m: COLORS,
    "toy": lambda m: TOYS,
    "owner": lambda m: (m["friend"], f"the {m['animal']}"),
    "fruit": lambda m: FRUIT,
    "skill": lambda m: SKILLS,
    "flower": lambda m: FLOWERS,
    "stones": lambda m: STONES,
    "animal": lambda m: ANIMALS,
    "n": lambda m: NUMBERS[2:8],
    "given": lambda m: NUMBERS[: min(3, value(m["n"]) - 1)],
    "left": lambda m: [NUMBERS[value(m["n"]) - value(m["given"]) - 1]],
    "counting": lambda m: [", ".join(NUMBERS[: value(m["n"])])],
}

RULES = read_rules(FOLDER / "rules.txt")
GRAMMAR = Grammar(RULES, CAST)
NAME = re.compile("|".join(rf"\b{name}\b" for name in HEROES))


def write(rng: random.Random, hero: str | None = None) -> str:
    """Write one story. Its hero is one of HEROES, drawn if not given.

    >>> write(random.Random(1), "Lily")[:52]
    'This is the story of Lily, a tiny, shy duck. She alw'
    """
    return GRAMMAR.write(rng, "story", initial_memory(hero))


def read(text: str, hero: str | None = None) -> Reading:
    """Find how likely a text is as a story, and where it stops being a story. hero: the hero that the story must have.

    >>> read("Once upon a time, there was a kind fish").expected
    ('fox', 'frog')
    """
    return GRAMMAR.read(text, "story", initial_memory(hero))


def initial_memory(hero: str | None) -> Memory:
    """The memory that a grammar starts with: the hero, if it is given."""
    if hero is None:
        return {}
    if hero not in HEROES:
        raise ValueError(f"no story is about {hero!r}; the heroes are {', '.join(HEROES)}")
    return {"hero": HEROES[hero]}
