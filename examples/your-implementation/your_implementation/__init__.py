"""Your implementation: here ZeRO stage 3, which divides parameters, gradients and optimizer state among the ranks."""

from your_implementation.zero3 import ZeroThree

__all__ = ["ZeroThree"]
__version__ = "0.1.0"
