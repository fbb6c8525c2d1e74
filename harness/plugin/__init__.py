"""How does pytest drive the harness? Options, collection, marks, records, verdicts and known failures.

Imports ``worlds``, ``parity``, ``simulation``, ``adapters``, ``collectives``, ``verdicts`` and ``tensors``,
``models`` for what it draws, and the tolerances of ``judging``. A
project's conftest names the plugin as ``shardproof.plugin``; case modules import ``marks`` by
``shardproof.testing``. Nothing else is imported from outside.

- ``hooks``: the hook functions; makes one pytest item for each implementation and world; exit codes and signals.
- ``state``: the objects that the hooks of one pytest process share.
- ``options``: the command line; ``selection``: the checked values of its options.
- ``marks``: the marks of cases.
- ``cases``: runs one item; compares expected texts; lists what no selected case asks.
- ``drawing``: searches for an example of a drawn parameter that fails, and shrinks it; ``strategies`` draws examples
  with hypothesis.
- ``effort``: what a shorter run leaves out.
- ``records``: the record of one case; ``journal``: the run file, with the ``environment`` of the run and the
  ``origin`` of the code.
- ``torchrun``: runs that torchrun started: their processes, several cases at once, and what restarted ones keep.
- ``reproduction``: the command that repeats one case.
- ``explaining``: runs a failed case again with capture on.
- ``progress``: which cases were selected and which have a record.
- ``terminal``: the live line, lines of waits, and failures that are alike once; the counts at the end are in ``hooks``.
- ``known_failures``: strict expected failures, of one implementation and of a whole run.
"""
