"""Torch's own tests of FSDP, run against the reference and against torch, from checkouts that the user names.

``python -m tests.fsdp_impl.upstream --help``; docs/upstream-tests.md. Nothing of these tests is in this repository.

``sources`` lists repositories, revisions and patches; ``exchange`` puts the names of the reference in the place of
torch's; ``process`` runs the tests of one file in a process of its own, which ``running`` starts and watches;
``private`` reads which private names of torch a test uses; ``table`` compares the outcomes.
"""
