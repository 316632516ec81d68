"""Batches of id lists, and the dense columns that come out of looking them up.

The letters of every shape in code and book:

======  =========================================================
B       samples on a rank
W       ranks
F       features
T       tables
N       ids
R       rows of a table
D       columns of a table, or of a result
======  =========================================================
"""

from tutorec._lazy import lazy_package
from tutorec.sparse import copying, jagged_tensor

__all__ = ["copying", "jagged_tensor"]

__getattr__, __dir__ = lazy_package(__name__)
