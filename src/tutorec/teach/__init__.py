"""What the book's notebooks use and nothing else does: exercises, recorded traces and figures.

``check`` grades exercises and compares predictions with measurements, ``trace`` records what a
batch did on every rank, ``draw`` turns recorded or measured data into figures, ``table``
shows measured numbers. Nothing in the library imports this package.
"""

from tutorec.teach.prose import table

__all__ = ["table"]
