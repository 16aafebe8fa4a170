"""Attend to f8 matrices on Hopper, forward and backward."""

from __future__ import annotations

from functools import partial

from jfp8.kernels.flash import backward, forward
from jfp8.kernels.hopper.attention_block import ForwardByWgmma
from jfp8.kernels.hopper.attention_dkv import KeyGradientsByWgmma
from jfp8.kernels.hopper.attention_dq import QueryGradientByWgmma

attention_forward = partial(forward.attention_forward, ForwardByWgmma)
attention_backward = partial(backward.attention_backward, QueryGradientByWgmma, KeyGradientsByWgmma)
