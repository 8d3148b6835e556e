"""Read the tokenizer files of a checkpoint, with transformers.

In: a folder. Out: transformers' fast tokenizer, with the ids of the tokenizers library for the folder's tokenizer.json.
transformers only contributes the special tokens that a class knows and the file lacks, since chat templates read them.
"""

import json
import logging
import re
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import CheckpointError, UnsupportedError, first_line, shown
from nanoinfer.tokenization.tokenizer import panics_raised

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
# transformers 4 warns of each tokenizer that is loaded without its class, as _from_file does.
logging.getLogger("transformers.tokenization_utils_base").addFilter(
    lambda record: "is not the same type as the class this function is called from" not in record.getMessage()
)

# The class of transformers without anything of its own, by the name that transformers 5 writes, and by that of transformers 4.
_WITHOUT_CLASS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
MAX_TOKEN_ID = 2**22  # The library makes tables of this length. The largest vocabularies have a million tokens.


def read_tokenizer(path: Path) -> "PreTrainedTokenizerFast | None":
    """Return the tokenizer in a folder, or None without tokenizer files. Raises: CheckpointError, UnsupportedError."""
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        _check_ids(path)
        with panics_raised():
            if (path / "tokenizer.json").exists():
                hf = _from_file(path)
            else:
                hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)  # else a checkpoint could ask for it
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises many classes for corrupted files
        if packages := _lacking_packages(path):
            hint = f"pip install {' '.join(packages)}, or add the model's tokenizer.json"
            text = f"{path / 'tokenizer.model'} needs {' and '.join(packages)}, not installed here; {hint}"
            raise UnsupportedError(text) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"transformers cannot load the tokenizer in {path} ({reason}); download it again") from error
    if not getattr(hf, "is_fast", False):
        raise UnsupportedError(
            f"the tokenizer in {path} ({type(hf).__name__}) has no tokenizer.json form, which streaming needs; "
            "convert it with transformers, and pass LLM(tokenizer=...)"
        )
    return hf


def _check_ids(path: Path) -> None:
    """Refuse a vocabulary whose ids are far apart, which would cost the library gigabytes, or have several tokens.

    Raises: CheckpointError, and the errors of json for a file that is not JSON.
    """
    file, keys = path / "tokenizer.json", ["model", "vocab"]
    if not file.exists():
        file, keys = path / "vocab.json", []
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    if not isinstance(content, dict):  # in a list, the positions are the ids. Anything else is refused by transformers
        return
    token_of: dict[int, str] = {}
    for token, token_id in content.items():
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKEN_ID:
            raise CheckpointError(
                f"{file} gives the token {shown(token)} the id {shown(token_id)}; ids are from 0 to {MAX_TOKEN_ID - 1}; "
                "download it again"
            )
        if (other := token_of.setdefault(token_id, token)) != token:
            raise CheckpointError(
                f"{file} gives the tokens {shown(other)} and {shown(token)} the same id {token_id}; download it again"
            )


def _from_file(path: Path) -> "PreTrainedTokenizerFast":
    """Read a folder with a tokenizer.json.

    A class of transformers may replace parts of the file, such as its normalizer, or refuse it. So the class is loaded with an
    empty vocabulary, for its special tokens, and gets the tokenizer of the file afterwards. This is also faster.
    """
    import tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config_file = path / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    options: dict[str, Any] = {"tokenizer_object": tokenizers.Tokenizer(tokenizers.models.BPE())}
    options |= dict.fromkeys(("tokenizer_file", "vocab_file", "merges_file"), "")
    options |= {"tokenizer_padding": backend.padding, "tokenizer_truncation": backend.truncation}
    older_files = (path / name for name in ("special_tokens_map.json", "added_tokens.json"))
    if "added_tokens_decoder" not in config and not any(file.exists() for file in older_files):
        options["added_tokens_decoder"] = backend.get_added_tokens_decoder()  # for which transformers would parse the file
    if version("transformers").startswith("4.") and isinstance(extra := config.get("extra_special_tokens"), list):
        options |= {"extra_special_tokens": {}, "additional_special_tokens": extra}  # the list has the second name there
    hf: Any = None
    try:
        with panics_raised():
            if config.get("tokenizer_class") not in _WITHOUT_CLASS:
                hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, **options)
    except Exception as error:
        logger.warning("%s: tokenizer.json is read without its class: %s", path, first_line(error))
    stated = hf if type(hf) is PreTrainedTokenizerFast else PreTrainedTokenizerFast.from_pretrained(str(path), **options)
    # Those that tokenizer_config.json states in addition. A call prepares the search for all of them: Gemma 3 has 6,414.
    backend.add_tokens([token for _, token in sorted(stated.added_tokens_decoder.items())])
    hf = hf if getattr(hf, "is_fast", False) else stated
    hf._tokenizer = backend
    hf.init_kwargs = {name: value for name, value in hf.init_kwargs.items() if name not in options}  # which are not saved
    backend.encode_special_tokens = hf.split_special_tokens
    if any(backend.token_to_id(token) is None for token in hf.all_special_tokens):
        hf.unk_token = None  # transformers would give the class's eos_token, for example, the id of unk_token
    _set_prefix_space(backend, config, path)
    ends: dict[str, str | None] = {}
    for kind, token in (("bos", hf.bos_token), ("eos", hf.eos_token)):
        is_stated = config.get(f"add_{kind}_token") is True
        ends[kind] = token if is_stated and token is not None and backend.token_to_id(token) is not None else None
        if is_stated and ends[kind] is None:
            logger.warning("%s: add_%s_token is ignored, since %s_token=%s has no id", path, kind, kind, shown(token))
    add_ends(backend, **ends)
    return hf


def _set_prefix_space(backend: "tokenizers.Tokenizer", config: dict[str, Any], path: Path) -> None:
    """Apply add_prefix_space of tokenizer_config.json: whether a space is inserted before a text."""
    from tokenizers.pre_tokenizers import ByteLevel, Metaspace

    adds_space, pre_tokenizer = config.get("add_prefix_space"), backend.pre_tokenizer
    steps = b"".join(part.__getstate__() for part in (backend.normalizer, pre_tokenizer) if part is not None)
    is_added = re.search(rb'"Prepend"|"add_prefix_space":true|"prepend_scheme":"(first|always)"', steps) is not None
    if not isinstance(adds_space, bool) or adds_space == is_added:
        return
    if isinstance(pre_tokenizer, ByteLevel):
        pre_tokenizer.add_prefix_space = adds_space
    elif isinstance(pre_tokenizer, Metaspace):
        pre_tokenizer.prepend_scheme = ("always" if config.get("legacy", True) else "first") if adds_space else "never"
    else:
        logger.warning("%s: add_prefix_space=%s is ignored, since tokenizer.json states otherwise", path, adds_space)


def add_ends(backend: "tokenizers.Tokenizer", bos: str | None, eos: str | None) -> None:
    """Add BOS before every text and EOS after it, where the tokenizer adds no other token. None: not this token."""
    from tokenizers import Tokenizer, models, processors

    probe = Tokenizer(models.WordLevel({"a": 0}, "a"))
    if backend.post_processor is not None:
        probe.post_processor = backend.post_processor
    encoding = probe.encode("a")
    # (text, id, whether the post-processor added it), such as ("a", 0, 0), ("</s>", 2, 1)
    parts: list[Any] = list(zip(encoding.tokens, encoding.ids, encoding.special_tokens_mask, strict=True))
    if bos is not None and not parts[0][2]:
        parts.insert(0, (bos, backend.token_to_id(bos), 1))
    if eos is not None and not parts[-1][2]:
        parts.append((eos, backend.token_to_id(eos), 1))
    if len(parts) > len(encoding):
        single = " ".join(f"token{index}" if is_added else "$A" for index, (_, _, is_added) in enumerate(parts))
        special = [{"id": f"token{i}", "ids": [part[1]], "tokens": [part[0]]} for i, part in enumerate(parts) if part[2]]
        backend.post_processor = processors.TemplateProcessing(single, pair=f"{single} $B:1", special_tokens=special)


def _lacking_packages(path: Path) -> list[str]:
    """Return the packages that a folder's tokenizer.model needs and that are not installed."""
    if (path / "tokenizer.json").exists() or not (path / "tokenizer.model").exists():
        return []
    with (path / "tokenizer.model").open("rb") as file:
        is_tiktoken = re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", file.read(2**10))
    installed = {distribution.name for distribution in distributions()}
    return [name for name in (["tiktoken"] if is_tiktoken else ["sentencepiece", "protobuf"]) if name not in installed]
