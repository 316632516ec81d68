"""Shares of a chapter's height in Chromium: code, output, figures. `make shares` prints
the table.
"""

from __future__ import annotations

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


def main() -> None:
    print("| chapter | height, px | code | printed output | figures |\n|---|---|---|---|---|")
    for page in sorted((BUILT / "notebooks").glob("[0-9p]*.html")):
        whole, *parts = ask(page, SCRIPT)
        print(f"| {page.stem} | {whole:,.0f} |", *(f"{part / whole:.0%} |" for part in parts))


if __name__ == "__main__":
    main()
