import pytest

from gpu_programs import assert_resources, compile_divided, compile_for


@pytest.fixture(autouse=True)
def one_kind_of_gpu(request):
    """Mosaic GPU compiles all kernels of a process for the kind of GPU of its first one."""
    of_b200 = ["blackwell" in item.path.name for item in request.session.items]
    if "blackwell" in request.path.name and not all(of_b200):
        pytest.skip("needs a process without kernels for an H200: run tests/gpu/*blackwell* alone")


@pytest.fixture
def recorded(add_row):
    """Adds the counts of a program to the table, under a name, and checks its kernels."""

    def record(name, program, spilled=0):
        add_row({"program": name} | program.row())
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
