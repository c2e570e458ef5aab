"""Write the prompts that commit_len is measured on: held-out prose, code, sentences, boilerplate.

    python prompts.py DEBIAN_FOLDER OUT.json.xz

Only freely redistributable text: public-domain prose, PSF-licensed code. None of it is in the
training set. See README.md beside the output.
"""

import json
import lzma
import random
import sys
from pathlib import Path

from corpus import sentences_of
from sources import documents, is_held_out

PROSE = {
    "tempest_gut.txt": "The Tempest",
    "macbeth_gut.txt": "Macbeth",
    "Mark.txt": "Gospel of Mark (KJV)",
    "devil.dict.dz": "The Devil's Dictionary",
}
CODE = ("argparse.py", "tarfile.py", "zipfile.py", "http/cookiejar.py", "statistics.py")
CHARACTERS = 100_000  # of one source: over 17k tokens
BOILERPLATE = {  # {i} counts 1, 2, 3, ...; {j} = 10 i. None of these is a training template.
    "licence header": (
        "# Module {i} of the orchard toolkit.\n#\n# Copyright 2019 The Orchard Developers. All "
        "rights reserved.\n# Use of this source code is governed by a BSD-style\n# licence that "
        "can be found in the LICENSE file.\n\nMODULE_ID = {i}\n\n"
    ),
    "getters": ("    def read_channel_{i}(self) -> float:\n        return self._readings[{i}]\n\n"),
    "config table": "| sensor {i} | enabled | 10.1.0.7 | {j} |\n",
    "accessors": (
        "int get_field_{i}(const struct record *r)\n{{\n    return r->field_{i};\n}}\n\n"
    ),
    "inventory": "  - host: node{i}.example.org\n    port: 9100\n    role: worker\n",
    "rows": '    {{"key": "item_{i}", "index": {i}, "active": true}},\n',
}


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    held = [d for d in documents(folder) if is_held_out(d)]
    texts = {d.name: d.text for d in held}
    # the dictionary's preface is left out: its entries are what is quoted
    prose = [
        {"source": title, "licence": "public domain", "text": texts[name][-CHARACTERS:]}
        for name, title in PROSE.items()
    ]
    code = [
        {"source": f"Python 3.11 {name}", "licence": "PSF-2.0", "text": texts[name][:CHARACTERS]}
        for name in CODE
    ]
    sentences = sentences_of(d for d in held if d.source in ("shakespeare", "bible", "devil"))
    sentences = [s for s in sentences if not any(c.isdigit() for c in s)]
    random.Random(11).shuffle(sentences)
    value = {
        "prose": prose,
        "code": code,
        "sentences": sentences[:64],
        "boilerplate": [{"name": n, "template": t} for n, t in BOILERPLATE.items()],
    }
    out.write_bytes(lzma.compress(json.dumps(value, indent=0).encode(), preset=9))
    print(out, out.stat().st_size, "bytes", {p["source"]: len(p["text"]) for p in prose + code})


if __name__ == "__main__":
    main()
