"""How does a TPU kernel reach the words of a page? What the Mosaic kernels share; called while tracing, no state.

A TPU stores the last two axes of an array in tiles of 8 by 128, and 16-bit rows in pairs. A page that is one row of
[n, w] would be strewn over its neighbours' tiles, half words apart, and no copy engine could fetch or write it alone.
So the arena has three axes here, [n pages, w / 128 *lines*, 128]: a page is one contiguous run of tiles. What a copy
moves begins and ends at a whole tile of 8 lines (1024 words); all entries of heads of 16 and more channels do.

`interpret` runs a kernel on the CPU, for tests of its arithmetic and of its copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._checks import MODEL_DTYPE_OF_WORD
from pallas_kernels._pages import LINE_WORDS, TILE_WORDS

TILE_LINES = TILE_WORDS // LINE_WORDS
_BUFFER_BYTES = 4 << 20  # of a v5e's 16 MiB that a kernel may scope

IN_PLACE = pl.BlockSpec(memory_space=pl.ANY)


def lines_at(kernel: str, offset_words: int, n_words: int) -> tuple[int, int]:
    """First line and number of lines of a component; ValueError where it is not whole tiles."""
    if offset_words % TILE_WORDS or n_words % TILE_WORDS:
        raise ValueError(
            f"{kernel}: the tpu backend moves whole tiles of {TILE_WORDS} words; the component "
            f"[{offset_words}, {offset_words + n_words}) is not made of them"
        )
    return offset_words // LINE_WORDS, n_words // LINE_WORDS


def buffers(n_bytes: int) -> int:
    """Pages on their way at a time: enough to hide a copy's latency, in a bounded part of the kernel's memory."""
    return max(2, min(8, _BUFFER_BYTES // n_bytes))


def own_row(width: int) -> pl.BlockSpec:
    """A program's own scalars of int32 [b, 1, width]. All programs' together, as a prefetched operand, would not fit
    the scalar memory of 1 MiB: 256 sequences of 131,072 tokens take 2."""
    return pl.BlockSpec((None, 1, width), lambda b, *_: (b, 0, 0), memory_space=pltpu.SMEM)


def page_buffers(n_buffers: int, n_lines: int, dtype: Any) -> list[Any]:
    """A kernel's scratch for `walk`: the buffers, and a semaphore for each."""
    return [pltpu.VMEM((n_buffers, n_lines, LINE_WORDS), dtype), pltpu.SemaphoreType.DMA((n_buffers,))]


def walk(
    n: Any, copies: Callable[[Any, Any], tuple[Any, ...]], n_buffers: int, *loops: tuple[Any, Callable], carry
) -> Any:  # type: ignore[no-untyped-def]
    """Runs `n` steps while the copies of the next ones are under way.

    `copies(i, buffer)` are the copies of step i; `loops` are (end, body): steps up to each end go through its body,
    `body(i, buffer, carry) -> carry`. The last end is n.
    """
    for ahead in range(n_buffers - 1):

        @pl.when(ahead < n)
        def _(ahead=ahead):  # type: ignore[no-untyped-def]
            for copy in copies(ahead, ahead):
                copy.start()

    start: Any = jnp.int32(0)
    for end, body in loops:

        def step(i, carry, body=body):  # type: ignore[no-untyped-def]
            buffer, ahead = lax.rem(i, n_buffers), i + (n_buffers - 1)

            @pl.when(ahead < n)
            def _():
                for copy in copies(ahead, lax.rem(ahead, n_buffers)):
                    copy.start()

            for copy in copies(i, buffer):
                copy.wait()
            return body(i, buffer, carry)

        carry = lax.fori_loop(start, end, step, carry)
        start = jnp.maximum(start, end)
    return carry


def stride_of(d: int) -> int:
    """How many entries of `d` words until one begins at a line again, where a page's lines cannot be reshaped."""
    return 1 if LINE_WORDS % d == 0 or d % LINE_WORDS == 0 else math.lcm(d, LINE_WORDS) // d


def entries(ref: Any, first_line: int, rows: int, d: int) -> jax.Array:
    """`rows` entries of `d` words that begin at a line of `ref` [lines, 128], as model values [rows, d].

    Where entries do not end with lines (576 words: 4.5 lines), those that begin a line come first: `token_of` says
    which entry a row is.
    """
    dtype = MODEL_DTYPE_OF_WORD[jnp.dtype(ref.dtype)]
    apart = stride_of(d)
    if apart == 1:
        words = ref[pl.ds(first_line, rows * d // LINE_WORDS), :]
        return lax.bitcast_convert_type(words, dtype).reshape(rows, d)
    n_lines = apart * d // LINE_WORDS
    columns = [ref[pl.ds(first_line + i, rows // apart, stride=n_lines), :] for i in range(n_lines)]
    wide = lax.bitcast_convert_type(jnp.concatenate(columns, axis=1), dtype)
    return jnp.concatenate([wide[:, i * d : (i + 1) * d] for i in range(apart)], axis=0)


def token_of(row: jax.Array, rows: int, d: int) -> jax.Array:
    """Which of its page's entries a row of `entries` is."""
    apart = stride_of(d)
    return row if apart == 1 else lax.rem(row, rows // apart) * apart + lax.div(row, rows // apart)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Product of two matrices over one axis of each, float32; of float32 operands with no bit dropped."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _blocks_kernel(ids_ref, blocks_ref, _, pages_ref, semaphore, *, first_line):
    n_lines = blocks_ref.shape[1]

    def block(i, carry):
        # One after the other: an id that occurs twice keeps one of its blocks.
        target = pages_ref.at[ids_ref[i], pl.ds(first_line, n_lines)]
        copy = pltpu.make_async_copy(blocks_ref.at[i], target, semaphore)
        copy.start()
        copy.wait()
        return carry

    lax.fori_loop(0, blocks_ref.shape[0], block, 0)


def write_blocks(
    kernel: str,
    pages_nlw: jax.Array,
    words_px: jax.Array,
    ids_p: jax.Array,
    offset_words: int,
    interpret: Any,
) -> jax.Array:
    """The arena with a whole component of each page of `ids_p` replaced."""
    first_line, n_lines = lines_at(kernel, offset_words, words_px.shape[1])
    return pl.pallas_call(
        functools.partial(_blocks_kernel, first_line=first_line),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[IN_PLACE, IN_PLACE],
            out_specs=IN_PLACE,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pages_nlw.shape, pages_nlw.dtype),
        input_output_aliases={2: 0},
        interpret=interpret,
        name="write_blocks",
    )(ids_p, words_px.reshape(-1, n_lines, LINE_WORDS), pages_nlw)


def _rows_kernel(
    ids_ref,
    slots_ref,
    owners_ref,
    images_ref,
    _,
    pages_ref,
    windows_ref,
    semaphore,
    *,
    first_line,
    part_lines,
    d,
):
    """Tokens of one step: read each window once, put all its tokens in, write it back."""
    n_rows, n_parts, n_lines = windows_ref.shape[:3]
    window_words = n_lines * LINE_WORDS
    base = pl.program_id(0) * n_rows

    def move(row, part, out):
        window = lax.div(slots_ref[base + row] * d, window_words)
        first = pl.multiple_of(first_line + part * part_lines + window * n_lines, TILE_LINES)
        there = pages_ref.at[ids_ref[base + row], pl.ds(first, n_lines)]
        here = windows_ref.at[row, part]
        return pltpu.make_async_copy(*((here, there) if out else (there, here)), semaphore)

    def owners(function):
        def row(i, carry):
            @pl.when(owners_ref[base + i] == i)
            def _():
                for part in range(n_parts):
                    function(i, part)

            return carry

        lax.fori_loop(0, n_rows, row, 0)

    owners(lambda row, part: move(row, part, False).start())
    owners(lambda row, part: move(row, part, False).wait())
    line = lax.broadcasted_iota(jnp.int32, (n_lines, LINE_WORDS), 0)
    lane = lax.broadcasted_iota(jnp.int32, (n_lines, LINE_WORDS), 1)

    def put(i, carry):
        owner = owners_ref[base + i]
        first = lax.rem(slots_ref[base + i] * d, window_words)
        place = line * LINE_WORDS + lane - first
        mine = (place >= 0) & (place < d)
        for part in range(n_parts):
            words = windows_ref[owner, part].astype(jnp.uint32)
            for j in range(images_ref.shape[2]):
                image = images_ref[i, part, pl.ds(j, 1), :].astype(jnp.uint32)
                words = jnp.where(mine & (line == lax.div(first, LINE_WORDS) + j), image, words)
            windows_ref[owner, part] = words.astype(windows_ref.dtype)
        return carry

    lax.fori_loop(0, n_rows, put, 0)
    owners(lambda row, part: move(row, part, True).start())
    owners(lambda row, part: move(row, part, True).wait())


def write_rows(
    kernel: str,
    pages_nlw: jax.Array,
    words_bxd: jax.Array,
    ids_b: jax.Array,
    slots_b: jax.Array,
    offset_words: int,
    part_words: int,
    interpret: Any,
) -> jax.Array:
    """The arena with one entry of d words a token in each of its x parts, which are `part_words` apart.

    Copies move whole tiles, so a window of tiles that holds the entry is read first. Tokens that share one are put
    into it together.
    """
    b, n_parts, d = words_bxd.shape
    first_line, part_lines = lines_at(kernel, offset_words, part_words)
    window_words = math.lcm(d, TILE_WORDS)  # no entry crosses from one to the next
    row_bytes = n_parts * window_words * words_bxd.dtype.itemsize
    n_rows = max(n for n in range(1, b + 1) if b % n == 0 and n * row_bytes <= max(_BUFFER_BYTES, row_bytes))
    window_b = slots_b * jnp.int32(d) // jnp.int32(window_words)
    key_xkn = jnp.stack([ids_b, window_b]).reshape(2, -1, n_rows)
    same_knn = jnp.all(key_xkn[:, :, :, None] == key_xkn[:, :, None, :], axis=0)
    owners_b = jnp.argmax(same_knn, axis=2).astype(jnp.int32).reshape(-1)
    images = _images(words_bxd, slots_b)
    return pl.pallas_call(
        functools.partial(_rows_kernel, first_line=first_line, part_lines=part_lines, d=d),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(b // n_rows,),
            in_specs=[pl.BlockSpec((n_rows, *images.shape[1:]), lambda i, *_: (i, 0, 0, 0)), IN_PLACE],
            out_specs=IN_PLACE,
            scratch_shapes=[
                pltpu.VMEM((n_rows, n_parts, window_words // LINE_WORDS, LINE_WORDS), pages_nlw.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages_nlw.shape, pages_nlw.dtype),
        input_output_aliases={4: 0},
        interpret=interpret,
        name="write_rows",
    )(ids_b, slots_b, owners_b, images, pages_nlw)


def _images(words_bxd: jax.Array, slots_b: jax.Array) -> jax.Array:
    """The lines that each entry touches, its words in their lanes; what the other lanes hold is not used."""
    b, n_parts, d = words_bxd.shape
    if d % LINE_WORDS == 0:
        return words_bxd.reshape(b, n_parts, d // LINE_WORDS, LINE_WORDS)
    if LINE_WORDS % d == 0:
        return jnp.tile(words_bxd, LINE_WORDS // d)[:, :, None]
    # Entries begin at the few multiples of d in a line: one roll for each, and a choice.
    step = math.gcd(d, LINE_WORDS)
    n_words = -(-(d + LINE_WORDS - step) // LINE_WORDS) * LINE_WORDS
    lane_b11 = (slots_b * jnp.int32(d) % jnp.int32(LINE_WORDS))[:, None, None]
    padded = jnp.pad(words_bxd, ((0, 0), (0, 0), (0, n_words - d)))
    image = padded
    for shift in range(step, LINE_WORDS, step):
        image = jnp.where(lane_b11 == shift, jnp.roll(padded, shift, axis=2), image)
    return image.reshape(b, n_parts, -1, LINE_WORDS)
