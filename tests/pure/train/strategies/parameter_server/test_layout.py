"""The layout of variables on parameter servers is a pure function of their shapes."""

from collections import Counter
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_app.train.strategies.parameter_server.layout import Strip, partition_variables, split_variable, strip_bytes

SHAPES = st.lists(st.lists(st.integers(1, 300), max_size=3).map(tuple), min_size=1, max_size=12)


@given(SHAPES, st.integers(1, 6), st.sampled_from([1, 64, 4096]))
def test_every_value_is_on_one_server(shapes: list[tuple[int, ...]], servers: int, min_bytes: int) -> None:
    parts = partition_variables(shapes, 4, servers, min_bytes)
    assert len(parts) == servers
    rows: Counter[tuple[int, int]] = Counter(
        (p.variable, row) for part in parts for p in part for row in range(p.low, p.high)
    )
    assert rows == Counter((i, row) for i, shape in enumerate(shapes) for row in range(shape[0] if shape else 1))
    assert sum(strip_bytes(p, shapes, 4) for part in parts for p in part) == 4 * sum(map(prod, shapes))


@given(SHAPES, st.integers(1, 6), st.sampled_from([1, 64, 4096]))
def test_the_loads_of_servers_differ_by_no_more_than_one_strip(
    shapes: list[tuple[int, ...]], servers: int, min_bytes: int
) -> None:
    parts = partition_variables(shapes, 4, servers, min_bytes)
    load = [sum(strip_bytes(p, shapes, 4) for p in part) for part in parts]
    assert max(load) - min(load) <= max(strip_bytes(p, shapes, 4) for part in parts for p in part)


def test_a_variable_is_split_along_its_first_dimension_into_large_enough_parts() -> None:
    assert split_variable(0, (1000, 64), 4, 4, 1) == [
        Strip(0, 0, 250),
        Strip(0, 250, 500),
        Strip(0, 500, 750),
        Strip(0, 750, 1000),
    ]
    assert len(split_variable(0, (1000, 64), 4, 4, 100_000)) == 2
    assert split_variable(0, (1000, 64), 4, 4, 1 << 20) == [Strip(0, 0, 1000)]
    assert split_variable(0, (), 4, 4, 1) == [Strip(0, 0, 1)]
    assert [p.low for p in split_variable(0, (1000,), 4, 3, 1)] == [0, 320, 640], (
        "strips should begin at multiples of 64 values"
    )


def test_a_strip_shares_the_memory_of_its_tensor() -> None:
    value = torch.arange(6.0).view(3, 2)
    Strip(0, 1, 3).of(value).zero_()
    assert value.tolist() == [[0, 1], [0, 0], [0, 0]]
    assert Strip(0, 0, 1).of(torch.tensor(2.0)).item() == 2
