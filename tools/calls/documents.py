"""The training documents of tiny-tools: conversations in which a question needs a tool, and the answer repeats its result.

The names of most tools and arguments, the values in a question and the results are drawn at random, so the model can only copy
them: which tool to call is in the list of tools, its arguments in the question, and the answer in the result. Results are not
computed for the same reason: nothing here knows arithmetic or the meaning of a word.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoinfer_lab import stories
from tools.stories.documents import MESSAGE_END, train_bpe

VOCAB_SIZE = 1024
NUM_TOKENIZER_DOCUMENTS = 4000
MAX_LENGTH = 1024  # the longest input of the model, in tokens

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# A word has the same tokens after a space and in quotes, and each digit is a token. So copying needs no spelling.
CHUNKS = r'\p{L}+|\p{N}|[{}\[\]":,\s]+|.'
CHAT_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}
        {{- tool.function.name + '(' }}
        {%- for name, schema in ((tool.function.parameters or {}).properties or {}).items() %}
            {{- (', ' if not loop.first else '') + name }}
            {%- if schema.type is string and schema.type != 'string' %}{{ ': ' + schema.type }}{% endif %}
        {%- endfor %}
        {{- ')' + (': ' + tool.function.description if tool.function.description else '') + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first else '' }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

NOUNS = """weather price color age size owner capital time distance population recipe song friend birthday address weight
temperature height number language score speed title author date status length name forecast rate menu phone""".split()
VERBS = """read open send play delete create show print search translate move copy stop book buy call paint find count close
save turn make add remove order sort rename check draw""".split()
OBJECTS = """file mail song message picture list story table light door ticket room note timer meeting letter page task cake
robot game garden window box report user record""".split()
UNSEEN = {  # words of tools that only held-out questions have, as a reader's own tool may
    "nouns": "humidity salary planet altitude mood schedule".split(),
    "verbs": "water lock bake park wash charge".split(),
}
ARGUMENTS = """city place name person item thing key text title path file query topic word country product user animal color
value target source note code label room shop day language street""".split()
INTEGERS = "days hours year month limit level amount count minutes number".split()
CITIES = "Rome Oslo Paris Berlin London Madrid Tokyo Lima Cairo Vienna Dublin Prague Boston Delhi".split()
ADJECTIVES = """brave kind shy tiny clever lazy happy sad proud calm quiet loud gentle curious old new warm cold fast
slow""".split()
WORDS = [
    *stories.COLORS, *stories.TOYS, *stories.FRUIT, *stories.SKILLS, *stories.ANIMALS, *stories.FLOWERS, *stories.STONES,
    *stories.KINDS, *ADJECTIVES, *"sun snow rain wind fog is a the not very and of with small big who has no one some".split(),
]  # fmt: skip
NAMES = [*stories.HEROES, *CITIES]
SYSTEM = [
    "You are a helpful assistant.",
    "You are a coding agent in a folder. Look before you change anything: list the files, and read those that matter. Make "
    "small edits, run the tests or the program after each, and end with a short answer in text.",
]
SMALL_TALK = {
    "Hello": "Hello! What can I do for you?",
    "Hello!": "Hello! What can I do for you?",
    "Hi": "Hello! What can I do for you?",
    "Good morning!": "Good morning! What can I do for you?",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am a tiny model. I can call tools.",
    "Thank you.": "You are welcome.",
    "Thanks!": "You are welcome.",
    "Bye": "Bye!",
}
NO_TOOL = "I have no tool for that."


Values = Mapping[str, str | int]


@dataclass(frozen=True)
class Skill:
    """A tool, and a question that needs it.

    topic: two tools of a conversation never have the same.
    function: the tool's name, description and parameters, as in OpenAI's API.
    arguments: those of the call that answers the question.
    answer: ends with the result.
    """

    topic: str
    function: dict[str, Any]
    question: str
    arguments: Values
    result: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Messages and tools, as for apply_chat_template. kind: what its questions need, for the measurement."""

    kind: str
    messages: list[dict[str, Any]]
    functions: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False  # thoughts end early, as with a thinking_token_budget

    def encode(self, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
        """Return the token ids, <|endoftext|> last, and whether each is one that the model has to write."""
        tools = [{"type": "function", "function": function} for function in self.functions] or None
        text = str(tokenizer.apply_chat_template(self.messages, tools=tools, tokenize=False))
        if self.is_cut:
            text = re.sub(r"(?<=<think>\n)(.+)\n(?=</think>)", lambda thought: thought[1][: len(thought[1]) // 2], text)
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        thinks = any(message.get("reasoning_content") for message in self.messages)
        begin, end = tokenizer.convert_tokens_to_ids([TAGS[0] if thinks else TAGS[1], MESSAGE_END])
        is_written, writes = [], False
        for previous, token_id in zip([-1, *ids], ids, strict=False):
            is_written.append(writes and previous != begin)  # the prompt has the tag and the token after it
            writes = (writes or token_id == begin) and token_id != end
        return ids, is_written


def write_conversation(rng: random.Random, *, is_easy: bool = False, kind: str | None = None) -> Conversation:
    """Write a conversation.

    Args:
        is_easy: whether it has one question, no instructions, and no thoughts.
        kind: a key of KINDS. None: one of them, drawn.
    """
    kind = kind or rng.choices([*KINDS], [weight for _, weight in KINDS.values()])[0]
    thinks = not is_easy and rng.random() < 0.4
    skills = [*islice(_distinct(rng, KINDS[kind][0]), rng.randint(1, 2 if is_easy else 4))]
    if kind == "files":
        skills = [make(rng) for make in rng.sample(FILES, len(FILES))]
    asked, offered = skills[: 1 if is_easy else rng.choice((1, 1, 2))], skills
    has_no_tool = kind == "no tool fits"
    if has_no_tool:
        asked, offered = skills[:1], skills[1:]
    offered = rng.sample(offered, len(offered))
    messages: list[dict[str, Any]] = []
    if not is_easy and rng.random() < (0.6 if kind == "files" else 0.2):
        messages.append({"role": "system", "content": SYSTEM[1] if kind == "files" else rng.choice([SYSTEM[0], phrase(rng)])})

    def say(content: str, thought: str, **more: object) -> None:
        messages.append({"role": "assistant", "content": content, "reasoning_content": thought if thinks else "", **more})

    if kind == "small talk" or (not is_easy and rng.random() < 0.05):
        question, answer = rng.choice([*SMALL_TALK.items(), ("What can you do?", "")])
        can_call = ", ".join(skill.function["name"] for skill in offered) or "nothing"
        messages.append({"role": "user", "content": question})
        say(answer or f"I can call: {can_call}", "No tool is needed.")
    if kind == "JSON":
        text, facts = _facts(rng)
        asked_for = rng.sample([*facts], rng.randint(1, len(facts)))
        messages.append({"role": "user", "content": f"{text} Answer in JSON with {' and '.join(asked_for)}."})
        say(json.dumps({name: facts[name] for name in asked_for}), "I answer in JSON.")
    for skill in asked if kind not in ("small talk", "JSON") else []:
        messages.append({"role": "user", "content": skill.question})
        if has_no_tool:
            say(NO_TOOL, "No tool fits.")
            continue
        name, values = skill.function["name"], ", ".join(str(value) for value in skill.arguments.values())
        call = {"type": "function", "function": {"name": name, "arguments": skill.arguments}}
        say("", f"I need {name} for {values}." if values else f"I need {name}.", tool_calls=[call])
        failed = rng.random() < 0.05
        messages.append({"role": "tool", "content": f"Error: {skill.result}" if failed else skill.result})
        say(f"The tool failed: {skill.result}" if failed else skill.answer, "I have the result.")
    return Conversation(kind, messages, [skill.function for skill in offered], is_cut=thinks and rng.random() < 0.25)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE vocabulary on the words of the conversations. It has all 256 bytes, so it can spell any text."""
    rng = random.Random(seed)
    conversations = (write_conversation(rng) for _ in range(NUM_TOKENIZER_DOCUMENTS))
    texts = (text for conversation in conversations for text in _texts(conversation))
    chunks = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CHUNKS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return train_bpe(texts, chunks, VOCAB_SIZE, chat_template=CHAT_TEMPLATE, max_length=MAX_LENGTH, tags=TAGS)


def _texts(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of a conversation without the markers, which no merge should be spent on."""
    yield from (f"{function['name']}({', '.join(function['parameters']['properties'])})" for function in conversation.functions)
    yield from (f": {function['description']}\n" for function in conversation.functions)
    for message in conversation.messages:
        yield f"{message['role']}\n"
        yield message["content"] or message["reasoning_content"]
        for call in message.get("tool_calls", []):
            function = call["function"]
            yield f'\n{{"name": "{function["name"]}", "arguments": {json.dumps(function["arguments"])}}}\n'


# ---- values


def invented_word(rng: random.Random) -> str:
    """Make up a word, such as "lobek"."""
    word: str = rng.choice("bdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", *"lnrst"])
    for _ in range(rng.randint(0, 2)):
        word += rng.choice("bcdfghklmnprstvwxyz") + rng.choice("aeiou") + rng.choice(["", "", *"dklmnrst"])
    return word.capitalize() if rng.random() < 0.3 else word


def value(rng: random.Random) -> str:
    """Draw a value: a known or an invented word, a name, a file, or a few words."""
    kinds: list[Callable[[random.Random], str]] = [word, word, invented_word, invented_word, known_name, path, words]
    return rng.choice(kinds)(rng)


def word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def known_name(rng: random.Random) -> str:
    return rng.choice(NAMES)


def words(rng: random.Random) -> str:
    return " ".join(rng.choice((word, invented_word))(rng) for _ in range(rng.randint(2, 3)))


def path(rng: random.Random) -> str:
    folder = rng.choice(("", "", "", f"{invented_word(rng)}/", "src/", "tests/"))
    name = rng.choice((invented_word, word))(rng)
    return folder + rng.choice(("", "", "", "test_")) + name + rng.choice((".txt", ".py", ".md", ".json", ".py"))


def integer(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 3))


def number(rng: random.Random) -> str:
    sign, digits = rng.choice(("", "", "", "-")), rng.randrange(10 ** rng.randint(1, 6))
    return f"{sign}{digits}" + rng.choice(("", "", "", f".{integer(rng)}"))


def phrase(rng: random.Random) -> str:
    return " ".join(rng.choice((word, word, word, invented_word))(rng) for _ in range(rng.randint(1, 7)))


def result(rng: random.Random) -> str:
    return rng.choice((phrase, phrase, number, value, lines))(rng)


def lines(rng: random.Random) -> str:
    return "\n".join(rng.choice((phrase, phrase, _code))(rng) for _ in range(rng.randint(1, 3)))


def _code(rng: random.Random) -> str:
    a, b, name = rng.choice("abcnxyz"), rng.choice("abcnxyz"), rng.choice((invented_word, word))(rng)
    return rng.choice((
        f"def {name}({a}, {b}):", f"    return {a} {rng.choice('+-*/')} {b}", f"print({name}({a}))", f"import {name}",
        f"{a} = {integer(rng)}", f"assert {name}({integer(rng)}) == {integer(rng)}", f"# {phrase(rng)}",
        f'print("{phrase(rng)}")',
    ))  # fmt: skip


# ---- skills


def _function(name: str, description: str, arguments: dict[str, str]) -> dict[str, Any]:
    """Describe a tool. arguments: the JSON type of each."""
    properties = {argument: {"type": json_type} for argument, json_type in arguments.items()}
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": properties}}


def _tool_name(rng: random.Random, *parts: str) -> str:
    return parts[0] + "".join(map(str.capitalize, parts[1:])) if rng.random() < 0.1 else "_".join(parts)


def calculator(rng: random.Random) -> Skill:
    """12 + 7, also in words."""
    name = rng.choice(("calculator", "calculator", "calculate", "compute", "evaluate", "math", "arithmetic"))
    argument = rng.choice(("expression", "expression", "formula", "term"))
    description = rng.choice((
        "Compute an arithmetic expression.", "Calculate a formula.", "Evaluate an expression, such as 2 * 3.", "Do arithmetic.",
    ))  # fmt: skip
    signs = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
    a, b, c, sign, other = integer(rng), integer(rng), integer(rng), rng.choice([*signs]), rng.choice([*signs])
    expression, spoken = f"{a} {sign} {b}", f"{a} {signs[sign]} {b}"
    if (form := rng.random()) < 0.15:
        expression = spoken = f"({expression}) {other} {c}"
    elif form < 0.3:
        expression, spoken = f"{expression} {other} {c}", f"{spoken} {signs[other]} {c}"
    elif form < 0.4:
        expression = spoken = f"{a}{sign}{b}"
    asked = rng.choice((expression, expression, spoken))
    question = rng.choice(("What is {}?", "What is {}?", "How much is {}?", "Compute {}.", "Calculate {}", "{} = ?", "{}?"))
    found = number(rng)
    function = _function(name, description, {argument: "string"})
    return Skill("calculator", function, question.format(asked), {argument: expression}, found, f"{expression} = {found}")


def dictionary(rng: random.Random) -> Skill:
    """What a word means."""
    name = rng.choice(("dictionary", "dictionary", "define", "meaning", "lexicon", "look_up_word", "definition"))
    argument = rng.choice(("word", "word", "term", "entry"))
    description = rng.choice((
        "Look up the meaning of a word.", "Explain what a word means.", "Find a word in the dictionary.", "Define a word.",
    ))  # fmt: skip
    asked, found = rng.choice((word, invented_word))(rng), phrase(rng)
    question = rng.choice((
        "What does {} mean?", "What does {} mean?", 'What does "{}" mean?', "What does the word {} mean?", "Define {}.",
        "What is the meaning of {}?", "Explain the word {}.", "What is a {}?", "Look up {} in the dictionary.",
    ))  # fmt: skip
    function = _function(name, description, {argument: "string"})
    return Skill("dictionary", function, question.format(asked), {argument: asked}, found, f"The word {asked} means: {found}")


def lookup(rng: random.Random, nouns: list[str] = NOUNS) -> Skill:
    """A property of something: the weather in Rome."""
    noun, place, argument = rng.choice(nouns), rng.choice(("of", "of", "in", "for")), rng.choice(ARGUMENTS)
    before = rng.choice(("", "get", "find", "look_up", "tell"))
    name = _tool_name(rng, *before.split(), noun)
    description = rng.choice((
        "", f"Look up the {noun}.", f"Return the {noun} of a {argument}.", f"Get the {noun}.",
        f"Find the {noun} {place} a {argument}.",
    ))  # fmt: skip
    asked, found = value(rng), result(rng)
    arguments: dict[str, str | int] = {argument: asked}
    types = {argument: "string"}
    question = rng.choice((
        "What is the {}{}?", "What is the {}{}?", "Tell me the {}{}.", "Find the {}{}", "How is the {}{}?", "I need the {}{}.",
        "Do you know the {}{}?", "Look up the {}{}.",
    ))  # fmt: skip
    more = ""
    if rng.random() < 0.2:
        count = rng.choice(INTEGERS)
        arguments[count], types[count] = integer(rng), "integer"
        more = f" {rng.choice(('in', 'for', 'with'))} {arguments[count]} {count}"
    about = f"{noun} {place} {asked}"
    function = _function(name, description, types)
    return Skill(noun, function, question.format(about, more), arguments, found, f"The {about} is {found}")


def action(rng: random.Random, verbs: list[str] = VERBS) -> Skill:
    """Something to do, with up to three arguments in the question, in order or by name."""
    verb, thing = rng.choice(verbs), rng.choice(OBJECTS)
    name = _tool_name(rng, *rng.choice(((verb, thing), (verb, thing), (verb,))))
    names = rng.sample(ARGUMENTS, rng.choice((0, 1, 1, 1, 2, 2, 3)))
    types = dict.fromkeys(names, "string")
    arguments: dict[str, str | int] = {argument: value(rng) for argument in names}
    if names and rng.random() < 0.15:
        last = names[-1]
        types[last], arguments[last] = "integer", integer(rng)
    what = f"the {thing}"
    if rng.random() < 0.3 and names:
        named = rng.sample(names, len(names))
        what += " with " + " and ".join(f"{argument} {arguments[argument]}" for argument in named)
    elif names:
        first, *others = [str(arguments[argument]) for argument in names]
        what = rng.choice((f"the {thing} {first}", first, f"{thing} {first}"))
        what += "".join(f" {rng.choice(('to', 'with', 'in', 'for', 'from', 'by', 'and'))} {other}" for other in others)
    question = rng.choice((
        "{Verb} {what}.", "{Verb} {what}", "Please {verb} {what}.", "Can you {verb} {what}?", "I want to {verb} {what}.",
    ))  # fmt: skip
    done = f"{verb.capitalize()} the {thing} and say whether it worked."
    description = rng.choice(("", f"{verb.capitalize()} a {thing}.", done))
    found = result(rng)
    function = _function(name, description, types)
    asked = question.format(Verb=verb.capitalize(), verb=verb, what=what)
    return Skill(verb, function, asked, arguments, found, f"Done: {found}")


def list_files(rng: random.Random) -> Skill:
    question = rng.choice((
        "Which files are there?", "List the files.", "What files are in the folder?", "Show me the files.",
        "Which files are here?",
    ))  # fmt: skip
    found = "\n".join(f"{path(rng)} ({integer(rng)})" for _ in range(rng.randint(1, 4)))
    function = _function("list_files", "List the files of the folder, with their sizes in bytes.", {})
    return Skill("list", function, question, {}, found, f"The files are:\n{found}")


def _operation(rng: random.Random) -> str:
    return f"{rng.choice('abnxy')} {rng.choice('+-*/')} {rng.choice('abnxy')}"


def read_file(rng: random.Random) -> Skill:
    asked, found = path(rng), lines(rng)
    question = rng.choice(("Read {}.", "Read the file {}", "What is in {}?", "Show me {}.", "What does {} say?"))
    function = _function("read_file", "Read a text file.", {"path": "string"})
    return Skill("read", function, question.format(asked), {"path": asked}, found, f"{asked} says:\n{found}")


def edit_file(rng: random.Random) -> Skill:
    file = path(rng)
    old, new = (rng.choice((word, invented_word, words, _operation))(rng) for _ in range(2))
    question = rng.choice((
        "Replace {old} by {new} in {file}.", "In {file}, replace {old} by {new}.", "In {file}, change {old} to {new}.",
        "Change {old} to {new} in {file}", "Edit {file}: write {new} instead of {old}.",
    ))  # fmt: skip
    description = "Replace a text that occurs exactly once in a file. With an empty old text, create a new file."
    function = _function("edit_file", description, {"path": "string", "old": "string", "new": "string"})
    arguments = {"path": file, "old": old, "new": new}
    asked, found = question.format(file=file, old=old, new=new), f"edited {file}"
    return Skill("edit", function, asked, arguments, found, f"Done: {found}")


def run_command(rng: random.Random) -> Skill:
    file = path(rng)
    command = rng.choice((
        "ls", "ls -l", "make test", "pytest", f"python {file}", f"cat {file}", f"pytest {file}", f"make {word(rng)}",
        f"echo {phrase(rng)}",
    ))  # fmt: skip
    question = rng.choice(("Run {}", "Run {}.", "Run the command {}", "Please run {}.", "Execute {}"))
    found = f"exit status {rng.choice((0, 0, 1))}\n{lines(rng)}"
    description = "Run a shell command in the folder, and return its exit status and output."
    function = _function("run_command", description, {"command": "string"})
    return Skill("run", function, question.format(command), {"command": command}, found, f"Done: {found}")


FILES: list[Callable[[random.Random], Skill]] = [list_files, read_file, edit_file, run_command]


def any_skill(rng: random.Random) -> Skill:
    return rng.choice((calculator, dictionary, lookup, lookup, action, action, *FILES))(rng)


def unseen_lookup(rng: random.Random) -> Skill:
    return lookup(rng, UNSEEN["nouns"])


def unseen_action(rng: random.Random) -> Skill:
    return action(rng, UNSEEN["verbs"])


# What a conversation needs -> its first skill, and its weight among the training documents
KINDS: dict[str, tuple[Callable[[random.Random], Skill], float]] = {
    "calculator": (calculator, 3),
    "dictionary": (dictionary, 3),
    "files": (read_file, 4),
    "a property": (lookup, 5),
    "an action": (action, 5),
    "small talk": (any_skill, 0.7),
    "no tool fits": (any_skill, 1),
    "JSON": (any_skill, 1),
    "a property, word unseen": (unseen_lookup, 0),
    "an action, word unseen": (unseen_action, 0),
}


def _distinct(rng: random.Random, first: Callable[[random.Random], Skill]) -> Iterator[Skill]:
    """Yield a skill of the kind, and then others, each with a tool of another topic and name."""
    seen: set[str] = set()
    make = first
    while True:
        skill = make(rng)
        make = any_skill
        if not seen & {skill.topic, skill.function["name"]}:
            seen |= {skill.topic, skill.function["name"]}
            yield skill


def _facts(rng: random.Random) -> tuple[str, Values]:
    """Write a sentence about somebody, and the values in it."""
    name, age, city = rng.choice((*NAMES, invented_word(rng).capitalize())), integer(rng), rng.choice(CITIES)
    kind, color, toy = rng.choice(stories.KINDS), rng.choice(stories.COLORS), rng.choice(stories.TOYS)
    facts: list[tuple[str, Values]] = [
        (f"{name} is a {kind} and {age} years old.", {"name": name, "animal": kind, "age": age}),
        (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} has a {color} {toy}.", {"name": name, "color": color, "toy": toy}),
    ]
    return rng.choice(facts)
