"""A GPU box without a GPU: tensors in CPU memory that say ``cuda:k``, and the errors that a GPU box
would raise.

    install(count=2)
    x = torch.randn(4, 3, device="cuda")
    x + torch.ones(4, 3)        # RuntimeError: Expected all tensors to be on the same device ...

How it works. An :class:`~pretend_cuda.tensors.OnDevice` wraps a CPU tensor. Python code sees its
``device`` and ``is_cuda``; C++ (autograd, views, operators) sees a tensor of the CPU, because a CPU
build of torch has no autograd for CUDA tensors. A program meets it on two levels:

1. A function of torch that a program calls (``torch.zeros(3, device="cuda")``, ``x.to("cuda")``)
   passes the mode in :mod:`~pretend_cuda.functions`, which is entered in every thread.
2. An operator that runs on such a tensor (``aten::add``, ``c10d::allreduce_``) passes
   :func:`~pretend_cuda.operators.run_operator`. It takes the CPU tensors out, refuses what a GPU
   box refuses, runs the operator, and wraps the result for the device of its arguments.

======================  ===========================================================================
``devices``             how many devices there are; the current one of each thread
``streams``             streams and events
``tensors``             ``OnDevice``: what a tensor says of itself, copies, pickles, ``torch.load``
``memory``              what a side stream made is read elsewhere only after ``record_stream``
``groups``              process groups; collectives without a backend for the device are refused
``operators``           level 2; tensors of several devices in one operator are refused
``moves``               ``to``, ``cuda``, ``cpu``, ``x.data = y``
``functions``           level 1; factories with ``device=`` and functions that need an own answer
``gradients``           backward, in which C++ makes tensors of the CPU
``cuda``                ``torch.cuda`` and ``torch.accelerator``
``python_types``        ``type(x) is Tensor`` in the modules of tutorec
======================  ===========================================================================

Imports point up this table. A module that replaces something of torch has an ``install``.

How to extend it. Where a program fails here that runs on GPUs:

- ``AttributeError`` in ``torch.cuda``: a line in ``cuda._cuda_functions``.
- "found at least two devices" although the program is right: C++ made a tensor on the CPU inside a
  function of torch. Add the function to ``functions._SPECIAL``, most often as ``_inside``, which
  runs the whole function on the CPU tensors inside.
- C++ tells something wrong of a tensor: a method of ``OnDevice``, and its name in the list of
  ``_as_on_class`` if torch calls it past the class.
- An operator may mix devices on a GPU box: its name in ``operators._COPIES`` or ``_INDEXING``.

Add the case to ``planted.py`` and to the table of ``test_pretend_cuda.py``, which has each mistake
that must be refused and each use that must be allowed.

A GPU's memory is used again as soon as a tensor is dropped, by the stream that made the tensor. So
what is made on a side stream and read on another one without ``record_stream`` is refused here; a
GPU box gives wrong numbers now and then.

What it cannot show: wrong numbers where one stream does not wait for another (everything is done at
once), CUDA kernels of fbgemm, nested tensors, lazy layers, time, and memory.
"""

from pretend_cuda import cuda, functions, gradients, groups, operators, python_types, tensors
from pretend_cuda.devices import set_count

__all__ = ["install", "set_count"]


def install(count: int) -> None:
    """Give this process ``count`` pretended GPUs, in every thread, until it ends."""
    set_count(count)
    python_types.install()
    cuda.install()
    operators.install()
    groups.install()
    groups.install_ddp()
    tensors.install()
    gradients.install()
    functions.install()
