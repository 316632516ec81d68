"""Under nbmake a notebook runs with its claims, and fails, too, where it differs from its document.

Claims are in tests/book/claims, what the documents print in tests/book/sources.yml. With
KEEP_FOR_BOOK=1 what was executed is kept, and `make book` does not execute it again.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import nbformat
from nbmake import pytest_items
from nbmake.nb_result import NotebookError, NotebookResult
from nbmake.nb_run import NotebookRun

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "book/_ext"))
import agreement
import build_book
from claims import MARK, with_claims


class ComparedRun(NotebookRun):
    """A run with the notebook's claims, whose result is compared with its document."""

    def execute(self) -> NotebookResult:
        """Execute every cell; a disagreement is an error like that of a cell."""
        name = self.filename.stem
        stored = json.loads(self.filename.read_text(encoding="utf-8"))
        notebook = nbformat.reads(
            json.dumps(with_claims(stored, name)), as_version=4
        )
        begin = time.monotonic()
        with patch.object(nbformat, "read", return_value=notebook):
            try:
                result = super().execute()
            except RuntimeError as error:
                # Another process took a port of the kernel between its choice
                # and its use: no cell has run.
                if "died before replying to kernel_info" not in str(error):
                    raise
                result = super().execute()
        seconds = time.monotonic() - begin

        if result.error is not None:
            return result
        executed = copy.deepcopy(result.nb)
        result.nb.cells = [
            cell for cell in result.nb.cells if not cell.id.startswith(MARK)
        ]
        problems = agreement.violations(name, result.nb)
        if problems:
            result.error = NotebookError(
                problems[0], "\n".join(problems), failing_cell_index=-1
            )
        elif os.environ.get("KEEP_FOR_BOOK") == "1":
            build_book.keep_executed(executed, self.filename, seconds)
        return result


pytest_items.NotebookRun = ComparedRun
