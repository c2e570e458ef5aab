"""``longleaf embedded``: the engine on this machine's CPU, behind SGLang's HTTP surface."""

import sys
from pathlib import Path

import click

from longleaf.embedded.config import ConfigError
from longleaf.embedded.load import DEFAULT_MODELS, load_models
from longleaf.embedded.options import EngineOptions, SpeculativeAlgorithm, SpeculativeOptions
from longleaf.embedded.weights import WeightsError

_SWITCH_SECONDS = 0.001
"""Longest wait of the event loop for the engine's thread to let go of the interpreter."""


@click.command("embedded")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=30000, show_default=True, type=click.IntRange(1, 65535), help="Port."
)
@click.option(
    "--model-path",
    type=click.Path(path_type=Path),
    default=DEFAULT_MODELS / "tiny-target",
    help="Checkpoint of the target (default: the tiny one of this package).",
)
@click.option(
    "--speculative-draft-model-path",
    type=click.Path(path_type=Path),
    default=DEFAULT_MODELS / "tiny-drafter",
    help="Checkpoint of the drafter (default: the tiny one of this package).",
)
@click.option("--served-model-name", default=None, help="Name in answers [the target's directory].")
@click.option(
    "--speculative-algorithm",
    type=click.Choice([str(algorithm) for algorithm in SpeculativeAlgorithm]),
    default=str(SpeculativeAlgorithm.DDTREE),
    show_default=True,
    help="none decodes one token a step.",
)
@click.option(
    "--speculative-budget", default=16, show_default=True, help="Drafted tree nodes a step."
)
@click.option(
    "--speculative-topk", default=8, show_default=True, help="Candidates a depth; 1 is a chain."
)
@click.option(
    "--speculative-block", type=int, default=None, help="Anchor plus drafted depths [drafter's]."
)
@click.option(
    "--speculative-seed-chain/--no-speculative-seed-chain",
    default=True,
    show_default=True,
    help="Keep the most probable chain in every tree.",
)
@click.option("--context-length", type=int, default=None, help="Longest context [the model's].")
@click.option("--max-total-tokens", default=40_960, show_default=True, help="Slots of the KV pool.")
@click.option(
    "--max-running-requests", default=8, show_default=True, help="Answers decoded together."
)
@click.option(
    "--max-queued-requests", type=int, default=None, help="Waiting requests at most [no limit]."
)
@click.option(
    "--chunked-prefill-size",
    default=512,
    show_default=True,
    help="Prompt tokens computed between two decode steps.",
)
@click.option("--max-body-bytes", default=64 << 20, show_default=True, help="Largest request body.")
@click.option(
    "--drain-seconds",
    default=60.0,
    show_default=True,
    help="How long running answers may take after SIGTERM.",
)
@click.option(
    "--show-draft-text",
    is_flag=True,
    help="Tell the text of draft trees at /longleaf/trees; it is users' text.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="How much the server logs.",
)
def embedded_command(
    host: str,
    port: int,
    model_path: Path,
    speculative_draft_model_path: Path,
    served_model_name: str | None,
    speculative_algorithm: str,
    speculative_budget: int,
    speculative_topk: int,
    speculative_block: int | None,
    speculative_seed_chain: bool,
    context_length: int | None,
    max_total_tokens: int,
    max_running_requests: int,
    max_queued_requests: int | None,
    chunked_prefill_size: int,
    max_body_bytes: int,
    drain_seconds: float,
    show_draft_text: bool,
    log_level: str,
) -> None:
    """Serve the embedded engine: a numpy target and drafter with tree speculation, on this CPU."""
    from longleaf.embedded.server.run import serve_engine
    from longleaf.embedded.server.service import ServerOptions

    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        options = EngineOptions(
            target=model_path,
            drafter=speculative_draft_model_path,
            served_model_name=served_model_name or model_path.name,
            context_length=context_length,
            max_total_tokens=max_total_tokens,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            chunked_prefill_size=chunked_prefill_size,
            speculative=SpeculativeOptions(
                algorithm=SpeculativeAlgorithm(speculative_algorithm),
                budget=speculative_budget,
                topk=speculative_topk,
                block=speculative_block,
                seed_chain=speculative_seed_chain,
            ),
        )
        loaded = load_models(options)
    except (ConfigError, WeightsError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    server = ServerOptions(
        host, port, max_body_bytes, drain_seconds, show_draft_text=show_draft_text
    )
    serve_engine(loaded, options, server, log_level)
