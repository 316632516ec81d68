"""Criteo's text format: label TAB 13 integers TAB 26 hexadecimal ids; any of the 39 may be empty.

One line is one impression of an advertisement. The files of the Kaggle challenge and of the 1 TB
click logs (24 files, day_0 to day_23) share this form. Names as in ``torchrec.datasets.criteo``.

Reading is vectorised over lines: find every tab and newline of a block at once, then take the k-th
character of all fields of a kind together, for k = 0, 1, ...
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES: list[str] = [f"int_{i}" for i in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES: list[str] = [f"cat_{i}" for i in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES: list[str] = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
FREQUENCY_THRESHOLD = 3
TOTAL_TRAINING_SAMPLES = 4_195_197_692  # rows of day_0 to day_22; day_23 is for validation and test
FIELDS = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT

_BLOCK_BYTES = 1 << 21
_LONGEST_LINE = 1 << 20
_TAB = 9
_NEWLINE = 10
_RETURN = 13
_MINUS = 45

_VALUES = np.full(256, 255, dtype=np.uint8)  # of characters as digits
_VALUES[list(b"0123456789abcdef")] = _VALUES[list(b"0123456789ABCDEF")] = np.arange(16)


@dataclass(frozen=True)
class ArrayColumns:
    """Rows as columns: the base of dataclasses of arrays."""

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of several blocks, in order."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(block).values() for block in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def slice(self, start: int, stop: int) -> Self:
        """Rows start..stop-1."""
        return type(self)(*(column[start:stop] for column in vars(self).values()))


@dataclass(frozen=True)
class CriteoColumns(ArrayColumns):
    """B rows of a Criteo file.

    Attributes:
        label: [B], 0 or 1; -1 in a file without labels.
        ints: [B, 13]; where ``ints_known`` is False the file had nothing, and the value is 0.
        ints_known: [B, 13].
        cats: [B, 26], the 32-bit ids; where ``cats_known`` is False the file had nothing, and the
            value is 0.
        cats_known: [B, 26].
    """

    label: NDArray[np.int64]
    ints: NDArray[np.int64]
    ints_known: NDArray[np.bool_]
    cats: NDArray[np.int64]
    cats_known: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of a file: the bytes, where each line ends, and what messages need.

    Attributes:
        path: the file.
        first_line: number of the block's first line, from 1.
        data: [bytes].
        separators: [lines, 40], or [lines, 39] without labels: where the fields of each line end
            (at a tab, and the last one at the newline).
    """

    path: Path
    first_line: int
    data: NDArray[np.uint8]
    separators: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.separators)


def line_blocks(path: Path, labelled: bool = True, bar: Any = None) -> Iterator[LineBlock]:
    """The lines of a file, some thousands at a time; every line is known to have 40 fields.

    Args:
        path: the file; ``.gz`` is unpacked on the way.
        labelled: whether lines start with a label; 39 fields are expected without it.
        bar: a progress bar over the bytes of the file, as stored.

    Yields:
        Blocks in order.

    Raises:
        ValueError: a line has another number of fields, or the file is not a readable gzip file.
    """
    first_line = 1
    fields = FIELDS - (not labelled)
    for data in _whole_lines(path, bar):
        separators = np.flatnonzero((data == _TAB) | (data == _NEWLINE))
        newlines = np.flatnonzero(data[separators] == _NEWLINE)
        counts = np.diff(newlines, prepend=-1)
        if (counts != fields).any():
            line = int((counts != fields).argmax())
            raise ValueError(
                f"{path}, line {first_line + line}: {counts[line]} fields found, {fields} expected "
                f"({'label, ' * labelled}{INT_FEATURE_COUNT} integers, {CAT_FEATURE_COUNT} "
                "hexadecimal ids, separated by tabs)"
            )
        yield LineBlock(path, first_line, data, separators.reshape(-1, fields))
        first_line += len(newlines)


def has_labels(path: Path) -> bool:
    """Whether the first line has 40 fields; those of the Kaggle challenge's test file have 39."""
    for data in _whole_lines(path):
        return np.count_nonzero(data[: (data == _NEWLINE).argmax()] == _TAB) != FIELDS - 2
    return True


def count_lines(path: Path) -> int:
    """How many lines a file has; one pass over its bytes."""
    return sum(data.tobytes().count(b"\n") for data in _whole_lines(path))


def parse_lines(block: LineBlock, lines: NDArray[np.int64] | slice = slice(None)) -> CriteoColumns:
    """Parse some lines of a block.

    Args:
        block: whole lines.
        lines: which of them, by position in the block.

    Returns:
        The rows, in the order of ``lines``.

    Raises:
        ValueError: a field is not what its column holds; names file, line and column.
    """
    ends = block.separators[lines]
    starts = np.empty_like(ends)
    starts[:, 1:] = ends[:, :-1] + 1
    # A line starts after the newline before it, the first one at 0.
    starts[:, 0] = np.concatenate([[-1], block.separators[:-1, -1]])[lines] + 1
    ends = ends.copy()
    ends[:, -1] -= block.data[np.maximum(ends[:, -1] - 1, 0)] == _RETURN

    split = ends.shape[1] - CAT_FEATURE_COUNT
    ints, ints_known, wrong_ints = _numbers(block.data, starts[:, :split], ends[:, :split], 10, 18)
    cats, cats_known, wrong_cats = _numbers(block.data, starts[:, split:], ends[:, split:], 16, 8)
    label = np.full(len(ends), -1)
    if split > INT_FEATURE_COUNT:
        label = ints[:, 0]
        ints = ints[:, 1:]
        wrong_ints[:, 0] |= ~ints_known[:, 0] | (label < 0) | (label > 1)
        ints_known = ints_known[:, 1:]

    if wrong_ints.any() or wrong_cats.any():
        row, column = np.argwhere(np.concatenate([wrong_ints, wrong_cats], axis=1))[0]
        name = DEFAULT_COLUMN_NAMES[column - ends.shape[1]]
        expected = {"l": "0 or 1", "i": "an integer", "c": "at most 8 hexadecimal digits"}[name[0]]
        line = block.first_line + np.arange(len(block))[lines][row]
        field = bytes(block.data[starts[row, column] : ends[row, column]][:40])
        text = field.decode("ascii", "backslashreplace")
        raise ValueError(
            f"{block.path}, line {line}: column '{name}' is '{text}', expected {expected}"
        )

    return CriteoColumns(label, ints, ints_known, cats, cats_known)


def _numbers(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    base: int,
    digits: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Fields [B, C] as numbers in a base, where there was anything at all, and which are wrong."""
    known = ends > starts
    position = starts.ravel().copy()
    is_negative = np.zeros(position.shape, dtype=bool)
    if base == 10:
        is_negative = (data[position] == _MINUS) & known.ravel()
        position += is_negative

    length = ends.ravel() - position
    wrong = (length > digits) | (is_negative & (length == 0))
    values = np.zeros(position.shape, dtype=np.int64)
    for k in range(min(int(length.max(initial=0)), digits)):
        inside = length > k
        digit = _VALUES[data[np.minimum(position + k, len(data) - 1)]]
        wrong |= inside & (digit >= base)
        np.copyto(values, values * base + digit, where=inside)

    np.negative(values, out=values, where=is_negative)
    return values.reshape(starts.shape), known, wrong.reshape(starts.shape)


def _whole_lines(path: Path, bar: Any = None) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a file in chunks that end with a newline."""
    tail = b""
    bytes_read = 0
    with open(path, "rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            while chunk := file.read(_BLOCK_BYTES):
                lines, newline, tail = (tail + chunk).rpartition(b"\n")
                if newline:
                    yield np.frombuffer(lines + newline, dtype=np.uint8)
                if bar is not None:
                    bar.update(raw.tell() - bytes_read)
                    bytes_read = raw.tell()
                if len(tail) > _LONGEST_LINE:
                    raise ValueError(
                        f"{path}: no newline within {len(tail):,} bytes: this is not a Criteo text "
                        "file"
                    )
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: damaged gzip file ({error}): fetch or write it again"
            ) from error

        if tail:
            yield np.frombuffer(tail + b"\n", dtype=np.uint8)


def write_rows(path: Path, blocks: Iterable[CriteoColumns]) -> Path:
    """Write blocks of rows as one Criteo TSV; ``.gz`` in the name compresses.

    Args:
        path: the file; it is overwritten.
        blocks: the rows.

    Returns:
        ``path``.
    """
    with open(path, "wb") as raw:
        file: Any = raw
        if path.suffix == ".gz":
            # With mtime=0 and no name, equal rows make equal bytes.
            file = gzip.GzipFile("", mode="wb", compresslevel=1, fileobj=raw, mtime=0)
        with file:
            file.writelines(map(format_rows, blocks))
    return path


def format_rows(rows: CriteoColumns) -> bytes:
    """The text of some rows, one line each; an id that is not of 32 bits is a ValueError."""
    ints_known = rows.ints_known.T
    cats_known = rows.cats_known.T
    known = rows.cats.T[cats_known]
    if ((known < 0) | (known >= 1 << 32)).any():
        raise ValueError(
            f"ids {known.min()} to {known.max()}: Criteo's format holds 0 to {2**32 - 1}, so hash "
            "them to 32 bits"
        )

    ids = known.astype(">u4").tobytes().hex().encode()
    columns = [rows.label.astype("S").tolist()]
    for known, texts in (
        (ints_known, rows.ints.T[ints_known].astype("S")),
        (cats_known, np.frombuffer(ids, "S8")),
    ):
        fields = np.zeros(known.shape, texts.dtype)
        fields[known] = texts
        columns += fields.tolist()

    return b"".join(b"\t".join(line) + b"\n" for line in zip(*columns, strict=True))
