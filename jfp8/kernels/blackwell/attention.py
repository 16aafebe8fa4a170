"""Attend to f8 matrices on Blackwell, forward and backward."""

from __future__ import annotations

from functools import partial

from jfp8.kernels.blackwell.attention_block import ForwardByTcgen05
from jfp8.kernels.blackwell.attention_dkv import KeyGradientsByTcgen05
from jfp8.kernels.blackwell.attention_dq import QueryGradientByTcgen05
from jfp8.kernels.flash import backward, forward

attention_forward = partial(forward.attention_forward, ForwardByTcgen05)
attention_backward = partial(
    backward.attention_backward, QueryGradientByTcgen05, KeyGradientsByTcgen05
)
