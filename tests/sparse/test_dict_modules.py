import warnings

import torch
from hypothesis import given
from strategies import DrawnBatch, jagged_batches

from tutorec.sparse import jagged_tensor
from tutorec.sparse.equality import kjt_is_equal
from tutorec.sparse.keyed_jagged import ComputeJTDictToKJT, ComputeKJTToJTDict, KeyedJaggedTensor


@given(jagged_batches())
def test_a_batch_becomes_its_features_and_comes_back(drawn: DrawnBatch) -> None:
    features = ComputeKJTToJTDict()(drawn.kjt())
    assert {
        key: [row.tolist() for row in jagged.to_dense()] for key, jagged in features.items()
    } == drawn.ids
    assert kjt_is_equal(ComputeJTDictToKJT()(features), drawn.kjt())


class ThereAndBack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.apart, self.together = ComputeKJTToJTDict(), ComputeJTDictToKJT()

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.apart(batch)["b"].values()


def test_the_module_is_traced_and_compiled() -> None:
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    assert torch.fx.symbolic_trace(ThereAndBack())(batch).tolist() == [7, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(ComputeKJTToJTDict())
    assert scripted(batch)["b"].values().tolist() == [7, 1]


def test_the_facade_converts_lengths_as_torchrec_does() -> None:
    offsets = jagged_tensor._to_offsets(torch.tensor([2, 0, 3], dtype=torch.int32))
    assert (offsets.tolist(), offsets.dtype) == ([0, 2, 2, 5], torch.int32)
