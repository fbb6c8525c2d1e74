"""Which cases of a run were selected, which of them have a record, and what is missing."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from shardproof.runfile import Verdict

Selected = dict[str, list[str]]
"""The ids of the selected cases, by implementation."""

Spared = Mapping[str, Mapping[str, int]]
"""The number of cases that the effort of a run left out, by implementation and file."""


class Progress:
    """The selected cases and the records of one run; in an xdist run, those of all workers.

    Attributes:
        selected: the ids of the selected cases, by implementation; empty until collection has ended.
        spared: the number of cases that the effort of the run left out, by implementation and file.
        unasked: by implementation, what is required of every implementation and no case asks, and what it would need.
        left_out: the selected cases that pytest skipped without asking the plugin, as by ``@pytest.mark.skip``.
        examples: the number of examples that cases which draw them have run.
        verdicts: the number of cases for each (implementation, verdict); a case that was run again counts once, with
            its last verdict.
    """

    def __init__(self) -> None:
        self.selected: Selected = {}
        self.spared: Spared = {}
        self.unasked: Mapping[str, Mapping[str, str]] = {}
        self.left_out: list[dict[str, str]] = []
        self.examples = 0
        self.verdicts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._last: dict[tuple[str, str], str] = {}
        self._seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
        self._attempts: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, record: Mapping[str, Any]) -> int:
        """Count a record.

        Args:
            record: the record of a case as JSON values.

        Returns:
            The number of the attempt, from 1: plugins such as pytest-rerunfailures run a case again.
        """
        self.examples += record.get("examples", 0)
        key = (record["implementation"], record["id"])
        self._seconds[key] += record["seconds"]
        if key in self._last:
            self.verdicts[key[0], self._last[key]] -= 1
        self._last[key] = record["verdict"]
        self._attempts[key] += 1
        self.verdicts[key[0], record["verdict"]] += 1
        return self._attempts[key]

    def verdicts_of(self, implementation: str, ids: Iterable[str]) -> list[str]:
        """Return the verdicts of these cases, as far as they have one."""
        return [self._last[implementation, id_] for id_ in ids if (implementation, id_) in self._last]

    def seconds_of(self, implementation: str, ids: Iterable[str]) -> float:
        """Return what these cases took, each in all of its attempts."""
        return sum(self._seconds.get((implementation, id_), 0.0) for id_ in ids)

    @property
    def missing(self) -> list[str]:
        """The selected cases that have no record and were not left out: ``<id> on <implementation>``."""
        known = self._last.keys() | {(item["implementation"], item["id"]) for item in self.left_out}
        return [f"{id_} on {name}" for name, ids in self.selected.items() for id_ in ids if (name, id_) not in known]

    @property
    def count(self) -> int:
        """The number of selected cases."""
        return sum(map(len, self.selected.values()))

    def asked_nothing(self, implementations: Iterable[str]) -> list[str]:
        """Return those of the implementations on which no case ran."""
        ran = {name for (name, verdict), count in self.verdicts.items() if count and not Verdict(verdict).is_skip}
        return [name for name in implementations if name not in ran]
