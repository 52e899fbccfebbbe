"""The memory of one KV group: what its layers keep of a token or a sequence, page by page.

All layers of a page move together, and so does what a draft model keeps of the same tokens; or one
part after the other, where the first layers begin before the last are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from bough.core.errors import ResourceError


class Part(NamedTuple):
    """Of a page what some layers keep, the first of them `layer`: which tensors, and which of its bytes."""

    layer: int
    tensors: slice
    columns: slice


class GroupPool:
    def __init__(
        self, tensors: Sequence[torch.Tensor], page_size: int, content: str, layers: Sequence[int] = (0,)
    ) -> None:
        """Each tensor has `page_size` lines for each page, and belongs to a layer; `content` is what errors call it."""
        order = sorted(range(len(tensors)), key=layers.__getitem__)
        self._tensors, self._layers = tuple(tensors[i] for i in order), tuple(layers[i] for i in order)
        self._page_size = page_size
        self._content = content
        self._learn_sizes()
        self._clear_scratch()

    def _learn_sizes(self) -> None:
        self.sizes = tuple(self._by_page(tensor).shape[1] for tensor in self._tensors)  # bytes of a page in each
        self._parts: dict[int, list[Part]] = {}
        self._table: torch.Tensor | None = None  # of `table`; with other addresses it is another

    @property
    def page_bytes(self) -> int:
        """What one page takes, over all layers of the group."""
        return sum(self.sizes)

    @property
    def table(self) -> torch.Tensor:
        """Of each tensor its address, the bytes of a page in it, and where they begin among those of all. int64"""
        if self._table is None:
            begins = list(accumulate(self.sizes, initial=0))[:-1]
            lines = list(zip(map(torch.Tensor.data_ptr, self._tensors), self.sizes, begins, strict=True))
            self._table = torch.tensor(lines, dtype=torch.int64, device=self._tensors[0].device)
        return self._table

    def join(self, other: GroupPool) -> None:
        """Pages of one number hold from now on what both pools keep of the same tokens."""
        self._tensors += other._tensors
        self._layers += (max(self._layers, default=0),) * len(other._tensors)  # read behind the last layer
        self._learn_sizes()

    def parts(self, least: int) -> list[Part]:
        """Consecutive layers together until they keep at least so many bytes of a page."""
        if least in self._parts:
            return self._parts[least]
        found, begin, begun, column = list[Part](), 0, 0, 0
        for end, (size, layer) in enumerate(zip(self.sizes, self._layers, strict=True), 1):
            column += size
            if end == len(self._tensors) or (layer < self._layers[end] and column - begun >= least):
                found.append(Part(self._layers[begin], slice(begin, end), slice(begun, column)))
                begin, begun = end, column
        self._parts[least] = found
        return found

    def read_pages(self, pages: torch.Tensor, part: Part | None = None) -> torch.Tensor:
        """What the pages hold, all layers of a page together, or a part. uint8 [pages, bytes], on the pool's device"""
        tensors = self._tensors if part is None else self._tensors[part.tensors]
        return torch.cat([self._by_page(tensor).index_select(0, pages) for tensor in tensors], dim=1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor, part: Part | None = None) -> None:
        """Gives the pages what `read_pages` has read, there or in a pool of the same shape; or of a part."""
        begin = 0
        for tensor in map(self._by_page, self._tensors if part is None else self._tensors[part.tensors]):
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
        self._table = None
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
