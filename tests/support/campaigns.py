"""Marking of tests that only ``make test-all`` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def representatives(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """All cases as parameters of a test, those not in ``keep`` marked as a campaign.

    Args:
        cases: Values of one parameter, or tuples of values of several.
        keep: Cases that ``make test`` runs.
    """
    cases = list(cases)
    assert all(case in cases for case in keep), "keep names a case that is not there"
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if case in keep else pytest.mark.campaign
        params.append(pytest.param(*values, marks=marks))
    return params
