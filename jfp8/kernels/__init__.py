"""Everything specific to a chip or a compiler: one planner for each kind of device.

A planner is a module with two functions, which `jfp8.matmul.spec.planner_of` finds::

    plan(spec)                  the operation for a spec; None to use the reference
    multiply(lhs, rhs, spec)    the matmul of two quantized operands; NotImplementedError if the
                                backend named in the spec cannot compute it

and optionally any of these, each of which replaces a default of the core::

    quantizes_by_kernels()      True if kernels that quantize may also compute an activation
    residual_sum(x, y)          x + y, where y is the result of a matmul
    expected_times(...)         the times of a matmul that a cost model expects
    over_stacked(function, args)   apply function to each of `args`, in few kernels
    GROUPED_IN_HIGH_PRECISION   the operation for grouped matmuls without quantization
"""
