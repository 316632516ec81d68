"""Simulation of a plan's traffic and time on arbitrary topologies, see `simulation`."""

from tutorec._lazy import lazy_package
from tutorec.distributed.simulate.ids import PowerLaw, RowShares, Uniform
from tutorec.distributed.simulate.loads import Load
from tutorec.distributed.simulate.replicas import SyncSimulation, simulate_sync
from tutorec.distributed.simulate.simulation import simulate
from tutorec.distributed.simulate.step import HotRow, Simulation, Straggler

__all__ = [
    "HotRow",
    "Load",
    "PowerLaw",
    "RowShares",
    "Simulation",
    "Straggler",
    "SyncSimulation",
    "Uniform",
    "simulate",
    "simulate_sync",
]

__getattr__, __dir__ = lazy_package(__name__)
