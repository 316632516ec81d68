"""Shares of a chapter's height in Chromium: code, output, figures. `make shares` prints the table,
and fails where code and output take more than a third or figures less than a tenth.
"""

from __future__ import annotations

import sys
from pathlib import Path

from browser import ask

BUILT = Path(__file__).resolve().parents[2] / "_build/html"
SCRIPT = """
const height = (nodes) => nodes.reduce((sum, node) => sum + node.getBoundingClientRect().height, 0);
const outermost = (selector) => [...document.querySelectorAll(selector)].filter(
  (node) => node.parentElement.closest(selector) === null && node.checkVisibility({contentVisibilityAuto: true})
    && node.closest("button") === null);
const article = document.querySelector(".bd-article");
const figures = outermost(".bd-article figure, .bd-article .cell_output img, .bd-article .cell_output svg");
const inFigure = (node) => figures.some((figure) => node.contains(figure));
const code = outermost(".bd-article .cell_input");
const text = outermost(".bd-article .cell_output .output.stream, .bd-article .cell_output .output.text_plain").filter(
  (node) => !inFigure(node));
return [article.getBoundingClientRect().height, height(code), height(text), height(figures)];
"""  # noqa: E501


def misses(name: str, code: float, printed: float, figures: float) -> list[str]:
    """What a page is over or under, by its shares."""
    found = [f"{name}: code and output take {code + printed:.1%}"] if code + printed > 1 / 3 else []
    return found + ([f"{name}: figures take {figures:.1%}"] if figures < 0.1 else [])


def main() -> int:
    found = []
    print("| chapter | height, px | code | printed output | figures |\n|---|---|---|---|---|")
    for page in sorted((BUILT / "notebooks").glob("[0-9p]*.html")):
        whole, *parts = ask(page, SCRIPT)
        shares = [part / whole for part in parts]
        print(f"| {page.stem} | {whole:,.0f} |", *(f"{share:.1%} |" for share in shares))
        found += misses(page.stem, *shares)
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
