"""``longleaf embedded``: the engine on this machine's CPU, behind SGLang's HTTP surface."""

import sys
from pathlib import Path

import click

from longleaf.embedded.arguments import ServerArguments, server_options
from longleaf.embedded.config import ConfigError
from longleaf.embedded.load import DEFAULT_MODELS, load_models
from longleaf.embedded.options import EngineOptions, SpeculativeAlgorithm, SpeculativeOptions
from longleaf.embedded.weights import WeightsError

_SWITCH_SECONDS = 0.001
"""Longest wait of the event loop for the engine's thread to let go of the interpreter."""


@click.command("embedded")
@server_options(
    served_model_name=None,
    context_length=None,
    max_total_tokens=40_960,
    chunked_prefill_size=512,
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
@click.option(
    "--show-draft-text",
    is_flag=True,
    help="Tell the text of draft trees at /longleaf/trees; it is users' text.",
)
def embedded_command(
    server: ServerArguments,
    model_path: Path,
    speculative_draft_model_path: Path,
    speculative_algorithm: str,
    speculative_budget: int,
    speculative_topk: int,
    speculative_block: int | None,
    speculative_seed_chain: bool,
    show_draft_text: bool,
) -> None:
    """Serve the embedded engine: a numpy target and drafter with tree speculation, on this CPU."""
    from longleaf.embedded.server.run import serve_engine
    from longleaf.embedded.server.service import ServerOptions

    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        options = EngineOptions(
            target=model_path,
            drafter=speculative_draft_model_path,
            served_model_name=server.served_model_name or model_path.name,
            context_length=server.context_length,
            max_total_tokens=server.max_total_tokens,
            max_running_requests=server.max_running_requests,
            max_queued_requests=server.max_queued_requests,
            chunked_prefill_size=server.chunked_prefill_size,
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
    surface = ServerOptions(
        server.host,
        server.port,
        server.max_body_bytes,
        server.drain_seconds,
        show_draft_text=show_draft_text,
    )
    serve_engine(loaded, options, surface, server.log_level)
