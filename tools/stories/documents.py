"""The training documents: stories and one-turn chats, as text, as probabilities, and as token ids of their tokenizer."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanoinfer_lab import stories
from nanoinfer_lab.stories.grammar import Reading

CHAT_SHARE = 0.2  # of the documents. The others are a story alone.
VOCAB_SIZE = 2048  # at most: training ends a little earlier, when every word of the stories is one token
NUM_TOKENIZER_DOCUMENTS = 20_000
SEQUENCE_LENGTH = 512  # the longest input of the models, in tokens

END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Document:
    """One story, and the question before it if it is a chat."""

    story: str
    question: str | None = None

    @property
    def log_prob(self) -> float:
        """The log-probability of this document among all documents, in nats."""
        if self.question is None:
            return math.log(1 - CHAT_SHARE) + stories.read(self.story).log_prob
        question = read_question(self.question)
        if not question.is_complete:
            return -math.inf
        hero = question.memory["hero"]
        return math.log(CHAT_SHARE) + question.log_prob + stories.read(self.story, hero.name).log_prob

    def encode(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        """The token ids, <|endoftext|> last. The chat template formats a chat."""
        if self.question is None:
            text = self.story
        else:
            messages = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.story}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        return [*tokenizer.encode(text), tokenizer.eos_token_id]


def write_question(rng: random.Random) -> str:
    """Write a question for a story, for example "Tell me a story about Lily"."""
    return stories.GRAMMAR.write(rng, "question")


def read_question(text: str) -> Reading:
    """Find how likely a text is as a question. If it is one, memory["hero"] is the one that the story must be about."""
    return stories.GRAMMAR.read(text, "question")


def write_document(rng: random.Random) -> Document:
    """Write a story or, with probability CHAT_SHARE, a chat."""
    if rng.random() >= CHAT_SHARE:
        return Document(stories.write(rng))
    question = write_question(rng)  # it draws the hero, which the story needs
    hero = read_question(question).memory["hero"]
    return Document(stories.write(rng, hero.name), question)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE vocabulary. It has all 256 bytes, so that it can spell any text, emoji and CJK included."""
    rng = random.Random(seed)
    # Without the chat markers. They are special tokens, and no merge should be spent on their spelling.
    documents = (write_document(rng) for _ in range(NUM_TOKENIZER_DOCUMENTS))
    texts = (f"user\n{d.question}\nassistant\n{d.story}" if d.question else d.story for d in documents)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train_bpe(texts, bytes_of, VOCAB_SIZE, chat_template=CHAT_TEMPLATE, max_length=SEQUENCE_LENGTH)


def train_bpe(
    texts: Iterable[str],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    vocab_size: int,
    *,
    chat_template: str,
    max_length: int,
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE vocabulary on texts, with the special tokens of a chat.

    Args:
        texts: the texts, without special tokens.
        pre_tokenizer: cuts a text into pieces of bytes, which no merge crosses.
        vocab_size: the number of tokens, with the special tokens and the tags.
        chat_template: the tokenizer's chat template.
        max_length: the longest input of the model, in tokens.
        tags: further tokens, which decoding keeps.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[MESSAGE_START, MESSAGE_END],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
