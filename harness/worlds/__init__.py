"""Where do ranks live? Worlds of rank processes: started once, reused by many cases, replaced when a case breaks one.

Imports ``parity``, ``collectives``, ``adapters``, ``findings`` and ``tensors``. The modules of the controller import no
torch.

- in the controller: ``pool`` (``Pool``), ``world`` (``World``, the processes of one world), ``lease`` (devices and
  cores shared among pytest processes), ``watchdog`` (who is stuck, and where), ``forkserver``.
- in a rank: ``entry`` (its first function), ``loop`` (start and jobs), ``casefile`` (the case's module), ``leftovers``
  (what a case left behind).
- between them: ``jobs``.
"""
