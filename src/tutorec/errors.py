"""Exceptions that tutorec raises.

A caller's mistake is a :class:`ValueError` or :class:`KeyError` (or a subclass below), so that code
that catches the built-in types keeps working. The classes here exist where a program may want to
react to one error and not another.
"""

from __future__ import annotations

import enum

__all__ = [
    "AgreementError",
    "BackendError",
    "CheckpointError",
    "PlannerError",
    "PlannerErrorType",
    "RankError",
    "RankTimeoutError",
]


class PlannerErrorType(enum.Enum):
    """The cause of a `PlannerError`.

    Example:
        >>> from tutorec.errors import PlannerErrorType
        >>> PlannerErrorType("insufficient_storage").name
        'INSUFFICIENT_STORAGE'
    """

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    INPUT_VALIDATION = "input_validation"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class PlannerError(ValueError):
    """No sharding plan fits, or a plan contradicts the module, the topology or the constraints.

    Args:
        message: What does not fit, the numbers, and what would.
        error_type: The cause.

    Example:
        >>> from tutorec.errors import PlannerError
        >>> PlannerError("nothing fits").error_type.value
        'other'
    """

    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        super().__init__(message)
        self.error_type: PlannerErrorType = error_type

    def __reduce__(self) -> tuple[type[PlannerError], tuple[str, PlannerErrorType]]:
        """Keep the kind when an error travels between processes."""
        return type(self), (str(self), self.error_type)


def bad_input(message: str) -> PlannerError:
    """The error for input of a planner that cannot be."""
    return PlannerError(message, PlannerErrorType.INPUT_VALIDATION)


class BackendError(ImportError):
    """A kernel backend was demanded (``TUTOREC_BACKEND=fbgemm``) and cannot be had on this machine.

    It is never raised by the automatic choice, which falls back to the torch backend and says why
    in ``doctor()``.

    Example:
        >>> from tutorec.errors import BackendError
        >>> issubclass(BackendError, ImportError)
        True
    """


class AgreementError(ValueError):
    """Ranks disagree about tables, keys or plan; raised on every rank, before the first exchange.

    Example:
        >>> from tutorec.errors import AgreementError
        >>> issubclass(AgreementError, ValueError)
        True
    """


class CheckpointError(ValueError):
    """A checkpoint could not be saved, or is damaged, of another version, or of another model.

    Example:
        >>> from tutorec.errors import CheckpointError
        >>> issubclass(CheckpointError, ValueError)
        True
    """


class RankError(RuntimeError):
    """A rank raised or died.

    Args:
        message: What happened, with the rank's number.
        rank: The rank that is the root cause; -1 when it is not known.
        child_traceback: The traceback as the rank printed it; empty when the process died without
            one.

    Example:
        >>> from tutorec.errors import RankError
        >>> RankError("rank 1 raised ValueError: bad id", rank=1).rank
        1
    """

    def __init__(self, message: str, rank: int = -1, child_traceback: str = "") -> None:
        super().__init__(message)
        self.rank: int = rank
        self.child_traceback: str = child_traceback

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int, str]]:
        """Keep the attributes when an error travels between processes."""
        return type(self), (str(self), self.rank, self.child_traceback)


class RankTimeoutError(RankError, TimeoutError):
    """A rank stalled past the deadline; the message names it and who was waiting for it.

    Example:
        >>> from tutorec.errors import RankTimeoutError
        >>> issubclass(RankTimeoutError, TimeoutError)
        True
    """
