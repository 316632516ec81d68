"""Counts of ids that have no row yet, in memory of a fixed size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutorec._kernels.memory import unwritten_zeros

_ROWS = 4
MOST_COUNTED = 2**15 - 1  # a counter, of 2 bytes, stays there


class FrequencySketch(nn.Module):
    """A count-min sketch: counts of ids that are never too low, and seldom too high.

    An id has one counter in each of four rows, shared with the ids that fall on it, and its
    estimate is the lowest of the four (Cormode and Muthukrishnan, 2005). Only counters below the
    new estimate are raised (conservative update, Estan and Varghese, 2002). When as many
    appearances were counted as a row has counters, all are halved, so that old ids do not fill it
    (the ageing of TinyLFU, Einziger, Friedman and Manes, 2017).

    Args:
        width: Counters in a row, a power of two.
        device: Where they live; they take 8 bytes times ``width``.

    Raises:
        ValueError: ``width`` is not a power of two.

    Example:
        >>> sketch = FrequencySketch(1024)
        >>> sketch.add(torch.tensor([7, 9]), torch.tensor([1, 2])).tolist()
        [1, 2]
        >>> sketch.add(torch.tensor([7]), torch.tensor([1])).tolist()
        [2]
    """

    _counters: Tensor
    _factors: Tensor

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        if width < 2 or width & (width - 1):
            raise ValueError(
                f"a sketch has a power of two of counters in a row, got {width}: use {1 << 16}"
            )

        self._shift = 65 - width.bit_length()
        self._width = width
        self._counted = 0
        counters = unwritten_zeros(_ROWS * width, torch.int16, device or "cpu")
        self.register_buffer("_counters", counters, persistent=False)

        # Odd numbers without a pattern: digits of pi, as Blowfish takes them.
        digits = [0x243F6A8885A308D3, 0x13198A2E03707345, 0x24093822299F31D1, 0x082EFA98EC4E6C89]
        self.register_buffer("_factors", torch.tensor(digits, device=device), persistent=False)

    def add(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Count appearances of different ids.

        Args:
            ids: Different ids [U].
            counts: Appearances of each, now [U].

        Returns:
            Appearances of each so far [U], estimated.
        """
        hashes = ((ids.unsqueeze(1) * self._factors) >> self._shift) & (self._width - 1)
        positions = hashes + torch.arange(_ROWS, device=ids.device) * self._width
        estimates = self._counters[positions].amin(1) + counts.to(torch.int32)
        raised = (
            estimates.clamp(max=MOST_COUNTED).short().unsqueeze(1).expand(-1, _ROWS).reshape(-1)
        )
        self._counters.scatter_reduce_(0, positions.view(-1), raised, "amax")
        self._counted += int(counts.sum())
        if self._counted >= self._width:
            self._counters >>= 1
            self._counted //= 2

        return estimates
