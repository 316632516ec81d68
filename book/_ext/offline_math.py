"""Serve MathJax from the book itself: one file, no network, works from file://.

The wheel `sphinx-mathjax-offline` carries MathJax; used as an extension it would copy 24 MB of
fonts. The SVG build is one file that needs none of them.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

BUNDLE = Path(sysconfig.get_path("purelib")) / "sphinx-mathjax-offline/static/mathjax/tex-svg.js"


def copy_bundle(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        target = Path(app.outdir, "_static", BUNDLE.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(BUNDLE, target)


def setup(app: Sphinx) -> dict[str, bool]:
    if not BUNDLE.exists():
        raise ExtensionError(
            f"no MathJax bundle at {BUNDLE}; install it with: pip install -r requirements.txt"
        )
    app.config.mathjax_path = BUNDLE.name
    app.connect("build-finished", copy_bundle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
