"""The benchmark of the kernels: `make bench-kernels` on a GPU host.

Outside the installable package: it needs a checkout, for the writer of results files and nvcc.
"""
