"""Measures of the lab and of a user's own, which a configuration names by their class."""

import pytest

from conf.errors import ConfigError
from lab.measures.ruler import Ruler
from ropewalk.evaluation.measures.base import build

OWN = """
from ropewalk.evaluation.measures.base import Measure, Plan


class Mine(Measure):
    n: int = 3

    def plan(self, data, cfg):
        return Plan("mine", {"n": self.n}, [])


class Unfinished(Measure):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_measures.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ROPEWALK_PLUGINS", "own_measures")


def test_a_measure_of_the_users_own(own):
    assert build({"_target_": "own_measures.Mine", "n": 5}).plan(None, None).eval == {"n": 5}


@pytest.mark.parametrize("target", ["own_measures.Unfinished", "own_measures.Plan", "os.system", "None", "nothing.X"])
def test_what_is_no_measure_is_not_called(own, target):
    with pytest.raises(ValueError, match=rf"measures\._target_='{target}' is not a Measure class"):
        build({"_target_": target})


def test_options_are_checked_by_the_names_that_a_user_types():
    options = {"_target_": "lab.measures.ruler.Ruler", "trials": 5, "tasks": ["vt"]}
    assert build(options) == Ruler(trials=5, tasks=["vt"])
    with pytest.raises(ConfigError, match=r"did you mean ruler\.trials"):
        build(options | {"trals": 5}, "ruler")
