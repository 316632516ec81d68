"""The project's public address is one constant; every other place that holds it holds the same."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from policy.tree import ROOT, assert_none

ADDRESS = re.compile(r"https://github\.com/[\w.-]+/tutorec\b")


def repository_url() -> str:
    """The constant: repository.url of _config.yml."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]


def address_violations(name: str, text: str, url: str) -> list[str]:
    return [
        f"{name}: {found}, expected {url}" for found in sorted(set(ADDRESS.findall(text)) - {url})
    ]


def test_pyproject_has_the_address():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Homepage"] == repository_url()


def test_readme_has_the_address():
    assert repository_url() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_mention_is_the_same():
    files = [p for pattern in ("*.md", "*.toml", "*.yml") for p in ROOT.glob(pattern)]
    files += [
        p
        for folder in ("book", "notebooks", "src", ".github")
        for p in (ROOT / folder).rglob("*.*")
        if p.is_file()
    ]
    texts = {
        str(p.relative_to(ROOT)): p.read_text(encoding="utf-8", errors="ignore") for p in files
    }
    url = repository_url()
    assert_none([v for name, text in texts.items() for v in address_violations(name, text, url)])


@pytest.mark.parametrize(
    "text",
    ["git+https://github.com/example/tutorec", "https://github.com/tutorec-org/tutorec/blob/main"],
)
def test_address_policy_rejects(text):
    assert len(address_violations("README.md", text, repository_url())) == 1
