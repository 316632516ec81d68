"""``tutorec migrate``: what it finds in a project, and what it renames."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tutorec import _migrate, cli
from tutorec._migrate import migrate

TRAIN = '''\
#!/usr/bin/env python3
"""Trains with torchrec; torchrec.metrics is for later."""
import os, torchrec.distributed as trec_dist  # torchrec stays in a comment
import torchrec
from torchrec.metrics.ne import NEMetric
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagConfig as Table,
    KeyedJaggedTensor,
)
from torchrec_dlrm.data import loader
from .torchrec import local

NOTE = "torchrec is a library", "torchrec.txt", "see torchrec.modules for more"
PATHS = ["torchrec.modules.mlp.MLP", 'torchrec.sparse', "torchrec.modules.embedding_tower.EmbeddingTower"]


def tables(torchrec_rows=3, **torchrec_options):
    global torchrec
    print(f"{torchrec.__version__} {{torchrec}} torchrec")
    plan = trec_dist.planner.types.SharderData()
    NEMetric.of(torchrec_rows)
    trec_dist.train_pipeline.TrainPipelineSparseDist[int, int](model=1, optimizer=2, device=3, torchrec=4)
    return torchrec.PoolingType.SUM, Table(name="a", rows=torchrec_rows), KeyedJaggedTensor.empty()


class Wrapped(torchrec.EmbeddingBagCollection):
    def __init__(self):
        super().__init__(tables=[], is_waited=True)


@patch("torchrec.modules.mlp.MLP")
@patch.object(torchrec.sparse.jagged_tensor, "KeyedTensor")
def test(module):
    importlib.import_module("torchrec"), os.path.join("torchrec")
    try:
        import torchrec.no_such_module
    except ImportError:
        torchrec = None
'''  # noqa: E501


def write(path: Path, text: str, **words: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(words.get("encoding", "utf-8")))
    return path


def test_names_and_calls_that_do_not_move_are_named_with_their_line(tmp_path: Path):
    report = migrate(write(tmp_path / "train.py", TRAIN))
    found = [(f.line, f.name, f.problem) for f in report.findings]
    places = [(line, name) for line, name, _ in found]
    assert places == [
        (5, "torchrec.metrics.ne.NEMetric"),
        (15, "torchrec.modules.embedding_tower.EmbeddingTower"),
        (21, "torchrec.distributed.planner.types.SharderData"),
        (23, "torchrec.distributed.train_pipeline.TrainPipelineSparseDist()"),
        (24, "torchrec.EmbeddingBagConfig()"),
        (29, "torchrec.EmbeddingBagCollection()"),
        (37, "torchrec.no_such_module"),
    ]
    problems = [problem for _, _, problem in found]
    assert problems[0].startswith("there is no NEMetric in tutorec.metrics.ne: use the computation")
    assert "call the interaction" in problems[1]
    assert problems[3].startswith(
        "there is no argument torchrec; it takes model, optimizer, device, "
    )
    assert problems[4].startswith(
        "there is no argument rows; it takes num_embeddings, embedding_dim"
    )
    assert problems[5].startswith("there is no argument is_waited; it takes tables, is_weighted")
    assert problems[6].startswith("there is no no_such_module in tutorec: TorchRec 1.8.0 has no")
    assert (report.files, report.using, len(report.missing), report.written) == (1, 1, 3, [])
    assert report.unknown == {"torchrec.no_such_module"}
    assert "1 not in TorchRec 1.8.0 either" in str(report)
    assert f"{tmp_path}/train.py:5: torchrec.metrics.ne.NEMetric: there is no NEMetric" in str(
        report
    )
    assert str(report).endswith("7 places to change by hand\nnothing was changed; --write renames")


def test_a_name_from_another_module_than_its_own_is_named_with_its_module(tmp_path: Path):
    imports = "from torchrec.distributed.comm import JaggedTensor\n"
    (found,) = migrate(write(tmp_path / "train.py", imports)).findings
    assert found.problem == (
        "there is no JaggedTensor in tutorec.distributed.comm: import it from tutorec."
    )


def test_names_that_are_newer_than_the_reference_are_not_counted_as_missing(tmp_path: Path):
    imports = (
        "import torchrec.distributed.maglev.stage\n"
        "from torchrec.modules.sorted_index_select import maybe_sorted_index_select\n"
        "from torchrec.distributed.comm_ops import set_use_triton_permute_2d\n"
        "from torchrec.modules.embedding_tower import EmbeddingTower\n"
    )
    report = migrate(write(tmp_path / "train.py", imports))
    assert report.unknown == {
        "torchrec.distributed.maglev.stage",
        "torchrec.distributed.comm_ops.set_use_triton_permute_2d",
    }
    assert report.missing == {"torchrec.modules.embedding_tower.EmbeddingTower"}
    problems = [finding.problem for finding in report.findings]
    assert ["it is new in TorchRec 1.9.2; " in problem for problem in problems] == [
        True,
        True,
        False,
    ]
    assert "4 names, 1 of them in tutorec and 2 not in TorchRec 1.8.0 either" in str(report)


def test_places_with_one_remedy_stand_below_it(tmp_path: Path):
    for name in ("a", "b"):
        code = "from torchrec.modules.embedding_tower import EmbeddingTower\n"
        write(tmp_path / f"{name}.py", f"{code}import torchrec.metrics.ctr\n")
    write(tmp_path / "c.py", "import torchrec.metrics.ndcg\n")
    lines = str(migrate(tmp_path)).splitlines()
    assert lines[0].startswith("2 places: call the interaction")
    assert lines[1:3] == [
        f"  {tmp_path}/{name}.py:1: torchrec.modules.embedding_tower.EmbeddingTower"
        for name in ("a", "b")
    ]
    assert lines[3].startswith("3 places: use torchmetrics")
    assert lines[6] == f"  {tmp_path}/c.py:1: torchrec.metrics.ndcg"
    assert "5 places to change by hand" in lines[7]


def test_a_file_that_is_not_python_is_a_place_to_change_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path / "a.py", "import torchrec\nimport (dl\n")
    assert cli.main(["migrate", str(tmp_path)]) == 1
    assert "1 place to change by hand" in capsys.readouterr().out


def test_a_call_with_too_many_arguments_is_named(tmp_path: Path):
    code = (
        "from torchrec import EmbeddingBagCollection as E\nE(1, 2, 3)\nE(1, 2, 3, 4, 5, 6, 7, "
        "8)\nE(*many)\nE(**all)\n"
    )
    (finding,) = migrate(write(tmp_path / "a.py", code)).findings
    assert finding.line == 3
    assert finding.problem.endswith("without a name, and gets 8")


def test_write_renames_code_and_nothing_else(tmp_path: Path):
    file = write(tmp_path / "train.py", TRAIN)
    file.chmod(0o754)
    migrate(tmp_path, write=True)
    changed = [
        (before, after)
        for before, after in zip(TRAIN.splitlines(), file.read_text().splitlines(), strict=True)
        if before != after
    ]
    assert [after for _, after in changed] == dedent(
        """\
        import os, tutorec.distributed as trec_dist  # torchrec stays in a comment
        import tutorec
        from tutorec.metrics.ne import NEMetric
        from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from tutorec import (
        PATHS = ["tutorec.modules.mlp.MLP", 'tutorec.sparse', "tutorec.modules.embedding_tower.EmbeddingTower"]
            global tutorec
            print(f"{tutorec.__version__} {{torchrec}} torchrec")
            return tutorec.PoolingType.SUM, Table(name="a", rows=torchrec_rows), KeyedJaggedTensor.empty()
        class Wrapped(tutorec.EmbeddingBagCollection):
        @patch("tutorec.modules.mlp.MLP")
        @patch.object(tutorec.sparse.jagged_tensor, "KeyedTensor")
            importlib.import_module("tutorec"), os.path.join("torchrec")
                import tutorec.no_such_module
                tutorec = None
        """  # noqa: E501
    ).splitlines()
    assert file.stat().st_mode & 0o777 == 0o754
    assert os.listdir(tmp_path) == ["train.py"]
    again = migrate(tmp_path, write=True)
    assert (again.using, again.written, again.complete) == (0, [], True)


def test_the_other_way_gives_the_same_bytes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write(tmp_path / "train.py", TRAIN)
    migrate(tmp_path, write=True)
    monkeypatch.setattr(_migrate, "_imports", lambda package: False)
    report = migrate(tmp_path, to="torchrec", write=True)
    assert file.read_text() == TRAIN
    assert report.complete
    assert "names were not compared, for torchrec cannot be imported here" in str(report)


@pytest.mark.parametrize(
    ("head", "encoding"),
    [("", "utf-8"), ("", "utf-8-sig"), ("# -*- coding: latin-1 -*-\r\n", "latin-1")],
)
def test_encodings_and_line_ends_stay(tmp_path: Path, head: str, encoding: str):
    text = (
        f"{head}x = '\u00e9\u00fc'; import torchrec\r\n\x0cy = '\u00e9', torchrec.PoolingType\r\n"
    )
    file = write(tmp_path / "a.py", text, encoding=encoding)
    assert migrate(file, write=True).complete
    after = text.replace("import torchrec", "import tutorec").replace("torchrec.P", "tutorec.P")
    assert file.read_bytes() == after.encode(encoding)


def notebook(*cells: str | list[str], **words: object) -> str:
    whole = {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": "import torchrec \u00e9"},
            *(
                {"cell_type": "code", "metadata": {}, "outputs": [], "source": source}
                for source in cells
            ),
        ],
        "metadata": {"kernelspec": {"language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [{"indent": 3}, {"indent": "\t"}, {"separators": (" ,", ":")}])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_nothing_but_the_names_changes_in_a_notebook(
    tmp_path: Path, form: dict[str, object], ends: str
):
    cells = [
        [
            "import torchrec\n",
            "print('\u00e9 \U0001f600', torchrec.PoolingType)\n",
            "x = '\\\\n'\n",
        ],
        ["import tor", "chrec\r\n", "torchrec.DataType"],
        "x = 1; import torchrec",
    ]
    text = notebook(*cells, **form)
    text = text.replace('"nbformat": 4', '"nbformat": 4.0e0, "big": 1.0e5, "nbformat" : 4')
    text = text.replace('"import torchrec\\n"', '"\\u0069mport torchre\\u0063\\n"').replace(
        "\n", ends
    )
    file = write(tmp_path / "a.ipynb", text + ends * 2)
    assert migrate(file, write=True).complete
    after = text.replace("torchre\\u0063", "tutorec").replace("torchrec.", "tutorec.")
    after = after.replace('import tor"', 'import tutorec"').replace('"chrec', '"')
    after = after.replace("x = 1; import torchrec", "x = 1; import tutorec")
    assert file.read_bytes().decode() == after + ends * 2
    assert migrate(file, write=True).using == 0


def test_a_notebook_with_a_byte_order_mark_keeps_it(tmp_path: Path):
    text = "\ufeff" + notebook("import torchrec; x = '\u00e9'", ensure_ascii=False)
    file = write(tmp_path / "a.ipynb", text)
    assert migrate(file, write=True).complete
    before, after = text.rsplit("import torchrec", 1)
    assert file.read_bytes().decode() == f"{before}import tutorec{after}"


@pytest.mark.parametrize("form", [{"indent": 1, "ensure_ascii": False}, {"indent": 2}, {}])
def test_notebooks_are_renamed_cell_by_cell(tmp_path: Path, form: dict[str, object]):
    first = ["!pip install torchrec\n", "import torchrec\n", "%matplotlib inline"]
    second = (
        "from torchrec.metrics import ctr\nif True:\n    !ls torchrec\n    "
        "print(torchrec.PoolingType)"
    )
    text = (
        notebook(
            first, second, "%%bash\nimport torchrec", "%%time\nx = torchrec.DataType\nx?", **form
        )
        + "\n"
    )
    file = write(tmp_path / "a.ipynb", text)
    report = migrate(file, write=True)
    (finding,) = report.findings
    assert (finding.cell, finding.line) == (3, 1)
    assert f"{file}: cell 3, line 1: torchrec.metrics.ctr" in str(report)
    after = text
    for before in (
        '"import torchrec\\n"',
        "torchrec.metrics",
        "torchrec.PoolingType",
        "torchrec.DataType",
    ):
        assert after.count(before) == 1
        after = after.replace(before, before.replace("torchrec", "tutorec"))
    assert file.read_text(encoding="utf-8") == after


def test_what_is_not_read_is_named_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    project = tmp_path / "project"
    write(project / "old.py", "import torchrec\nprint 'two'\n")
    write(project / "bytes.py", "import torchrec  # \u00e9\n", encoding="latin-1")
    write(project / "broken.ipynb", '{"cells": [torchrec')
    write(project / "list.ipynb", '["torchrec"]')
    write(project / "cell.ipynb", notebook("import torchrec (", "import torchrec"))
    outside = write(tmp_path / "outside.py", "import torchrec\n")
    (project / "link.py").symlink_to(outside)
    (project / "inside.py").symlink_to(project / "old.py")
    (project / "loop").symlink_to(project)
    assert cli.main(["migrate", str(project), "--write"]) == 1
    told = capsys.readouterr().out
    assert f"{project}/old.py: not read: not Python 3." in told
    assert "line 2" in told
    assert (
        f"{project}/bytes.py: not read: not UTF-8; save it so, or name its encoding in the first "
        "line"
    ) in told
    assert f"{project}/broken.ipynb: not read: not a notebook of format 4" in told
    assert f"{project}/list.ipynb: not read: not a notebook of format 4" in told
    assert f"{project}/cell.ipynb: cell 2: not read: not Python" in told
    assert f"{project}/link.py: not read: a link to {outside}, outside {project}" in told
    assert "inside.py" not in told
    assert "loop" not in told
    assert outside.read_text() == "import torchrec\n"
    assert "import tutorec" in (project / "cell.ipynb").read_text()
    assert (project / "link.py").is_symlink()


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have no more than 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


ODD = {
    "deep.py": ("import torchrec\nx = " + "+".join(["1"] * 50_000), "nested too deeply"),
    "signs.py": ("import torchrec\nx = " + "-" * 100_000 + "1", "nested too deeply"),
    "calls.py": ("import torchrec\nf" + "()" * 50_000, "nested too deeply"),
    "dots.ipynb": ('{"cells": "torchrec", "x": ' + "[" * 100_000, "not a notebook of format 4"),
    "number.ipynb": ('{"cells": "torchrec", "x": ' + "1" * 5000 + "}", "not a notebook"),
    "null.ipynb": ('{"cells": null, "x": "torchrec"}', "not a notebook of format 4"),
    "mixed.ipynb": ('{"cells": [null, 3, "torchrec"]}', "not a notebook of format 4"),
    "bare.ipynb": ('{"cells": [{"cell_type": "code"}, "torchrec"]}', "not a notebook of format 4"),
    "old.ipynb": ('{"worksheets": [{"cells": "torchrec"}]}', "not a notebook of format 4"),
    "source.ipynb": (notebook(["import torchrec", 4]), "not a notebook of format 4"),  # type: ignore[list-item]
    "cut.ipynb": (notebook("import torchrec")[:-20], "not a notebook of format 4"),
    "tabs.py": ("if 1:\n\timport torchrec\n        x = 1\n", "inconsistent use of tabs"),
    "binary.py": (lambda path: path.write_bytes(b"torchrec" + bytes(range(256))), "not UTF-8"),
    "twice.ipynb": (
        '{"cells": [{"cell_type": "code", "source": "import torchrec", "source": "1"}]}',
        "cell 1 has two sources",
    ),
    "surrogate.ipynb": (
        notebook("import torchrec; x = '\\ud800'").replace("\\\\u", "\\u"),
        "cell 2",
    ),
    "rot13.py": ("# coding: rot13\nimport torchrec\n", "name its encoding in the first line"),
    "none.py": ("# coding: no-such\nimport torchrec\n", "name its encoding in the first line"),
    "escapes.py": ("# coding: unicode_escape\nimport torchrec # \\x41\n", "writes other bytes"),
    "zero.py": ("import torchrec\0", "null bytes"),
    "itself.py": (lambda path: path.symlink_to(path), "not an ordinary file"),
    "nothing.py": (lambda path: path.symlink_to(path.parent / "none"), "not an ordinary file"),
    "device.py": (lambda path: path.symlink_to("/dev/zero"), "not an ordinary file"),
    "pipe.py": (os.mkfifo, "not an ordinary file"),
    "socket.py": (_socket, "not an ordinary file"),
    "sparse.py": (_sparse, "1,099,511,627,776 bytes, and 16,777,216 are read at most"),
    "sparse.ipynb": (_sparse, "1,099,511,627,776 bytes, and 268,435,456 are read at most"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_named_and_the_others_are_renamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    made, why = ODD[name]
    if callable(made):
        made(tmp_path / f"m_{name}")
    else:
        write(tmp_path / f"m_{name}", made)
    others = [write(tmp_path / other, "import torchrec\n") for other in ("a.py", "z.py")]
    (tmp_path / "folder.py").mkdir()
    others.append(write(tmp_path / "folder.py" / "in.py", "import torchrec\n"))
    assert cli.main(["migrate", str(tmp_path), "--write"]) == 1
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "not read" in line]
    assert told.startswith(f"{tmp_path}/m_{name}: ")
    assert why in told
    assert [other.read_text() for other in others] == ["import tutorec\n"] * 3


def test_a_file_or_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # a file that vanishes between the list of names and its reading, and a folder that is closed
    listed, gone = os.listdir, write(tmp_path / "gone.py", "import torchrec\n")
    write(tmp_path / "closed" / "a.py", "import torchrec\n")

    def listdir(path: Path) -> list[str]:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        names = listed(path)
        gone.unlink(missing_ok=True)
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    report = migrate(tmp_path, write=True)
    assert report.skipped[str(gone)].startswith("not read: [Errno 2] No such file or directory")
    assert report.skipped[f"{tmp_path}/closed"].startswith("not read: [Errno 13] Permission denied")
    assert not report.complete


def test_an_expression_as_deep_as_python_compiles_is_migrated(tmp_path: Path):
    code = "import torchrec\nx = " + " | ".join(["torchrec.PoolingType"] * 2000) + "\n"
    compile(code, "a.py", "exec")
    file = write(tmp_path / "a.py", code)
    limit = sys.getrecursionlimit()
    assert migrate(file, write=True).complete
    assert file.read_text() == code.replace("torchrec", "tutorec")
    assert sys.getrecursionlimit() == limit


def test_folders_within_folders_are_read_however_deep(tmp_path: Path):
    folders = [tmp_path / ("a/" * depth) for depth in range(1, 1100)]
    for folder in folders:
        folder.mkdir()
    file = write(folders[-1] / "b.py", "import torchrec\n")
    report = migrate(tmp_path)
    file.unlink()
    for folder in reversed(folders):  # which shutil.rmtree cannot remove
        folder.rmdir()
    assert (report.files, report.using, report.complete) == (1, 1, True)


def test_what_a_terminal_would_obey_in_a_name_is_shown_as_an_escape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in (b"\x1b[31mred\n.py", b"\xff.py", "\u202e.py".encode()):
        (tmp_path / os.fsdecode(name)).write_text("import torchrec.nothing\nimport torchrec (\n")
    assert cli.main(["migrate", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    for shown in (r"\x1b[31mred\n.py: not read", r"\udcff.py: not read", r"\u202e.py: not read"):
        assert f"{tmp_path}/{shown}" in told
    assert cli.main(["migrate", str(tmp_path / "\x1b[31m"), "--json"]) == 2
    assert r"\x1b[31m" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".py", "a/" * 3000 + "b.py", "a\0.py", "loop.py", "pipe.py"]
)
def test_a_path_that_is_none_of_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    os.mkfifo(tmp_path / "pipe.py")
    expected = 1 if name == "pipe.py" else 2
    assert cli.main(["migrate", str(tmp_path / name)]) == expected
    told = capsys.readouterr()
    assert "there is no file or folder" in told.err or "not an ordinary file" in told.out


def test_a_link_that_is_named_is_read_and_stays(tmp_path: Path):
    write(tmp_path / "there" / "a.py", 'import torchrec\nx = "\\d"\n')
    (tmp_path / "here").symlink_to(tmp_path / "there")
    (tmp_path / "link.py").symlink_to(tmp_path / "there" / "a.py")
    assert migrate(tmp_path / "here").using == 1
    assert migrate(tmp_path / "link.py", write=True).written == [str(tmp_path / "there" / "a.py")]
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "link.py").read_text().startswith("import tutorec")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = write(tmp_path / "a.py", "import torchrec\n")
    monkeypatch.setattr("tutorec._migrate_files.whole_file", full)
    report = migrate(tmp_path, write=True)
    assert report.skipped == {str(file): "not written: [Errno 28] No space left on device"}
    assert (report.complete, report.written) == (False, [])


def test_folders_that_are_not_the_project_are_passed_over(tmp_path: Path):
    for folder in (".git", ".venv", "env", "lib/site-packages/x", "a/__pycache__"):
        write(tmp_path / folder / "a.py", "import torchrec.nothing\n")
    write(tmp_path / "env" / "pyvenv.cfg", "")
    write(tmp_path / "torchrec_dlrm" / "data" / "a.py", "from torchrec import DataType\n")
    report = migrate(tmp_path)
    assert (report.files, report.using, report.complete) == (1, 1, True)


def test_the_command_reports_as_json_and_by_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert (
        cli.main(["migrate", str(write(tmp_path / "good.py", "import torchrec.modules.mlp\n"))])
        == 0
    )
    assert "1 of 1 file use torchrec: 1 name, 1 of them in tutorec" in capsys.readouterr().out
    bad = write(tmp_path / "bad.py", "from torchrec.metrics import ctr\n")
    assert cli.main(["migrate", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["file"] == str(bad)
    assert (report["using"], report["missing"], report["complete"]) == (
        2,
        ["torchrec.metrics.ctr"],
        False,
    )
    for path in (tmp_path / "nothing", write(tmp_path / "a.txt", "import torchrec")):
        assert cli.main(["migrate", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
