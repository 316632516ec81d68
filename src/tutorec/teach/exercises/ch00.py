"""Exercises of chapter 00, Setup and doctor."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake


def _minor(torch_version: str) -> int:
    """Minor number of a version such as "2.13.0+cpu"."""
    return int(torch_version.split(".")[1])


def _by_decimals(torch_version: str) -> str:
    """What comes out when "2.10" is read as the decimal number 2.1."""
    decimal = float(".".join(torch_version.split(".")[:2]))
    return f"1.{round(10 * (decimal - 2)) - 5}"


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="00.1",
        compared="the fbgemm releases for torch 2.5, 2.10 and 2.13",
        solution=lambda torch_version: f"1.{_minor(torch_version) - 5}",
        mistakes=(
            Mistake(
                "reads a version as a decimal number",
                _by_decimals,
                "It works for 2.5 and not for 2.10: a version is whole numbers with dots between, "
                "and 10 comes after 9.",
            ),
            Mistake(
                "adds where the rule subtracts",
                lambda torch_version: f"1.{_minor(torch_version) + 5}",
                "The rule goes from fbgemm 1.X to torch 2.(X+5). You are going the other way.",
            ),
            Mistake(
                "expects equal minor numbers",
                lambda torch_version: f"1.{_minor(torch_version)}",
                "The two projects did not start counting together. Look at any row of the table.",
            ),
        ),
        cases=(("2.5.0",), ("2.10.1+cu128",), ("2.13.0+cpu",)),
    ),
    Exercise(
        id="00.2",
        compared="the five backends, machine by machine",
        solution=[True, False, False, False, True],
        mistakes=(
            Mistake(
                "believes that a newer torch keeps old wheels working",
                [True, True, False, False, True],
                "Apply the rule to the second machine. A wheel compiled for one minor release of "
                "torch does not load in another.",
            ),
            Mistake(
                "believes that two wheels are safer than one",
                [True, False, True, False, True],
                "On the third machine each wheel fits torch. But both write files of the same "
                "name: which files are there after the second install?",
            ),
            Mistake(
                "takes everything old for broken",
                [True, False, False, False, False],
                "Old is not wrong. Apply the rule to the last machine.",
            ),
        ),
        shape="a list of five truth values",
    ),
)
