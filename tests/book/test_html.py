"""The built pages: they need no network, every picture says what it shows, every link leads
somewhere.

Run by `make html` (and .ci/run) after the book was built; marker `html`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from policy.tree import ROOT, assert_none

sys.path.insert(0, str(ROOT / "book/_ext"))
from sources_page import rows

BUILT = ROOT / "_build/html"
# Pages that Sphinx makes of the code: their headings and the places they link to are its own.
GENERATED = ("_modules/", "genindex", "py-modindex", "search")
# Attributes by which a browser fetches something without being asked.
FETCHES = {
    "img": ("src", "srcset"),
    "script": ("src",),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src",),
}
FETCHES |= {
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href",),
}
FETCHING_LINKS = {
    "stylesheet",
    "preload",
    "modulepreload",
    "icon",
    "shortcut",
    "prefetch",
    "dns-prefetch",
    "preconnect",
}
REMOTE = re.compile(r"^\s*(https?:)?//")
REMOTE_CSS = re.compile(r"(@import\s+|url\()\s*[\"']?(https?:)?//")
REMOTE_SCRIPT = re.compile(r"(from|import)\s*\(?\s*[\"'](https?:)?//")


@dataclass
class Page:
    """What the checks need of one HTML file."""

    resources: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    images: list[tuple[str, str | None]] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    text: str = ""


class PageParser(HTMLParser):
    """Collects a Page."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._open: list[str] = []
        self._svg: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        page = self.page
        if values.get("id"):
            page.ids.add(str(values["id"]))
        if tag == "a" and values.get("name"):
            page.ids.add(str(values["name"]))
        if tag == "a" and values.get("href"):
            page.links.append(str(values["href"]))
        for attribute in FETCHES.get(tag, ()):
            page.resources += [
                part.split()[0] for part in (values.get(attribute) or "").split(",") if part.strip()
            ]
        if tag == "link" and FETCHING_LINKS & set((values.get("rel") or "").split()):
            page.resources.append(values.get("href") or "")
        if REMOTE_CSS.search(values.get("style") or ""):
            page.resources.append(str(values["style"]))
        if tag == "img":
            page.images.append((values.get("src") or "", values.get("alt")))
        if tag == "svg" and (values.get("role") == "img" or "width" in values):
            self._svg.append(values)
        if tag in {"title", "h1", "h2", "h3", "style", "script"}:
            self._open.append(tag)
            if tag in {"title", "h1", "h2", "h3"} and not self._svg:
                page.titles.append("")

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
        if tag == "svg" and self._svg:
            values = self._svg.pop()
            if values.get("aria-hidden") != "true" and "sd-octicon" not in (
                values.get("class") or ""
            ):
                self.page.images.append(
                    ("inline svg", values.get("aria-label") or values.get("svg-title"))
                )

    def handle_data(self, data: str) -> None:
        kind = self._open[-1] if self._open else ""
        if kind == "style" and REMOTE_CSS.search(data):
            self.page.resources.append("https:// in a style element")
        elif kind == "script" and REMOTE_SCRIPT.search(data):
            self.page.resources.append("https:// in a script element")
        elif kind == "title" and self._svg:
            self._svg[-1]["svg-title"] = data
        elif kind in {"title", "h1", "h2", "h3"}:
            self.page.titles[-1] += data


def parse(html: str) -> Page:
    parser = PageParser()
    parser.feed(html)
    parser.page.text = html
    return parser.page


@cache
def parsed(path: Path) -> Page:
    return parse(path.read_text(encoding="utf-8"))


def network_violations(name: str, page: Page) -> list[str]:
    return [
        f"{name}: fetches {r[:100]}"
        for r in page.resources
        if REMOTE.match(r) or r.startswith("https:")
    ]


def alt_violations(name: str, page: Page) -> list[str]:
    return [
        f"{name}: no alt text on {source[:100]}"
        for source, alt in page.images
        if not (alt or "").strip()
    ]


def title_violations(name: str, page: Page) -> list[str]:
    bare = [title.replace("#", "").strip() for title in page.titles]
    return [
        f"{name}: a title or heading reads {t!r}"
        for t in bare
        if not t or re.search(r"\b(nan|None|inf)\b", t)
    ]


def link_violations(name: str, page: Page, exists: dict[str, Page | None]) -> list[str]:
    """Links of the page at `name` (relative to the book) that lead nowhere; `exists` maps paths to
    pages or None.
    """
    found = []
    for link in page.links:
        target, fragment = urldefrag(link)
        if urlsplit(link).scheme or link.startswith("//"):
            continue
        path = resolve(name, unquote(target)) if target else name
        if path not in exists:
            found.append(f"{name}: {link} leads to no file")
        elif (
            fragment
            and (there := exists[path]) is not None
            and unquote(fragment) not in there.ids | {"", "top"}
        ):
            found.append(f"{name}: {link} leads to no place of that page")
    return sorted(set(found))


def resolve(name: str, target: str) -> str:
    parts = [] if target.startswith("/") else name.split("/")[:-1]
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts)


# Between dollar signs, text that begins and ends without a blank and has a command, an index or a
# power.
RAW_TEX = re.compile(r"\$(?! )[^$\n]{0,200}[\\_^][^$\n]{0,200}(?<! )\$")
VERBATIM = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.DOTALL)


def markup_violations(name: str, page: Page) -> list[str]:
    """Formulas and roles that the reader would see as they were typed."""
    text = re.sub(r"<[^>]+>", "", VERBATIM.sub("", page.text))
    raw = [found.group() for found in RAW_TEX.finditer(text)]
    raw += re.findall(r"(?:\{[a-z:-]+\}|:[a-z:-]+:)`[^`\n]{0,60}`", text)
    return [f"{name}: shows the markup {markup[:80]}" for markup in raw]


def pages() -> Iterator[tuple[str, Page]]:
    for path in sorted(BUILT.rglob("*.html")):
        if "_static" not in path.relative_to(BUILT).parts:
            yield str(path.relative_to(BUILT)), parsed(path)


@pytest.mark.html
class TestBuiltBook:
    def test_the_book_was_built(self):
        assert (BUILT / "index.html").exists(), f"no {BUILT}/index.html: run `make book` first"

    def test_no_page_fetches_from_the_network(self):
        assert_none([v for name, page in pages() for v in network_violations(name, page)])

    def test_no_style_sheet_fetches_from_the_network(self):
        sheets = [
            p
            for p in BUILT.rglob("*.css")
            if REMOTE_CSS.search(p.read_text(encoding="utf-8", errors="ignore"))
        ]
        assert_none([str(p.relative_to(BUILT)) for p in sheets])

    def test_every_picture_has_alt_text(self):
        assert_none([v for name, page in pages() for v in alt_violations(name, page)])

    def test_no_title_is_empty_or_not_a_number(self):
        written = [(name, page) for name, page in pages() if not name.startswith(GENERATED)]
        assert_none([v for name, page in written for v in title_violations(name, page)])

    def test_no_page_shows_its_markup(self):
        written = [(name, page) for name, page in pages() if not name.startswith(GENERATED)]
        assert_none([v for name, page in written for v in markup_violations(name, page)])

    def test_every_internal_link_leads_somewhere(self):
        files = {str(p.relative_to(BUILT)) for p in BUILT.rglob("*") if p.is_file()}
        exists = {
            name: parsed(BUILT / name) if name.endswith(".html") and "_static" not in name else None
            for name in files
        }
        found = [v for name, page in pages() for v in link_violations(name, page, exists)]
        assert_none(
            [
                v
                for v in found
                if not (v.startswith(GENERATED) and v.endswith("no place of that page"))
            ]
        )

    def test_no_page_shows_a_path_of_the_machine_that_built_it(self):
        machine = (str(ROOT), str(Path.home()) + "/", "site-packages/")
        assert_none(
            [f"{name}: {path}" for name, page in pages() for path in machine if path in page.text]
        )

    def test_a_page_shows_a_warning_only_where_its_document_does(self):
        warned = [name for name, page in pages() if 'class="output stderr' in page.text]
        of_documents = {
            f"notebooks/{row['notebook']}.html" for row in rows() if "warning" in row["what"]
        }
        assert_none([name for name in warned if name not in of_documents])

    def test_maths_is_served_by_the_book(self):
        with_maths = [name for name, page in pages() if 'class="math' in page.text]
        assert_none([name for name in with_maths if "tex-svg.js" not in parsed(BUILT / name).text])
        assert (BUILT / "_static/tex-svg.js").exists(), (
            "book/_ext/offline_math.py copies tex-svg.js at the end of a build"
        )


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        '<link rel="stylesheet" href="//cdn.example.org/x.css">',
        '<img alt="a" src="http://example.org/x.png">',
        '<img alt="a" src="x.png" srcset="x.png 1x, https://example.org/x2.png 2x">',
        "<style>@import 'https://example.org/x.css';</style>",
        '<script type="module">import mermaid from "https://example.org/mermaid.mjs"</script>',
    ],
)
def test_network_check_rejects(html):
    assert len(network_violations("x.html", parse(html))) == 1


def test_network_check_accepts_links_that_a_reader_follows():
    assert (
        network_violations(
            "x.html", parse('<a href="https://example.org">x</a><img src="x.png" alt="x">')
        )
        == []
    )


@pytest.mark.parametrize(
    "html", ['<img src="x.png">', '<img src="x.png" alt=" ">', '<svg width="5"><path/></svg>']
)
def test_alt_check_rejects(html):
    assert len(alt_violations("x.html", parse(html))) == 1


def test_alt_check_accepts_a_titled_drawing():
    assert (
        alt_violations(
            "x.html", parse('<svg role="img"><title>two ranks</title></svg><img src="x" alt="y">')
        )
        == []
    )


@pytest.mark.parametrize("html", ["<title></title>", "<h1>loss is nan</h1>", "<h2>None</h2>"])
def test_title_check_rejects(html):
    assert len(title_violations("x.html", parse(html))) == 1


def test_link_check_rejects_missing_files_and_places():
    page = parse(
        '<a href="../b/y.html">1</a><a href="z.html">2</a><a href="#here">3</a><a '
        'href="../b/y.html#there">4</a>'
    )
    violations = link_violations(
        "a/x.html", page, {"a/x.html": page, "b/y.html": parse('<p id="here">')}
    )
    assert len(violations) == 3, violations


@pytest.mark.parametrize(
    "html", ["<p>the mean of $g^2$ is</p>", "<p>see {term}`bag`</p>", "<p>:class:`Table` is</p>"]
)
def test_markup_check_rejects(html):
    assert len(markup_violations("x.html", parse(html))) == 1


@pytest.mark.parametrize(
    "html", ["<p>from $5 to $6 a day</p>", "<code>$g^2$</code>", "<pre>{term}`bag`</pre>"]
)
def test_markup_check_accepts(html):
    assert markup_violations("x.html", parse(html)) == []
