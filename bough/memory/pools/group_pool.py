"""The memory of one KV group: what its layers keep of a token or a sequence, page by page.

All layers of a page move together, and so does what a draft model keeps of the same tokens. They move in parts
where the first layers are to begin before the others are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from bough.core.errors import ResourceError
from bough.core.plan import IntArray


class Part(NamedTuple):
    """What layers from the `first` on keep of a page: these tensors, and columns of its bytes."""

    first: int
    tensors: list[int]
    columns: list[slice]
    nbytes: int


class GroupPool:
    def __init__(
        self, tensors: Iterable[torch.Tensor], page_size: int, content: str, layers: Iterable[int] = (0,)
    ) -> None:
        """Each tensor has `page_size` lines for each page, and is of one of `layers`; `content` is what errors call
        it."""
        self._tensors, self._layers = tuple(tensors), tuple(layers)
        self._page_size = page_size
        self._content = content
        self._clear_scratch()

    @property
    def page_bytes(self) -> int:
        """What one page takes, over all layers of the group."""
        return sum(tensor[: self._page_size].nbytes for tensor in self._tensors)

    def join(self, other: GroupPool) -> None:
        """Pages of one number hold from now on what both pools keep of the same tokens."""
        self._tensors += other._tensors
        self._layers += (max(self._layers, default=0),) * len(other._tensors)  # read behind the last layer

    def parts(self, least: int) -> list[Part]:
        """Consecutive layers together until they keep at least so many bytes of a page."""
        ends = [*accumulate((self._by_page(tensor).shape[1] for tensor in self._tensors), initial=0)]
        layers, found, begun = sorted({*self._layers}), list[Part](), 0
        for count, last in enumerate(layers, 1):
            tensors = [index for index, layer in enumerate(self._layers) if layers[begun] <= layer <= last]
            nbytes = sum(ends[index + 1] - ends[index] for index in tensors)
            if nbytes >= least or count == len(layers):
                columns = [slice(ends[at], ends[at + end - begin]) for begin, end, at in runs(np.array(tensors))]
                found.append(Part(layers[begun], tensors, columns, nbytes))
                begun = count
        return found

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """What the pages hold, all layers of a page together. uint8 [pages, page_bytes], on the pool's device"""
        return torch.cat([self._by_page(tensor).index_select(0, pages) for tensor in self._tensors], dim=1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor, part: Part | None = None) -> None:
        """Gives the pages what `read_pages` has read, there or in a pool of the same shape; or of a part."""
        begin, indices = 0, range(len(self._tensors)) if part is None else part.tensors
        for tensor in (self._by_page(self._tensors[index]) for index in indices):
            tensor.index_copy_(0, pages, content[:, begin : begin + tensor.shape[1]])
            begin += tensor.shape[1]

    def move(self, origin: torch.Tensor, to: torch.Tensor) -> None:
        """Gives slots what others hold."""
        for tensor in self._tensors:
            slots = tensor.view(len(tensor), -1).view(torch.uint8)
            slots.index_copy_(0, to, slots.index_select(0, origin))

    def release(self) -> None:
        """Gives the memory back; what the pages held is lost."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Takes the memory again, at other addresses; nothing is taken where there is too little."""
        try:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
        except RuntimeError as error:
            self.release()
            raise ResourceError(f"There is not enough free memory for the {self._content}: {error}") from None
        self._clear_scratch()

    def _clear_scratch(self) -> None:
        """A page table has page 0 where a window has passed. Nobody attends to that, but kernels read blocks that begin
        there, and a stray NaN would survive a weight of 0."""
        for tensor in self._tensors:
            tensor[: self._page_size].zero_()

    def _by_page(self, tensor: torch.Tensor) -> torch.Tensor:
        """[pages + 1, bytes of a page]"""
        numbers = self._page_size * math.prod(tensor.shape[1:])
        return tensor.view(len(tensor) // self._page_size, numbers).view(torch.uint8)


def runs(numbers: IntArray) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive numbers: where each begins and ends in the list, and its first number."""
    cuts = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
    for first, last in zip([0, *cuts], [*cuts, len(numbers)], strict=True):
        yield first, last, int(numbers[first])
