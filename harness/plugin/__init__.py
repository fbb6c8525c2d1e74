"""How does pytest drive it? Options, collection, marks, records, verdicts and known failures.

Imports ``worlds``, ``adapters``, ``collectives`` and ``findings``. A project's conftest names the plugin as
``shardproof.plugin``; case modules import from ``marks`` (through ``shardproof.harness``) and ``axes``. Nothing else
outside imports from here.

- ``hooks``: the hook functions; ``state``: what they share in one pytest process.
- ``options``: the command line; ``selection``: what it asks for, checked.
- ``marks``, ``axes``: what cases say of themselves, and parameters that several chapters share.
- ``collection``: from test functions to items on worlds; ``cases``: runs one item.
- ``records``, ``run_file``: a case's record and the file of all records.
- ``known_failures``: expected failures; ``expected_texts``: inline expected texts.
"""
