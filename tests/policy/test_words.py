"""Words that do not belong into the project: codes of working papers, paths of one machine; and
ASCII in code.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from policy.chapters import chapters
from policy.tree import ROOT, assert_none

# The documents have public names (book/sources.md). Codes and folders of their working copies mean
# nothing to a reader.
FORBIDDEN = {
    "a code of a working paper": re.compile(r"\bS[0-4]-\d+"),
    "a working copy of a document": re.compile(
        r"\bseeds/|\bseed[ _]?(document|00\d)|\bthe seed (document|notebook)s?\b"
    ),
    "a path of one machine": re.compile(r"(?<![\w.])/(?:(?:work|root|opt|mnt)/|home/(?!me/))[\w.]"),
    "a package index": re.compile(
        r"(extra-)?index-url\b|--find-links\b|download\.pytorch\.org|pypi\.org|pythonhosted"
    ),
}
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".txt",
    ".ipynb",
    ".bib",
    ".css",
    ".svg",
    ".json",
    ".cfg",
    "",
}
# This file has to spell what it forbids.
EXEMPT = {"tests/policy/test_words.py"}


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; every file outside a git clone (an unpacked
    archive).
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        return [
            p
            for folder in ("src", "tests", "book", "notebooks")
            for p in (ROOT / folder).rglob("*")
            if p.is_file()
        ]
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def word_violations(name: str, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [
            f"{name}:{number}: {what}: {match[0]!r}"
            for what, p in FORBIDDEN.items()
            if (match := p.search(line))
        ]
    return found


def ascii_violations(name: str, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        odd = [c for c in line if ord(c) > 126 or (ord(c) < 32 and c != "\t")]
        found += [f"{name}:{number}: {odd[0]!r} is not ASCII"] if odd else []
    return found


def test_no_file_holds_forbidden_words():
    found = []
    for path in tracked_files():
        name = str(path.relative_to(ROOT))
        if path.suffix in TEXT and name not in EXEMPT:
            found += word_violations(name, path.read_text(encoding="utf-8", errors="ignore"))
    assert_none(found)


def test_code_is_ascii():
    found = []
    for path in tracked_files():
        if path.suffix == ".py":
            found += ascii_violations(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    for chapter in chapters():
        for cell in chapter.code:
            found += ascii_violations(f"{chapter.name} cell {cell.index}", cell.text)
    assert_none(found)


@pytest.mark.parametrize(
    "line",
    [
        "as S0-9 shows",
        "seeds/000.txt",
        "see the seed document",
        'open("/home/someone/x")',
        "pip install --extra-index-url x",
    ],
)
def test_word_policy_rejects(line):
    assert len(word_violations("x.md", line)) == 1


@pytest.mark.parametrize(
    "line", ["torch.manual_seed(0)", "three seeds agree", "S2 is a rank", "a/opt-in", "at/home/now"]
)
def test_word_policy_accepts(line):
    assert_none(word_violations("x.md", line))


def test_ascii_policy_rejects():
    assert len(ascii_violations("x.py", "x = 1  # " + chr(0x2192))) == 1
