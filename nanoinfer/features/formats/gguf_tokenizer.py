"""The tokenizer and the chat template in the metadata of a GGUF file.

In: the metadata, as gguf.py reads it. Out: a Tokenizer. Two kinds are supported: byte-level BPE ("gpt2": GPT-2,
Qwen, Llama 3, SmolLM) and SentencePiece's BPE ("llama": Llama 2, TinyLlama, Mistral).

transformers' own converter differs between versions, and splits text as GPT-2 does if it does not know how to split for a
vocabulary, which may give wrong tokens. Here such a vocabulary is refused by name.
Source: llama-vocab.cpp of https://github.com/ggml-org/llama.cpp, and the tokenizer.json of each model
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import CheckpointError, NanoinferError, UnsupportedError, first_line, shown
from nanoinfer.loading.tokenizer_files import add_ends
from nanoinfer.tokenization.tokenizer import Tokenizer, panics_raised

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4  # token types: special tokens, and others that are never split
MAX_SENTENCEPIECE_CHARACTERS = 2**21  # of all tokens together. Every way to cut each token in two is tried

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
# tiktoken's o200k: a word ends where capitals follow small letters
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> the regex that splits a text into words. None: GPT-2's, which the tokenizers library has.
_WORDS = {
    "gpt-2": None,
    "smollm": None,  # every digit is a word
    "qwen2": _ENGLISH + r"\p{N}" + _REST,
    "deepseek-r1-qwen": _ENGLISH + r"\p{N}" + _REST,
    "qwen35": (_ENGLISH + r"\p{N}" + _REST).replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),
    "llama-bpe": _ENGLISH + r"\p{N}{1,3}" + _REST,
    "gpt-4o": _O200K + r"|\p{N}{1,3}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*"),  # gpt-oss
}
_LLAMA3 = "llama-bpe"


def tokenizer_from_gguf(metadata: dict[str, Any], path: Path) -> Tokenizer | None:
    """Build the tokenizer of a GGUF file, or return None if it has none."""
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    hint = "pass LLM(tokenizer=...), a folder or a hub name with the model's tokenizer.json"
    try:
        with panics_raised():
            return _build(metadata, path, hint)
    except NanoinferError:
        raise
    except Exception as error:  # of many classes, for metadata of the wrong type
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"the tokenizer in {path} cannot be used ({reason}); {hint}") from error


def _build(metadata: dict[str, Any], path: Path, hint: str) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if split is None and metadata.get("general.architecture") == "gpt2":
        split = "gpt-2"
    if kind == "gpt2" and split in _WORDS:
        backend = _byte_level(metadata, tokens, split)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens)
    else:
        raise UnsupportedError(
            f"the tokenizer in {path} is {shown(kind)} with the splitting {shown(split)}; supported are 'llama', and 'gpt2' "
            f"with {', '.join(_WORDS)}. P{hint[1:]}"
        )
    _add_special_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type", []))
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or split == _LLAMA3)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    add_ends(backend, special["bos_token"] if adds_bos else None, special["eos_token"] if adds_eos else None)
    chat_template = metadata.get("tokenizer.chat_template")
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **special))


def _byte_level(metadata: dict[str, Any], tokens: list[str], split: str) -> "tokenizers.Tokenizer":
    """Make GPT-2's BPE over bytes, with the word splitting that the vocabulary was learned on."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == _LLAMA3))
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_WORDS[split] is None)
    ]
    if split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif words := _WORDS[split]:
        steps.insert(0, pre_tokenizers.Split(Regex(words), behavior="isolated"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    if split in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> "tokenizers.Tokenizer":
    """Make Llama 2's BPE over characters, with bytes for unknown characters. A space is written as U+2581."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    if sum(map(len, tokens)) > MAX_SENTENCEPIECE_CHARACTERS:
        raise CheckpointError(f"the tokens have more than {MAX_SENTENCEPIECE_CHARACTERS} characters; download the file again")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    # SentencePiece stores no merges: every pair of tokens that forms a token is a merge, the best score first.
    merges = generate_merges(vocabulary, zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if adds_space else spaces
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if adds_space else []))
    return backend


def _add_special_tokens(backend: "tokenizers.Tokenizer", tokens: list[str], types: list[int]) -> None:
    """Keep control tokens and user-defined tokens whole. They already have ids."""
    from tokenizers import AddedToken

    for token_type, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        texts = [token for token, its_type in zip(tokens, types, strict=False) if its_type == token_type and token]
        add([AddedToken(token, normalized=False, special=token_type == _CONTROL) for token in texts])
