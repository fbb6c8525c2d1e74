"""What both halves of the reference need, once.

The seams at which behaviour is replaced are module attributes, always called through their module:
``collectives.gather``, ``collectives.reduce``, ``collectives.all_reduce``, ``collectives.reshard``,
``divide.divide`` and ``clip.reduce_norm``.
"""
