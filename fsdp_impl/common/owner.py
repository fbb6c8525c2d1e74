"""Where a parameter is registered."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Owner:
    """A module attribute that holds the parameter; shared parameters have several."""

    module: nn.Module
    name: str
