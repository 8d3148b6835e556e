"""Tell two checkpoints apart whose files have the same sizes and times, by some pages of their content.

In: a Checkpoint whose files have been checked (WeightFiles, read_gguf). Out: a digest, which is a part of the identity of kept
weights (fast/cpu/packs.py). A file that is written through a memory mapping may keep its times, and files of two read-only
images may have the same times. Weights that were trained further differ on nearly every page, so a page of each tensor is
enough. A change of some rows of a tensor stays unseen.
"""

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from nanoinfer.loading.checkpoint import Checkpoint

PAGE = 4096  # bytes
MAX_PAGES = 512


def sampled_digest(checkpoint: Checkpoint) -> str:
    """Return a digest of the index, of the tables of tensors, and of the page in the middle of each tensor.

    Small neighbours share a page. Of more than MAX_PAGES pages, as many as that count, at even distances.
    """
    digest, pages = hashlib.sha256(repr(checkpoint.weight_map).encode()), []
    for path in checkpoint.weight_files:
        table, middles = _tensors(path, checkpoint)
        digest.update(table)
        pages += [(path, number * PAGE) for number in sorted({middle // PAGE for middle in middles})]
    num = min(MAX_PAGES, len(pages))
    chosen = [pages[i * len(pages) // num] for i in range(num)]
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb", buffering=0)) for path, _ in chosen}
        if hasattr(os, "posix_fadvise"):  # a disk reads many pages at a time
            for path, start in chosen:
                os.posix_fadvise(files[path].fileno(), start, PAGE, os.POSIX_FADV_WILLNEED)
        for path, start in chosen:
            files[path].seek(start)
            digest.update(files[path].read(PAGE))
    return digest.hexdigest()


def _tensors(path: Path, checkpoint: Checkpoint) -> tuple[bytes, list[int]]:
    """Return a file's table of tensors, and the byte in the middle of each tensor."""
    if path.suffix == ".gguf":
        from nanoinfer.features.formats.gguf_families import GGUFCheckpoint

        tensors = cast(GGUFCheckpoint, checkpoint).file.tensors
        return repr(tensors).encode(), [tensor.start + tensor.num_bytes // 2 for tensor in tensors.values()]
    with path.open("rb") as file:
        table = file.read(int.from_bytes(file.read(8), "little"))
        data = file.tell()
    spans = [entry["data_offsets"] for name, entry in json.loads(table).items() if name != "__metadata__"]
    return table, [data + (start + end) // 2 for start, end in spans]
