"""40 small tokenizers with every normalizer, pre-tokenizer and decoder of the tokenizers library, as in a tokenizer.json."""

import struct
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ["he", "hel", "hell", "hello", "th", "the", "wo", "wor", "worl", "world", "er", "in", "an", "caf"]
SPACE = "\u2581"


def _charsmap() -> bytes:
    """SentencePiece's map of characters, with the rule q -> k: a trie of 512 units, and the texts that its leaves point to."""
    units = [0] * 512
    units[ord("q")] = ord("q") | 1 << 8 | 256 << 10  # label, "has a leaf", the leaf's distance
    return struct.pack("<I", 4 * len(units)) + struct.pack("<512I", *units) + b"k\0"


NORMALIZERS: dict[str, Callable[[], normalizers.Normalizer]] = {
    "BertNormalizer": normalizers.BertNormalizer,
    "ByteLevel": normalizers.ByteLevel,
    "Lowercase": normalizers.Lowercase,
    "NFC": normalizers.NFC,
    "NFD": normalizers.NFD,
    "NFKC": normalizers.NFKC,
    "NFKD": normalizers.NFKD,
    "Nmt": normalizers.Nmt,
    "Precompiled": lambda: normalizers.Precompiled(_charsmap()),
    "Prepend": lambda: normalizers.Prepend("!"),
    "Replace": lambda: normalizers.Replace(Regex("l+"), "L"),
    "Sequence": lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    "Strip": lambda: normalizers.Strip(left=True, right=True),
    "StripAccents": normalizers.StripAccents,
}
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "BertPreTokenizer": pre_tokenizers.BertPreTokenizer,
    "ByteLevel": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "CharDelimiterSplit": lambda: pre_tokenizers.CharDelimiterSplit("o"),
    "Digits": lambda: pre_tokenizers.Digits(individual_digits=True),
    "FixedLength": lambda: pre_tokenizers.FixedLength(3),
    "Metaspace": pre_tokenizers.Metaspace,
    "Punctuation": pre_tokenizers.Punctuation,
    "Sequence": lambda: pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits()]),
    "Split": lambda: pre_tokenizers.Split(Regex(ENGLISH), "isolated"),
    "UnicodeScripts": pre_tokenizers.UnicodeScripts,
    "Whitespace": pre_tokenizers.Whitespace,
    "WhitespaceSplit": pre_tokenizers.WhitespaceSplit,
}
DECODERS: dict[str, Callable[[], decoders.Decoder]] = {
    "BPEDecoder": lambda: decoders.BPEDecoder(suffix="</w>"),
    "ByteFallback": decoders.ByteFallback,
    "ByteLevel": decoders.ByteLevel,
    "CTC": lambda: decoders.CTC(pad_token="<unk>", word_delimiter_token=SPACE),
    "Fuse": decoders.Fuse,
    "Metaspace": decoders.Metaspace,
    "Replace": lambda: decoders.Replace(SPACE, " "),
    "Sequence": lambda: decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "Strip": lambda: decoders.Strip("#", 1, 0),
    "WordPiece": decoders.WordPiece,
}


def byte_level() -> Tokenizer:
    """GPT-2's: BPE over bytes."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {word: len(vocab) + i for i, word in enumerate(WORDS)}
    merges = [(word[:-1], word[-1]) for word in WORDS if len(word) == 2 or word[:-1] in vocab]
    backend = Tokenizer(models.BPE(vocab, [pair for pair in merges if all(part in vocab for part in pair)]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return backend


def sentencepiece() -> Tokenizer:
    """Llama 2's: BPE over characters, with bytes for those that it lacks."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *"helowrdtain#.,!?0123"]
    vocab = {token: i for i, token in enumerate([*tokens, SPACE + "h", *WORDS[:3]])}
    merges = [(SPACE, "h"), ("h", "e"), ("he", "l"), ("hel", "l")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = DECODERS["Sequence"]()
    return backend


def unigram() -> Tokenizer:
    """T5's and Gemma's kind."""
    tokens = ["<unk>", "</s>", SPACE, *(f"<0x{byte:02X}>" for byte in range(256)), *"helowrdtain#.,!?", *WORDS, SPACE + "the"]
    backend = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(tokens)], 0, byte_fallback=True))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def word_piece() -> Tokenizer:
    """BERT's."""
    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *WORDS,
        *"helowrdtaincf.,!?0123",
        *(f"##{letter}" for letter in "helowrdtaincfs#é0123"),
    ]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return backend


def _words() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["<unk>", *WORDS, "Hello", ",", "!", "Ġworld", "Hel"])}
    return Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))


def _llama3() -> Tokenizer:
    backend = byte_level()
    split = pre_tokenizers.Split(Regex(ENGLISH), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.add_special_tokens(["<s>"])
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def _bert() -> Tokenizer:
    backend = word_piece()
    backend.normalizer = normalizers.BertNormalizer(strip_accents=True)
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


def tokenizer_files() -> dict[str, Tokenizer]:
    """Return the tokenizers by name. Each has the special token <|im_start|> and the added tokens "café" and " two words"."""
    made = {"llama-3": _llama3(), "llama-2": sentencepiece(), "unigram": unigram(), "bert": _bert()}
    for name, normalizer in NORMALIZERS.items():
        made[f"normalizer {name}"] = backend = byte_level()
        backend.normalizer = normalizer()
        if name == "ByteLevel":
            backend.pre_tokenizer = pre_tokenizers.Split(Regex("\u0120?[a-z]+"), "isolated")
    makers = [byte_level, word_piece, _words, sentencepiece]
    for i, (name, pre_tokenizer) in enumerate(PRE_TOKENIZERS.items()):
        made[f"pre-tokenizer {name}"] = backend = makers[i % len(makers)]()
        backend.pre_tokenizer = pre_tokenizer()
    makers = [sentencepiece, unigram]
    for i, (name, decoder) in enumerate(DECODERS.items()):
        made[f"decoder {name}"] = backend = makers[i % len(makers)]()
        backend.decoder = decoder()
    for backend in made.values():
        backend.add_special_tokens(["<|im_start|>"])
        backend.add_tokens([AddedToken("café", normalized=False), AddedToken(" two words", normalized=False)])
    return made
