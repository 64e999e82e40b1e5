# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Other releases run few cases of a product, and none of its values is left out."""

from __future__ import annotations

import pytest

from tests.covering import each_value_once, values_of

LONG, SHORT = range(5), "abc"


@pytest.mark.parametrize("first", LONG)
@pytest.mark.parametrize("second", SHORT)
@pytest.mark.parametrize(("third", "fourth"), [(1, 2), (1, 3)])
def test_a_product_keeps_each_value_of_every_list(
    request: pytest.FixtureRequest, first: int, second: str, third: int, fourth: int
) -> None:
    this = request.node.nodeid.partition("[")[0]
    cases = [item for item in request.session.items if item.nodeid.startswith(this + "[")]
    if len(cases) < 2 * len(LONG) * len(SHORT):
        pytest.skip("not all of its cases are run")
    kept = list(each_value_once(cases))
    assert len(kept) == len(LONG)
    assert set().union(*map(values_of, kept)) == set().union(*map(values_of, cases))


def test_a_test_without_parameters_is_kept(request: pytest.FixtureRequest) -> None:
    assert list(each_value_once([request.node])) == [request.node]
