"""No test depends on a clock or on luck: one profile draws for all (`tests/conftest.py`), no assert
reads the time.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from policy.tree import ROOT, SourceFile, assert_none

PROFILE_SETTINGS = {"deadline", "derandomize", "database", "suppress_health_check"}
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
PROFILE_FILE = "tests/conftest.py"
# A file without these words has nothing to find, and is not parsed.
WORTH_PARSING = re.compile(r"settings\(|\b(time|monotonic|perf_counter)(_ns)?\(|_time(_ns)?\(")


def reads_clock(node: ast.AST) -> bool:
    """A call of a clock by its name: ``time.monotonic()``, ``perf_counter()``,
    ``time.time_ns()``.
    """
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    module, _, function = name.rpartition(".")
    return function.removesuffix("_ns") in CLOCKS and (
        module == "time" or (not module and function != "time")
    )


def clock_violations(file: SourceFile) -> list[str]:
    violations = []
    for node in ast.walk(file.ast):
        where = f"{file.where}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assert) and any(reads_clock(part) for part in ast.walk(node.test)):
            violations.append(f"{where}: an assert reads a clock: {ast.unparse(node.test)[:60]}")
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "settings":
            given = PROFILE_SETTINGS & {keyword.arg for keyword in node.keywords}
            violations += [
                f"{where}: {name}= belongs to the profile in {PROFILE_FILE}"
                for name in sorted(given)
            ]
    return violations


def test_no_test_sets_a_deadline_or_asserts_a_clock():
    violations = []
    for path in sorted(Path(ROOT / "tests").rglob("*.py")):
        label = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if label != PROFILE_FILE and WORTH_PARSING.search(text):
            violations += clock_violations(SourceFile(path.stem, text, label=label))
    assert_none(violations)


def test_the_rule_rejects_what_it_is_there_for():
    bad = """
@settings(deadline=200, max_examples=5)
@given(st.integers())
def test_a(number):
    start = time.perf_counter()
    assert time.perf_counter() - start < 1
    assert monotonic() < 3, "late"
"""
    good = (
        "limit = time.monotonic() + 60\n@settings(max_examples=5)\ndef test_b():\n    assert "
        "seconds('time') == 2\n"
    )
    assert len(clock_violations(SourceFile("bad", bad))) == 3
    assert clock_violations(SourceFile("good", good)) == []
