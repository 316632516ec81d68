"""What a plan is made from: the options of every table, the machines, and what a person laid down.

A planner searches it, a report explains by it, and a remedy is checked by changing it and searching again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tutorec.distributed.planner.changes import Change
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.cost import fixed_cost
from tutorec.distributed.planner.interfaces import Constraints
from tutorec.distributed.planner.kernels import kernel_model
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.problem import PlanningProblem
from tutorec.distributed.planner.refusals import Refusal
from tutorec.distributed.planner.topology import Topology
from tutorec.errors import PlannerError


@dataclass(frozen=True)
class PlanInputs:
    """A planning problem with the names that belong to its numbers.

    Args:
        options: Every legal option of every table, estimated, in the order of the model's tables.
        topology: The machines as they are.
        reserved: The machines with the storage that tables may use.
        batch_size: B of a rank.
        constraints: Table name -> what was laid down for it.
        refusals: Ways to shard a table that are no options, and why.
        remake: The inputs after a change: enumerated, estimated and reserved anew. None where the model is not at hand,
            in another process than the planner's.
    """

    options: Sequence[ShardingOption]
    topology: Topology
    reserved: Topology
    batch_size: int
    constraints: Constraints = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    remake: Callable[[Change], PlanInputs] | None = field(default=None, repr=False)

    @cached_property
    def problem(self) -> PlanningProblem:
        """The numbers alone.

        Raises:
            PlannerError: Tables that are to lie together can be cut alike in no way.
        """
        serves = all(kernel_model(option.compute_kernel).serves for option in self.options)

        def fixed(kind: str, pooled: bool) -> float:
            # Who serves exchanges nothing with other ranks.
            return 0.0 if serves else fixed_cost(self.topology, kind, pooled)

        return PlanningProblem.of(self.options, self.reserved, self.constraints, fixed)

    @cached_property
    def by_table(self) -> dict[str, list[ShardingOption]]:
        """Path and name of each table -> its options."""
        found: dict[str, list[ShardingOption]] = {}
        for option in self.options:
            found.setdefault(option.fqn, []).append(option)
        return found

    def __getstate__(self) -> dict[str, object]:
        """What travels to another process: everything but the way to the model."""
        return {**self.__dict__, "remake": None}

    def constraint(self, table: str) -> ParameterConstraints:
        """That of a table, or one that leaves it free."""
        return self.constraints.get(table) or ParameterConstraints()

    def remade(self, change: Change) -> PlanInputs | None:
        """The inputs after a change; None where nothing can be planned anew, or not so."""
        if self.remake is None:
            return None
        try:
            with warnings.catch_warnings():
                # What a change does to the other constraints is no news to the person who wrote them.
                warnings.simplefilter("ignore")
                return self.remake(change)
        except PlannerError:
            return None
