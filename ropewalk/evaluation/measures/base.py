"""What is asked of a network: a measure is a plan of parts, each a set of texts with the targets that count."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from conf import plugins
from conf.schema import Config, Section, parse
from data.base import Data
from ropewalk.evaluation.results import PartResult
from ropewalk.evaluation.scoring import Scorer


class Part(NamedTuple):
    """A part of a measure."""

    length: int  # of its longest text
    run: Callable[[Scorer], list[PartResult]]


class Plan(NamedTuple):
    """A measure of one network, before any work."""

    kind: str
    eval: dict[str, Any]  # the settings that decide the texts, see `ropewalk.evaluation.results.Evaluation`
    parts: list[Part]


class Measure(Section, ABC):
    """Base class of the measures that are named by their class. Its fields are its options."""

    @abstractmethod
    def plan(self, data: Data, cfg: Config) -> Plan | None:
        """Return what is to be done; None if the measure has no meaning for these data and lengths.

        Raises ValueError: it cannot be made with these options.
        """


def build(options: Mapping[str, Any], name: str = "measures") -> Measure:
    """Return the measure that `options` describe: a `_target_`, and the options of that class.

    Args:
        name: of the section of the configuration, for the messages.

    Raises ValueError: there is no such class, or it has other options; a line for each key that is wrong.
    """
    cls, values = plugins.resolve(options, Measure, "ropewalk", name)  # type: ignore[type-abstract]
    return parse(cls, values, f"{name}.")
