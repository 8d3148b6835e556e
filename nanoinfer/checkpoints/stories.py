"""Short children's stories, made up sentence by sentence from a seed: the text the models in the box learn from.

A random generator goes in, a story or a one-turn chat comes out. Every sentence is ours; no foreign text is used.
A story is an opening, then a plot. A plot is a row of beats, and a beat is a choice of sentences that all fit there.
"""

import random

# name -> what the hero is, and the pronoun. A name always means the same hero, so a small model can learn who is who.
HEROES = {
    "Lily": ("girl", "she"), "Tom": ("boy", "he"), "Anna": ("girl", "she"), "Sam": ("boy", "he"),
    "Mia": ("cat", "she"), "Max": ("dog", "he"), "Ruby": ("rabbit", "she"), "Oscar": ("owl", "he"),
    "Daisy": ("duck", "she"), "Finn": ("fox", "he"), "Bella": ("bear", "she"), "Pip": ("mouse", "he"),
}  # fmt: skip
OBJECT_FORM = {"she": "her", "he": "him"}
POSSESSIVE = {"she": "her", "he": "his"}

# place -> the word before it ("in the park", "on the beach"), and spots where something can be hidden there.
PLACES = {
    "the park": ("in", ("under a bench", "behind the fountain", "next to the slide")),
    "the garden": ("in", ("behind the roses", "under a flower pot", "beside the gate")),
    "the forest": ("in", ("inside a hollow log", "under the leaves", "behind an old oak tree")),
    "the beach": ("on", ("behind a rock", "under a small boat", "next to a sand castle")),
    "the farm": ("on", ("under the hay", "behind the barn", "beside the pond")),
    "the river": ("by", ("under the bridge", "between two stones", "in the tall grass")),
}
TRAITS = ("little", "kind", "brave", "curious", "happy", "clever", "shy", "honest")
WEATHER = ("sunny", "windy", "cloudy", "warm", "cool", "bright")
COLORS = ("red", "blue", "green", "yellow", "orange", "purple")
TOYS = ("ball", "kite", "hat", "scarf", "drum", "bell", "book")
FRUIT = ("apples", "pears", "plums", "cherries", "berries", "nuts")
SKILLS = ("whistle", "dance", "sing", "juggle", "skip", "paint")
FAMILY = ("mother", "father", "grandmother", "grandfather")
TRAPS = ("in the mud", "in a deep hole", "in a thorny bush", "under a heavy branch")
LIGHTS = ("lamp", "candle", "lantern")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

OPENINGS = (
    "Once upon a time, there was {a_trait} {kind} named {hero}. One {weather} day, {he} went to {place}.",
    "Once upon a time, {a_trait} {kind} named {hero} was playing {in_place}.",
    "One {weather} morning, {a_trait} {kind} named {hero} went to {place}.",
    "{hero} was {a_trait} {kind}. One {weather} day, {he} was walking {in_place}.",
)
LOST = (
    ("{he} wanted to play with {his} {thing}, but it was gone.", "There {he} lost {his} favorite {thing}."),
    ('"Oh no, where is my {thing}?" {he} cried.', "{he} looked everywhere, and then {he} began to cry."),
    ('{friend_intro} came by and said, "I will help you."', "Then {his} friend {friend_intro} came to help."),
    ("First they looked {other_spot}, but it was not there.", "They looked for a long, long time.", ""),
    ("At last, they found the {thing} {spot}.", '"Look!" said {friend}, and there was the {thing} {spot}.'),
    ('"Thank you!" said {hero}, and the two friends played until dinner.', "{hero} gave {friend} a big hug."),
)
FOUND = (
    ("There {he} found {a_thing} {spot}.", "{he} looked down and saw {a_thing} {spot}."),
    ('"Whose {thing} is this?" {he} asked.', "{he} wanted to keep it, but that was not right."),
    ('Soon {he} met {friend_intro}, who said, "I lost my {thing}."', "Then {friend_intro} came to look for it."),
    ('"Here it is," said {hero} with a smile.', "{hero} gave it back right away."),
    ("{friend} was so happy that {fhe} danced.", '"Thank you so much!" said {friend}.', ""),
    ("From that day on, {hero} and {friend} were best friends.", "{hero} was happy and proud all day."),
)
HELP = (
    ('Suddenly {he} heard a small voice call, "Help!"', "Then {he} heard someone crying."),
    ("It was {friend_intro}, who was stuck {trap}.",),
    ('"Do not worry, I will help you," said {hero}.', '"Hold on, I am coming!" said {hero}.'),
    ("{he} took a long rope and pulled {n} times.", "{he} held out a long stick and pulled very hard."),
    ("Pop, {friend} was free!", "Soon {friend} was safe again.", '"You saved me," said {friend}, and {fhe} laughed.'),
    ("Then {hero} and {friend} walked home together.", "{friend} never forgot how brave {hero} was."),
)
SHARE = (
    ("{he} had {n} sweet {fruit} for lunch.", "{he} carried a basket with {n} {fruit}."),
    ("Then {he} met {friend_intro}, who was very hungry.", "{friend_intro} came by and sat down."),
    ('"May I have some {fruit}, please?" asked {friend}.', '"Those {fruit} look good," said {friend}.'),
    ("{hero} gave {friend} {given}, so {he} had {left} left.",),
    ("They ate slowly and watched the clouds.", '"You are very kind," said {friend}.', ""),
    ("{hero} learned that it is good to share.", "The {fruit} were sweet, and {hero} was glad to have a friend."),
)
DARK = (
    ("{he} played until the sun went down, and it grew dark.", "Then the sky grew dark, and a big storm came."),
    ("{he} was so afraid that {he} hid {spot}.", '"I am scared," {he} whispered.'),
    ("{his} {family} came with a {light} and sat down beside {him}.",),
    ('"I am here with you," said {his} {family}.', '"Close your eyes and count to {n}," said {his} {family}.'),
    ("Soon the moon came out, and they saw {n} stars.", "They sang a quiet song together.", ""),
    ("After that, {hero} was not afraid of the dark.", "{hero} smiled and fell asleep."),
)
LEARN = (
    ("{he} wanted to learn to {skill}.", "{his} friends could all {skill}, but {he} could not."),
    ("{he} tried {n} times, but it was too hard.", '"I will never learn to {skill}," {he} said.'),
    ('"Try again, and I will show you how," said {friend_intro}.', '"Do not give up," said {friend_intro}.'),
    ("{hero} took a deep breath and tried once more.", "So {hero} tried again and again, all day long."),
    ("This time it worked!", "At last, {he} could do it."),
    ("{friend} clapped, and {hero} was very proud.", "Now {hero} loves to {skill} with {friend}."),
)
PLOTS = (LOST, FOUND, HELP, SHARE, DARK, LEARN)

QUESTIONS = (
    "Tell me a story about {hero}",
    "Please tell me a story about {hero}.",
    "Can you tell me a story about {hero}?",
)


def story(rng: random.Random, hero: str | None = None) -> str:
    """Make one story of six to eight sentences. Its hero is one of HEROES, drawn if not given.

    The first sentence names the hero, and so does the last.
    Example: story(Random(7), "Lily") begins "Once upon a time, a little girl named Lily was playing ..."
    """
    words = cast(rng, hero or rng.choice(list(HEROES)))
    beats = (OPENINGS, *rng.choice(PLOTS))
    sentences = [rng.choice(beat).format(**words) for beat in beats]
    return " ".join(capitalized(sentence) for sentence in sentences if sentence)


def chat(rng: random.Random) -> list[dict[str, str]]:
    """Make one question and its answer, as the messages a chat template takes.

    Example: [{"role": "user", "content": "Tell me a story about Tom"}, {"role": "assistant", "content": "..."}]
    """
    hero = rng.choice(list(HEROES))
    question = rng.choice(QUESTIONS).format(hero=hero)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": story(rng, hero)}]


def cast(rng: random.Random, hero: str) -> dict[str, str]:
    """Draw everything a story about this hero may mention, once, so that all its sentences agree."""
    kind, he = HEROES[hero]
    friend = rng.choice([name for name in HEROES if name != hero])
    friend_kind, friend_he = HEROES[friend]
    is_person = friend_kind in ("girl", "boy")
    place, (preposition, spots) = rng.choice(list(PLACES.items()))
    spot, other_spot = rng.sample(spots, 2)
    thing = f"{rng.choice(COLORS)} {rng.choice(TOYS)}"
    n = rng.randint(3, 10)
    given = rng.randint(1, n - 1)
    return {
        "hero": hero, "kind": kind, "he": he, "him": OBJECT_FORM[he], "his": POSSESSIVE[he],
        "friend": friend, "friend_intro": friend if is_person else f"{friend} the {friend_kind}", "fhe": friend_he,
        "place": place, "in_place": f"{preposition} {place}", "spot": spot, "other_spot": other_spot,
        "thing": thing, "a_thing": with_article(thing), "a_trait": with_article(rng.choice(TRAITS)),
        "n": NUMBERS[n], "given": NUMBERS[given], "left": NUMBERS[n - given],
        "weather": rng.choice(WEATHER), "fruit": rng.choice(FRUIT), "skill": rng.choice(SKILLS),
        "family": rng.choice(FAMILY), "trap": rng.choice(TRAPS), "light": rng.choice(LIGHTS),
    }  # fmt: skip


def with_article(words: str) -> str:
    """Put "a" or "an" in front, by sound. Example: "orange kite" gives "an orange kite", "honest" gives "an honest"."""
    return f"an {words}" if words[0] in "aeiou" or words.startswith("honest") else f"a {words}"


def capitalized(sentence: str) -> str:
    """Raise the first letter and leave the rest, unlike str.capitalize. Example: "she saw Tom" gives "She saw Tom"."""
    return sentence[0].upper() + sentence[1:]
