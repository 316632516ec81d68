"""The front end of the built pages: what they load, how they describe themselves, who can read
them.
"""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
from book.browser import CHROMIUM, ask
from book.test_html import BUILT, parse, parsed
from policy.tree import ROOT, assert_none

sys.path.insert(0, str(ROOT / "book/_ext"))
import web_pages

AXE = ROOT / "node_modules/axe-core/axe.min.js"
MOST_BYTES = 1_500_000  # of a page without formulas, with what it loads
PAGES = sorted(
    [p.with_suffix(".html").relative_to(ROOT).as_posix() for p in (ROOT / "book").glob("*.md")]
    + [
        p.with_suffix(".html").relative_to(ROOT).as_posix()
        for p in (ROOT / "notebooks").glob("*.ipynb")
    ]
)
INLINE = (
    "<script>const THEBE_JS_URL = 1;</script>\n<script>let x = 1;</script>\n<script>let x = "
    "1;</script>\n"
)
VIEWPORT = '<meta name="viewport" content="a" />'


def weight(name: str) -> int:
    """Bytes of a page and of the scripts and style sheets that it loads."""
    page = BUILT / name
    loaded = re.findall(
        r'<(?:script[^>]* src|link[^>]* href)="([^"]+\.(?:js|css))[^"]*"', parsed(page).text
    )
    return page.stat().st_size + sum(
        (page.parent / path).resolve().stat().st_size for path in set(loaded)
    )


@pytest.mark.html
class TestBuiltPages:
    def test_pages_without_formulas_are_light(self):
        plain = [name for name in PAGES if 'class="math' not in parsed(BUILT / name).text]
        heavy = {name: weight(name) for name in plain if weight(name) > MOST_BYTES}
        assert plain and not heavy

    def test_every_page_describes_itself_once(self):
        counts = {
            name: [
                parsed(BUILT / name).text.count(f'"{tag}"') for tag in ("description", "viewport")
            ]
            for name in PAGES
        }
        assert_none(
            [
                f"{name}: descriptions, viewports {found}"
                for name, found in counts.items()
                if found != [1, 1]
            ]
        )

    def test_no_script_is_there_twice(self):
        assert_none(
            [
                name
                for name in PAGES
                if "THEBE" in (text := parsed(BUILT / name).text)
                or len(inline(text)) != len(set(inline(text)))
            ]
        )

    def test_no_line_ends_between_a_number_and_its_unit(self):
        kept = re.compile(r"<(pre|code|script|style|svg|title)\b.*?</\1>|<[^>]*>", re.DOTALL)
        texts = {name: kept.sub("|", parsed(BUILT / name).text) for name in PAGES}
        loose = {
            name: re.search(r".{0,40}\d\s(?:%|[MG]i?B|[mu]s)(?!\w)", text, re.DOTALL)
            for name, text in texts.items()
        }
        assert_none([f"{name}: {found[0]}" for name, found in loose.items() if found])
        assert any("&nbsp;%" in text for text in texts.values())

    @pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
    @pytest.mark.parametrize("width", [390, 640])
    def test_no_page_scrolls_sideways(self, width):
        """In frames: a window of Chromium is not as narrow as a phone."""
        here = BUILT / "book/intro.html"
        names = [os.path.relpath(BUILT / name, here.parent) for name in PAGES]
        script = f"const wide = []; for (const name of {json.dumps(names)}) {{"
        script += "const frame = document.createElement('iframe'); frame.src = name;"
        script += f"frame.style = 'width: {width}px; height: 900px'; document.body.append(frame);"
        script += "await new Promise(done => frame.onload = done);"
        script += "const page = frame.contentDocument.documentElement;"
        script += "if (page.scrollWidth > page.clientWidth)"
        script += "wide.push(`${name}: ${page.scrollWidth} px`); frame.remove(); } return wide;"
        assert_none(ask(here, script))

    @pytest.mark.skipif(
        not (CHROMIUM and AXE.exists()),
        reason="needs Chromium, and `npm install --no-save axe-core`",
    )
    @pytest.mark.parametrize("width", [1440, 390])
    @pytest.mark.parametrize("name", PAGES)
    def test_axe_finds_nothing_serious(self, name, width):
        script = AXE.read_text(encoding="utf-8").replace("</script", "<\\/script")
        script += "; const found = await axe.run(document, {resultTypes: ['violations']});"
        script += (
            "return found.violations.map(v => [v.id, v.impact, v.nodes[0].html.slice(0, 200)]);"
        )
        found = ask(BUILT / name, script, width=width)
        assert not [violation for violation in found if violation[1] in {"serious", "critical"}]


def inline(text: str) -> list[str]:
    return re.findall(r"<script>[^<]+</script>", text)


def test_a_page_keeps_what_it_uses():
    search, maths = (
        '<script src="a/searchindex.js"></script>',
        '<script defer src="tex-svg.js"></script>',
    )
    page = f'{VIEWPORT}{VIEWPORT}{INLINE}{search}{maths}<i class="fa-solid fa-sun"></i>'
    assert (
        web_pages.trimmed(page, search=False).split()
        == f'{VIEWPORT}<script>let x = 1;</script> <i class="fa-solid fa-sun"></i>'.split()
    )
    with_maths = page + '<span class="math notranslate">x</span>'
    assert search in web_pages.trimmed(with_maths, search=True)
    assert maths in web_pages.trimmed(with_maths, search=True)


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<p>from 3\n% to <b>25.6 GB</b>, 2.1 ms</p>", "from 3~% to <b>25.6~GB</b>, 2.1~ms"),
        ("<p>12 shops, 4 Bs</p><pre>86 %</pre>", "12 shops, 4 Bs</p><pre>86 %</pre>"),
        ('<p><img alt="7 %"><code>7 %</code> 7 us</p>', '<img alt="7 %"><code>7 %</code> 7~us'),
    ],
)
def test_a_number_and_its_unit_stay_together(page, shown):
    assert shown.replace("~", "&nbsp;") in web_pages.unbroken(page)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("--max-restarts", "--max-restarts"),
        ("EmbeddingBagCollectionSharder", "Embedding|Bag|Collection|Sharder"),
        ("plan[path][table].sharding_spec", "plan|[path]|[table]|.sharding_spec"),
        ("dmp_collection_sync_interval", "dmp_|collection_|sync_|interval"),
        ("src/tutorec/datasets/random.py", "src/|tutorec/|datasets/|random.py"),
    ],
)
def test_long_words_of_code_break_between_their_parts(code, shown):
    page = f'<span class="pre">{code}</span>'
    assert page.replace(code, shown.replace("|", "<wbr>")) == web_pages.breakable(page)
    assert web_pages.breakable(web_pages.breakable(page)) == web_pages.breakable(page)


def test_headers_without_words_are_cells_and_the_mark_is_in_a_landmark():
    page = f'{VIEWPORT}<th class="head"><p></p></th>'
    page += '<div class="sidebar-primary-item">\n<a class="navbar-brand logo">x</a></div>'
    trimmed = web_pages.trimmed(page, search=False)
    assert (
        "<td></td>" in trimmed
        and '<div role="navigation" aria-label="Home" class="sidebar-primary-item">' in trimmed
    )


def test_a_sitemap_has_whole_addresses():
    text = web_pages.sitemap("https://example.org/", ["b.html", "a.html"])
    assert text.splitlines()[1] == "<url><loc>https://example.org/a.html</loc></url>"


def test_the_table_of_times_has_titles_and_words():
    row = '<td><span class="doc">notebooks/00_setup</span></td><td>\N{WHITE HEAVY CHECK MARK}</td>'
    named = web_pages.named(row, {"notebooks/00_setup": "00 Setup & doctor"})
    assert named == '<td><span class="doc">00 Setup &amp; doctor</span></td><td>ran to its end</td>'


def test_icons_are_kept_by_name_and_by_alias():
    kept = 'sun:[1,1,[],"f1","M1"],"circle-half-stroke":[2,2,[9680,"adjust"],"f2",["M2","M3"]],'
    script = f'var p={{{kept}moon:[1,1,[],"f3","M4"]}};'
    assert web_pages.fewer_icons(script, {"sun", "adjust"}) == f"var p={{{kept}}};"
    assert web_pages.fewer_icons(script, set()) == "var p={};"


def test_the_glossary_has_a_link_for_each_letter():
    page = '<h1>Terms</h1><h1>Terms<a class="headerlink" href="#t">#</a></h1>'
    page += "".join(f'<dt id="term-{name}">{name}</dt>' for name in ("bag", "batch", "Adam"))
    bar = parse(web_pages.alphabet(page)).links
    assert bar == ["#t", "#term-Adam", "#term-bag"]
