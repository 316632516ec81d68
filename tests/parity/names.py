"""How many of the names that public projects import from TorchRec are here, package by package."""

from __future__ import annotations

from pathlib import Path

from tutorec._torchrec_names import instead_of

USED = Path(__file__).with_name("used_names.txt")


def used_names() -> dict[str, list[int]]:
    """Package to its names that are imported, how many of them are here, uses by projects, and
    those of names here.
    """
    counts: dict[str, list[int]] = {}
    for line in USED.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        projects, _families, name = line.split()
        path = name.removeprefix("torchrec.")
        package, here = path.split(".")[0] if "." in path else "the root", instead_of(path) is None
        of_package = counts.setdefault(package, [0, 0, 0, 0])
        for position, more in enumerate((1, here, int(projects), here * int(projects))):
            of_package[position] += more
    return dict(sorted(counts.items()))
