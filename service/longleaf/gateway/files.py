"""Files that are renewed in place: keys, certificates."""

from pathlib import Path


def file_version(path: Path) -> tuple[int, ...]:
    """Differs whenever ``path`` is another file, or has other contents; ``()`` if it is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev
