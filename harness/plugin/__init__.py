"""How does pytest drive the harness? Options, collection, marks, records, verdicts and known failures.

Imports ``worlds``, ``parity``, ``simulation``, ``adapters``, ``collectives``, ``judging`` and ``tensors``,
``models`` for what it draws, and the tolerances of ``judging``. A
project's conftest names the plugin as ``shardproof.plugin``; case modules import ``marks`` by
``shardproof.testing``. Nothing else is imported from outside.

- ``hooks``: the hook functions; makes one pytest item for each implementation and world; exit codes.
- ``state``: the objects that the hooks of one pytest process share.
- ``options``: a row for each option, with its check; ``command_line``: the options in pytest's parser;
  ``selection``: what their checked values select.
- ``marks``: the marks of cases.
- ``cases``: runs one item; ``expected``: compares its inline texts.
- ``packaged``: the files and modules of shardproof's own suites.
- ``unasked``: the requirements that no selected case asks.
- ``drawing``: searches for an example of a drawn parameter that fails, and shrinks it; ``strategies`` draws examples
  with hypothesis.
- ``effort``: what a shorter run leaves out; ``pairs``, ``standard`` and ``quick``: which items it keeps.
- ``records``: the record of one case; ``journal``: the run file, with the ``environment`` of the run and the
  ``origin`` of the code.
- ``torchrun``: runs that torchrun started: their processes; ``ahead``: several cases at once; ``resuming``: what a
  restarted job keeps of the attempt before.
- ``reproduction``: the command that repeats one case.
- ``explaining``: runs a failed case again with capture on.
- ``progress``: which cases were selected and which have a record.
- ``live``: the live line; ``terminal``: lines of waits, and failures that are alike once; the counts at the end are in
  ``hooks``.
- ``signals``: signals that end a run.
- ``known_failures``: strict expected failures, of one implementation and of a whole run.
"""
