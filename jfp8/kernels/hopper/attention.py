"""Attention of f8 matrices on Hopper, forward and backward."""

from __future__ import annotations

from functools import partial

from jfp8.kernels.flash import backward, forward
from jfp8.kernels.hopper.attention_block import Attend
from jfp8.kernels.hopper.attention_dkv import DifferentiateKeys
from jfp8.kernels.hopper.attention_dq import DifferentiateQueries

attention_forward = partial(forward.attention_forward, Attend)
attention_backward = partial(backward.attention_backward, DifferentiateQueries, DifferentiateKeys)
