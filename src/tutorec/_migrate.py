"""``tutorec migrate``: which parts of a project that uses TorchRec run here, and the renaming."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tutorec._migrate_code import Call, CodeBlock, Use, parsed, without_magics, word_positions
from tutorec._migrate_files import SourceText, read_source, source_paths
from tutorec._text import several, visible
from tutorec._torchrec_names import absent_names, instead_of

__all__ = ["Finding", "Migration", "migrate"]

_PACKAGES = ("torchrec", "tutorec")
TORCHREC = "1.8.0"
_NEW = "it is new in TorchRec "  # so the table's sentences begin for names that 1.8.0 lacks
_UNKNOWN = (
    f"TorchRec {TORCHREC} has no such public name either, nor has 1.9.2: it is newer, older or "
    "private, and you have to replace it"
)
# Classes, functions and ``__all__`` of a source file.
_PUBLIC = re.compile(r"^(?:class|def) ([A-Za-z]\w*)|^__all__ = \[(.*?)\]", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A place in the code that has to be changed by hand."""

    file: str
    cell: int  # of a notebook, from 1; 0 in a Python file
    line: int
    name: str
    problem: str
    remedy: str = ""  # the end of the problem; findings with the same remedy are listed together

    @property
    def location(self) -> str:
        """File and line."""
        if self.cell:
            return f"{self.file}: cell {self.cell}, line {self.line}"
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.location}: {self.name}: {self.problem}"


@dataclass
class Migration:
    """The findings in a project, and the files in which the package was renamed.

    ``findings`` are names and calls that the other package does not have as they are; ``missing``
    are the names among them, and ``unknown`` those that TorchRec 1.8.0 lacks, too. ``skipped`` are
    files that were not read or not written, with the reason; they have to be changed by hand.
    """

    package: str
    to: str
    checked: bool = True
    files: int = 0
    using: int = 0
    names: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    calls: int = 0
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether no file was skipped and nothing has to be changed by hand."""
        return not self.findings and not self.skipped

    def as_json(self) -> str:
        """The report for programs."""
        lists = {
            "names": sorted(self.names),
            "missing": sorted(self.missing),
            "unknown": sorted(self.unknown),
            "complete": self.complete,
        }
        return json.dumps({**asdict(self), **lists}, indent=2)

    def __str__(self) -> str:
        lines = [visible(line) for line in _by_remedy(self.findings)]
        lines += [visible(f"{file}: {reason}") for file, reason in self.skipped.items()]

        using = f"{self.using} of {several(self.files, 'file')} use {self.package}"
        if self.checked:
            resolved = len(self.names) - len(self.missing) - len(self.unknown)
            names = f"{several(len(self.names), 'name')}, {resolved} of them in {self.to}"
            if self.unknown:
                names += f" and {len(self.unknown)} not in TorchRec {TORCHREC} either"

            by_hand = len(self.findings) + len(self.skipped)
            lines.append(
                f"{using}: {names}; {several(self.calls, 'call')} compared, "
                f"{several(by_hand, 'place')} to change by hand"
            )
        else:
            lines.append(f"{using}; names were not compared, for {self.to} cannot be imported here")

        if self.written:
            lines.append(f"renamed in {several(len(self.written), 'file')}")
        elif self.using:
            lines.append("nothing was changed; --write renames")
        return "\n".join(lines)


def _by_remedy(findings: list[Finding]) -> list[str]:
    """A line for each finding; those with the same remedy below one line that says it."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.remedy or str(finding), []).append(finding)

    lines = []
    for remedy, group in groups.items():
        if len(group) == 1:
            lines.append(str(group[0]))
            continue

        lines.append(f"{len(group)} places: {remedy}")
        lines += [f"  {finding.location}: {finding.name}" for finding in group]
    return lines


def migrate(path: Path, *, to: str = "tutorec", write: bool = False) -> Migration:
    """Read the code of a project, and rename the package in it.

    Args:
        path: A Python file, a notebook, or a folder.
        to: ``"tutorec"`` or ``"torchrec"``, the package that the code is to use.
        write: Rename; each file is replaced whole or not at all.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: The file is neither Python nor a notebook.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}")

    path = path.resolve() if path.is_symlink() else path
    if not path.is_dir() and path.suffix not in (".py", ".ipynb"):
        raise ValueError(f"{str(path)!r} is neither a Python file (.py) nor a notebook (.ipynb)")

    package = next(name for name in _PACKAGES if name != to)
    report = Migration(package, to, checked=_imports(to))

    def failed(name: Path, error: Exception) -> None:
        report.skipped[str(name)] = f"not read: {_error_text(error)}"

    for file in source_paths(path, failed):
        report.files += 1
        try:
            _migrate_path(report, file, path, write)
        except Exception as error:  # one odd file does not end the others' migration
            failed(file, error)

    return report


def _migrate_path(report: Migration, file: Path, project: Path, write: bool) -> None:
    """Read one file, if it is the project's own, and migrate it."""
    if file.is_symlink() and os.path.exists(file):
        if file.resolve().is_relative_to(project.resolve()):
            return  # its target is read at its own path
        if read_source(file, report.package) is not None:
            raise ValueError(f"a link to {file.resolve()}, outside {project}: migrate that file")
    elif source := read_source(file, report.package):
        _migrate_file(report, source, write)


def _error_text(error: Exception) -> str:
    """The text of an error, with its class if the text alone is not clear."""
    if isinstance(error, (RecursionError, MemoryError)):
        return f"nested too deeply, or too large ({type(error).__name__})"
    known = isinstance(error, (OSError, ValueError)) and not isinstance(error, UnicodeError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _migrate_file(report: Migration, source: SourceText, write: bool) -> None:
    """Add one file to the report, and rename in it."""
    bound: dict[str, str] = {}
    positions: dict[int, list[int]] = {}
    count = 0

    for number, text in source.blocks.items():
        try:
            block = CodeBlock(_python(text, source), report.package, bound)
        except Exception as error:  # Python's parser and what goes through its tree raise many
            name = f"{source.path}: cell {number}" if number else str(source.path)
            reason = _error_text(error)
            if isinstance(error, SyntaxError):
                reason = f"{error.msg}, line {error.lineno}"
            report.skipped[name] = f"not read: not Python {platform.python_version()}: {reason}"
            continue

        other_text = {use for use in block.uses if use.in_text and not _is_import_path(use.path)}
        if report.checked:
            uses = [use for use in block.uses if use not in other_text]
            for fields in sorted(set(_findings(report, block, uses))):
                report.findings.append(Finding(str(source.path), number, *fields))

        count += sum(use not in other_text for _, _, use in block.occurrences)
        positions[number] = word_positions(text, block, other_text)

    report.using += count > 0
    if write and count:
        try:
            source.write(positions, report.package, report.to)
            report.written.append(str(source.path))
        except Exception as error:
            report.skipped[str(source.path)] = f"not written: {_error_text(error)}"


def _python(text: str, source: SourceText) -> str:
    """The text of a file, or of a cell without the lines that only IPython understands."""
    try:
        parsed(text)
    except SyntaxError:
        return text if source.cells is None else without_magics(text)
    return text


def _findings(
    report: Migration, block: CodeBlock, uses: list[Use]
) -> Iterator[tuple[int, str, str, str]]:
    """Names that the other package lacks, and calls that it refuses, as a `Finding` has them."""
    for use in uses:
        if use.base and _missing(use.base, report):
            continue  # the finding of the import says it

        report.names.add(use.path)
        if lack := _missing(use.path, report):
            is_unknown = lack.remedy.startswith((_UNKNOWN, _NEW))
            (report.unknown if is_unknown else report.missing).add(use.path)
            yield use.line, use.path, lack.problem, lack.remedy

    for call in block.calls:
        if not _missing(call.path, report):
            report.calls += 1
            if problem := _misfit(_resolved(_in(call.path, report)), call):
                yield call.line, f"{call.path}()", problem, ""


def _in(path: str, report: Migration) -> str:
    return report.to + path[len(report.package) :]


class Lack(NamedTuple):
    """A name that the other package does not have, and what to do about it."""

    problem: str
    remedy: str


def _missing(path: str, report: Migration) -> Lack | None:
    """What the other package lacks of a name; None for one that it has.

    The table of absent names has every public name of TorchRec that is not here, so what is in
    neither is not in TorchRec.
    """
    try:
        _resolved(_in(path, report))
    except LookupError as error:
        problem = str(error.args[0])
        if report.to != "tutorec":
            return Lack(problem, "")

        below = path.partition(".")[2]
        remedy = instead_of(below) or defined_elsewhere(below) or _UNKNOWN
        return Lack(f"{problem}: {remedy}", remedy)
    return None


def defined_elsewhere(path: str) -> str | None:
    """What to do about a name that a module of TorchRec imports from another one, None if unknown.

    Args:
        path: With dots, below the root, of a name that is neither here nor in the table.

    Example:
        >>> defined_elsewhere("distributed.comm.KeyedJaggedTensor")
        'import it from tutorec.'
        >>> defined_elsewhere("distributed.comm.nothing") is None
        True
    """
    name = path.rpartition(".")[2]
    module = _defining_modules().get(name)
    if module is not None:
        return f"import it from {module}."

    remedies = {remedy for absent, remedy in absent_names().items() if absent.endswith(f".{name}")}
    return remedies.pop() if len(remedies) == 1 else None


@cache
def _defining_modules() -> dict[str, str]:
    """The module with the shortest path that defines or lists a public name, by name."""
    root = Path(__file__).parent
    files = sorted(root.rglob("*.py"), key=lambda file: (len(file.parts), file))
    modules: dict[str, str] = {}
    for file in files:
        path = file.relative_to(root.parent).with_suffix("")
        module = ".".join(path.parts).removesuffix(".__init__")
        if "._" in module:
            continue
        # A search, not a parse: parsing all sources takes seconds.
        for defined, listed in _PUBLIC.findall(file.read_text(encoding="utf-8")):
            for name in re.findall(r"\w+", defined or listed):
                modules.setdefault(name, module)

    return modules


@cache
def _resolved(path: str) -> object:
    """The object at a dotted path; None where its module needs a package that is missing.

    Raises:
        LookupError: There is no such name.
    """
    root, *names = path.split(".")
    value: object = importlib.import_module(root)

    for position, name in enumerate(names, 1):
        # A function may have the name of the module that defines it: what follows more dots is in
        # the module.
        if isinstance(value, ModuleType) and (position < len(names) or not hasattr(value, name)):
            try:
                value = importlib.import_module(f"{value.__name__}.{name}")
                continue
            except ImportError as error:
                if not (error.name or "").startswith(root):
                    return None

        if not hasattr(value, name):
            raise LookupError(f"there is no {name} in {'.'.join([root, *names[: position - 1]])}")
        value = getattr(value, name)

    return value


def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # TorchRec's import raises many kinds of errors
        return False
    return True


def _is_import_path(text: str) -> bool:
    """Whether dotted names begin like a path of TorchRec or tutorec, unlike ``torchrec.txt``."""
    below = text.split(".")[1:]
    try:
        _resolved(".".join(["tutorec", *below[:1]]))
    except LookupError:
        return instead_of(".".join(below)) is not None
    return True


def _misfit(function: object, call: Call) -> str | None:
    """Why a function refuses a call, by names and numbers of arguments, or None if it takes it."""
    try:
        parameters = inspect.signature(function).parameters if callable(function) else {}
    except (TypeError, ValueError):
        return None

    by_kind = Counter(parameter.kind for parameter in parameters.values())
    if not parameters or by_kind[inspect.Parameter.VAR_KEYWORD]:
        return None

    takes_any_number = by_kind[inspect.Parameter.VAR_POSITIONAL] > 0
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    unknown = [name for name in call.keywords if name not in names]
    if unknown:
        return f"there is no argument {', '.join(unknown)}; it takes {', '.join(names)}"

    positional = len(names) - by_kind[inspect.Parameter.KEYWORD_ONLY]
    if call.positional > positional and not takes_any_number:
        return (
            f"it takes {several(positional, 'argument')} without a name, and gets {call.positional}"
        )
    return None
