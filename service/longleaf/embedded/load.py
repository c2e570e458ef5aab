"""Load a target, its drafter and its tokenizer, and start an engine on them."""

from dataclasses import dataclass
from pathlib import Path

from longleaf.ddtree import SamplingParams
from longleaf.embedded.config import ConfigError, DrafterConfig, TargetConfig
from longleaf.embedded.drafter import Drafter
from longleaf.embedded.engine import Engine
from longleaf.embedded.executor import Executor
from longleaf.embedded.fields import read_object
from longleaf.embedded.kv_pool import KvPool
from longleaf.embedded.loads import LoadCounters
from longleaf.embedded.memory import KvMemory
from longleaf.embedded.model_set import Models
from longleaf.embedded.options import EngineOptions, SchedulerOptions
from longleaf.embedded.recorder import Recorder
from longleaf.embedded.scheduler import Scheduler
from longleaf.embedded.step import DecodeStep
from longleaf.embedded.target import Target
from longleaf.embedded.tokenizer import Tokenizer
from longleaf.metrics import EngineMetrics

DEFAULT_MODELS = Path(__file__).parent / "models"
"""Where the package keeps the tiny target and its drafter."""
_EVICTED_SHARE = 10
"""A tenth of the pool gives way at once: evicted by the few slots that a step is short of, rows of
many requests end up among each other, and what is scattered is read slowly.
"""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server tells about the model."""

    name: str
    path: str
    model_type: str
    architectures: tuple[str, ...]
    context_length: int
    vocab_size: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Models, tokenizer and limits, ready to be scheduled.

    ``sampling``: what a request that says nothing about sampling gets.
    """

    models: Models
    tokenizer: Tokenizer
    info: ModelInfo
    limits: SchedulerOptions
    sampling: SamplingParams

    @property
    def kv_cache_bytes(self) -> int:
        """Size of the KV pool's arrays."""
        return sum(array.nbytes for array in self.models.pool.arrays())

    @property
    def block_size(self) -> int | None:
        """Anchor and drafted depths of the drafter; None without one."""
        return None if self.models.drafter is None else self.models.drafter.config.block_size

    def scheduler(self, options: EngineOptions, recorder: Recorder) -> Scheduler:
        """A scheduler on these models; it owns the pool."""
        capacity = self.limits.max_total_tokens
        memory = KvMemory(capacity, evict_at_least=max(1, capacity // _EVICTED_SHARE))
        counters = LoadCounters()
        decode = DecodeStep(self.models, memory, options.speculative)
        executor = Executor(self.models, memory, decode, recorder, counters)
        vocab_size = self.models.target.config.vocab_size
        return Scheduler(executor, memory, counters, self.tokenizer, vocab_size, self.limits)

    def start(self, options: EngineOptions, metrics: EngineMetrics) -> Engine:
        """An engine on these models; close it when done."""
        drafter = self.models.drafter
        recorder = Recorder(metrics, drafter.window_tokens if drafter is not None else None)
        return Engine(self.scheduler(options, recorder), recorder)


def load_models(options: EngineOptions) -> LoadedModels:
    """Read the checkpoints and set aside the pool. ``ConfigError`` and ``OSError`` say what is
    wrong.
    """
    target_config = TargetConfig.load(options.target)
    drafter_config = None
    if options.speculative.enabled:
        drafter_config = DrafterConfig.load(options.drafter)
        drafter_config.check_target(target_config)
        block = options.speculative.block
        if block is not None and block > drafter_config.block_size:
            raise ConfigError(
                f"speculative block must be at most the drafter's {drafter_config.block_size}, "
                f"got {block}"
            )
    longest = target_config.max_positions
    context_length = longest if options.context_length is None else options.context_length
    if context_length > longest:
        raise ConfigError(
            f"context length must be at most the model's {longest}, got {context_length}"
        )
    if drafter_config is not None and context_length > drafter_config.max_positions:
        raise ConfigError(
            f"context length must be at most the drafter's {drafter_config.max_positions}, "
            f"got {context_length}"
        )
    limits = SchedulerOptions(
        context_length=context_length,
        max_total_tokens=options.max_total_tokens,
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        chunked_prefill_size=options.chunked_prefill_size,
    )
    target = Target.load(options.target, drafter_config.taps if drafter_config else ())
    drafter = None
    if drafter_config is not None:
        drafter = Drafter.load(options.drafter, target)
    try:
        pool = KvPool(target_config, drafter_config, options.max_total_tokens)
    except MemoryError as error:
        raise ConfigError(
            f"max_total_tokens is {options.max_total_tokens}: no memory for such a pool ({error})"
        ) from None
    models = Models(target, drafter, pool, frozenset(target_config.eos_token_ids))
    read = [options.target] if drafter is None else [options.target, options.drafter]
    weight_bytes = sum((path / "model.safetensors").stat().st_size for path in read)
    raw = read_object(options.target / "config.json")
    info = ModelInfo(
        options.served_model_name,
        str(options.target),
        str(raw.get("model_type", "")),
        tuple(raw.get("architectures", ())),
        context_length,
        target_config.vocab_size,
        weight_bytes,
    )
    tokenizer, sampling = Tokenizer.load(options.target), _sampling(options.target)
    return LoadedModels(models, tokenizer, info, limits, sampling)


def _sampling(target: Path) -> SamplingParams:
    """What the checkpoint's ``generation_config.json`` names, SGLang's defaults for the rest."""
    path = target / "generation_config.json"
    values = read_object(path) if path.is_file() else {}
    names = ("temperature", "top_p", "top_k", "min_p")
    try:
        return SamplingParams(
            **{name: values[name] for name in names if values.get(name) is not None}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
