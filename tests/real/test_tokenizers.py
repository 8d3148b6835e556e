"""Published tokenizers give the ids and the texts of the tokenizers library, whole and as a stream."""

import json

import pytest
import tokenizers

from nanoinfer.tokenization.detokenizer import REPLACEMENT, Detokenizer
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.real.packages import PACKAGES
from tests.real.texts import TEXTS

PREFIX = "@lenml/tokenizer-"


def test_the_texts_are_315_different_ones():
    assert len(set(TEXTS)) == len(TEXTS) == 315


@pytest.mark.parametrize("name", [name.removeprefix(PREFIX) for name in PACKAGES if name.startswith(PREFIX)])
def test_a_tokenizer_encodes_decodes_and_streams_as_the_library(tokenizer_folder, name):
    """Under the class that its tokenizer_config.json names, such as GPT2Tokenizer for gpt4o."""
    folder = tokenizer_folder(name)
    tokenizer, library = Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stated = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    begin = library.encode("").ids  # llama2's file adds a BOS
    if stated.get("add_bos_token") and not begin:  # deepseek_v3's file does not, so that its configuration decides
        begin = [library.token_to_id(stated["bos_token"]["content"])]
    has_space = b'"Strip"' in library.decoder.__getstate__()  # llama2 inserts a space, which the library removes from any text
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == tokenizer.hf(text).input_ids == begin + ids, text
        for skip_special_tokens in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            expected = library.decode(ids, skip_special_tokens=skip_special_tokens)
            assert whole in ([expected, " " + expected] if has_space else [expected]), text
            stream = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
            assert "".join([*map(stream.push, ids), stream.finish()]) == whole.rstrip(REPLACEMENT), text
