"""Holm's correction."""

import pytest

from lab.board.correction import holm


def test_holm_is_the_step_down_of_its_article():
    """The smallest of four is multiplied by 4, the next by 3, ...; none becomes smaller than one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
