"""Bucketizing under TorchRec's name gives what fbgemm's operator gives, which TorchRec calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutorec._kernels.backend import backend
from tutorec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

LENGTHS = torch.tensor([2, 0, 3, 1, 4, 2])
IDS = torch.tensor([0, 11, 5, 5, 29, 3, 7, 24, 31, 1, 2, 18])


def batch(weighted: bool) -> KeyedJaggedTensor:
    weights = torch.arange(12.0) if weighted else None
    return KeyedJaggedTensor(["a", "b"], IDS, weights, lengths=LENGTHS)


CASES = {
    "blocks": {"block_sizes": torch.tensor([6, 10])},
    "modulo": {"block_sizes": torch.tensor([0, 16])},
    "two levels": {"block_sizes": torch.tensor([2, 5]), "total_num_blocks": torch.tensor([4, 6])},
    "ranges": {
        "block_sizes": torch.tensor([1, 1]),
        "block_bucketize_row_pos": [torch.tensor([0, 5, 40]), torch.tensor([0, 7, 40])],
    },
}


@pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("keep", [False, True])
def test_buckets_are_those_of_the_operator(case: str, keep: bool) -> None:
    words = CASES[case]
    kjt = batch(weighted=True)
    found, places = bucketize_kjt_before_all2all(
        kjt, 2, **words, output_permute=True, keep_original_indices=keep
    )
    expected = torch.ops.fbgemm.block_bucketize_sparse_features(
        *(LENGTHS, IDS, False, True, words["block_sizes"], 2, kjt.weights()),
        block_bucketize_pos=words.get("block_bucketize_row_pos"),
        total_num_blocks=words.get("total_num_blocks"),
        keep_orig_idx=keep,
    )
    for one, other in zip(
        (found.lengths(), found.values(), found.weights(), places),
        (*expected[:3], expected[4]),
        strict=True,
    ):
        assert isinstance(one, Tensor) and torch.equal(one, other)


def test_halves_can_be_split_and_read_by_key() -> None:
    found, places = bucketize_kjt_before_all2all(
        batch(weighted=False), 2, torch.tensor([6, 10]), bucketize_pos=True
    )
    low, high = found.split([2, 2])
    assert places is None and low["a"].values().tolist() == [0, 5, 5]
    assert high["b"].values().tolist() == [15, 8]  # 31 and 18
    assert low["a"].weights().tolist() == [0.0, 0.0, 1.0]


def test_block_sizes_of_another_number_of_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1.*2 features \['a', 'b'\]"):
        bucketize_kjt_before_all2all(batch(weighted=False), 2, torch.tensor([6]))
