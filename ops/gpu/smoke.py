"""Does a server of the tiny pair start, answer sensibly, and draft as well as the embedded engine?

``python -m ops.gpu.smoke METHOD ...``: all servers start together; one short report each.
"""

import json
import traceback

import click

from longleaf.embedded.load import DEFAULT_MODELS
from longleaf.embedded.tokenizer import Tokenizer
from ops.bench.prompts import PromptSource
from ops.gpu.client import Client, EngineError
from ops.gpu.pairs import LOGS, long, tiny
from ops.gpu.servers import Method, Server, free_port
from ops.gpu.timing import random_prompt, time_steps


def report(client: Client, source: PromptSource, *, speculates: bool) -> None:
    """Print answers and commit_len of a few prompts."""
    chat = client.json(
        "/v1/chat/completions",
        {
            "model": "longleaf",
            "messages": [{"role": "user", "content": "Count from 1 to 20."}],
            "max_tokens": 48,
            "temperature": 0,
        },
        timeout=120,
    )
    print("chat:", json.dumps(chat["choices"][0]["message"]["content"]), flush=True)
    for kind, prompts in (
        ("predictable 1k", source.predictable(1024, 1)),
        ("prose 1k", source.cut("prose", 1024, 1)[:2]),
        ("code 1k", source.cut("code", 1024, 1)[:2]),
        ("predictable 8k", source.predictable(8192, 1)),
    ):
        for prompt in prompts:
            answer = client.generate(prompt.tokens.tolist(), 64)
            last = answer.events[-1].at - answer.events[0].at
            print(
                f"{kind:15} {prompt.name[:24]:24} commit_len "
                f"{answer.commit_len if speculates else 1.0:5.2f} {63 / last:6.0f} tok/s, first "
                f"token {1e3 * answer.first_token_seconds:5.0f} ms: {answer.text[:60]!r}",
                flush=True,
            )
    sampled = client.generate("Once upon a time", 32, temperature=1.0, top_p=0.95)
    print("sampled:", repr(sampled.text), "free", client.free_tokens(), flush=True)


def report_steps(client: Client) -> None:
    """Print the step time at short contexts, of a server with random weights."""
    for context in (1024, 8192):
        prompt = random_prompt(context)
        client.generate(prompt, 8)
        print(f"{context:6} {time_steps(client, prompt, 32)}", flush=True)


@click.command()
@click.argument("methods", nargs=-1, type=click.Choice([method.value for method in Method]))
@click.option(
    "--long",
    "long_methods",
    multiple=True,
    type=click.Choice([method.value for method in Method]),
    help="Start a 61-layer server too.",
)
@click.option("--bare", is_flag=True, help="Without our launcher.")
@click.option("--nodes", type=int, multiple=True, help="Node counts of ddtree's steps.")
def main(
    methods: tuple[str, ...],
    long_methods: tuple[str, ...],
    nodes: tuple[int, ...],
    *,
    bare: bool,
) -> None:
    """Report on servers of the tiny pair, and step times of 61-layer ones."""
    source = PromptSource(Tokenizer.load(DEFAULT_MODELS / "tiny-target"))
    names = [(tiny, name) for name in methods] + [(long, name) for name in long_methods]
    specs = [make(Method(name), nodes=nodes if name == "ddtree" else ()) for make, name in names]
    servers = [
        Server(spec.variant(spec.name, bare=bare), free_port(i), LOGS)
        for i, spec in enumerate(specs)
    ]
    failed = 0
    try:
        for server in servers:
            try:
                print(f"== {server.spec.name}: ready in {server.wait_ready(200):.0f} s", flush=True)
                if server.spec.dummy:
                    report_steps(server.client)
                else:
                    report(server.client, source, speculates=server.spec.method.speculates)
            except (EngineError, OSError, KeyError):
                failed += 1
                traceback.print_exc()
                print(server.tail(15), flush=True)
    finally:
        for server in servers:
            server.stop()
    if failed:
        raise SystemExit(f"{failed} of {len(servers)} servers failed")


if __name__ == "__main__":
    main()
