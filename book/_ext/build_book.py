"""Build the executed book: `python book/_ext/build_book.py` from anywhere, or `make book`.

jupyter-cache executes a notebook again when the notebook changes, and only then. A chapter's output
depends as much on the library, on the installed versions and on the backend, so this script keys
the cache on those too and removes it when they change. When nothing at all changed since the last
success it builds nothing. `make notebooks` and `make nb` fill the same cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "_build"
ROOT_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<title>tutorec: distributed embedding tables, an executed book</title>
<meta http-equiv="refresh" content="0; url=book/intro.html" />
</head>
<body><p><a href="book/intro.html">tutorec, the first page</a></p></body>
</html>
"""
SOURCE_SUFFIXES = {
    ".py",
    ".html",
    ".ipynb",
    ".md",
    ".yml",
    ".bib",
    ".css",
    ".svg",
    ".txt",
    ".json",
    ".js",
}


def digest(paths: Iterable[Path], *words: str) -> str:
    """A hash over names and contents of files and over words."""
    total = hashlib.sha256()
    for word in words:
        total.update(word.encode() + b"\0")
    for path in sorted(paths):
        total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def sources(*roots: str) -> list[Path]:
    """Every source file under the given files and folders of the repository."""
    found: list[Path] = []
    for root in roots:
        path = ROOT / root
        found += (
            [path]
            if path.is_file()
            else [p for p in path.rglob("*") if p.suffix in SOURCE_SUFFIXES]
        )
    return [
        p
        for p in found
        if not {"_build", "__pycache__", ".ipynb_checkpoints", "reference"} & set(p.parts)
    ]


def execution_key() -> str:
    """What the output of every notebook depends on, the notebook itself excepted."""
    words = (os.environ.get("TUTOREC_BACKEND", "auto"), sys.version.split()[0])
    return digest(sources("src/tutorec", "requirements.txt"), *words)


def book_key() -> str:
    """What the built pages depend on."""
    roots = (
        "book",
        "notebooks",
        "_config.yml",
        "tests/book/sources.yml",
        "tests/book/claims",
        "tests/parity/used_names.txt",
    )
    return digest(sources(*[r for r in roots if (ROOT / r).exists()]), execution_key())


def stored(name: str) -> str:
    path = BUILD / name
    return path.read_text() if path.exists() else ""


def failed_notebooks() -> dict[str, Path]:
    """Name of each notebook that failed -> its execution log."""
    reports = BUILD / "html" / "reports"
    ending = ".err.log"
    return {
        str(log.relative_to(reports)).removesuffix(ending): log
        for log in sorted(reports.glob(f"**/*{ending}"))
    }


def forget_failures() -> None:
    """Drop the pages of notebooks that failed: Sphinx keeps them and would call them current."""
    for name in failed_notebooks():
        (BUILD / ".doctrees" / f"{name}.doctree").unlink(missing_ok=True)


def report_failures() -> None:
    """Print the end of every execution log, so that a failed cell is seen at once."""
    for log in failed_notebooks().values():
        tail = log.read_text(errors="replace").splitlines()[-40:]
        print(
            f"\n---- {log.relative_to(ROOT)} (its last {len(tail)} lines)",
            *tail,
            sep="\n",
            file=sys.stderr,
        )


def drop_stale_executions() -> None:
    """Remove executed notebooks whose output may differ by now."""
    BUILD.mkdir(exist_ok=True)
    key = execution_key()
    if stored(".execution_key") != key:
        for stale in ("html", ".doctrees", ".jupyter_cache"):
            shutil.rmtree(BUILD / stale, ignore_errors=True)
        (BUILD / ".execution_key").write_text(key)


def keep_executed(notebook: NotebookNode, path: Path, seconds: float) -> None:
    """Put an executed notebook into the cache of the book, which then does not execute it again.

    Args:
        notebook: With outputs, and with its claims, as the book would execute it. Its cells lose
            the times at which they ran, and get the prompts of the page: a notebook is found by
            its code and metadata.
        path: Its file.
        seconds: How long it took: the page of execution times shows it.
    """
    from jupyter_cache import get_cache
    from jupyter_cache.base import CacheBundleIn
    from nbformat import from_dict
    from prompts import named

    drop_stale_executions()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    as_read = from_dict(named(notebook))
    bundle = CacheBundleIn(as_read, str(path), data={"execution_seconds": seconds})
    cache = get_cache(BUILD / ".jupyter_cache")
    cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def main() -> int:
    subprocess.run([sys.executable, str(ROOT / "book/_ext/sources_page.py")], check=True)
    index = BUILD / "html" / "index.html"
    wanted = book_key()
    if index.exists() and stored(".book_key") == wanted:
        print("The book is current: nothing to build.")
        return 0
    drop_stale_executions()
    if not (BUILD / ".jupyter_cache").exists():
        # Sphinx would execute one notebook at a time; this runs those that take no times together.
        execute = ["make", "--no-print-directory", "notebooks"]
        status = subprocess.run(execute, cwd=ROOT, check=False).returncode
        if status:
            return status
    (BUILD / ".book_key").unlink(missing_ok=True)
    shutil.rmtree(BUILD / "html" / "reports", ignore_errors=True)
    # What the theme leaves behind when a notebook failed: its logo, under the folder's name.
    if (BUILD / "html/_static").is_file():
        shutil.rmtree(BUILD / "html")
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    command += ["build", ".", "--toc", "book/_toc.yml", "-W", "--keep-going"]
    status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    if status:
        report_failures()
        forget_failures()
        print("\nThe book was not built: see the warnings and errors above.", file=sys.stderr)
        return status
    if subprocess.run(
        [sys.executable, str(ROOT / "book/_ext/agreement.py")], check=False
    ).returncode:
        print(
            "\nThe book shows other outputs than tests/book/sources.yml promises: see above.",
            file=sys.stderr,
        )
        return 1
    index.write_text(ROOT_PAGE, encoding="utf-8")
    (BUILD / ".book_key").write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
