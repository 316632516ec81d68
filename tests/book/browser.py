"""Asks a built page a question in Chromium: a script runs in a copy of the page and
returns JSON.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

_PROBE = """<script>
window.addEventListener("load", () => setTimeout(async () => {
  const answer = JSON.stringify(await (async () => { {script} })());
  document.documentElement.innerHTML = "<body><pre id='answer'></pre></body>";
  document.getElementById("answer").textContent = answer;
}, 2000));
</script></body>"""


def ask(page: Path, script: str, *, width: int = 1440) -> Any:
    """Run the body of an async function in a page, after its scripts and formulas; its result.

    Raises:
        RuntimeError: Chromium gave no answer.
    """
    copy = page.with_name(f".probe-{width}-{page.name}")
    text = page.read_text(encoding="utf-8")
    before, _, after = text.rpartition("</body>")
    copy.write_text(before + _PROBE.replace("{script}", script) + after, encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--allow-file-access-from-files",  # a page may look into others, in frames
        "--dump-dom",
        "--virtual-time-budget=30000",
    ]
    command += [f"--window-size={width},2000", copy.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    finally:
        copy.unlink()
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    if answer is None:
        raise RuntimeError(f"Chromium gave no answer for {page.name}: {done.stderr[-2000:]}")
    return json.loads(unescape(answer[1]))
