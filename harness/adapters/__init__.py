"""Adapters: the small classes through which the harness drives one implementation each."""
