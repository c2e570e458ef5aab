"""The gateway's configuration: read once (flags over ``LONGLEAF_GATEWAY_*``), then passed down."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=0, le=65_535)]
RoutingPolicyName = Literal["expected_cost", "prefix", "kv_pressure", "round_robin"]


def normalized_replica_url(text: str) -> str:
    """Check the base URL of a replica and strip its trailing slash; ``ValueError`` says why not."""
    text = text.strip()
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"replica {text!r} is not a URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"replica {text!r} is not a URL like http://host:30000")
    if parts.query or parts.fragment or parts.username is not None or port == 0:
        raise ValueError(f"replica {text!r} must be a plain base URL: scheme, host, port, path")
    return text.rstrip("/")


def split_tokenizer(entry: str) -> tuple[str, str]:
    """Model (``""`` for all) and directory of ``PATH`` or ``MODEL=PATH``; ``ValueError``."""
    model, equals, path = entry.strip().rpartition("=")
    if not path or (equals and not model):
        raise ValueError(f"tokenizer {entry!r} is not PATH or MODEL=PATH")
    return model, path


class GatewayConfig(BaseSettings):
    """Every setting of the gateway; times in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(
        env_prefix="LONGLEAF_GATEWAY_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    replicas: Annotated[tuple[str, ...], NoDecode] = ()
    """Base URLs of the replicas (in the environment: separated by commas)."""
    host: str = "127.0.0.1"
    port: Port = 8080
    metrics_host: str = "127.0.0.1"
    metrics_port: Port = 9080
    """Port of ``/metrics``, apart from the public port."""
    kubernetes_service: str | None = None
    """Find replicas as the endpoints of this Service, ``[namespace/]name``."""
    kubernetes_port: str | None = None
    """Number or name of the endpoints' port; by default the first."""
    kubernetes_scheme: Literal["http", "https"] = "http"
    """How the endpoints are spoken to."""
    kubernetes_api: str | None = None
    """API server; by default the one of the cluster that the gateway runs in."""
    kubernetes_token_file: Path | None = None
    """Bearer token for the API server; by default the pod's own."""
    kubernetes_ca_file: Path | None = None
    """Certificates that the API server is trusted by; by default the pod's."""
    upstream_ca_file: Path | None = None
    """Certificates that ``https`` replicas are trusted by; by default the system's."""
    tls_certificate_file: Path | None = None
    """Certificate chain (PEM) of the public port; with it, it speaks TLS alone."""
    tls_key_file: Path | None = None
    header_timeout: Seconds = 10.0
    """Longest time a client may take to send a request's head."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    """Longest head of a request."""
    write_timeout: Seconds = 60.0
    """Longest time a client may read nothing of what is sent to it."""
    otlp_endpoint: str | None = None
    """Send OpenTelemetry traces to this OTLP/HTTP endpoint."""
    api_key_file: Path | None = None
    """File of accepted API keys, one a line; without it the API is open to everyone."""
    upstream_api_key: SecretStr | None = None
    """Bearer key sent to the replicas; a client's own key never is."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20
    body_timeout: Seconds = 60.0
    """Longest silence of a client that is sending its request's body."""
    min_body_rate: Annotated[int, Field(ge=1)] = 8 * 1024
    """Bytes a second, on the whole, of a body that takes longer than ``body_timeout``."""
    receive_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Long bodies that are received at a time, together; at least ``max_body_bytes``, which is what
    one counts that does not tell its length. Further ones are made to wait."""
    routing: RoutingPolicyName = "expected_cost"
    prefix_index_bytes: Annotated[int, Field(ge=0)] = 16 * 2**20
    """Memory, for each replica, to remember which prompts it should have cached."""
    max_attempts: Annotated[int, Field(ge=1, le=16)] = 3
    """Replicas that one request may try, as long as none has sent an event."""
    connect_timeout: Seconds = 5.0
    max_connections: Annotated[int, Field(ge=1)] = 1024
    """Requests on one replica at most."""
    first_byte_timeout: Seconds = 1800.0
    """Longest wait for the first event, on however many replicas: a long prefill sends nothing at
    all before it."""
    hang_timeout: Seconds = 60.0
    """Silence (no health check passed, no token, no progress reported) after which requests that
    wait for a replica's first event try another."""
    breaker_failures: Annotated[int, Field(ge=1)] = 5
    """Failed requests in a row after which a replica gets none for a while, healthy or not."""
    breaker_pause: Seconds = 5.0
    """That while; twice as long after each trial that fails, up to 16 times."""
    silence_before_comment: Seconds = 15.0
    """Silence of a streamed answer after which a comment line keeps its connection alive. The
    first one commits the answer to status 200."""
    idle_timeout: Seconds = 300.0
    """Longest silence between two chunks of a started answer."""
    tokenize_timeout: Seconds = 30.0
    """Of a tokenizer worker over one body, and of a replica's ``/tokenize``."""
    health_interval: Seconds = 5.0
    """Interval at which a ready replica's health, models and limits are read."""
    recovery_interval: Seconds = 0.5
    """Interval of the health checks of a replica that is not ready."""
    health_timeout: Seconds = 5.0
    """Of one health check. SGLang's ``/health`` generates a token and takes about a second."""
    unhealthy_after: Annotated[int, Field(ge=1)] = 3
    """Failures in a row that make a ready replica not ready."""
    healthy_after: Annotated[int, Field(ge=1)] = 2
    """Successes in a row that make a replica ready again (the first time, one is enough)."""
    tokenizers: Annotated[tuple[str, ...], NoDecode] = ()
    """Directories with ``tokenizer.json`` (or ``tiktoken.model``) and a chat template, as ``PATH``
    or ``MODEL=PATH``; without one for its model, a prompt is counted by a replica."""
    tokenizer_workers: Annotated[int, Field(ge=1, le=64)] = 2
    """Processes that parse long bodies and count tokens; one is kept for short ones."""
    tokenizer_queue_size: Annotated[int, Field(ge=0)] = 1024
    """Requests that may wait for such a process."""
    tokenizer_queue_bytes: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Their bodies, together; one alone may be longer."""
    loads_interval: Seconds = 1.0
    """Interval at which a replica's load is read."""
    queue_size: Annotated[int, Field(ge=0)] = 512
    """Requests that may wait for room."""
    queue_bytes: Annotated[int, Field(gt=0)] = 128 * 2**20
    """Bodies that may wait, together."""
    queue_timeout: Seconds = 30.0
    """Longest wait for room."""
    aging_interval: Seconds = 2.0
    """Waiting time that counts as much as one step of priority, up to the highest that waits: 15
    steps within ``queue_timeout``, so that only keys below that starve."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 65_536
    """Prompt tokens in flight at most on one replica (a longer prompt runs alone among long ones).
    """
    short_prompt_tokens: Annotated[int, Field(ge=0)] = 4_096
    """Prompts up to this length may start beside a long one, and overtake it in the queue."""
    max_overtakes: Annotated[int, Field(ge=0)] = 32
    """Short prompts that may overtake one that waits."""
    assumed_completion_tokens: Annotated[int, Field(ge=1)] = 4_096
    """Of a completion whose request names no limit: reserved (at most 1/8 of the KV pool), and
    charged to its key until the true number is known."""
    tpot_ms: Annotated[float, Field(gt=0)] | None = None
    """Predicted milliseconds a token above which no further request starts on a replica."""
    ttft_ms: Annotated[float, Field(gt=0)] | None = None
    """Predicted milliseconds to the first token above which no further prompt starts."""
    key_reload_interval: Seconds = 2.0
    """Interval at which the key file is looked at for changes."""
    drain_timeout: Seconds = 600.0
    """Longest wait for running answers after SIGTERM."""

    @field_validator("replicas", "tokenizers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part for part in value.split(",") if part.strip())
        return value

    @field_validator("replicas")
    @classmethod
    def _check_replicas(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(normalized_replica_url(url) for url in value)
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"replica given twice: {', '.join(twice)}")
        return urls

    @field_validator("tokenizers")
    @classmethod
    def _check_tokenizers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        models = [split_tokenizer(entry)[0] for entry in value]
        if len(set(models)) < len(models):
            raise ValueError("two tokenizers for the same model")
        return tuple(entry.strip() for entry in value)

    @property
    def tokenizer_paths(self) -> dict[str, str]:
        """Tokenizer directory by model name; ``""`` stands for every other model."""
        return dict(split_tokenizer(entry) for entry in self.tokenizers)

    @field_validator("kubernetes_port")
    @classmethod
    def _check_kubernetes_port(cls, value: str | None) -> str | None:
        if value is not None and value.isdigit() and not 0 < int(value) < 65_536:
            raise ValueError(f"must be a port's name or its number up to 65535, got {value}")
        return value

    @field_validator("health_timeout")
    @classmethod
    def _check_health_timeout(cls, value: float) -> float:
        if value <= 1.0:
            raise ValueError(f"must be more than 1 s (a busy replica takes that long), got {value}")
        return value

    @model_validator(mode="after")
    def _check_ports(self) -> "GatewayConfig":
        if not self.replicas and self.kubernetes_service is None:
            raise ValueError(
                "no replica given: at least one --replica URL is needed, or --kubernetes-service"
            )
        if self.replicas and self.kubernetes_service is not None:
            raise ValueError("replicas are either given or found in Kubernetes, not both")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file belong together")
        if self.port and self.port == self.metrics_port:
            raise ValueError(f"port and metrics_port must differ, both are {self.port}")
        return self
