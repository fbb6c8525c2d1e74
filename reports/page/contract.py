"""The requirements of the contract and their chapters, from the JSON that docs/make_features.py writes."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Requirement:
    """A requirement that some case of a page checks.

    Attributes:
        id: the chapter and the number.
        chapter: the name of its chapter.
        text: what is required, in Markdown; empty if the contract of this version does not have it.
    """

    id: str
    chapter: str
    text: str


class Contract:
    """The contract of this version of shardproof.

    Run files of other versions, and of cases in other projects, name requirements that it does not have.
    """

    def __init__(self) -> None:
        text = resources.files("shardproof").joinpath("contract.json").read_text(encoding="utf-8")
        chapters: list[tuple[str, str, list[tuple[str, str, bool]]]] = json.loads(text)
        self._subjects = {name: subject for name, subject, _ in chapters}
        self._requirements = {id_: Requirement(id_, name, said) for name, _, rows in chapters for id_, said, _ in rows}

    def subject(self, chapter: str) -> str:
        """What a chapter is about; empty if it is unknown."""
        return self._subjects.get(chapter, "")

    def in_order(self, ids: Iterable[str]) -> list[Requirement]:
        """Return requirements in the order of the contract, and behind them the unknown ones in the order of `ids`.

        Unknown requirements of one chapter stay together, behind the known ones of their chapter if there are any.
        """
        wanted = dict.fromkeys(ids)
        known = [one for id_, one in self._requirements.items() if id_ in wanted]
        unknown = [
            Requirement(id_, id_.rpartition("-")[0] or id_, "") for id_ in wanted if id_ not in self._requirements
        ]
        chapters = [*self._subjects, *dict.fromkeys(one.chapter for one in unknown)]
        position = {name: i for i, name in enumerate(dict.fromkeys(chapters))}
        return sorted([*known, *unknown], key=lambda one: position[one.chapter])
