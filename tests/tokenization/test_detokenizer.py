"""Incremental text: the pieces joined equal the decode without an incomplete end, and no piece changes with a later id."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from nanoinfer.tokenization.detokenizer import Detokenizer
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import BEYOND, EOS, IM_END, TOKENS, byte_tokenizer

# id -> bytes. Ids 0 to 255 are single bytes. Further ids begin, end or straddle characters of several bytes.


def pieces_of(ids, *, skip_special_tokens=True, tokenizer=None):
    """The text that each push releases, and the text that finish releases at the end."""
    detokenizer = Detokenizer(tokenizer or byte_tokenizer(), skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def decoded_by_python(ids, *, skip_special_tokens):
    """The oracle: Python's own UTF-8 decoder on the bytes of the ids."""
    special = {} if skip_special_tokens else {EOS: b"<eos>", IM_END: b"<|im_end|>"}
    return b"".join(TOKENS[i] if i < EOS else special.get(i, b"") for i in ids).decode("utf-8", errors="replace")


def check(ids, *, skip_special_tokens=True, pieces_of=pieces_of):
    pieces = pieces_of(ids, skip_special_tokens=skip_special_tokens)
    text = "".join(pieces)
    assert text == byte_tokenizer().decode(ids, skip_special_tokens=skip_special_tokens).rstrip("\ufffd")
    assert text == decoded_by_python(ids, skip_special_tokens=skip_special_tokens).rstrip("\ufffd")
    for end in range(len(ids) + 1):
        shown, now = "".join(pieces[:end]), decoded_by_python(ids[:end], skip_special_tokens=skip_special_tokens)
        assert now.startswith(shown)
        if not now.endswith("\ufffd"):
            assert shown == now  # nothing certain waits


some_ids = st.lists(st.one_of(st.integers(0, 255), st.integers(256, IM_END), st.sampled_from([*BEYOND, 0xE2, 0x82, 0xAC])))


@settings(max_examples=200, deadline=None)
@given(ids=some_ids, skip_special_tokens=st.booleans())
def test_the_pieces_of_any_ids_joined_are_their_decode_without_an_incomplete_end_and_no_piece_changes(ids, skip_special_tokens):
    check(ids, skip_special_tokens=skip_special_tokens)


@st.composite
def split_texts(draw):
    """A text, and ids of its bytes. Longer tokens are chosen at random where they fit."""
    text = draw(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("the€x😀你a\u200d\ufffd")), max_size=12))
    data, ids = text.encode(), []
    while data:
        fitting = [i for i, token in enumerate(TOKENS) if data.startswith(token)]
        ids.append(draw(st.sampled_from(fitting)))
        data = data[len(TOKENS[ids[-1]]) :]
    return text, ids


@settings(max_examples=150, deadline=None)
@given(split_texts())
def test_any_text_comes_back_however_its_bytes_are_split(case):
    text, ids = case
    assert "".join(pieces_of(ids)) == text.rstrip("\ufffd")
    check(ids)


def test_the_check_notices_ids_decoded_one_at_a_time():
    def one_at_a_time(ids, *, skip_special_tokens):
        return [byte_tokenizer().decode([token_id], skip_special_tokens=skip_special_tokens) for token_id in ids]

    check([*b"abc"], pieces_of=one_at_a_time)
    with pytest.raises(AssertionError):
        check([*"é".encode()], pieces_of=one_at_a_time)


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([], [""]),
        ([0xE2, 0x82], ["", "", ""]),  # truncated: left out
        ([262], ["", "a"]),  # but not the text beside it
        ([0xE2, 0x82, ord("a")], ["", "", "\ufffda", ""]),
        ([0xFF, 0xFF, ord("a")], ["", "", "\ufffd\ufffda", ""]),
        ([0x80, *b"a"], ["", "\ufffda", ""]),
        ([*"\ufffd".encode(), *b"a"], ["", "", "", "\ufffda", ""]),  # a real U+FFFD looks like half a character: it waits
        ([262, 263], ["", "a€", ""]),  # a\xe2 \x82\xac: the a waits with the half character in its token
    ],
)
def test_invalid_utf8_is_released_once_no_later_id_can_complete_it(ids, pieces):
    assert pieces_of(ids) == pieces


# ---- Llama's tokenizer: a space is "\u2581", one is written before every text, and unknown characters are bytes


def llama_tokenizer(*, has_metaspace):
    """The two ways in which tokenizer.json files write the same."""
    words = ["\u2581", "a", "t", "h", "e", "\u2581a", "th", "the", "\u2581the"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    merges = [("\u2581", "a"), ("t", "h"), ("th", "e"), ("\u2581", "the")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if has_metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        last = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *last])
    backend.add_special_tokens(["<s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


@pytest.mark.parametrize("has_metaspace", [False, True])
def test_an_answer_continues_its_prompt_with_its_space_and_whole_characters(has_metaspace):
    tokenizer = llama_tokenizer(has_metaspace=has_metaspace)
    text = "the a \u4f60\u597d the\n\u20ac  a"
    ids = tokenizer.encode(text)
    assert tokenizer.hf.decode(ids) == text
    num_answers = 0
    for start in range(1, len(ids)):
        prompt = tokenizer.hf.decode(ids[:start])
        if not prompt.endswith("\ufffd"):  # a prompt does not end inside a character
            pieces = pieces_of(ids[start:], tokenizer=tokenizer)
            assert prompt + "".join(pieces) == text
            assert not any("\ufffd" in piece for piece in pieces)
            num_answers += 1
    assert num_answers > 8
    assert "".join(pieces_of(ids, tokenizer=tokenizer)) == " " + text  # without a prompt, too, the space is the first token's


def test_the_texts_and_bytes_of_llamas_tokens_alone():
    tokenizer = llama_tokenizer(has_metaspace=False)
    ids = tokenizer.hf.convert_tokens_to_ids(["\u2581the", "a", "<0xE4>", "<0x0A>"])
    assert [tokenizer.token_text(token_id) for token_id in ids] == [" the", "a", "\ufffd", "\n"]
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" the", b"a", b"\xe4", b"\n"]


def test_an_id_that_changes_the_text_before_it_does_not_end_the_stream():
    """Llama's byte tokens: in a run of bytes that is no UTF-8, every byte is U+FFFD, those of an é already shown included."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "<unk>": 257}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.ByteFallback()
    ids = [0xC3, 0xA9, 0xFF, 256, 256]
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):  # the case is real
        [stream.step(backend, token_id) for token_id in ids]
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert pieces_of(ids, tokenizer=tokenizer) == ["", "é", "", "\ufffda", "a", ""]


# ---- added tokens of a byte-level tokenizer, whose letters also stand for bytes


def byte_tokenizer_with(*added, special=()):
    backend = Backend.from_str(byte_tokenizer().hf.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    backend.add_special_tokens(list(special))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_added_tokens_of_any_letters_keep_their_text():
    tokens = ["café", "đem", "Ã©", "ÃĥÂ©", "été", "[é]", "naïve\nĠ", "日本é", "plain"]
    tokenizer = byte_tokenizer_with(*tokens, special=["<|ünd|>"])
    ids = [tokenizer.backend.token_to_id(token) for token in [*tokens, "<|ünd|>"]]
    assert [tokenizer.token_text(token_id) for token_id in ids] == [*tokens, "<|ünd|>"]
    assert [tokenizer.token_bytes(token_id).decode() for token_id in ids] == [*tokens, "<|ünd|>"]
    text = "a café 你đem\U0001f600Ã© été" + "".join(tokens) + "<|ünd|>é"
    encoded = tokenizer.encode(text)
    assert set(ids) <= set(encoded)
    for skip_special_tokens in (True, False):
        options = {"skip_special_tokens": skip_special_tokens}
        expected = text.replace("<|ünd|>", "") if skip_special_tokens else text
        assert tokenizer.decode(encoded, **options) == expected
        assert tokenizer.decode(encoded * 4000, **options) == expected * 4000  # as a batch
        pieces = pieces_of(encoded, tokenizer=tokenizer, **options)
        assert "".join(pieces) == expected
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_added_token_that_is_also_a_byte_stays_a_byte():
    """The é of the added token has the id of the byte E9, with which many Chinese characters begin."""
    tokenizer = byte_tokenizer_with("é", "th")
    assert tokenizer.own_texts == {}
    assert tokenizer.decode([*"這the".encode()]) == "這the"


def test_only_the_first_space_of_a_text_is_kept():
    """Not other characters that a decoder strips, nor those of every token."""
    backend = Backend(models.WordLevel({"##a": 0, " b": 1, "c": 2}, unk_token="c"))
    for decoder in (decoders.Strip("#", 2, 0), decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Strip("#", 1, 0)])):
        backend.decoder = decoder
        tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
        assert tokenizer.decode([0, 1, 1, 2]) == backend.decode([0, 1, 1, 2])
