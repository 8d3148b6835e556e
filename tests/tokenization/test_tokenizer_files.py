"""A tokenizer.json is the promise: ids and texts are those of the tokenizers library, whatever class the folder names."""

import json

import pytest
from tokenizers import decoders, normalizers, pre_tokenizers

from nanoinfer.tokenization.detokenizer import Detokenizer, without_incomplete_end
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.helpers.tokenizer_files import DECODERS, NORMALIZERS, PRE_TOKENIZERS, tokenizer_files

CLASSES = ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "BertTokenizer", None]
FILES = tokenizer_files()
TEXTS = [
    *(
        "",
        "hello world",
        " the  Hello,\n\tWorld! 123 .",
        "日本語 👩‍👩‍👧 e\u0301 ﬁ½ q",
        "a café here, café",
        "xcafé two words ##the##",
    ),
    "<|im_start|>user\n<s>[CLS] hello</s><|endoftext|><pad> <|im_start|>",
]
# Decoders whose later ids change earlier text, which is already released.
CHANGES_EARLIER_TEXT = {
    "WordPiece": "removes the space before a full stop",
    "CTC": "keeps one of several equal tokens",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for a tokenizer with a class's name. Everything else that it states is the tokenizer.json."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "config.json").write_text('{"model_type": "qwen3"}')  # names a class where tokenizer_config.json does not

    def write(backend, tokenizer_class, **stated):
        backend.save(str(path / "tokenizer.json"))
        stated |= {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
        (path / "tokenizer_config.json").write_text(json.dumps(stated))
        return path

    return write


def decoded(backend, ids, **options):
    """The library's text, except that a byte-level decoder's added token is its own content."""
    lossy = backend.token_to_id("café") if type(backend.decoder) is decoders.ByteLevel else None
    parts = [[]]
    for token_id in ids:
        parts += [token_id, []] if token_id == lossy else []
        parts[-1] += [] if token_id == lossy else [token_id]
    return "".join("café" if part == lossy else backend.decode(part, **options) for part in parts)


def check(folder, name, tokenizer_class):
    backend = FILES[name]
    tokenizer = Tokenizer.load(folder(backend, tokenizer_class))
    keeps_space = type(backend.decoder) is decoders.Metaspace or isinstance(backend.decoder, decoders.Sequence)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == tokenizer.hf(text).input_ids == ids, text
        for skip_special_tokens in (True, False):
            options = {"skip_special_tokens": skip_special_tokens}
            whole, expected = tokenizer.decode(ids, **options), decoded(backend, ids, **options)
            assert whole == expected or (keeps_space and whole == " " + expected), text
            if type(backend.decoder).__name__ not in CHANGES_EARLIER_TEXT:
                detokenizer = Detokenizer(tokenizer, **options)
                pieces = [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]
                assert "".join(pieces) == without_incomplete_end(whole), text


@pytest.mark.parametrize("name", FILES)
def test_ids_and_texts_are_those_of_the_library_under_every_class(folder, name):
    for tokenizer_class in CLASSES:
        check(folder, name, tokenizer_class)


def test_the_files_have_every_type_of_the_library():
    assert len(FILES) == 40
    for module, base, types in (
        (normalizers, normalizers.Normalizer, NORMALIZERS),
        (pre_tokenizers, pre_tokenizers.PreTokenizer, PRE_TOKENIZERS),
        (decoders, decoders.Decoder, DECODERS),
    ):
        known = {name for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, base)}
        assert known - {base.__name__} == types.keys()
