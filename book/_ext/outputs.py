"""Printed output as the kernel sent it, and lines that fold where folding does no harm.

A busy kernel sends a printed text in pieces, and a piece may end in the middle of a line. myst-nb
starts a new line after each piece and drops the blank lines at its end; `joined` puts the pieces
together first. Sentences that are wider than the page are folded (class ``folds``, see
tutorec.css); tables are not: their columns would come apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from myst_nb.core import render
from nbformat import NotebookNode
from sphinx.application import Sphinx

# The gaps between the columns of a line; those after a comma or a colon are none.
GAP = re.compile(r"(?<=[^\s,:]) {2,}(?=\S)")
# The folder of an installation, which is that of the machine that builds the book.
FOLDER = re.compile(r"(?:/[\w.+-]+)+/(?:site-packages|python3\.\d+)/")
WIDTH, LONGEST = 84, 102  # letters that a line of the page has room for, and if they are smaller


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs with the pieces of each stream put together, as they were sent."""
    whole: list[NotebookNode] = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output["output_type"] != "stream":
            whole.append(output)
        elif output["name"] in streams:
            streams[output["name"]]["text"] += output["text"]
        else:
            streams[output["name"]] = NotebookNode(output)
            whole.append(streams[output["name"]])
    for stream in streams.values():
        stream["text"] = FOLDER.sub(".../", stream["text"])
    return whole


def is_table(text: str) -> bool:
    """Whether in two lines that follow each other a column begins, or ends, at the same place."""
    before: set[tuple[str, int]] = set()
    for line in text.splitlines():
        gaps = list(GAP.finditer(line))
        here = {("begins", gap.end()) for gap in gaps} | {("ends", gap.start()) for gap in gaps}
        if gaps:
            here.add(("ends", len(line.rstrip())))
        if here & before:
            return True
        before = here
    return False


def fold(app: Sphinx, document: nodes.document) -> None:
    """Mark printed outputs that are no tables, and tables that fit if their letters are smaller."""
    for block in document.findall(nodes.literal_block):
        if "output" in block["classes"]:
            text = block.astext()
            longest = max(map(len, text.splitlines()), default=0)
            if not is_table(text) or longest > LONGEST:
                block["classes"].append("folds")
            elif longest > WIDTH:
                block["classes"].append("long")


def setup(app: Sphinx) -> dict[str, bool]:
    merge: Callable[[list[NotebookNode]], Any] = render.coalesce_streams
    render.coalesce_streams = lambda outputs: merge(joined(outputs))
    app.connect("doctree-read", fold)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
