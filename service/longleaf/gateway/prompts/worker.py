"""The worker process: parses a body, checks it, and counts its prompt's tokens.

It reads jobs on standard input and writes answers on standard output, until its input ends:

    job:    header length, body length (4 bytes each, big endian), header (JSON), body
    answer: length (4 bytes), JSON
"""

import json
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from longleaf.gateway.prompts.chat_template import TemplateError
from longleaf.gateway.prompts.inspection import Inspection, WrongBodyError, inspect, parse
from longleaf.gateway.prompts.tokenizer import Count, Tokenizer, TokenizerError

JOB = struct.Struct(">II")
ANSWER = struct.Struct(">I")
_NICENESS = 5
"""The event loop comes first: it answers everyone, a worker one."""


class Worker:
    """Does jobs; keeps the tokenizers that it has loaded."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}

    def answer(self, header: Mapping[str, Any], body: bytes) -> dict[str, Any]:
        """The answer to one job; every error is part of it."""
        if header["kind"] == "load":
            return self._load(header["path"])
        try:
            fields = parse(body, header["route"])
            inspection = inspect(fields, len(body), header["route"])
        except WrongBodyError as error:
            return {"wrong": str(error), "param": error.param}
        answer: dict[str, Any] = {"inspection": asdict(inspection)}
        paths: Mapping[str, str | None] = header["tokenizers"]  # "": of every other model
        path = paths.get(inspection.model, paths.get(""))
        if path is not None and inspection.plain and inspection.given_tokens is None:
            answer |= self._count(path, fields, inspection, header["most"])
        return answer

    def _load(self, path: str) -> dict[str, Any]:
        try:
            if path not in self._tokenizers:
                self._tokenizers[path] = Tokenizer.load(Path(path))
        except TokenizerError as error:
            return {"tokenizer_error": str(error)}
        return {}

    def _count(
        self, path: str, fields: Mapping[str, Any], inspection: Inspection, most: int | None
    ) -> dict[str, Any]:
        failed = self._load(path)
        if failed:
            return failed
        begin = time.perf_counter()
        try:
            count = _counted(self._tokenizers[path], fields, inspection, most)
        except TemplateError:  # the engine will say what is wrong with the messages
            return {}
        return {"count": asdict(count), "seconds": time.perf_counter() - begin}


def _counted(
    tokenizer: Tokenizer, fields: Mapping[str, Any], inspection: Inspection, most: int | None
) -> Count:
    if inspection.chat:
        extra = fields.get("chat_template_kwargs")
        return tokenizer.count_chat(fields["messages"], extra or {}, most)
    prompt = fields["prompt"]
    return tokenizer.count_prompts([prompt] if isinstance(prompt, str) else prompt, most)


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answer jobs until there are no more."""
    worker = Worker()
    while head := jobs.read(JOB.size):
        header_length, body_length = JOB.unpack(head)
        header = json.loads(jobs.read(header_length))
        body = jobs.read(body_length)
        answer = json.dumps(worker.answer(header, body)).encode()
        answers.write(ANSWER.pack(len(answer)) + answer)
        answers.flush()


def main() -> None:
    """Run one worker. Signals are the gateway's affair: it ends the worker by ending its input."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write into the answers
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
