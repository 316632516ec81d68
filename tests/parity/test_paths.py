"""The path manifest: TorchRec's names import under tutorec once their line says so, and
not before.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path

import pytest
from policy.tree import assert_none

MANIFEST = Path(__file__).with_name("torchrec_paths.txt")
WHEN = {"now", "later", "never"}
# Document 004 adds it to TorchRec; in 1.8.0 it is gone, and `maybe_td_to_kjt` does its work.
NOT_IN_1_8 = {"torchrec.sparse.jagged_tensor.td_to_kjt"}


def entries(text: str) -> list[tuple[str, str]]:
    """Pairs of `now`, `later` or `never` and a dotted name."""
    lines = [
        line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    return [(line[0], line[-1]) for line in lines]


def importable(name: str, root: str) -> bool:
    """Whether the name, its root exchanged, is there: its module imports and has it."""
    module, _, attribute = name.replace("torchrec", root, 1).rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there and something that it needs is not
        return False


def path_violations(text: str, root: str = "tutorec") -> list[str]:
    found = []
    for when, name in entries(text):
        here = importable(name, root)
        if when == "now" and not here:
            found.append(f"{name} does not import as {name.replace('torchrec', root, 1)}")
        elif when != "now" and here:
            found.append(f"{name} is here: write `now` in {MANIFEST.name}")
    return found


def form_violations(text: str) -> list[str]:
    names = [name for _, name in entries(text)]
    found = [
        f"{name}: {when!r} is not one of {sorted(WHEN)}"
        for when, name in entries(text)
        if when not in WHEN
    ]
    found += [
        f"{name}: not a name of torchrec" for name in names if not name.startswith("torchrec.")
    ]
    return found + [f"{name}: out of order or twice" for a, name in pairwise(names) if name <= a]


def test_manifest_lines_are_sorted_and_marked():
    assert_none(form_violations(MANIFEST.read_text(encoding="utf-8")))


def test_names_are_here_now_or_later_as_the_manifest_says():
    assert_none(path_violations(MANIFEST.read_text(encoding="utf-8")))


@pytest.mark.live
def test_every_name_is_one_of_torchrec():
    pytest.importorskip("torchrec", reason="torchrec is installed by `make parity` only")
    names = {name for _, name in entries(MANIFEST.read_text(encoding="utf-8"))}
    assert {name for name in names if not importable(name, "torchrec")} == NOT_IN_1_8


def test_path_policy_rejects_a_missing_and_an_early_name():
    assert len(path_violations("now torchrec.types.NoSuchName\nnow torchrec.no.module.X")) == 2
    assert len(path_violations("later torchrec.types.DataType\nnever torchrec.types.DataType")) == 2
    assert path_violations("later torchrec.no.module.X") == []


@pytest.mark.parametrize(
    "text", ["soon torchrec.a.B", "now other.a.B", "now torchrec.b.B\nnow torchrec.a.B"]
)
def test_manifest_form_rejects(text):
    assert len(form_violations(text)) == 1
