"""Two modules that turn a batch into a dict of its features and back, for places where only a module fits."""

from torch import nn

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class ComputeKJTToJTDict(nn.Module):
    """``KeyedJaggedTensor.to_dict`` as a module: a batch to one jagged tensor per feature, views of it.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> ComputeKJTToJTDict()(batch)["b"].to_dense()
        [tensor([7, 1])]

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.ComputeKJTToJTDict``.
    """

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The batch's features by name: each ``[B]`` lists."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """``KeyedJaggedTensor.from_jt_dict`` as a module: one jagged tensor per feature to a batch.

    Example:
        >>> import torch
        >>> one = JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1, 0]))
        >>> two = JaggedTensor(torch.tensor([7, 1]), lengths=torch.tensor([0, 2]))
        >>> ComputeJTDictToKJT()({"a": one, "b": two}).lengths()
        tensor([1, 0, 0, 2])

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.ComputeJTDictToKJT``.
    """

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """The features as one batch, in the order of the dict."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
