"""A curve whose times one reckons in one's head."""

from longleaf.simulate.curve import Curve, parse_curve


def flat(batch: int = 1) -> Curve:
    """Steps of 10 ms whatever the context, prefill of 1 ms a token."""
    return parse_curve(
        {
            "name": "flat",
            "nodes": 9,
            "kv_bytes_per_token": 1000,
            "steps": [{"context": 1, "batch": batch, "seconds": 0.01}],
            "prefill": [{"context": 10_000, "cached": 0, "seconds": 10.0},
                        {"context": 10, "cached": 0, "seconds": 0.01}],
        },
        "flat",
    )  # fmt: skip
