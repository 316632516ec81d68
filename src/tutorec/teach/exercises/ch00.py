"""Exercises of chapter 00, Setup and doctor."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

EXERCISES = (
    Exercise(
        "00.1",
        compared="the fbgemm releases for torch 2.5, 2.10 and 2.13",
        right=["1.0", "1.5", "1.8"],
        cases=(("2.5.0",), ("2.10.1+cu128",), ("2.13.0+cpu",)),
        mistakes={
            "It works for 2.5 and not for 2.10: a version is whole numbers with dots between, "
            "and 10 comes after 9.": ["1.0", "1.-4", "1.-4"],
            "The rule goes from fbgemm 1.X to torch 2.(X+5). You are going the other way.": [
                "1.10",
                "1.15",
                "1.18",
            ],
            "The two projects did not start counting together. Look at any row of the table.": [
                "1.5",
                "1.10",
                "1.13",
            ],
        },
    ),
    Exercise(
        "00.2",
        compared="the five backends, machine by machine",
        right=[True, False, False, False, True],
        mistakes={
            "Apply the rule to the second machine. A wheel compiled for one minor release of "
            "torch does not load in another.": [True, True, False, False, True],
            "On the third machine each wheel fits torch. But both write files of the same "
            "name: which files are there after the second install?": [
                True,
                False,
                True,
                False,
                True,
            ],
            "Old is not wrong. Apply the rule to the last machine.": [
                True,
                False,
                False,
                False,
                False,
            ],
        },
        shape="a list of five truth values",
    ),
)
