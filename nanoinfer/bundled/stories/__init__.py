"""The stories that the bundled models learned from: their words, their sentences, and the shapes a story can have.

A story is an opening, something about the hero, a day, a plot, and an ending. The grammar (grammar.py says how to read its
slots) is the whole truth about them, so the models can be measured against it. Every sentence is ours; there is no foreign
text. What only a model that looks back can get right:

- The first sentence names the hero. Then come pronouns only, for 60 tokens or more, until the name returns; a story's last
  name is the hero's again.
- Hero and friend never share a pronoun, so "she" and "he" always say who is meant.
- Something given away is found with its new owner; what is lost, counted or promised keeps its colour and its number.
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


# Each part of a story -> who or what can take it, given the parts already taken.
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
    return GRAMMAR.write(rng, "story", settled(hero))


def read(text: str, hero: str | None = None) -> Reading:
    """Say how likely a text is as a story, and where it stops being one. hero: the story was asked to be about this one.

    >>> read("Once upon a time, there was a kind fish").expected
    ('fox', 'frog')
    """
    return GRAMMAR.read(text, "story", settled(hero))


def write_question(rng: random.Random) -> str:
    """Ask for a story. Example: "Tell me a story about Lily"."""
    return GRAMMAR.write(rng, "question")


def read_question(text: str) -> Reading:
    """Say how likely a text is as a question. If it is one, memory["hero"] is who the story has to be about."""
    return GRAMMAR.read(text, "question")


def write_tale(rng: random.Random) -> str:
    """Write a tale, a story cut down to a sentence or two in which a name, a thing or a number comes back soon."""
    return GRAMMAR.write(rng, "tale")


def settled(hero: str | None) -> Memory:
    """What a grammar has to remember from the start, if the hero is known."""
    if hero is None:
        return {}
    if hero not in HEROES:
        raise ValueError(f"no story is about {hero!r}; the heroes are {', '.join(HEROES)}")
    return {"hero": HEROES[hero]}


def hero_is_right(text: str, hero: str | None = None) -> bool:
    """Say whether the hero's name came back right, in a text that need not be a story otherwise.

    The last name must be the first, the grammar not left where the hero is expected, and nobody named who was not introduced:
    the hero in the first sentence, the friend in the one that names the friend first. A text that is cut off before the hero
    comes back is wrong. hero: who had to be the first, if that was asked.
    """
    names = list(NAME.finditer(text))
    if len(names) < 2 or not names[0][0] == names[-1][0] == (hero or names[0][0]):
        return False
    introduced = NAME.findall(text[: text.find(".", names[1].end())])
    return {name[0] for name in names} <= set(introduced) and names[0][0] not in read(text).expected
