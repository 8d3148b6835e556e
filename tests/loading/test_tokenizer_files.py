"""A tokenizer.json is the promise: ids and texts are those of the tokenizers library, whatever class the folder names."""

import json

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoinfer.errors import UnsupportedError
from nanoinfer.loading import tokenizer_files as reading
from nanoinfer.tokenization.detokenizer import REPLACEMENT, Detokenizer
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.helpers.tokenizer_files import DECODERS, NORMALIZERS, PRE_TOKENIZERS, byte_level, tokenizer_files, unigram

CLASSES = ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "BertTokenizer", None]
FILES = tokenizer_files()
TEXTS = [
    *("", "hello world", " the  Hello,\n\tWorld! 123 .", "日本語 👩‍👩‍👧 e\u0301 ﬁ½ q", "a café here, café"),
    *("xcafé two words ##the##", "<|im_start|>user\n<s>[CLS] hello</s><|endoftext|><pad> <|im_start|>"),
]
# Decoders whose later ids change earlier text, which is already released.
CHANGES_EARLIER_TEXT = ("WordPiece", "CTC")  # the space before a full stop is removed, and one of several equal tokens kept


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

    write.path = path
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
                assert "".join(pieces) == whole.rstrip(REPLACEMENT), text


@pytest.mark.parametrize(("number", "name"), [*enumerate(FILES)])
def test_ids_and_texts_are_those_of_the_library_under_every_class(folder, number, name):
    """Two of the six classes for each file: each class reads files of every kind."""
    for tokenizer_class in (CLASSES[number % 6], CLASSES[(number + 1 + number // 6) % 6]):
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


# ---- what tokenizer_config.json and the class say


def with_tokens(*special, backend=None):
    backend = backend or byte_level()
    backend.add_special_tokens(list(special))
    return backend


def test_the_tokens_that_only_a_class_knows_stay_for_templates_and_change_no_id(folder):
    backend = with_tokens("<|endoftext|>")
    eos = backend.token_to_id("<|endoftext|>")
    hf = Tokenizer.load(folder(backend, "GPT2Tokenizer")).hf
    assert (hf.eos_token, hf.eos_token_id, hf.pad_token) == ("<|endoftext|>", eos, None)
    assert Tokenizer.load(folder(backend, "Qwen2Tokenizer")).hf.pad_token == "<|endoftext|>"
    backend = with_tokens()
    tokenizer = Tokenizer.load(folder(backend, "GPT2Tokenizer"))
    assert tokenizer.hf.eos_token == "<|endoftext|>"
    assert tokenizer.hf.eos_token_id is None  # and not the id of another token
    assert tokenizer.encode("<|endoftext|>") == backend.encode("<|endoftext|>").ids
    tokenizer = Tokenizer.load(folder(unigram(), "T5Tokenizer", eos_token="<end>", unk_token="<unk>"))
    assert tokenizer.hf.eos_token_id == tokenizer.encode("<end>", add_special_tokens=False)[-1]  # stated, so it is added


def test_a_class_that_cannot_read_the_file_is_left_out_with_a_line(folder, caplog):
    """Such as one that has no fast form, or comes with the checkpoint as code."""
    backend = with_tokens("<eos>")
    for tokenizer_class, stated in (
        ("CTRLTokenizer", {}),
        ("ByT5Tokenizer", {}),
        ("MyTokenizer", {"auto_map": {"AutoTokenizer": ["code.MyTokenizer", None]}}),
    ):
        tokenizer = Tokenizer.load(folder(backend, tokenizer_class, eos_token="<eos>", **stated))
        assert tokenizer.encode("hello<eos>") == tokenizer.hf("hello<eos>").input_ids == backend.encode("hello<eos>").ids
        assert tokenizer.hf.eos_token_id == backend.token_to_id("<eos>")
    assert "tokenizer.json is read without its class" in caplog.text


def test_the_tokens_that_tokenizer_config_states_are_added(folder):
    backend = with_tokens("<eos>")
    num = backend.get_vocab_size()
    added = {str(num): AddedToken("[x]", normalized=False).__getstate__(), str(num + 1): AddedToken("<s>").__getstate__()}
    stated = {"added_tokens_decoder": added, "bos_token": "<s>", "extra_special_tokens": ["<|turn|>"]}
    for tokenizer_class in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
        tokenizer = Tokenizer.load(folder(backend, tokenizer_class, **stated))
        assert tokenizer.encode("[x]<s><|turn|><eos>") == [num, num + 1, num + 2, num - 1]
        assert tokenizer.decode([num, num + 1, num + 2]) == "[x]"


def test_the_number_of_calls_that_add_tokens_does_not_grow_with_the_tokens(folder, monkeypatch):
    """Each call prepares the search for all added tokens, of which Gemma 3 states 6,414."""
    calls = []
    for name in ("add_tokens", "add_special_tokens"):
        add = getattr(LibraryTokenizer, name)
        monkeypatch.setattr(LibraryTokenizer, name, lambda self, tokens, add=add: calls.append(tokens) or add(self, tokens))

    def num_calls(num_tokens):
        stated = {str(300 + i): {"content": f"<{i}>"} for i in range(num_tokens)}
        path = folder(with_tokens("<eos>"), None, added_tokens_decoder=stated)
        calls.clear()
        Tokenizer.load(path)
        return len(calls)

    assert num_calls(40) == num_calls(2)


def test_split_special_tokens_is_obeyed(folder):
    backend = with_tokens("<|im_end|>")
    for tokenizer_class in ("Qwen2Tokenizer", None):
        tokenizer = Tokenizer.load(folder(backend, tokenizer_class, split_special_tokens=True))
        ids = tokenizer.encode("<|im_end|>")
        assert ids == tokenizer.hf("<|im_end|>").input_ids
        assert len(ids) == len("<|im_end|>")
        assert tokenizer.decode(ids) == "<|im_end|>"
    assert len(Tokenizer.load(folder(backend, None)).encode("<|im_end|>")) == 1


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast", None])
def test_a_stated_add_prefix_space_goes_to_a_pre_tokenizer_that_stands_alone(folder, caplog, tokenizer_class):
    backend = byte_level()
    plain, spaced = backend.encode("hello").ids, backend.encode(" hello").ids
    for in_file in (True, False):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=in_file)
        for stated, ids in ((True, spaced), (False, plain), (None, spaced if in_file else plain)):
            tokenizer = Tokenizer.load(folder(backend, tokenizer_class, add_prefix_space=stated))
            assert tokenizer.encode("hello") == tokenizer.hf("hello").input_ids == ids
    backend = unigram()
    spaced = backend.encode("the").tokens
    for scheme, stated, is_spaced in (("always", False, False), ("never", True, True), ("first", True, True)):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer = Tokenizer.load(folder(backend, tokenizer_class, add_prefix_space=stated))
        assert (tokenizer.backend.encode("the").tokens == spaced) == is_spaced
    assert "is ignored" not in caplog.text


def test_a_stated_add_prefix_space_that_cannot_be_applied_is_ignored_with_a_line(folder, caplog):
    backend = byte_level()
    split = pre_tokenizers.Split(" ", "isolated")
    for in_file in (True, False):
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=in_file, use_regex=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        for stated in (True, False):
            caplog.clear()
            tokenizer = Tokenizer.load(folder(backend, "Qwen2Tokenizer", add_prefix_space=stated))
            assert tokenizer.encode("hello world") == backend.encode("hello world").ids
            assert (f"add_prefix_space={stated} is ignored" in caplog.text) == (stated != in_file)


ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def template(single):
    backend = with_tokens("<s>", "</s>")
    special = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    return processors.TemplateProcessing(single=single, special_tokens=special)


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    ("post_processor", "stated", "added"),
    [
        (None, {}, ""),
        (None, {"add_bos_token": True}, "<s>"),
        (None, {"add_eos_token": True}, "</s>"),
        (processors.ByteLevel(), {"add_bos_token": True, "add_eos_token": True}, "<s></s>"),
        (processors.ByteLevel(), {"add_bos_token": False}, ""),
        (template("<s> $A"), {"add_bos_token": True}, "<s>"),
        (template("<s> $A"), {"add_bos_token": False, "add_eos_token": None}, "<s>"),
        (template("<s> $A"), {"add_bos_token": False, "add_eos_token": True}, "<s></s>"),
        (template("$A </s>"), {"add_eos_token": False}, "</s>"),  # Qwen3-Embedding's
        (processors.Sequence([processors.ByteLevel(), template("$A </s>")]), {"add_bos_token": True}, "<s></s>"),
    ],
)
def test_add_bos_token_and_add_eos_token_add_what_the_post_processor_does_not(
    folder, tokenizer_class, post_processor, stated, added
):
    backend = with_tokens("<s>", "</s>")
    if post_processor is not None:
        backend.post_processor = post_processor
    tokenizer = Tokenizer.load(folder(backend, tokenizer_class, **ENDS, **stated))
    bare = tokenizer.encode("hello", add_special_tokens=False)
    ids = [*([backend.token_to_id("<s>")] * ("<s>" in added)), *bare, *([backend.token_to_id("</s>")] * ("</s>" in added))]
    assert tokenizer.encode("hello") == tokenizer.hf("hello").input_ids == ids


def test_an_end_that_the_file_lacks_is_ignored_with_a_line(folder, caplog):
    tokenizer = Tokenizer.load(folder(byte_level(), "GPT2Tokenizer", add_bos_token=True))  # the class's <|endoftext|>
    assert tokenizer.encode("hello") == byte_level().encode("hello").ids
    assert "add_bos_token is ignored, since bos_token='<|endoftext|>' has no id" in caplog.text


def test_a_saved_tokenizer_is_the_same(folder, tmp_path):
    tokenizer = Tokenizer.load(folder(with_tokens("<s>", "</s>"), "GPT2Tokenizer", **ENDS, add_bos_token=True))
    tokenizer.hf.save_pretrained(tmp_path)
    saved = Tokenizer.load(tmp_path)
    assert saved.encode("<s> hello") == tokenizer.encode("<s> hello")
    assert saved.hf.special_tokens_map == tokenizer.hf.special_tokens_map
    assert "vocab_file" not in (tmp_path / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("content", "packages"), [(b"\n\x0e\n\x05<unk>\x15", "sentencepiece protobuf"), (b"IQ== 0\nIg== 1\n", "tiktoken")]
)
def test_a_tokenizer_model_without_its_package_names_it(tmp_path, monkeypatch, content, packages):
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setattr(reading, "distributions", list)  # none is installed
    with pytest.raises(UnsupportedError, match=rf"tokenizer.model needs .+; pip install {packages}, or add"):
        Tokenizer.load(tmp_path)


def test_a_folder_of_transformers_5_is_read_by_transformers_4_without_a_line(folder, monkeypatch, caplog):
    """transformers 4 lacks the class TokenizersBackend, and takes extra_special_tokens for a mapping."""
    load = PreTrainedTokenizerFast.from_pretrained

    def load_as_4(path, **options):
        stated = json.loads((folder.path / "tokenizer_config.json").read_text()) | options
        assert isinstance(stated["extra_special_tokens"], dict)
        return load(path, **options | {"extra_special_tokens": options["additional_special_tokens"]})

    monkeypatch.setattr(reading, "version", lambda package: "4.51.0", raising=False)
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", load_as_4)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", {}.__getitem__)
    backend = with_tokens("<eos>")
    folder(backend, "TokenizersBackend", extra_special_tokens=["<|turn|>"], eos_token="<eos>")
    tokenizer = Tokenizer.load(folder.path)
    assert tokenizer.encode("<|turn|><eos>") == [backend.get_vocab_size(), backend.get_vocab_size() - 1]
    assert tokenizer.hf.eos_token == "<eos>"
    assert not caplog.text
