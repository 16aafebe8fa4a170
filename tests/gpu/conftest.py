from __future__ import annotations

import pytest

from support.gpu_programs import assert_resources, compile_divided, compile_for


@pytest.fixture
def recorded(record_property, request):
    """Leaves the counts of a program in the report, under a name, and checks its kernels."""

    def record(name, program, spilled=0):
        record_property("order", request.session.items.index(request.node))
        record_property("program", name)
        for count, value in program.row().items():
            record_property(count, value)
        assert_resources(program, spilled)
        return program

    return record


@pytest.fixture
def compiled(recorded):
    """`compile_for`, recorded under a name."""
    return lambda name, *args, **how: recorded(name, compile_for(*args), **how)


@pytest.fixture
def compiled_for_eight(recorded):
    """`compile_divided` for eight H200, recorded under a name."""
    return lambda name, *args, **how: recorded(name, compile_divided("h200", *args), **how)
