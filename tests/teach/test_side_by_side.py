"""What chapter 20 reads: the files that it shows are whole, and tutorec answers as they say."""

from __future__ import annotations

import pytest
import torch
from parity.moved_script import digest, project
from parity.names import used_names
from parity.write_ratios import RUNS

from tutorec.teach import draw, side_by_side

PARITY = side_by_side.stored("parity")


def test_tutorec_answers_as_stored(ranks):
    [ours] = ranks(1).run(side_by_side.answers, "tutorec")
    stored = {question: both["tutorec"] for question, both in PARITY["answers"].items()}
    if torch.cuda.is_available():
        ours, stored = (
            {q: a for q, a in each.items() if "CUDA" not in q} for each in (ours, stored)
        )
    assert ours == stored


def test_a_refusal_is_an_answer():
    assert side_by_side._asked(lambda root: root[99], "tutorec") == "IndexError"


def test_stored_lines_are_of_the_project_in_the_chapter():
    assert PARITY["runs"]["sha256"] == digest(project())


def test_a_script_that_fails_says_what_it_wrote(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("print('begun')\nraise KeyError('user')\n")
    with pytest.raises(RuntimeError, match=r"(?s)broken\.py ended with 1:.*KeyError: 'user'"):
        side_by_side.launch(script, ranks=1)


def test_stored_names_are_those_of_today():
    assert PARITY["names"] == used_names()


def test_every_ratio_of_the_list_is_stored():
    rows = [what for _, _, wanted in RUNS for what, _ in wanted.values()]
    assert [row["what"] for row in side_by_side.stored("ratios")["rows"]] == rows


def test_ratios_count_intervals_above_one():
    chart = draw.ratios(
        {"a": (2.0, 1.9, 2.1), "b": (1.1, 0.9, 1.2)},
        axis="theirs / ours",
        claim="{above} of {count}",
    )
    assert chart.claim == "1 of 2"


@pytest.mark.live
def test_torchrec_answers_as_stored(ranks):
    pytest.importorskip("torchrec", reason="torchrec is installed by `make parity` only")
    [theirs] = ranks(1).run(side_by_side.answers, "torchrec")
    assert theirs == {question: both["torchrec"] for question, both in PARITY["answers"].items()}
