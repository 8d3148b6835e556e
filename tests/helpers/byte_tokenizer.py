"""A small byte-level BPE tokenizer, for tests of what becomes of bytes that are no whole character."""

import functools

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanoinfer.tokenization.tokenizer import Tokenizer

TOKENS = [bytes([byte]) for byte in range(256)]
TOKENS += [b"th", b"the", b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xacx", b"a\xe2", b"\x82\xac"]
EOS, IM_END = len(TOKENS), len(TOKENS) + 1  # the two special tokens, "<eos>" and "<|im_end|>"
BEYOND = [IM_END + 1, 5000, 2**31]  # the model's vocabulary is larger than the tokenizer's


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer as GPT-2's, with a handful of merges."""
    letters = bytes_to_unicode()  # byte -> the printable character that stands for it
    written = ["".join(letters[byte] for byte in token) for token in TOKENS]
    merges = [(token[:-1], token[-1]) for token in written[256:]]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(written)}, merges=merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert backend.add_special_tokens(["<eos>", "<|im_end|>"]) == 2
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))
