"""Tables written down in a YAML file: what there is to plan, without a line of code.

.. code-block:: yaml

    batch_size: 512                     # samples of a rank's batch; may be left out, as all but the tables may
    fused_params: {optimizer: exact_row_wise_adagrad, learning_rate: 0.02}
    tables:
      - name: item
        num_embeddings: 100_000_000     # or 1e8
        embedding_dim: 64
        feature_names: [item, seen]     # [item] where left out
        pooling_factors: [1, 20]        # ids of a sample, on average, for each feature
      - name: user
        num_embeddings: 5_000_000
        embedding_dim: 128
        sharding_types: [table_wise, column_wise]
        min_partition: 32

Keys of a table are fields of `EmbeddingBagConfig` (``name``, ``num_embeddings``, ``embedding_dim``, ``feature_names``,
``data_type``, ``pooling``) and of `ParameterConstraints` (``sharding_types``, ``compute_kernels``, ``min_partition``,
``pooling_factors``, ``num_poolings``, ``batch_sizes``, ``is_weighted``, ``pin``, ``colocate``), and ``module``: the
path of the table's collection in the model. Without it the model is the collection. A ``pooling`` of ``NONE`` makes it
an `EmbeddingCollection`. YAML's anchors and merge keys (``<<: *wide``) save repetition.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.errors import PlannerError, PlannerErrorType
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.types import DataType

_T = TypeVar("_T")
_TOP = ("batch_size", "fused_params", "tables")
_TABLE = ("name", "num_embeddings", "embedding_dim", "feature_names", "data_type", "pooling", "is_weighted", "module")
_CONSTRAINTS = (
    "sharding_types compute_kernels min_partition pooling_factors num_poolings batch_sizes pin colocate".split()
)
_YES_NO = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


_MOST = 10**15  # rows, samples: a slip of the pen beyond, and torch counts in 64 bits
_MOST_COLUMNS = 10**6  # every way to cut them is listed
_DEEPEST = 50  # levels of lists and mappings; a file of tables has four


@dataclass(frozen=True, eq=False)
class TableFile:
    """What such a file says.

    Args:
        model: Its tables in their collections, on the meta device: nothing is allocated.
        constraints: Table name -> what is laid down for it.
        batch_size: B of a rank, where the file says it.
        fused_params: The optimizer, for the sharders, where the file says it.
        names: Path and name of each table.
    """

    model: nn.Module
    constraints: dict[str, ParameterConstraints]
    batch_size: int | None
    fused_params: dict[str, Any] | None
    names: tuple[str, ...] = ()


def load_tables(path: str | os.PathLike[str]) -> TableFile:
    """Read a file.

    Args:
        path: Where it is.

    Raises:
        FileNotFoundError: There is none.
        PlannerError: It is no YAML, or says what cannot be; the message names the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlannerError(
            f"{os.fspath(path)} is no text in UTF-8: {error}; write it as YAML", PlannerErrorType.INPUT_VALIDATION
        ) from None
    return tables_of(text, os.fspath(path))


def tables_of(text: str, source: str = "the text") -> TableFile:
    """Read the text of such a file.

    Args:
        text: YAML.
        source: Where it comes from, for messages.

    Raises:
        PlannerError: It is no YAML, or says what cannot be; the message names the line.

    Example:
        >>> file = tables_of("tables: [{name: item, num_embeddings: 1e3, embedding_dim: 4, min_partition: 4}]")
        >>> file.model.embedding_bag_configs()[0].feature_names, file.constraints["item"].min_partition
        (['item'], 4)
    """
    top = _Entry.of(_composed(text, source), source, "the file", "").check_keys(_TOP)
    entries = [
        _Entry.of(node, source, f"entry {number} of tables", "a table").check_keys([*_TABLE, *_CONSTRAINTS])
        for number, node in enumerate(top.nodes("tables", required=True), 1)
    ]
    if not entries:
        raise top.wrong("tables", "lists no table: give at least one, with name, num_embeddings and embedding_dim")
    tables = [_Table.of(entry) for entry in entries]
    return TableFile(
        _model(tables),
        {table.config.name: constraint for table in tables if (constraint := table.constraint) is not None},
        top.whole("batch_size"),
        top.words("fused_params"),
        tuple(f"{table.path}.{table.config.name}".strip(".") for table in tables),
    )


class _Entry:
    """A mapping of the file, read by key; what is wrong is told with its line."""

    def __init__(self, node: Any, source: str, what: str) -> None:
        self.source, self.what, self.line = source, what, node.start_mark.line + 1
        self._values: dict[str, Any] = {key.value: value for key, value in node.value}
        self._keys = {key.value: key for key, _ in node.value}

    @classmethod
    def of(cls, node: Any, source: str, what: str, kind: str) -> _Entry:
        """The entry of a node, its merge keys resolved."""
        from yaml import MappingNode
        from yaml.constructor import SafeConstructor

        if not isinstance(node, MappingNode):
            needed = "keys and values, as 'name: item'" if kind else "a mapping with the key 'tables'"
            raise _bad(f"{source}, line {node.start_mark.line + 1}: {what} is no mapping: write {needed}")
        seen: dict[str, int] = {}
        for count, (key, _) in enumerate(node.value):
            line = key.start_mark.line + 1
            first = seen.setdefault(str(key.value), line)
            if len(seen) <= count and key.value != "<<":
                raise _bad(f"{source}, line {line}: {what} has {key.value!r} twice, first in line {first}")
        SafeConstructor().flatten_mapping(node)
        return cls(node, source, what)

    def check_keys(self, known: Sequence[str]) -> _Entry:
        """Itself, if it has no other keys."""
        for name, key in self._keys.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
                raise _bad(f"{self.source}, line {key.start_mark.line + 1}: {self.what} has the key {name!r}; {hint}")
        return self

    def wrong(self, key: str, problem: str) -> PlannerError:
        """The error for the value of a key."""
        line = self._values[key].start_mark.line + 1 if key in self._values else self.line
        return _bad(f"{self.source}, line {line}: {key} of {self.what} {problem}")

    def nodes(self, key: str, required: bool = False) -> list[Any]:
        """The items of a list, or the one item that stands in the place of a list."""
        from yaml import SequenceNode

        if key not in self._values:
            if required:
                raise _bad(f"{self.source}, line {self.line}: {self.what} lacks {key!r}")
            return []
        node = self._values[key]
        return node.value if isinstance(node, SequenceNode) else [node]

    def text(self, key: str, required: bool = False) -> str | None:
        """A word; None where there is none."""
        found = self.nodes(key, required)
        if not found:
            return None
        if len(found) > 1 or not isinstance(found[0].value, str) or not found[0].value:
            raise self.wrong(key, "is no word: give one")
        return found[0].value

    def texts(self, key: str) -> list[str] | None:
        """A list of words; None where there is none."""
        found = self.nodes(key)
        if any(not isinstance(node.value, str) for node in found):
            raise self.wrong(key, f"is no list of words: write {key}: [one, two]")
        return [node.value for node in found] if key in self._values else None

    def whole(self, key: str, required: bool = False, most: int = _MOST) -> int | None:
        """A whole number from 1 to the most there may be; None where there is none."""
        found = self.numbers(key, required)
        if found is None:
            return None
        if len(found) != 1 or not found[0].is_integer() or found[0] < 1:
            raise self.wrong(key, f"is {self._as_written(key)}: give a whole number, at least 1")
        if found[0] > most:
            raise self.wrong(key, f"is {self._as_written(key)}: give at most {most:.0e}")
        return int(found[0])

    def wholes(self, key: str) -> list[int] | None:
        """A list of whole numbers from 0; None where there is none."""
        found = self.numbers(key)
        if found is not None and any(not number.is_integer() or number < 0 for number in found):
            raise self.wrong(key, f"is {self._as_written(key)}: give whole numbers, at least 0")
        return None if found is None else [int(number) for number in found]

    def numbers(self, key: str, required: bool = False) -> list[float] | None:
        """A list of numbers, or a number; None where there is none. ``1e8`` is one, which YAML takes for a word."""
        nodes = self.nodes(key, required)
        try:
            found = [float(node.value) for node in nodes]
        except (TypeError, ValueError):
            raise self.wrong(key, f"is {self._as_written(key)}, and numbers belong there, as 100_000 or 1e5") from None
        return found if key in self._values else None

    def yes(self, key: str) -> bool:
        """A yes or no; no where there is none."""
        word = self.text(key)
        if word is None:
            return False
        if word.lower() not in _YES_NO:
            raise self.wrong(key, f"is {word!r}: write true or false")
        return _YES_NO[word.lower()]

    def one_of(self, key: str, words: Mapping[str, _T], default: _T) -> _T:
        """What a word stands for."""
        word = self.text(key)
        if word is None:
            return default
        if word.upper() not in words:
            raise self.wrong(key, f"is {word!r}: write one of {', '.join(words)}")
        return words[word.upper()]

    def words(self, key: str) -> dict[str, Any] | None:
        """A mapping of words to words and numbers; None where there is none."""
        if key not in self._values:
            return None
        inner = _Entry.of(self._values[key], self.source, f"{key} of {self.what}", "words")
        return {name: _number_or_word(inner.text(name, required=True)) for name in inner._values}

    def _as_written(self, key: str) -> str:
        return ", ".join(repr(node.value) for node in self.nodes(key)) or "empty"


@dataclass(frozen=True, eq=False)
class _Table:
    """A table of the file."""

    config: EmbeddingBagConfig | EmbeddingConfig
    weighted: bool
    path: str
    constraint: ParameterConstraints | None
    entry: _Entry

    @classmethod
    def of(cls, entry: _Entry) -> _Table:
        """What an entry says."""
        name = entry.text("name", required=True)
        entry.what = f"table {name!r}"
        pooling = entry.one_of("pooling", {kind.value: kind for kind in PoolingType}, PoolingType.SUM)
        formats = {kind.value: kind for kind in (DataType.FP32, DataType.FP16, DataType.BF16)}
        fields: dict[str, Any] = {
            "name": name,
            "num_embeddings": entry.whole("num_embeddings", required=True),
            "embedding_dim": entry.whole("embedding_dim", required=True, most=_MOST_COLUMNS),
            "feature_names": entry.texts("feature_names") or [name],
            "data_type": entry.one_of("data_type", formats, DataType.FP32),
        }
        try:
            pooled = pooling is not PoolingType.NONE
            config = EmbeddingBagConfig(**fields, pooling=pooling) if pooled else EmbeddingConfig(**fields)
        except ValueError as error:
            raise _bad(f"{entry.source}, line {entry.line}: {error}") from None
        return cls(config, entry.yes("is_weighted"), entry.text("module") or "", cls._constraint(entry), entry)

    @staticmethod
    def _constraint(entry: _Entry) -> ParameterConstraints | None:
        given: dict[str, Any] = {
            "sharding_types": entry.texts("sharding_types"),
            "compute_kernels": entry.texts("compute_kernels"),
            "min_partition": entry.whole("min_partition"),
            "pooling_factors": entry.numbers("pooling_factors"),
            "num_poolings": entry.numbers("num_poolings"),
            "batch_sizes": entry.wholes("batch_sizes"),
            "pin": entry.wholes("pin"),
            "colocate": entry.text("colocate"),
        }
        given = {key: value for key, value in given.items() if value is not None}
        return ParameterConstraints(**given) if given else None


def _model(tables: Sequence[_Table]) -> nn.Module:
    """The tables in their collections, each at its path."""
    first: dict[str, _Table] = {}
    for table in tables:
        other = first.setdefault(table.config.name, table)
        if other is not table:
            raise table.entry.wrong("name", f"stands a second time, first in line {other.entry.line}: rename one")
    by_path: dict[str, list[_Table]] = {}
    for table in tables:
        by_path.setdefault(table.path, []).append(table)
    _check_apart(by_path)
    root = nn.Module()
    for path, members in by_path.items():
        collection = _collection(members)
        if not path:
            return collection
        _put(root, path, collection, members[0].entry)
    return root


def _check_apart(by_path: Mapping[str, Sequence[_Table]]) -> None:
    """No collection lies inside another; the model itself holds all others."""
    for path, members in by_path.items():
        outer = next((other for other in by_path if other != path and f"{path}.".startswith(f"{other}.")), None)
        outer = "" if path and "" in by_path else outer
        if outer is not None:
            lead, where = by_path[outer][0].entry, f"module {outer!r}" if outer else "the model itself"
            raise members[0].entry.wrong(
                "module",
                f"is {path!r}, inside {where}, which is the collection of {lead.what} (line {lead.line}) and holds no "
                "other: give that table another module, too",
            )


def _collection(members: Sequence[_Table]) -> nn.Module:
    """The tables of one path."""
    lead = members[0]
    for other in members[1:]:
        if type(other.config) is not type(lead.config):
            raise other.entry.wrong(
                "pooling",
                f"differs from {lead.entry.what} (line {lead.entry.line}) of the same module: one pools, the other "
                "(NONE) does not; give them different modules, as 'module: bags' and 'module: sequences'",
            )
        if other.weighted != lead.weighted:
            raise other.entry.wrong(
                "is_weighted",
                f"differs from {lead.entry.what} (line {lead.entry.line}) of the same module: a module's ids carry "
                "weights or do not; give the tables different modules",
            )
    configs: list[Any] = [member.config for member in members]
    meta = torch.device("meta")
    try:
        if isinstance(lead.config, EmbeddingConfig):
            return EmbeddingCollection(configs, device=meta)
        return EmbeddingBagCollection(configs, is_weighted=lead.weighted, device=meta)
    except (ValueError, RuntimeError) as error:  # torch refuses shapes of more than 2 ** 63 bytes
        raise _bad(f"{lead.entry.source}: {error}") from None


def _put(root: nn.Module, path: str, collection: nn.Module, entry: _Entry) -> None:
    """Set a module at a dotted path, with plain modules on the way."""
    *way, last = path.split(".")
    for name in [*way, last]:
        if not name or hasattr(nn.Module(), name):
            taken = f", and {name!r} is an attribute of every torch.nn.Module" if name else ""
            raise entry.wrong("module", f"is {path!r}{taken}: write a path as 'sparse.bags'")
    at = root
    for name in way:
        if not hasattr(at, name):
            at.add_module(name, nn.Module())
        at = at.get_submodule(name)
    at.add_module(last, collection)


def _composed(text: str, source: str) -> Any:
    """The text as YAML's nodes, which know their lines."""
    import yaml

    # The C loader reads thousands of tables in the time of a blink; it is not in every build of PyYAML.
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        """Refuses what is nested so deep that the C loader would overflow its stack, which ends the process."""

        depth = 0

        def descend_resolver(self, parent: Any, index: Any) -> None:
            """Called before each node."""
            self.depth += 1
            if self.depth > _DEEPEST:
                problem = f"lists and mappings are nested deeper than {_DEEPEST} levels"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=parent.start_mark)

        def ascend_resolver(self) -> None:
            """Called after each node."""
            self.depth -= 1

    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise _bad(f"{source}{where} is no YAML: {getattr(error, 'problem', None) or error}") from None
    if node is None:
        raise _bad(f"{source} is empty: it holds a list 'tables:' of name, num_embeddings and embedding_dim")
    return node


def _number_or_word(text: str | None) -> Any:
    try:
        return float(text or "")
    except ValueError:
        return text


def _bad(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.INPUT_VALIDATION)
