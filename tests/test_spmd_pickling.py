"""Code that is sent to ranks keeps its file and its lines, whatever cloudpickle makes of them."""

from __future__ import annotations

import functools
import linecache
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import pytest

from tutorec.errors import RankError
from tutorec.spmd import Ranks
from tutorec.spmd.pickling import dump, dump_function, load


@pytest.fixture(params=["installed", "renamed", "kept"], autouse=True)
def cloudpickle_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed cloudpickle, one that renames the file of code (3.1.3), one that does not."""
    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    def named(code: CodeType) -> Any:
        name = "<dynamic-code>" if request.param == "renamed" else code.co_filename
        make, arguments = reduce_code(code)
        known = (code.co_filename, "<dynamic-code>")
        return make, tuple(name if argument in known else argument for argument in arguments)

    if request.param != "installed":
        monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, named)


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with Ranks(1) as pool:
        yield pool


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return 2 * function(*arguments)

    return call


def closure(divisor: int) -> Callable[[int], float]:
    def divide(value: int) -> float:
        return value / divisor

    return divide


class Model:
    @property
    def size(self) -> int:
        return 3

    @staticmethod
    def rows() -> list[int]:
        return [row * 2 for row in range(3)]

    def run(self, value: int) -> float:
        return (lambda other: other / value)(1)


def codes(function: FunctionType) -> Iterator[CodeType]:
    """The code of a function, and of all functions inside of it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield code


@pytest.mark.parametrize(
    "sent", [closure(0), doubled(closure(0)), lambda value: [value for _ in "ab"]]
)
def test_code_that_is_sent_has_its_file_and_its_lines(sent: Any) -> None:
    received = load(dump(sent))
    assert received is not sent
    for ours, theirs in zip(codes(sent), codes(received), strict=True):
        assert theirs.co_filename == ours.co_filename == __file__
        assert theirs.co_firstlineno == ours.co_firstlineno
        assert list(theirs.co_lines()) == list(ours.co_lines())
        assert theirs.co_consts == ours.co_consts


def test_what_a_function_closes_over_has_its_file_too() -> None:
    (inner,) = load(dump(doubled(closure(0)))).__closure__
    assert inner.cell_contents.__code__.co_filename == __file__


def test_methods_of_a_class_have_its_file_on_a_rank(world: Ranks) -> None:
    def where() -> list[tuple[str, int]]:
        methods = [Model.size.fget, Model.rows, Model.run]
        found = [code for method in methods for code in codes(method)]
        return [(code.co_filename, code.co_firstlineno) for code in found]

    assert world.run(where)[0] == where()
    assert {path for path, _ in where()} == {__file__}


def test_a_traceback_of_a_rank_shows_the_lines_of_the_sender(world: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        world.run(lambda: Model().run(0))
    text = str(caught.value)
    assert "<dynamic-code>" not in text
    assert text.count(f'{Path(__file__).name}", line') == 3
    assert text.count("return (lambda other: other / value)(1)") == 2


def test_functions_of_notebook_cells_keep_the_name_of_their_cell() -> None:
    cell = "/tmp/ipykernel_7/123.py"
    text = "def fail(rank):\n    return rank / 0\n"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, cell, "exec"), namespace)
    received = load(dump_function(namespace["fail"]).payload)
    assert received.__code__.co_filename == cell
    with pytest.raises(ZeroDivisionError) as caught:
        received(1)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "return rank / 0"
    del linecache.cache[cell]
