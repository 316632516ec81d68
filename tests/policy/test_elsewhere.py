"""No file names what only one machine has: its folders, or its package index."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from policy.tree import ROOT, assert_none

ELSEWHERE = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:(?:work|root|opt|mnt)/|home/(?!me/))[\w.]"),
    "a package index": re.compile(
        r"(extra-)?index-url\b|--find-links\b|download\.pytorch\.org|pypi\.org|pythonhosted"
    ),
}
EXEMPT = {"tests/policy/test_elsewhere.py"}


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; none outside a clone."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def elsewhere_violations(name: str, text: str) -> list[str]:
    found = []
    for what, pattern in ELSEWHERE.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {what}: {match[0]!r}")
    return found


def test_no_file_names_what_one_machine_has():
    found = []
    for path in tracked_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in {".png", ".pt"} and name not in EXEMPT:
            found += elsewhere_violations(name, path.read_text(encoding="utf-8", errors="ignore"))
    assert_none(found)


@pytest.mark.parametrize("line", ['open("/home/someone/x")', "pip install --extra-index-url x"])
def test_elsewhere_policy_rejects(line):
    assert len(elsewhere_violations("x.md", line)) == 1


@pytest.mark.parametrize("line", ["a/opt-in", "at/home/now", "/home/me/x"])
def test_elsewhere_policy_accepts(line):
    assert_none(elsewhere_violations("x.md", line))
