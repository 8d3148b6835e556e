"""The stories that the bundled models learned from: the cast, writing and reading a story, and a check of the hero's name.

A story is an opening, something about the hero, a day, a plot, and an ending. sentences.py and plots.py have the rules, and
grammar.py says how to read their slots. Every sentence was written for nanoinfer. Only a model that attends to the earlier
text can get these right:

- The first sentence names the hero. Only pronouns follow, for 60 tokens or more, until the name returns. The last name in a
  story is the hero's again.
- Hero and friend never share a pronoun, so "she" and "he" are never ambiguous.
- A present is found with its new owner. What is lost, counted or promised keeps its colour and its number.
"""

import random
import re
from dataclasses import dataclass

from nanoinfer.bundled.stories.grammar import Cast, Grammar, Memory, Reading
from nanoinfer.bundled.stories.sentences import RULES


@dataclass(frozen=True)
class Character:
    """Somebody with a name, and the pronouns that go with it."""

    name: str
    he: str  # "she" or "he"

    @property
    def him(self) -> str:
        return {"she": "her", "he": "him"}[self.he]

    @property
    def his(self) -> str:
        return {"she": "her", "he": "his"}[self.he]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Place:
    """Somewhere to go, and spots there for hiding and finding."""

    name: str
    spots: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


SHE = [Character(name, "she") for name in "Lily Anna Mia Ruby Daisy Bella Rosie Zoe Emma Nora Ivy Clara".split()]
HE = [Character(name, "he") for name in "Tom Sam Max Oscar Finn Pip Leo Ben Jack Milo Hugo Felix".split()]
HEROES = {character.name: character for character in SHE + HE}

PLACES = (
    Place("the park", ("under a bench", "behind the fountain", "next to the slide")),
    Place("the garden", ("behind the roses", "under a flower pot", "beside the gate")),
    Place("the forest", ("inside a hollow log", "under the ferns", "behind an old oak")),
    Place("the beach", ("behind a rock", "under a small boat", "next to a sand castle")),
    Place("the farm", ("under the hay", "behind the barn", "beside the tractor")),
    Place("the river", ("under the bridge", "between two stones", "in the tall grass")),
    Place("the market", ("under a table", "between two baskets", "behind the cheese")),
    Place("the meadow", ("among the daisies", "near a beehive", "under a clover leaf")),
    Place("the lake", ("near the dock", "among the reeds", "behind a canoe")),
    Place("the castle", ("behind the throne", "under the stairs", "inside a trunk")),
    Place("the bakery", ("behind the oven", "beside the flour", "under an apron")),
    Place("the mountain", ("inside a cave", "below a cliff", "behind a pine tree")),
)
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
    "spot": lambda m: m["place"].spots,
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

GRAMMAR = Grammar(RULES, CAST)
NAME = re.compile("|".join(rf"\b{name}\b" for name in HEROES))


def write(rng: random.Random, hero: str | None = None) -> str:
    """Write one story. Its hero is one of HEROES, drawn if not given.

    >>> write(random.Random(1), "Lily")[:52]
    'This is the story of Lily, a tiny, shy duck. She alw'
    """
    return GRAMMAR.write(rng, "story", initial_memory(hero))


def read(text: str, hero: str | None = None) -> Reading:
    """Find how likely a text is as a story, and where it stops being one. hero: the one that the story must be about.

    >>> read("Once upon a time, there was a kind fish").expected
    ('fox', 'frog')
    """
    return GRAMMAR.read(text, "story", initial_memory(hero))


def write_question(rng: random.Random) -> str:
    """Write a question for a story, for example "Tell me a story about Lily"."""
    return GRAMMAR.write(rng, "question")


def read_question(text: str) -> Reading:
    """Find how likely a text is as a question. If it is one, memory["hero"] is the one that the story must be about."""
    return GRAMMAR.read(text, "question")


def write_tale(rng: random.Random) -> str:
    """Write a tale: a short story in which a name, a thing or a number returns after a few words."""
    return GRAMMAR.write(rng, "tale")


def initial_memory(hero: str | None) -> Memory:
    """The memory that a grammar starts with: the hero, if it is given."""
    if hero is None:
        return {}
    if hero not in HEROES:
        raise ValueError(f"no story is about {hero!r}; the heroes are {', '.join(HEROES)}")
    return {"hero": HEROES[hero]}


def hero_is_right(text: str, hero: str | None = None) -> bool:
    """Whether the hero's name returns correctly, in a text that need not be a story otherwise.

    The last name must be the first name. The text must not leave the grammar where the hero is expected. Every name must have
    been introduced: the hero in the first sentence, the friend in the sentence with the second name. A text that ends before
    the hero's name returns is wrong.

    Args:
        text: a story, or an attempt at one.
        hero: the one that the story must be about, or None for any.
    """
    names = list(NAME.finditer(text))
    if len(names) < 2 or not names[0][0] == names[-1][0] == (hero or names[0][0]):
        return False
    introduced = NAME.findall(text[: text.find(".", names[1].end())])
    return {name[0] for name in names} <= set(introduced) and names[0][0] not in read(text).expected
