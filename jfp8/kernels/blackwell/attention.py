"""Attention of f8 matrices on Blackwell, forward and backward."""

from __future__ import annotations

from functools import partial

from jfp8.kernels.blackwell.attention_block import Attend
from jfp8.kernels.blackwell.attention_dkv import DifferentiateKeys
from jfp8.kernels.blackwell.attention_dq import DifferentiateQueries
from jfp8.kernels.flash import backward, forward

attention_forward = partial(forward.attention_forward, Attend)
attention_backward = partial(backward.attention_backward, DifferentiateQueries, DifferentiateKeys)
