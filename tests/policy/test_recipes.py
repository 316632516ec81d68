"""CONTRIBUTING's recipes name files that exist, and what stands in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from policy.tree import ROOT, assert_none

FILE = r"`([\w./]+\.(?:py|md|yml))`"
NAMES_IN_FILE = re.compile(rf"((?:`[\w.]+`(?:, | and )?)+) in {FILE}")
FILE_WITH_NAMES = re.compile(rf"{FILE}(?: \(([^()]*)\))?")
PLACEHOLDER = re.compile(r"NN|xx|part_N")


def recipe_violations(text: str, files: Mapping[str, str]) -> list[str]:
    """Files that do not exist, and names that do not stand in the file beside them.

    Args:
        text: Of CONTRIBUTING.md.
        files: Path -> content.
    """
    line = " ".join(text.split())
    named = [(path, names) for names, path in NAMES_IN_FILE.findall(line)]
    found = []
    for path, names in [*FILE_WITH_NAMES.findall(line), *named]:
        texts = [content for file, content in files.items() if f"/{file}".endswith(f"/{path}")]
        if not texts and not PLACEHOLDER.search(path):
            found.append(f"CONTRIBUTING.md names {path}, and there is no such file")
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", names) if texts else ():
            if name != "py" and not any(re.search(rf"\b{name}\b", each) for each in texts):
                found.append(f"CONTRIBUTING.md names {name} of {path}, which does not have it")
    return found


def test_files_and_names_of_the_recipes_exist():
    places = [
        ROOT.glob("*.md"),
        *((ROOT / part).rglob("*.*") for part in ("src", "benchmarks", "tests", "book")),
    ]
    files = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for place in places
        for path in place
        if path.suffix in (".py", ".md", ".yml")
    }
    assert_none(recipe_violations(files["CONTRIBUTING.md"], files))


def test_policy_rejects_files_and_names_that_are_gone():
    files = {"src/tutorec/plan/sizes.py": "CUTS = ()\n"}
    for text in ("`sizes.py`\n(`CUTS`)", "`CUTS` in `plan/sizes.py`", "`xx_sharding.py`"):
        assert not recipe_violations(text, files)
    for text in (
        "`state/sizes.py`",
        "`sizes.py` (`CUTS`,\n`ROWS`)",
        "`ROWS` and `CUTS` in `sizes.py`",
    ):
        assert len(recipe_violations(text, files)) == 1
