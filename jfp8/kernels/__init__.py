"""Everything that knows a chip or the habits of a compiler: one planner for each kind of device.

A planner is a module with two functions, which `jfp8.matmul.spec.planner_of` finds::

    plan(spec)                  what computes the operation that spec describes; None: the reference
    multiply(lhs, rhs, spec)    the product of two quantized operands

and with any of these, each for something that the core otherwise does itself::

    quantizes_by_kernels()      whether kernels that quantize may also compute an activation
    residual_sum(x, y)          x + y, where a product wrote y
    expected_times(...)         what a cost model expects of a product
    over_stacked(function, args)   function of each of `args`, in few kernels
    GROUPED_IN_HIGH_PRECISION   the operation that multiplies groups without quantizing anything
"""
