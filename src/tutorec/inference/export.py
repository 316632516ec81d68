"""Models as exported programs, torch's successor of TorchScript for serving without Python.

``torch.export`` records one run of a model as a graph of torch operators, for any number of samples
and ids. The file can be compiled for a server (AOTInductor), or loaded and called in Python.
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
from tutorec._kernels.older_torch import renew_constants
from tutorec.inference.file_digest import check_digest, digested_file
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["export_model", "load_exported", "save_exported"]

# Folders of an archive: the example inputs, and the tensors with their index.
_SAMPLE_INPUTS = "data/sample_inputs/"
_TENSORS = ("data/weights/", "data/constants/")


def export_model(
    model: nn.Module, example: Sequence[Tensor | KeyedJaggedTensor]
) -> torch.export.ExportedProgram:
    """Export a model to a program that accepts any number of samples B >= 1 and of ids N.

    The features of a batch, their order, and the presence of weights are those of the example. In
    other tensors, the first dimension is B if it equals the example's B; all other dimensions are
    fixed.

    The parameters of the program share memory with the model's and require no gradients; those of
    the model stay as they are.

    An id outside its table raises ``RuntimeError`` when the program runs. The message names table,
    rows and feature; unlike TorchScript's it cannot name sample and id.

    Args:
        model: The model.
        example: Its inputs, in the order of its arguments. Each batch needs at least two samples
            and two ids, so that no size is specialized to 0 or 1.

    Returns:
        The program; call ``.module()``.

    Raises:
        ValueError: The example has no batch of two samples and two ids, or a variable batch.

    Example:
        >>> import torch
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=10,
        ...         embedding_dim=4,
        ...         name="item_table",
        ...         feature_names=["item"],
        ...     )
        ... ]
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1])
        ... )
        >>> program = export_model(EmbeddingBagCollection(tables), [batch])
        >>> one = KeyedJaggedTensor(["item"], torch.tensor([7]), lengths=torch.tensor([1]))
        >>> program.module()(one)["item"].shape
        torch.Size([1, 4])
    """
    backend()
    samples = _samples(example)
    dimension = torch.export.Dim("samples")
    shapes = []
    for position, argument in enumerate(example):
        if isinstance(argument, KeyedJaggedTensor):
            ids = {0: torch.export.Dim(f"ids_{position}")}
            weights = [] if argument.weights_or_none() is None else [ids]
            shapes.append([ids, {0: len(argument.keys()) * dimension}, *weights])
        else:
            shapes.append(
                {0: dimension} if argument.dim() > 0 and argument.shape[0] == samples else None
            )

    with torch.no_grad(), _no_special_sizes():
        program = torch.export.export(
            model, tuple(example), dynamic_shapes=tuple(shapes), strict=False
        )

    renew_constants(program)
    _drop_unused_buffers(program)
    frozen: dict[int, nn.Parameter] = {}
    for name, value in list(program.state_dict.items()):
        if isinstance(value, nn.Parameter):
            # A tensor of its own, which shares memory: the model may be trained on.
            parameter = nn.Parameter(value.detach(), requires_grad=False)
            program.state_dict[name] = frozen.setdefault(id(value), parameter)
    return program


def save_exported(program: torch.export.ExportedProgram, path: str | Path) -> None:
    """Write an exported program to a file atomically, with a digest that `load_exported` checks.

    ``torch.export.load`` can read the file, too, but does not check the digest.

    Args:
        program: The result of `export_model`.
        path: Path of the file, in an existing folder; torch expects the suffix ``.pt2``.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    with digested_file(path) as draft:
        torch.export.save(program, str(draft))


def load_exported(path: str | Path) -> torch.export.ExportedProgram:
    """Load an exported program, frozen, and the operators that it calls.

    ``torch.export.load`` unpickles the parts of an archive that are marked as pickled
    (``use_pickle``, custom and opaque constants, example inputs that are more than tensors and
    batches) and loads compiled libraries from it. This function refuses such archives;
    `save_exported` never writes one. An untrusted file is still not safe: torch evaluates the sizes
    in its graph as Python expressions and runs code generated from the graph. Load only files from
    sources that you trust.

    Args:
        path: A file by `save_exported`, whose digest is checked, or by ``torch.export.save``, which
            has none: damage may go unnoticed. After one call of this function, a process can use
            ``torch.export.load``, too.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, is not an exported program, or contains pickles.
    """
    backend()
    check_digest(path)

    try:
        pickled = _pickled_records(path)
        if not pickled:
            program = torch.export.load(str(path))
            for value in program.state_dict.values():
                value.requires_grad_(False)
            return program
    except Exception as error:  # torch's reader raises many kinds of errors
        raise ValueError(
            f"{str(path)!r} holds no exported program; write it with save_exported: {error}"
        ) from error

    danger = (
        f"{str(path)!r} holds {pickled}, which torch.export.load unpickles or loads as a library"
    )
    raise ValueError(
        f"{danger}: the file could run any code; call torch.export.load if you trust who wrote it"
    )


def _pickled_records(path: str | Path) -> list[str]:
    """The records of an archive that torch.export.load would run as code: pickles and libraries."""
    archive = PT2ArchiveReader(str(path))
    records = []
    for name in archive.get_file_names():
        # torch 2.8 writes the tensors as it does the inputs, in one file and without an index.
        saved_whole = name.startswith(_TENSORS) and name.endswith(".pt")
        if name.startswith(_SAMPLE_INPUTS) or saved_whole:
            saved = archive.read_bytes(name)
            try:
                torch.load(io.BytesIO(saved), weights_only=True) if saved else None
            except pickle.UnpicklingError:
                records.append(name)
        elif name.startswith(_TENSORS) and name.endswith(".json"):
            for key, entry in json.loads(archive.read_string(name))["config"].items():
                # For a custom or opaque object, the record name decides, whatever the entry says.
                if entry["use_pickle"] or not entry["path_name"].startswith(("weight_", "tensor_")):
                    records.append(f"{name}: {key}")
        elif name.endswith(".pt") or name.startswith("data/aotinductor/"):
            records.append(name)

    return records


def _samples(example: Sequence[Tensor | KeyedJaggedTensor]) -> int:
    """B of the example's batches."""
    batches = [value for value in example if isinstance(value, KeyedJaggedTensor)]
    batch_sizes = {batch.stride() for batch in batches}
    if any(batch.variable_stride_per_key() for batch in batches) or len(batch_sizes) > 1:
        raise ValueError(f"the example's features differ in their number of samples: {batch_sizes}")
    if (
        not batch_sizes
        or min(batch_sizes) < 2
        or any(batch.values().numel() < 2 for batch in batches)
    ):
        sizes = [(batch.stride(), batch.values().numel()) for batch in batches]
        raise ValueError(
            f"the example needs batches of at least 2 samples and 2 ids; (samples, ids) are {sizes}"
        )

    return batch_sizes.pop()


def _drop_unused_buffers(program: torch.export.ExportedProgram) -> None:
    """Remove buffers that no operator reads: the tables' views of the operators' buffers.

    Otherwise the file would contain both.
    """
    specs = program.graph_signature.input_specs
    state = program.state_dict
    for node in [node for node in program.graph.nodes if node.op == "placeholder"]:
        spec = next(spec for spec in specs if spec.arg.name == node.name)
        if spec.kind is InputKind.BUFFER and not node.users:
            program.graph.erase_node(node)
            specs.remove(spec)
            state.pop(str(spec.target), None)

    program.graph_module.recompile()
    program.validate()


def _no_special_sizes() -> Any:
    """Treat sizes 0 and 1 like others; torch assumes by default that dynamic sizes are >= 2."""
    from torch.fx.experimental import _config as settings

    if hasattr(settings, "backed_size_oblivious"):
        return settings.patch(backed_size_oblivious=True)  # pyright: ignore[reportAttributeAccessIssue]
    return contextlib.nullcontext()
