"""Models as exported programs: torch's way of taking a model out of Python after TorchScript.

``torch.export`` writes down one run of a model as a graph of torch's operators, for any number of samples and ids. The
file of such a program can be compiled for a server (AOTInductor), or loaded and called where there is Python.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.export.pt2_archive import PT2ArchiveReader

from tutorec._kernels.backend import backend
from tutorec.inference.file_digest import check_digest, digested_file
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["export_model", "load_exported", "save_exported"]

# Folders of an archive: the example inputs, and the tensors with their lists.
_SAMPLE_INPUTS, _TENSORS = "data/sample_inputs/", ("data/weights/", "data/constants/")


def export_model(model: nn.Module, example: Sequence[Tensor | KeyedJaggedTensor]) -> torch.export.ExportedProgram:
    """A model as an exported program that takes batches of any number of samples B >= 1, and of ids N.

    The features of a batch, their order, and whether it has weights are those of the example. Of another tensor the
    first dimension is taken for samples where the example's is B; all others stay what they are.

    An id that is no row of its table raises ``RuntimeError`` when the program runs, as it does in TorchScript.

    Args:
        model: What is to answer requests.
        example: Its inputs, in the order of its arguments; with at least two samples and two ids in each batch, so that
            no size is taken for one that is always 0 or 1.

    Returns:
        The program; ``.module()`` is what one calls.

    Raises:
        ValueError: The example has no batch of two samples and two ids, or a variable batch.

    Example:
        >>> import torch
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="item_table", feature_names=["item"])]
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1]))
        >>> program = export_model(EmbeddingBagCollection(tables), [batch])
        >>> one = KeyedJaggedTensor(["item"], torch.tensor([7]), lengths=torch.tensor([1]))
        >>> program.module()(one)["item"].shape
        torch.Size([1, 4])
    """
    backend()
    samples = _samples(example)
    dimension, shapes = torch.export.Dim("samples"), []
    for position, part in enumerate(example):
        if isinstance(part, KeyedJaggedTensor):
            ids = {0: torch.export.Dim(f"ids_{position}")}
            weights = [] if part.weights_or_none() is None else [ids]
            shapes.append([ids, {0: len(part.keys()) * dimension}, *weights])
        else:
            shapes.append({0: dimension} if part.dim() > 0 and part.shape[0] == samples else None)
    with torch.no_grad(), _no_special_sizes():
        program = torch.export.export(model, tuple(example), dynamic_shapes=tuple(shapes), strict=False)
    _drop_unused_buffers(program)
    return program


def save_exported(program: torch.export.ExportedProgram, path: str | Path) -> None:
    """Write an exported program to a file, whole or not at all, with a digest that `load_exported` checks.

    ``torch.export.load`` reads the file, too, and does not look at the digest.

    Args:
        program: What `export_model` gives.
        path: Of the file, in a folder that exists; torch wants a name that ends in ``.pt2``.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    with digested_file(path) as draft:
        torch.export.save(program, str(draft))


def load_exported(path: str | Path) -> torch.export.ExportedProgram:
    """Read an exported program, after the operators that it calls.

    ``torch.export.load`` unpickles what an archive marks as pickled (``use_pickle``, custom and opaque constants,
    example inputs that are more than tensors and batches) and loads compiled libraries from it. Such archives are
    refused here; none by `save_exported` is one. That does not make a stranger's file safe: torch evaluates the sizes
    in its graph as Python expressions and runs code that it makes of the graph. Load only files that you or somebody
    you trust wrote.

    Args:
        path: A file by `save_exported`, whose digest is checked, or by ``torch.export.save``, which writes none: damage
            to such a file may go unnoticed. Where this function is not to be had, a process that has called
            ``tutorec.inference.export.load_exported`` before can use ``torch.export.load``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, holds no exported program, or holds pickles.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no exported program {str(path)!r}; save_exported(program, path) writes one")
    backend()
    check_digest(path)
    try:
        pickled = _pickled_records(path)
        if not pickled:
            return torch.export.load(str(path))
    except Exception as error:  # torch's reader raises many kinds of errors
        raise ValueError(f"{str(path)!r} holds no exported program; write it with save_exported: {error}") from error
    danger = f"{str(path)!r} holds {pickled}, which torch.export.load unpickles or loads as a library"
    raise ValueError(f"{danger}: the file could run any code; call torch.export.load if you trust who wrote it")


def _pickled_records(path: str | Path) -> list[str]:
    """The records of an archive that torch.export.load would run as code: pickles and compiled libraries."""
    archive, records = PT2ArchiveReader(str(path)), []
    for name in archive.get_file_names():
        if name.startswith(_SAMPLE_INPUTS):
            inputs = archive.read_bytes(name)
            try:
                torch.load(io.BytesIO(inputs), weights_only=True) if inputs else None
            except pickle.UnpicklingError:
                records.append(name)
        elif name.startswith(_TENSORS) and name.endswith(".json"):
            for key, entry in json.loads(archive.read_string(name))["config"].items():
                # Of a custom or opaque object the name of its record decides, whatever the entry says.
                if entry["use_pickle"] or not entry["path_name"].startswith(("weight_", "tensor_")):
                    records.append(f"{name}: {key}")
        elif name.endswith(".pt") or name.startswith("data/aotinductor/"):
            records.append(name)
    return records


def _samples(example: Sequence[Tensor | KeyedJaggedTensor]) -> int:
    """B of the example's batches."""
    batches = [part for part in example if isinstance(part, KeyedJaggedTensor)]
    batch_sizes = {batch.stride() for batch in batches}
    if any(batch.variable_stride_per_key() for batch in batches) or len(batch_sizes) > 1:
        raise ValueError("the example's features differ in their number of samples; an exported program has one number")
    if not batch_sizes or min(batch_sizes) < 2 or any(batch.values().numel() < 2 for batch in batches):
        sizes = [(batch.stride(), batch.values().numel()) for batch in batches]
        raise ValueError(f"the example needs batches of at least 2 samples and 2 ids; (samples, ids) are {sizes}")
    return batch_sizes.pop()


def _drop_unused_buffers(program: torch.export.ExportedProgram) -> None:
    """Take out what no operator reads: a quantized table's own buffer is a view of what its group's lookup reads.

    A file would hold both.
    """
    specs, state = program.graph_signature.input_specs, program.state_dict
    for node in [node for node in program.graph.nodes if node.op == "placeholder"]:
        spec = next(spec for spec in specs if spec.arg.name == node.name)
        if spec.kind is InputKind.BUFFER and not node.users:
            program.graph.erase_node(node)
            specs.remove(spec)
            state.pop(str(spec.target), None)
    program.graph_module.recompile()
    program.validate()


def _no_special_sizes() -> Any:
    """Sizes 0 and 1 are sizes like others: by default a dynamic one is taken to be at least 2."""
    from torch.fx.experimental import _config as settings

    if hasattr(settings, "backed_size_oblivious"):
        return settings.patch(backed_size_oblivious=True)  # pyright: ignore[reportAttributeAccessIssue]
    return contextlib.nullcontext()
