"""``python -m longleaf`` is the ``longleaf`` command."""

from longleaf.cli import main

main(prog_name="longleaf")
