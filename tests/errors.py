"""What a call refuses, in the one line that a user reads."""

import pytest


def error_of(call, *arguments, kind=ValueError, **keywords):
    """The text, of one line, of the error of this kind with which a call ends."""
    with pytest.raises(kind) as caught:
        call(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)
