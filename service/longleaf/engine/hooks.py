"""What the plugin changes in SGLang beyond registering an algorithm and a backend."""

from longleaf.engine.patches import Patch, apply_all


def register() -> tuple[Patch, ...]:
    """Apply the numbered patches; returns them. Raises DriftError before any of them is applied.

    SGLang's own HookRegistry only logs a hook that fails, so nothing that a right answer depends
    on may go through it.
    """
    return apply_all()
