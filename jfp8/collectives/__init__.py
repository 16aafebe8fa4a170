"""Means, sums and gathers over devices that send one byte per element.

No collective adds in FP8: 448 + 448 is NaN in E4M3FN, and a ring rounds again at every hop. So a
mean is two exchanges of bytes around a sum in f32, as in an all-reduce of two steps: ::

    device i:   blocks of x_i, quantized  --all_to_all-->  block j of all x_i, on device j
    device j:   y = sum_i decode(x_i[j]) / n in f32, quantized again  --all_gather-->  y

Every element is summed on one device, so that all devices end with the same bits, and each value is
rounded twice, whatever their number. Stopping half-way gives `reduce_scatter`.

What travels is a record for every block of elements: their codes, then the four bytes of their f32
scale. Scales in a collective of their own would be one more to wait for, as long as the codes' own
for all but the largest models; and XLA:CPU widens arrays of f8 types on the wire to 16 bits, but
leaves bytes alone.

Records never cross the border between two arrays, and each array is quantized by itself: a small
gradient does not share a scale with a large one, and no copy of all gradients in f32 is made. An
array so small that its record would be longer than its elements in f32 travels in f32.

Nothing on the wire is multiplied, so that no hardware has to know its format. E4M3FN rounds every
element by at most 1/16 of itself, over a range of 2^18, whatever else is in its block. That is a
noise of -31.5 dB (twice: -28.8 dB) unless a few elements have all the energy, however well blocks
are scaled. `E2M5` has four times finer steps, but rounds to zero what is below 1/504 of the
largest element of its block. The default, `FINEST`, writes every block in the one of the two that
is nearer to it: 40 dB for Gaussian blocks of any magnitudes, and for heavy tails.
"""

from jfp8.collectives.exchange import all_gather, pmean, reduce_scatter
from jfp8.collectives.wire import E2M5, FINEST

__all__ = ["E2M5", "FINEST", "all_gather", "pmean", "reduce_scatter"]
