"""Says when the texts of two failures are alike: for several ranks, several cases of a run, and two runs."""

import re

#: Follows the names of ranks whose texts are not the same in every character.
ALIKE = ", alike but for ranks, addresses and times"

#: Begins the line of an exception's text that lists the calls of the training before it.
CALLS = "calls before it"

_FRAME = '  File "'
#: Begins the lines that say in which call of the training an exception was raised, and what was called before.
_OF_CALLS = ("exception in ", CALLS, "gathered in this forward")
_TRACEBACK = "Traceback (most recent call last)"
#: Begins the text of a case that passed and left something in its process, whose kinds precede colons.
LEAK = "leak: "
_KINDS = re.compile(r"(?:^leak:|;) ([\w' ]+):")
_SIZE = re.compile(r"\bof \d+(?=[:,])")
_RANKS = re.compile(r"\branks? [\d*, -]*[\d*]")
_NUMBERS = re.compile(r"-?\b\d[\d.]*(e[+-]?\d+)?\b(, -?\d+)*")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")

#: What differs between ranks that fail in the same way: their numbers, devices, ports, addresses, processes and times.
_OF_ONE_RANK = [
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"0x[0-9a-f]+", "0x*"),
        (r"\b(rank|pid|process|thread|cuda|device)([ =:]*)\d+", r"\1\2*"),
        (r"(\[?(?<!\d)\d{1,3}(?:\.\d{1,3}){3}\]?|localhost):\d+", r"\1:*"),
        (r"\d{4}-\d\d-\d\d[T ]", "* "),
        (r"\b\d\d:\d\d:\d\d([.,]\d+)?", "*"),
    )
]


def without_rank(text: str) -> str:
    """Replace what differs between ranks that fail in the same way: numbers of ranks, addresses, processes, times."""
    for pattern, replacement in _OF_ONE_RANK:
        text = pattern.sub(replacement, text)
    return text


def without_numbers_and_names(line: str) -> str:
    """Replace the numbers, the ranks and what is quoted in a line, as they differ between cases that fail alike."""
    return _NUMBERS.sub("#", _RANKS.sub("ranks #", _QUOTED.sub("'...'", line)))


def kind_of_text(text: str, file: str) -> str:
    """Reduce the text of a failure of a case in ``file`` to what the texts of failures that are alike share.

    The numbers and names of a comparison may differ, and the case's own frames if an error was raised below them. An
    error that the case itself raised must be the same but for ranks and addresses.
    """
    text = _SIZE.sub("of #", without_rank(text.replace(ALIKE, "")))
    lines = [line for line in text.splitlines() if not line.startswith(_OF_CALLS)]
    if text.startswith(LEAK):
        # Each model has classes of its own, and one cause leaves whichever there are.
        return f"{LEAK}{', '.join(sorted(set(_KINDS.findall(lines[0]))))}"
    in_case = f'{file}", line '
    frames = [line for line in lines if line.startswith(_FRAME)]
    if _TRACEBACK in text and (not frames or in_case in frames[-1]):
        return "\n".join(lines)
    kept, is_case = [], False
    for line in lines:
        is_case = in_case in line if line.startswith(_FRAME) else is_case and line.startswith("    ")
        if not is_case:
            kept.append(line if line.startswith(_FRAME) else without_numbers_and_names(line))
    return "\n".join(kept)
