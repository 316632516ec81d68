from __future__ import annotations

import socket
import unittest

import pytest

from tutorec import test_utils


def test_a_free_port_can_be_listened_to() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", test_utils.get_free_port()))


@pytest.mark.parametrize("symbol", ["__asan_init", "__tsan_init", None])
def test_tests_are_skipped_under_a_sanitizer_alone(
    symbol: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_utils, "_has_symbol", lambda name: name == symbol)
    ran = []

    class Case(unittest.TestCase):
        @test_utils.skip_if_asan
        def test_it(self) -> None:
            ran.append("method")

    result = unittest.TestResult()
    Case("test_it").run(result)
    assert ran == ([] if symbol else ["method"])
    assert len(result.skipped) == (1 if symbol else 0)


def test_this_python_says_whether_it_has_a_symbol() -> None:
    assert test_utils._has_symbol("malloc") and not test_utils._has_symbol(
        "no_such_symbol_anywhere"
    )
