"""BLAS threads: one, for the whole process."""

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]


def use_one_blas_thread() -> None:
    """Keep matrix products on the calling thread.

    A step is a few hundred small products: splitting one gains little, and BLAS threads wait for
    each other by spinning, so that whenever another process wants the core a product of 0.1 ms can
    take a whole time slice (12 ms measured on two busy cores).
    """
    threadpool_limits(limits=1, user_api="blas")
