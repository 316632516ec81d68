"""Errors keep what they carry, and stay catchable as the built-in types."""

import pickle

import pytest

from tutorec import errors


def test_rank_errors_keep_their_attributes_between_processes():
    for kind in (errors.RankError, errors.RankTimeoutError):
        error = pickle.loads(
            pickle.dumps(kind("rank 1 stalled", rank=1, child_traceback="Traceback ..."))
        )
        assert type(error) is kind
        assert (str(error), error.rank, error.child_traceback) == (
            "rank 1 stalled",
            1,
            "Traceback ...",
        )


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.PlannerError, ValueError),
        (errors.BackendError, ImportError),
        (errors.AgreementError, ValueError),
        (errors.RankError, RuntimeError),
        (errors.RankTimeoutError, TimeoutError),
    ],
)
def test_errors_are_caught_as_the_built_in_types(kind: type[Exception], base: type[Exception]):
    with pytest.raises(base, match="numbers"):
        raise kind("what, where, numbers, remedy")


def test_every_error_is_exported():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined | {"PlannerErrorType"} == set(errors.__all__)
