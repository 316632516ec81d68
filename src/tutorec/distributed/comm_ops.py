"""Names of TorchRec's ``torchrec.distributed.comm_ops``, from the module that defines them."""

from tutorec.distributed.collectives.autograd import get_gradient_division, set_gradient_division

__all__ = ["get_gradient_division", "set_gradient_division"]
