"""Means, sums and gathers over devices that send one byte per element.

No collective adds in FP8: 448 + 448 is NaN in E4M3FN, and a ring rounds again at every hop. So a
mean is two exchanges of bytes around a sum in f32, as in an all-reduce of two steps: ::

    device i:   blocks of x_i, quantized  --all_to_all-->  block j of all x_i, on device j
    device j:   y = sum_i decode(x_i[j]) / n in f32, quantized again  --all_gather-->  y

Every element is summed on one device, so that all devices end with the same bits, and each value is
rounded twice, whatever the number of devices. The first half alone is `reduce_scatter`.

A record is sent for every block of elements: their codes, then the four bytes of their f32 scale. A
separate collective for scales would be one more to wait for, and for all but the largest models
would take as long as that for the codes. Records are bytes, because XLA:CPU widens arrays of f8
types on the wire to 16 bits.

Records never cross the border between two arrays, and each array is quantized by itself: a small
gradient does not share a scale with a large one, and no copy of all gradients in f32 is made. An
array so small that its record would be longer than its elements in f32 is sent in f32.

Nothing on the wire is multiplied, so hardware need not support its format. E4M3FN rounds every
element by at most 1/16 of itself, over a range of 2^18, whatever else is in its block. That is a
noise of -31.5 dB (rounded twice: -28.8 dB), however well blocks are scaled, unless a few elements
have all the energy. `E2M5` has four times finer steps, but rounds elements below 1/504 of the
largest in their block to zero. The default, `FINEST`, writes every block in whichever of the two is
more accurate: 40 dB for Gaussian blocks of any magnitudes, and for heavy tails.
"""

from jfp8.collectives.exchange import all_gather, pmean, reduce_scatter
from jfp8.collectives.wire import E2M5, FINEST
from jfp8.tracing.listing import listing

__all__ = ["E2M5", "FINEST", "all_gather", "pmean", "reduce_scatter"]

__dir__ = listing(__all__)
