"""What an H200's figures are under known loads."""

FIGURES = ("tensor_active_ratio", "dram_active_ratio", "sm_active_ratio", "sm_resident_ratio")
SIGNATURES = {
    "idle": ((0, 0.001), (0, 0.001), (0, 0.001), (0, 0.05)),
    "matmul": ((0.85, 1), (0.05, 0.4), (0.9, 1), (0.95, 1)),
    "copy": ((0, 0.001), (0.75, 1), (0.9, 1), (0.95, 1)),
    "sglang-verify-64k": ((0, 0.02), (0, 0.01), (0.03, 0.1), (0.95, 1)),
    "longleaf-verify-64k": ((0.3, 0.5), (0.3, 0.5), (0.9, 1), (0.95, 1)),
    "longleaf-verify-185k": ((0.4, 0.6), (0.35, 0.5), (0.9, 1), (0.95, 1)),
}
"""Least and most of each figure."""
