"""The files of a batch job: the rows of the input, and the results so far. A job that was interrupted goes on after them.

In: a JSONL file in OpenAI's batch format. Out: OUTPUT.partial, to which results are appended, and which becomes OUTPUT at the
end; beside it OUTPUT.manifest.json, which says what job they belong to. A job of another model, input or seed is refused.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"}}
    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from nanoinfer.errors import InvalidValueError

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LISTED = 10  # invalid lines in an error message
FSYNC_SECONDS = 5.0  # what a power failure may cost. A killed process loses no line


class Row(BaseModel):
    """A line of the input."""

    model_config = ConfigDict(extra="forbid", strict=True)
    custom_id: str = Field(min_length=1, max_length=512)
    method: str = Field(pattern="^POST$")
    url: str = Field(pattern=f"^({'|'.join(URLS)})$")
    body: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What decides the bytes of a job's results.

    Attributes:
        input_digest, num_rows: of the input file.
        model: the files of the checkpoint and their digests.
        options: of the engine, those that may change tokens.
        seed: the job's.
    """

    input_digest: str
    num_rows: int
    model: dict[str, str]
    options: dict[str, Any]
    seed: int


def check_rows(path: Path) -> tuple[str, int]:
    """Read the whole input before anything is computed. Returns its digest and the number of rows.

    Raises: InvalidValueError for lines that are no rows, and for a custom_id that two rows have.
    """
    digest, num_rows, problems = hashlib.blake2b(digest_size=16), 0, []
    lines_by_id: dict[int, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if not line.strip():
                continue
            num_rows += 1
            try:
                row = Row.model_validate(from_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                problems.append(f"line {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}"[:200])
            except ValueError as error:
                problems.append(f"line {number} is not JSON: {error}"[:200])
            else:
                if (first_line := lines_by_id.setdefault(_key(row.custom_id), number)) != number:
                    problems.append(f"line {number} has the custom_id of line {first_line}, {row.custom_id[:50]!r}")
            if len(problems) == MAX_LISTED:
                break
    if problems:
        raise InvalidValueError(f"{path} is no batch of requests; mend these lines:\n" + "\n".join(problems))
    if not num_rows:
        raise InvalidValueError(f"{path} has no requests; write one JSON object per line")
    return digest.hexdigest(), num_rows


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a checked input."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield Row.model_validate(from_json(line))


class Ledger:
    """The results of one job. One process writes them.

    Attributes:
        num_finished: rows that have a result.
        num_errors: those of them whose result is an error.
    """

    def __init__(self, output: Path, manifest: Manifest, *, retry_errors: bool = False) -> None:
        """Begin a job, or go on with one.

        Args:
            retry_errors: remove the results that are errors.

        Raises: InvalidValueError if the files belong to another job, or another process writes them.
        """
        self.num_errors = 0
        self._output = output
        self._partial = output.with_name(output.name + ".partial")
        self._manifest = manifest
        self._finished: set[int] = set()
        self._file: BinaryIO | None = None
        found = next((path for path in (output, self._partial) if path.exists()), None)
        if found is not None and read_manifest(output) is None:
            raise InvalidValueError(f"{found} exists and has no manifest of a batch job; choose another output")
        self._lock = manifest_path(output).open("a+b")
        try:
            _lock(self._lock, output)
            if found is None:
                self._lock.truncate(0)
                self._lock.write(json.dumps(asdict(manifest), indent=1).encode() + b"\n")
                self._lock.flush()
            else:
                self._compare(found)
                self._read(found, retry_errors=retry_errors)
            if not output.exists():
                self._file = self._partial.open("ab", buffering=0)
        except BaseException:
            self._lock.close()
            raise
        self._last_fsync = time.monotonic()

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def is_complete(self) -> bool:
        return self.num_finished == self._manifest.num_rows

    def is_finished(self, custom_id: str) -> bool:
        return _key(custom_id) in self._finished

    def append(self, result: dict[str, Any]) -> None:
        """Add a result. It is in the file when this returns, and on the disk some seconds later."""
        assert self._file is not None, "an output that has its final name is complete"
        self._file.write(to_json(result) + b"\n")
        self._count(result)
        if time.monotonic() - self._last_fsync > FSYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._last_fsync = time.monotonic()

    def close(self) -> None:
        """Leave the results on the disk, under the output's name if all are there."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            if self.is_complete:
                os.replace(self._partial, self._output)
        self._lock.close()

    def _count(self, result: dict[str, Any]) -> None:
        self._finished.add(_key(result["custom_id"]))
        self.num_errors += result["error"] is not None

    def _compare(self, found: Path) -> None:
        before, now = read_manifest(self._output), asdict(self._manifest)
        changed = [name for name, value in asdict(before).items() if value != now[name]] if before else ["manifest"]
        if changed:
            raise InvalidValueError(
                f"{found} belongs to a job with another {' and '.join(changed)}; choose another output, or remove this one"
            )

    def _read(self, found: Path, *, retry_errors: bool) -> None:
        """Read the results. The rest of a line, which a killed process or a full disk has left, is removed."""
        kept = found.with_name(found.name + ".new").open("wb") if retry_errors else None
        end = 0
        with found.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    result = from_json(line)
                    if kept is None or result["error"] is None:
                        self._count(result)
                        if kept is not None:
                            kept.write(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise InvalidValueError(f"{found} is damaged in line {number}; remove that line") from error
        if kept is None:
            os.truncate(found, end)
            return
        with kept:
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(kept.name, self._partial)
        if found != self._partial:
            found.unlink()


def manifest_path(output: Path) -> Path:
    return output.with_name(output.name + ".manifest.json")


def read_manifest(output: Path) -> Manifest | None:
    """The manifest of a job that was begun. None if there is none, or it cannot be read."""
    try:
        return Manifest(**json.loads(manifest_path(output).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _key(custom_id: str) -> int:
    """128 bits in place of a string of any length, so that a million of them need some 100 MB."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest())


def _lock(file: BinaryIO, output: Path) -> None:
    """Keep a second process from the same job, where the system can."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidValueError(f"another process is writing {output}; wait for it, or choose another output") from error
