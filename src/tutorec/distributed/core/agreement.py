"""Agreement check: do all ranks have the same tables and plan? Run once, before the first exchange.

Ranks that differ in a table's width or in a plan send buffers of unexpected sizes; without this
check the process crashes in native code. Each rank sends a digest of each fact. Only if digests
differ do ranks exchange the facts themselves, to report which rank differs in which fact.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.errors import AgreementError

_STAGE = "agreement"


def check_agreement(
    subject: str, facts: Mapping[str, str], env: ShardingEnv, problem: Exception | None = None
) -> None:
    """Return if all ranks have the same facts and none has a problem; else raise on every rank.

    Args:
        subject: The operation that is about to run, for the message.
        facts: Fact -> value. A fact that some ranks do not have is a disagreement.
        env: The ranks. Without a process group only ``problem`` is checked.
        problem: This rank's own error. It is raised here after the other ranks have received it.

    Raises:
        AgreementError: Ranks differ, or another rank has a problem.

    Example:
        >>> check_agreement(
        ...     "sharding", {"table 'item': rows": "8"}, ShardingEnv.from_local(1, 0)
        ... )
    """
    if env.process_group is None or env.world_size == 1:
        if problem is not None:
            raise problem
        return

    digest = 0 if problem is not None else _digest(sorted(facts.items()))
    digests = [row[0] for row in comm.all_gather_ints([digest], env.process_group, _STAGE)]
    if digests[0] != 0 and len(set(digests)) == 1:
        return
    notes = getattr(problem, "__notes__", [])
    own_problem = (
        "; ".join([f"{type(problem).__name__}: {problem}", *notes]) if problem is not None else None
    )
    gathered = comm.all_gather_objects((own_problem, dict(facts)), env.process_group, _STAGE)

    if problem is not None:
        raise problem
    problems = [
        f"rank {rank} raised {text}" for rank, (text, _) in enumerate(gathered) if text is not None
    ]
    if problems:
        raise AgreementError(f"{subject} was aborted on every rank: " + "; ".join(problems))
    raise AgreementError(
        f"ranks disagree in {subject}: " + _differences([rank_facts for _, rank_facts in gathered])
    )


def _digest(value: object) -> int:
    """A digest of 63 bits, never 0: 0 marks a rank with a problem."""
    return (
        int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1
        or 1
    )


def _differences(held: list[dict[str, str]]) -> str:
    """The values that differ from those of most ranks, by rank; ties go to rank 0's values."""
    names = dict.fromkeys(name for rank_facts in held for name in rank_facts)
    lines = []

    for name in names:
        values = [rank_facts.get(name, "missing") for rank_facts in held]
        if len(set(values)) == 1:
            continue
        common, _ = Counter(values).most_common(1)[0]
        others = values.index(common)
        differing = [rank for rank, value in enumerate(values) if value != common]
        lines.extend(
            f"{name} is {values[rank]} on rank {rank} and {common} on rank {others}"
            for rank in differing
        )

    printed = lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])
    return "; ".join(printed)
