"""Imported by Python when it starts, if this folder is on PYTHONPATH."""

from planted.upstream import edit

edit.install()
