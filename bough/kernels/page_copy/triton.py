"""Pages of all layers to lines and back, in one launch: `GroupPool.read_pages` and `write_pages` in Triton."""

import math

import torch
import triton
import triton.language as tl

BLOCK = 1024  # words of a program: 8 KiB at most
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def copy_pages_(
    table: torch.Tensor,  # [tensors, 3] int64: address, bytes of a page, where they begin in a line
    sizes: tuple[int, ...],  # the bytes, on the host
    pages: torch.Tensor,  # [count] int64
    lines: torch.Tensor,  # [count, bytes] uint8, contiguous
    into_pages: bool,
) -> None:
    """Writes the pages to `lines`, or what these hold to the pages. The first of the tensors begins the line."""
    word = math.gcd(8, *sizes)
    if len(pages) and sizes:
        grid = len(pages), len(sizes), triton.cdiv(max(sizes) // word, BLOCK)
        width = lines.shape[1] // word
        given = table, pages, lines.view(TYPES[word]), width
        _copy[grid](*given, INTO_PAGES=into_pages, WORD=WORDS[word], BYTES=word, BLOCK=BLOCK)


@triton.jit
def _copy(
    table, pages, lines, width, INTO_PAGES: tl.constexpr, WORD: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    of, line, column = table + tl.program_id(1) * 3, tl.program_id(0).to(tl.int64), tl.program_id(2) * BLOCK
    column += tl.arange(0, BLOCK)
    size = tl.load(of + 1) // BYTES
    page = tl.load(of).to(tl.pointer_type(WORD)) + tl.load(pages + line) * size + column
    line = lines + line * width + (tl.load(of + 2) - tl.load(table + 2)) // BYTES + column
    if INTO_PAGES:
        tl.store(page, tl.load(line, mask=column < size), mask=column < size)
    else:
        tl.store(line, tl.load(page, mask=column < size), mask=column < size)
