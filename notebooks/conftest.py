"""Under nbmake a notebook fails, too, where a cell shows something else than tests/book/sources.yml promises."""

from __future__ import annotations

import sys
from pathlib import Path

from nbmake import pytest_items
from nbmake.nb_result import NotebookError, NotebookResult
from nbmake.nb_run import NotebookRun

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "book/_ext"))
import agreement


class ComparedRun(NotebookRun):
    """A run whose result is compared with the documents."""

    def execute(self) -> NotebookResult:
        """Execute every cell; a disagreement is an error like that of a cell."""
        result = super().execute()
        problems = (
            agreement.violations(self.filename.stem, result.nb)
            if result.error is None
            else []
        )
        if problems:
            result.error = NotebookError(
                problems[0], "\n".join(problems), failing_cell_index=-1
            )
        return result


pytest_items.NotebookRun = ComparedRun
