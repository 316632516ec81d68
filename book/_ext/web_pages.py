"""What the built pages load and say about themselves, beyond what the theme does.

A page loads MathJax only where it has formulas, the search index only where one searches, and of
the icons those that some page shows. Numbers and their units stay on one line. Buttons that lead to
the repository appear once ``published: true`` says that the address exists.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

_THEBE = re.compile(
    r"[ \t]*<script[^>]*(?:thebe[^>]*>|>[^<]*THEBE_JS_URL)[^<]*</script>\n?|[ "
    r"\t]*<link[^>]*thebe[^>]*>\n?"
)
_INLINE = re.compile(r"[ \t]*<script>[^<]*</script>\n?")
_VIEWPORT = re.compile(r'<meta name="viewport"[^>]*/?>')
_MATHJAX = re.compile(
    r"[ \t]*<script>window\.MathJax[^<]*</script>\n?|[ \t]*<script[^>]*tex-svg\.js[^<]*</script>\n?"
)
_SEARCH = re.compile(
    r'[ \t]*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^<]*</script>\n?'
)
_MATH = re.compile(r'class="[^"]*\b(?:math|tex2jax_process)\b')
_ICON_CLASS = re.compile(r"\bfa-([a-z0-9-]+)")
_ICON = re.compile(
    r'(?:"([a-z0-9-]+)"|([a-z0-9]+)):(\[\d+,\d+,\[([^]]*)\],"[0-9a-f]+",(?:"[^"]*"|\["[^]]*\])\]),?'
)
# Names that screen readers read in place of what is shown, or that are missing.
_NAMES = (
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>"),
    (re.compile(r'(<button class="btn search-button-field[^>]*?) aria-label="[^"]*"'), r"\1"),
    (re.compile(r'(<i class="theme-switch[^>]*?)\s*title="[^"]*"'), r'\1 aria-hidden="true"'),
    (
        re.compile(r'<summary>(?=<span class="toctree-toggle")'),
        '<summary aria-label="Pages of this section">',
    ),
    (
        re.compile(r'(?<=<div)(?= class="sidebar-primary-item">\s*<a class="navbar-brand)'),
        ' role="navigation" aria-label="Home"',
    ),
    (re.compile(r'<th class="head"><p></p></th>'), "<td></td>"),
    (re.compile(r'(?<=<div) role="list"(?= class="citation-list">)'), ""),
    (re.compile(r' role="doc-biblioentry"'), ""),
)
# A number and its unit stay on one line; code, printed output and drawings keep their characters.
_UNIT = re.compile(
    r"(?P<kept><(?P<tag>pre|code|script|style|svg|title)\b.*?</(?P=tag)>|<[^>]*>)"
    r"|(?<=\d)\s(?=(?:%|[kKMGT]?i?B|[nmu\u00b5\u03bc]?s|px|million|billion)(?!\w))",
    re.DOTALL,
)
_LONG_CODE = re.compile(r'(?<=<span class="pre">)[^<]{20,}(?=</span>)')
_PART = re.compile(r"(?<=[A-Za-z\])])(?=\.(?!py\b)|[(\[][^)\]])|(?<=[,/])(?=\w)")
_LONG_NAME, _IN_NAME = re.compile(r"\w{20,}"), re.compile(r"(?<=_)(?=[A-Za-z])|(?<=[a-z])(?=[A-Z])")
_TITLE = re.compile(r'<h1>(?:(?!</h1>).)*class="headerlink".*?</h1>', re.DOTALL)
_TERM = re.compile(r'<dt[^>]* id="(term-[^"]+)">\s*(?:<[^>]+>\s*)*([A-Za-z0-9])')


def switch(app: Sphinx, config: Config) -> None:
    """Hide the buttons that lead to the repository until it exists; say version and licence."""
    if not config.published:
        options = dict(config.html_theme_options or {})
        for name in ("use_edit_page_button", "use_issues_button", "use_repository_button"):
            options[name] = False
        options["launch_buttons"] = {}
        config.html_theme_options = options
    facts = metadata("tutorec")
    footer = f"<p>tutorec {facts['Version']}, licence {facts['License-Expression']}</p>"
    config.html_theme_options = {**(config.html_theme_options or {}), "extra_footer": footer}


def describe(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """A page's description for search engines and for previews: the first sentences of its text."""
    first = doctree and next(
        (each for each in doctree.findall(nodes.paragraph) if len(each.astext()) > 60), None
    )
    if first is None:
        return
    text = " ".join(first.astext().split())
    text = text if len(text) <= 200 else text[:200].rsplit(" ", 1)[0] + " ..."
    facts = [
        ("name", "description", text),
        ("property", "og:title", context.get("title") or app.config.project),
    ]
    facts += [("property", "og:description", text), ("property", "og:type", "article")]
    facts += [("property", "og:site_name", app.config.project)]
    if base := app.config.html_baseurl:
        facts += [
            ("property", "og:url", f"{base}{page}.html"),
            ("property", "og:image", f"{base}_static/card.png"),
            ("name", "twitter:card", "summary_large_image"),
        ]
    tags = [
        f'<meta {kind}="{name}" content="{html.escape(_plain(value))}" />'
        for kind, name, value in facts
    ]
    context["metatags"] = context.get("metatags", "") + "\n".join(["", *tags, ""])


def trimmed(page: str, *, search: bool) -> str:
    """The page without scripts that it does not use and without duplicates of extensions."""
    page = _THEBE.sub("", page)
    for wrong, right in _NAMES:
        page = wrong.sub(right, page)
    seen: set[str] = set()

    def once(match: re.Match[str]) -> str:
        text = match[0].strip()
        return "" if text in seen else (seen.add(text) or match[0])

    page = _INLINE.sub(once, page)
    head, first, rest = (
        page.partition(match[0]) if (match := _VIEWPORT.search(page)) else (page, "", "")
    )
    page = head + first + _VIEWPORT.sub("", rest)
    if not _MATH.search(page):
        page = _MATHJAX.sub("", page)
    return page if search else _SEARCH.sub("", page)


def unbroken(page: str) -> str:
    """The page with no-break spaces between numbers and their units.

    Example:
        >>> unbroken("<p>86 % of 25.6 GB</p><pre>86 %</pre>")
        '<p>86&nbsp;% of 25.6&nbsp;GB</p><pre>86 %</pre>'
    """
    return _UNIT.sub(lambda found: found["kept"] or "&nbsp;", page)


def breakable(page: str) -> str:
    """The page with places at which long words of code may go on in the next line.

    Example:
        >>> breakable('<span class="pre">torchrec.distributed.planner</span>')
        '<span class="pre">torchrec<wbr>.distributed<wbr>.planner</span>'
    """

    def parts(code: re.Match[str]) -> str:
        names = _LONG_NAME.sub(lambda name: _IN_NAME.sub("<wbr>", name[0]), code[0])
        return _PART.sub("<wbr>", names)

    return _LONG_CODE.sub(parts, page)


def fewer_icons(script: str, used: set[str]) -> str:
    """The script of Font Awesome with the icons of these names, or aliases, only."""

    def kept(match: re.Match[str]) -> str:
        names = {match[1] or match[2], *re.findall(r'"([a-z0-9-]+)"', match[4])}
        return match[0] if names & used else ""

    return _ICON.sub(kept, script)


def alphabet(page: str) -> str:
    """The glossary with links to the first term of each letter below its title."""
    first: dict[str, str] = {}
    for anchor, letter in _TERM.findall(page):
        first.setdefault(letter.upper(), anchor)
    links = " ".join(
        f'<a href="#{anchor}">{letter}</a>' for letter, anchor in sorted(first.items())
    )
    bar = f'\n<nav class="alphabet" aria-label="Terms by letter">{links}</nav>'
    return _TITLE.sub(lambda title: title[0] + bar, page, count=1)


def named(page: str, titles: Mapping[str, str]) -> str:
    """The table of times with the titles of chapters and a word in place of a sign."""
    page = re.sub(
        r'(?<=<span class="doc">)[^<]+',
        lambda name: html.escape(titles.get(name[0], name[0])),
        page,
    )
    return page.replace("\N{WHITE HEAVY CHECK MARK}", "ran to its end")


def sitemap(base: str, names: list[str]) -> str:
    """The addresses of the pages, for search engines."""
    lines = [f"<url><loc>{html.escape(base + name)}</loc></url>" for name in sorted(names)]
    space = "http://www.sitemaps.org/schemas/sitemap/0.9"
    return "\n".join([f'<urlset xmlns="{space}">', *lines, "</urlset>", ""])


def finish(app: Sphinx, error: Exception | None) -> None:
    """Trim every page, and the icons to those that pages and scripts name."""
    if error is not None or app.builder.format != "html":
        return
    folder, used = Path(app.outdir), set[str]()
    for path in folder.rglob("*.html"):
        name = path.relative_to(folder).as_posix()
        page = trimmed(path.read_text(encoding="utf-8"), search=name == "search.html")
        page = breakable(unbroken(page))
        if name == "book/glossary.html" and 'class="alphabet"' not in page:
            page = alphabet(page)
        if name == "book/status.html":
            page = named(page, {doc: title.astext() for doc, title in app.env.titles.items()})
        path.write_text(page, encoding="utf-8")
        used.update(_ICON_CLASS.findall(page))
    if base := app.config.html_baseurl:  # a sitemap holds whole addresses
        own = [name for name in app.env.found_docs if not name.startswith("book/api/reference/")]
        text = sitemap(base, [f"{name}.html" for name in own])
        (folder / "sitemap.xml").write_text(text, encoding="utf-8")
    scripts = folder / "_static/scripts"
    for path in scripts.glob("*.js"):
        if path.name != "fontawesome.js":
            used.update(_ICON_CLASS.findall(path.read_text(encoding="utf-8")))
    icons = scripts / "fontawesome.js"
    icons.write_text(fewer_icons(icons.read_text(encoding="utf-8"), used), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("published", False, "html", bool)
    app.connect("config-inited", switch, priority=900)
    app.connect("html-page-context", describe)
    app.connect("build-finished", finish, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _plain(title: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", title))
