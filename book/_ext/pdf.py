"""The whole book as one PDF, printed by Chromium from the built pages: `make pdf`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urldefrag

import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "_build/html"
TARGET = ROOT / "_build/tutorec.pdf"

_ARTICLE = re.compile(r'<article class="bd-article"[^>]*>(.*?)</article>', re.DOTALL)
_ID = re.compile(r'(\s(?:id|name)=")([^"]+)"')
_LINK = re.compile(r'\shref="([^"]*)"')
_BREAK = '<div style="break-after: page"></div>'


def names(toc: dict) -> list[str]:
    """The pages of the table of contents in order, those of the API left out."""
    files = [
        toc["root"],
        *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"]),
    ]
    return [name for name in files if "/api/" not in name]


def article(name: str, page: str, known: set[str]) -> str:
    """A page's article; its ids are those of one document, and links lead to them."""
    found = _ARTICLE.search(page)
    if found is None:
        raise SystemExit(f"{name}.html has no article: build the book first, `make book`")

    def link(match: re.Match[str]) -> str:
        target, fragment = urldefrag(match[1])
        if "://" in target:
            return match[0]
        path = (Path("/" + name).parent / target).as_posix() if target else f"/{name}.html"
        goal = re.sub(r"/[^/]+/\.\./", "/", path)[1:].removesuffix(".html")
        return f' href="#{slug(goal)}-{fragment}"' if goal in known else ""

    body = _ID.sub(lambda match: f'{match[1]}{slug(name)}-{match[2]}"', _LINK.sub(link, found[1]))
    return f'<div id="{slug(name)}-">{body}</div>{_BREAK}'


def slug(name: str) -> str:
    return name.replace("/", "-")


def main() -> int:
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        print(
            "make pdf prints with Chromium, and there is none: install it, for example `apt "
            "install chromium`"
        )
        return 2
    order = names(yaml.safe_load((ROOT / "book/_toc.yml").read_text(encoding="utf-8")))
    pages = {name: (BUILT / f"{name}.html").read_text(encoding="utf-8") for name in order}
    head = pages[order[0]].partition("<body")[0]
    maths = next(
        (
            match[0]
            for page in pages.values()
            if (match := re.search(r"<script[^>]*tex-svg[^<]*</script>", page))
        ),
        "",
    )
    articles = "".join(article(name, page, set(order)) for name, page in pages.items())
    whole = BUILT / "book/.whole.html"
    whole.write_text(
        f'{head}{maths}<body><div class="bd-article">{articles}</div></body></html>',
        encoding="utf-8",
    )
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--no-pdf-header-footer",
        "--virtual-time-budget=300000",
    ]
    try:
        subprocess.run(
            [*command, f"--print-to-pdf={TARGET}", whole.as_uri()],
            check=True,
            capture_output=True,
            timeout=900,
        )
    finally:
        whole.unlink()
    print(f"The book as a PDF: {TARGET}, {TARGET.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
