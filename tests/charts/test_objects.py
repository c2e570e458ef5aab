"""What the objects say, shape by shape."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from longleaf.embedded.command import embedded_command
from longleaf.engine.launch import engine_command
from longleaf.engine.options import EngineOptions, read_options
from longleaf.exporters.command import gpu_command
from longleaf.gateway.command import gateway_command, load_config
from longleaf.gateway.config import GatewayConfig
from longleaf.metrics import GatewayMetrics
from longleaf.probes.preflight.command import preflight_command
from longleaf.probes.preflight.report import all_checks
from longleaf.probes.preflight.trials import Trials
from longleaf.probes.watch import watch_command
from tests.charts.rendering import (
    CHART,
    SHAPES,
    Object,
    Rendered,
    Tools,
    container,
    environment,
    load_yaml,
)

ROOT = Path(__file__).parents[2]


def _gateway_config(rendered: Rendered) -> GatewayConfig:
    """The configuration that the gateway's own command reads from the rendered arguments."""
    arguments = container(rendered.gateway, "gateway")["args"]
    assert arguments[0] == "gateway"
    context = gateway_command.make_context("gateway", list(arguments[1:]))
    flags = {name: value for name, value in context.params.items() if name != "log_level"}
    return load_config(**flags)


def _terms(spec: Object) -> dict[str, Any]:
    node = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = node["nodeSelectorTerms"]
    return {one["key"]: (one["operator"], one["values"]) for one in term["matchExpressions"]}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_pods_are_locked_down(tools: Tools, shape: str) -> None:
    for name, spec in tools.template(shape).pod_specs():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", name
        for one in [*spec["containers"], *spec.get("initContainers", ())]:
            context = one["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= set(one["resources"]["requests"])
            assert "memory" in one["resources"]["limits"]
        tokens = spec["automountServiceAccountToken"]
        assert tokens is name.endswith("-gateway"), name


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_mounts_have_volumes_and_ports_have_names(tools: Tools, shape: str) -> None:
    rendered = tools.template(shape)
    claims = {
        claim["metadata"]["name"]
        for claim in rendered.engines["spec"].get("volumeClaimTemplates", ())
    }
    for name, spec in rendered.pod_specs():
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        if name.endswith("-engine"):
            volumes |= claims
        mounted = {
            mount["name"]
            for one in [*spec["containers"], *spec.get("initContainers", ())]
            for mount in one.get("volumeMounts", ())
        }
        assert mounted == volumes, name
    for service in (one for one in rendered.objects if one["kind"] == "Service"):
        for port in service["spec"]["ports"]:
            assert {"name", "protocol", "port", "targetPort"} == set(port)


def test_an_engine_takes_the_whole_node(default: Rendered) -> None:
    spec = default.engine
    for name in ("engine", "preflight"):
        resources = container(spec, name)["resources"]
        assert resources["requests"]["nvidia.com/gpu"] == "8"
        assert resources["limits"]["nvidia.com/gpu"] == "8"
    terms = _terms(spec)
    assert terms["nvidia.com/gpu.count"] == ("Gt", ["7"])
    assert terms["nvidia.com/gpu.compute.major"] == ("In", ["12"])
    operator, products = terms["nvidia.com/gpu.product"]
    assert (operator, len(products)) == ("In", 3)
    assert all(
        product.startswith("NVIDIA-RTX-PRO-6000-Blackwell-") and len(product) <= 63
        for product in products
    )
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_shared_memory_is_memory(default: Rendered) -> None:
    volumes = {volume["name"]: volume for volume in default.engine["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    for name in ("engine", "preflight"):
        mounts = {mount["name"]: mount for mount in container(default.engine, name)["volumeMounts"]}
        assert mounts["shm"]["mountPath"] == "/dev/shm"
        assert mounts["models"]["readOnly"] is True


def test_weights_may_load_for_an_hour_and_a_busy_engine_lives(default: Rendered) -> None:
    engine = container(default.engine, "engine")
    startup, liveness = engine["startupProbe"], engine["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert startup["exec"] == engine["readinessProbe"]["exec"]
    assert startup["initialDelaySeconds"] == 15  # a killed predecessor's file may be there
    ready = startup["exec"]["command"][-1]
    assert f"--ready-file={ready}" in engine["args"]
    assert liveness["httpGet"]["path"] == "/health"
    assert liveness["timeoutSeconds"] > 20  # SGLang's own limit of that request
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 600


@pytest.mark.parametrize("longest", [60, 3600, 7200])
def test_everything_waits_for_the_longest_request(tools: Tools, longest: int) -> None:
    rendered = tools.template("default", {"longestRequestSeconds": longest})
    engine, gateway = rendered.engine, rendered.gateway
    config = _gateway_config(rendered)
    assert config.drain_timeout == config.first_byte_timeout == longest
    context = engine_command.make_context("engine", list(container(engine, "engine")["args"][1:]))
    assert context.params["stop_seconds"] == longest
    for spec, name in ((engine, "engine"), (gateway, "gateway")):
        sleep = int(container(spec, name)["lifecycle"]["preStop"]["exec"]["command"][1])
        assert sleep > 0
        assert spec["terminationGracePeriodSeconds"] > sleep + longest


def test_the_engine_is_started_as_its_command_reads(full: Rendered) -> None:
    engine = container(full.engine, "engine")
    context = engine_command.make_context("engine", list(engine["args"][1:]))
    arguments = context.params["sglang_args"]
    assert context.params["start_seconds"] == 3600
    for word in (
        *("--tp-size=8", "--context-length=200000", "--max-total-tokens=218000"),
        *("--page-size=1", "--attention-backend=longleaf_mla", "--speculative-algorithm=DDTREE"),
        *("--speculative-num-draft-tokens=64", "--speculative-draft-window-size=2048"),
        *("--kv-cache-dtype=fp8_e4m3", "--api-key=$(LONGLEAF_ENGINE_API_KEY)"),
        *("--model-path=/models/target", "--speculative-draft-model-path=/models/drafter"),
    ):
        assert word in arguments
    assert arguments[-2:] == ("--reasoning-parser=kimi_k2", "--tool-call-parser=kimi_k2")
    variables = environment(engine)
    assert read_options(variables) == EngineOptions(
        nodes=(1, 8, 16, 32, 64),
        grammar_nodes=8,
        sampling_seed=1_234_567,
        step_ms=(
            (1, 8192, 18.5),
            (8, 8192, 21.0),
            (16, 8192, 22.5),
            (32, 8192, 26.25),
            (64, 8192, 33.0),
        ),
    )
    assert variables["NCCL_P2P_DISABLE"] == "1"
    assert variables["NCCL_DEBUG"] == "INFO"
    assert "NCCL_P2P_LEVEL" not in variables
    assert variables["LONGLEAF_ENGINE_API_KEY"]["secretKeyRef"]["name"] == "longleaf-engine-key"


def test_files_beside_the_weights_run_unless_the_values_refuse(tools: Tools) -> None:
    """Kimi K2.6's tokenizer is such a file."""
    for asked in (True, False):
        rendered = tools.template("default", {"model.trustRemoteCode": asked})
        arguments = container(rendered.engine, "engine")["args"]
        assert ("--trust-remote-code" in arguments) is asked
        assert "--disable-prefill-cuda-graph" in arguments


@pytest.mark.parametrize("major", ["3", "4"])
def test_the_users_environment_replaces_the_charts(tools: Tools, major: str) -> None:
    values = {
        "engine.extraEnv": [
            {"name": "NCCL_DEBUG", "value": "TRACE"},
            {"name": "HOME", "value": "/elsewhere"},
            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        ],
        "engine.nccl.env.NCCL_P2P_DISABLE": "0",
        "gateway.extraEnv": [
            {"name": "LONGLEAF_GATEWAY_UPSTREAM_API_KEY", "value": "own"},
        ],
    }
    rendered = tools.template("full", values, major=major)
    named = {
        one["name"]: [entry["name"] for entry in one.get("env", ())]
        for _, spec in rendered.pod_specs()
        for one in [*spec["containers"], *spec.get("initContainers", ())]
    }
    for name, names in named.items():
        assert len(set(names)) == len(names), name
    variables = environment(container(rendered.engine, "engine"))
    assert variables["NCCL_DEBUG"] == "TRACE"
    assert variables["NCCL_P2P_DISABLE"] == "0"
    assert variables["NCCL_IB_DISABLE"] == "1"
    download = environment(container(rendered.engine, "download"))
    assert (download["HOME"], download["HTTPS_PROXY"]) == ("/elsewhere", "http://proxy:3128")
    assert download["HF_TOKEN"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert environment(container(rendered.gateway, "gateway")) == {
        "LONGLEAF_GATEWAY_UPSTREAM_API_KEY": "own"
    }


def test_the_schema_knows_the_plugins_options() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    speculative = schema["properties"]["engine"]["properties"]["speculative"]["properties"]
    # The node counts have a value of their own, which is held to `nodes`.
    known = {field.name for field in fields(EngineOptions)} - {"nodes"}
    assert set(speculative["options"]["properties"]) == known


def test_preflight_sees_what_the_engine_sees(full: Rendered) -> None:
    engine, preflight = container(full.engine, "engine"), container(full.engine, "preflight")
    assert [one["name"] for one in full.engine["initContainers"]] == ["download", "preflight"]
    for field in ("image", "env", "volumeMounts", "resources"):
        assert preflight[field] == engine[field], field


def test_preflight_is_asked_what_the_engine_is_told(full: Rendered) -> None:
    arguments = container(full.engine, "preflight")["args"]
    params = preflight_command.make_context("preflight", list(arguments[1:])).params
    assert params["as_json"] is True
    assert (params["gpus"], params["nodes"], params["block_size"]) == (8, 64, 8)
    assert (params["context_length"], params["kv_pool_tokens"]) == (200_000, 218_000)
    assert (params["kv_cache_dtype"], params["draft_window"]) == ("fp8_e4m3", 2048)
    assert (params["memory_fraction"], params["shared_memory"]) == (0.9, 32 << 30)
    assert params["compute_majors"] == (12,)
    assert len(params["products"]) == 3
    assert set(params["skip"]) <= set(all_checks(Trials()))
    engine = container(full.engine, "engine")["args"]
    assert f"--model-path={params['target']}" in engine
    assert f"--speculative-draft-model-path={params['drafter']}" in engine


def test_nccl_is_set_for_pcie(default: Rendered) -> None:
    variables = environment(container(default.engine, "engine"))
    assert {name: value for name, value in variables.items() if name.startswith("NCCL")} == {
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "WARN",
    }


def test_the_gateway_follows_the_engines_service(full: Rendered) -> None:
    config = _gateway_config(full)
    service = full.of("Service", "chat-longleaf-engine")
    assert config.kubernetes_service == "serving/chat-longleaf-engine"
    assert service["spec"]["clusterIP"] == "None"
    assert config.kubernetes_port == service["spec"]["ports"][0]["name"]
    assert full.engines["spec"]["serviceName"] == service["metadata"]["name"]
    assert config.host == config.metrics_host == "0.0.0.0"
    assert (config.tpot_ms, config.ttft_ms) == (60, 120_000)
    assert str(config.api_key_file) == "/etc/longleaf/keys/keys"
    assert str(config.tls_key_file) == "/etc/longleaf/tls/tls.key"
    gateway = container(full.gateway, "gateway")
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    key = environment(gateway)["LONGLEAF_GATEWAY_UPSTREAM_API_KEY"]
    assert key["secretKeyRef"] == {"name": "longleaf-engine-key", "key": "key"}


def test_rollouts_keep_gateways(default: Rendered) -> None:
    spec = default.of("Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    budget = default.of("PodDisruptionBudget", "chat-longleaf-gateway")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == spec["selector"]


def test_the_gateways_account_may_watch_endpointslices_alone(default: Rendered) -> None:
    role = default.of("Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    binding = default.of("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == default.gateway["serviceAccountName"]
    assert subject["namespace"] == "serving"
    assert not {"ClusterRole", "ClusterRoleBinding"} & default.kinds()


def test_network_policy_denies_by_default(default: Rendered) -> None:
    deny = default.of("NetworkPolicy", "chat-longleaf-deny")["spec"]
    assert set(deny) == {"podSelector", "policyTypes"}
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    for one in default.objects:
        if one["kind"] in {"Deployment", "StatefulSet"}:
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert deny["podSelector"]["matchLabels"].items() <= labels.items()
    engine = default.of("NetworkPolicy", "chat-longleaf-engine")["spec"]
    (rule,) = engine["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 30000}]
    peer = rule["from"][0]["podSelector"]["matchLabels"]
    gateway = default.of("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer.items() <= gateway.items()
    assert [port["port"] for to in engine["egress"] for port in to["ports"]] == [53, 53]


def test_downloads_open_the_hub_and_closed_lists_are_kept(full: Rendered) -> None:
    engine = full.of("NetworkPolicy", "chat-longleaf-engine")["spec"]
    assert [port["port"] for to in engine["egress"] for port in to["ports"]] == [53, 53, 443]
    gateway = full.of("NetworkPolicy", "chat-longleaf-gateway")["spec"]
    clients = gateway["ingress"][0]["from"]
    assert clients[-1]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    api = gateway["egress"][2]
    assert api["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    assert [port["port"] for port in api["ports"]] == [6443]


def test_minimal_needs_no_gpu(minimal: Rendered) -> None:
    assert "nvidia.com/gpu:" not in minimal.text
    assert "affinity" not in minimal.engine
    engine = container(minimal.engine, "engine")
    assert engine["image"] == container(minimal.gateway, "gateway")["image"]
    assert "initContainers" not in minimal.engine
    context = embedded_command.make_context("embedded", list(engine["args"][1:]))
    assert context.params["served_model_name"] == "longleaf-tiny"
    assert context.params["max_total_tokens"] == 40_960
    assert engine["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_multi_node_spreads_and_keeps_the_charts_own_terms(multi_node: Rendered) -> None:
    spec = multi_node.engines["spec"]
    assert spec["replicas"] == 4
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "local-nvme"
    engine = multi_node.engine
    assert "nvidia.com/gpu.product" in _terms(engine)
    assert engine["affinity"]["podAntiAffinity"]
    spread = engine["topologySpreadConstraints"]
    assert [one["topologyKey"] for one in spread] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    for one in spread:
        assert one["labelSelector"]["matchLabels"] == spec["selector"]["matchLabels"]


def test_autoscalers_own_the_replicas(full: Rendered) -> None:
    assert full.of("Deployment")["spec"]["replicas"] == 2
    assert full.engines["spec"]["replicas"] == 1
    target = full.of("ScaledObject")["spec"]
    assert target["scaleTargetRef"]["kind"] == "StatefulSet"
    assert target["scaleTargetRef"]["name"] == full.engines["metadata"]["name"]
    query = target["triggers"][0]["metadata"]["query"]
    service = full.of("Service", "chat-longleaf-gateway-metrics")["metadata"]["name"]
    assert query == (
        f'sum(longleaf_gateway_queue_depth{{namespace="serving",service="{service}"}})'
    )
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    assert "longleaf_gateway_queue_depth" in {one.name for one in registry.collect()}
    scaler = full.of("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == full.of("Deployment")["metadata"]["name"]


def test_a_first_install_starts_where_the_autoscaler_may(tools: Tools) -> None:
    values = {"keda.minReplicas": 3, "gateway.replicas": 5}
    rendered = tools.template("full", values)
    assert rendered.engines["spec"]["replicas"] == 3
    assert rendered.of("Deployment")["spec"]["replicas"] == 5


def test_a_rollout_of_gateways_waits_for_weights(tools: Tools) -> None:
    rendered = tools.template("default", {"engine.startup.seconds": 5400})
    assert rendered.of("Deployment")["spec"]["progressDeadlineSeconds"] == 6000


def test_proxies_do_not_end_or_hold_back_streams(full: Rendered) -> None:
    annotations = full.of("Ingress")["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"
    assert annotations[f"{prefix}proxy-buffering"] == "off"
    assert annotations[f"{prefix}proxy-read-timeout"] == "3600"
    assert annotations[f"{prefix}proxy-body-size"] == "128m"
    (rule,) = full.of("HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_monitors_select_what_there_is(full: Rendered) -> None:
    monitor = full.of("ServiceMonitor")["spec"]
    service = full.of("Service", "chat-longleaf-gateway-metrics")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    public = full.of("Service", "chat-longleaf-gateway")
    assert not monitor["selector"]["matchLabels"].items() <= public["metadata"]["labels"].items()
    ports = {port["name"] for one in full.engine["containers"] for port in one["ports"]}
    engines = full.of("PodMonitor", "chat-longleaf-engine")["spec"]
    scraped = {one["port"] for one in engines["podMetricsEndpoints"]}
    assert scraped == ports == {"http", "gpu-metrics"}
    labels = full.engines["spec"]["template"]["metadata"]["labels"]
    assert engines["selector"]["matchLabels"].items() <= labels.items()
    probes = full.of("PodMonitor", "chat-longleaf-probe")["spec"]
    pods = full.of("StatefulSet", "chat-longleaf-probe")["spec"]["template"]
    assert probes["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert not probes["selector"]["matchLabels"].items() <= labels.items()


def test_the_exporter_is_ours_unless_another_is_given(tools: Tools, full: Rendered) -> None:
    exporter = container(full.engine, "gpu-exporter")
    assert exporter["image"] == container(full.engine, "engine")["image"]
    assert exporter["command"] == ["longleaf"]
    group, command, *words = exporter["args"]
    assert (group, command) == ("exporter", "gpu")
    params = gpu_command.make_context("gpu", words).params
    assert (params["host"], params["port"]) == ("0.0.0.0", exporter["ports"][0]["containerPort"])
    values = {"gpuExporter.image.repository": "dcgm-exporter", "gpuExporter.image.tag": "4"}
    other = container(tools.template("full", values).engine, "gpu-exporter")
    assert other["image"] == "dcgm-exporter:4"
    assert "command" not in other


def test_rules_and_dashboards_are_those_of_ops(full: Rendered) -> None:
    files = sorted((ROOT / "ops" / "prometheus").glob("*.yml"))
    groups = [group for path in files for group in load_yaml(path)["groups"]]
    assert full.of("PrometheusRule")["spec"]["groups"] == groups
    boards = full.of("ConfigMap", "chat-longleaf-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    paths = sorted((ROOT / "ops" / "dashboards" / "json").glob("*.json"))
    assert len(paths) >= 3
    found = {name: json.loads(text) for name, text in boards["data"].items()}
    assert found == {path.name: json.loads(path.read_text()) for path in paths}


def test_another_version_of_the_chart_starts_no_pod_anew(tools: Tools, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "longleaf")
    description = tmp_path / "longleaf" / "Chart.yaml"
    text = re.sub(r"(?m)^version: .*$", "version: 99.1.2", description.read_text())
    description.write_text(text)
    newer = tools.helm(
        *("template", "chat", tmp_path / "longleaf", "--namespace", "serving"),
        *("-f", SHAPES["full"], "--kube-version", "1.33.0"),
    )
    old = tools.template("full")
    assert "longleaf-99.1.2" in newer
    for kind, name in (
        ("StatefulSet", "chat-longleaf-engine"),
        ("StatefulSet", "chat-longleaf-probe"),
        ("Deployment", "chat-longleaf-gateway"),
    ):
        new = Rendered(newer).of(kind, name)["spec"]["template"]
        assert new == old.of(kind, name)["spec"]["template"]
        assert new["metadata"]["labels"]["team"] == "serving"


def _watched(rendered: Rendered) -> dict[str, Any]:
    """What the probe's own command reads of its arguments."""
    sets = rendered.of("StatefulSet", "chat-longleaf-probe")["spec"]["template"]["spec"]
    arguments = container(sets, "probe")["args"]
    assert arguments[:2] == ["probe", "watch"]
    return watch_command.make_context("watch", list(arguments[2:])).params


def test_each_engine_has_a_probe_which_shows_its_key(full: Rendered, tools: Tools) -> None:
    sets = full.of("StatefulSet", "chat-longleaf-probe")
    spec = sets["spec"]["template"]["spec"]
    params = _watched(full)
    engine = "http://chat-longleaf-engine-$(ENGINE).chat-longleaf-engine.serving:30000"
    assert (params["url"], params["metrics_url"]) == (engine, f"{engine}/metrics")
    assert full.engines["spec"]["serviceName"] == "chat-longleaf-engine"
    assert (params["contexts"], params["repeats"]) == ((1024, 16384, 131072), 3)
    assert (params["every"], params["start_seconds"], params["max_tokens"]) == (21600, 3600, 64)
    one = container(spec, "probe")
    variables = environment(one)
    number = "metadata.labels['apps.kubernetes.io/pod-index']"
    assert variables["ENGINE"] == {"fieldRef": {"fieldPath": number}}
    key = environment(container(full.engine, "engine"))["LONGLEAF_ENGINE_API_KEY"]
    assert variables["LONGLEAF_PROBE_API_KEY"] == key
    assert one["image"] == container(full.gateway, "gateway")["image"]
    (port,) = one["ports"]
    assert (port["containerPort"], params["host"]) == (params["port"], "0.0.0.0")
    (scraped,) = full.of("PodMonitor", "chat-longleaf-probe")["spec"]["podMetricsEndpoints"]
    assert scraped["port"] == port["name"]
    # Those that an autoscaler adds come and go.
    scaled = tools.template("full", {"engine.replicas": 3, "keda.minReplicas": 2})
    assert scaled.of("StatefulSet", "chat-longleaf-probe")["spec"]["replicas"] == 2


@pytest.mark.parametrize("shape", ["default", "minimal", "multi-node"])
def test_probes_are_asked_for(tools: Tools, shape: str) -> None:
    assert "probe watch" not in tools.template(shape).text
    rendered = tools.template(shape, {"probe.enabled": True})
    replicas = rendered.of("StatefulSet", "chat-longleaf-probe")["spec"]["replicas"]
    assert replicas == rendered.engines["spec"]["replicas"]
    assert _watched(rendered)["contexts"] is None
    # Engines are as they were: none is started anew.
    assert rendered.engines == tools.template(shape).engines


def test_labels_and_annotations_stand_once(tools: Tools) -> None:
    values = {
        "engine.podLabels": {"team": "engines"},
        "engine.podAnnotations": {"kubectl.kubernetes.io/default-container": "gpu-exporter"},
        "monitoring.labels": {"team": "watchers"},
        "ingress.annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "9"},
    }
    rendered = tools.template("full", values)
    metadata = rendered.engines["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "engines"
    assert metadata["annotations"]["kubectl.kubernetes.io/default-container"] == "gpu-exporter"
    assert (
        rendered.of("PodMonitor", "chat-longleaf-engine")["metadata"]["labels"]["team"]
        == "watchers"
    )
    annotations = rendered.of("Ingress")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "9"
    assert annotations["nginx.ingress.kubernetes.io/proxy-send-timeout"] == "3600"
    for one in ("team:", "proxy-read-timeout", "default-container:"):
        for text in rendered.text.split("\n---\n"):
            assert text.count(one) <= 2, text
    gateway = rendered.of("Deployment")["spec"]["template"]["metadata"]
    assert gateway["labels"]["team"] == "serving"


def test_budgets_let_unhealthy_pods_go(default: Rendered) -> None:
    for name in ("chat-longleaf-engine", "chat-longleaf-gateway"):
        spec = default.of("PodDisruptionBudget", name)["spec"]
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_long_names_that_differ_at_their_end_stay_apart(tools: Tools) -> None:
    names = [
        tools.template("default", release="a" * 52 + end).engines["metadata"]["name"]
        for end in "xy"
    ]
    assert names[0] != names[1]
    assert all(len(name) <= 47 for name in names)


def test_long_names_stay_valid(tools: Tools) -> None:
    rendered = tools.template("full", release="a" * 53)
    names = [one["metadata"]["name"] for one in rendered.objects]
    assert max(map(len, names)) <= 63
    assert len({(one["kind"], one["metadata"]["name"]) for one in rendered.objects}) == len(names)


def test_notes_say_how_to_call_it(tools: Tools) -> None:
    text = tools.helm(
        *("install", "chat", "charts/longleaf", "--dry-run=client", "--namespace", "serving")
    )
    notes = text.partition("NOTES:")[2]
    assert "/v1/chat/completions" in notes
    assert "logs chat-longleaf-engine-0 -c preflight" in notes
    assert "--wait needs --timeout 4200s" in notes
    assert "whoever reaches the gateway may use it" in notes
    assert "Secrets" not in notes
    keys = ("--set", "gateway.apiKeys.existingSecret=keys")
    text = tools.helm("install", "chat", "charts/longleaf", "--dry-run=client", *keys)
    notes = text.partition("NOTES:")[2]
    assert '-H "Authorization: Bearer $API_KEY"' in notes
    assert "a line of the Secret keys, key keys" in notes
    assert "helm test will be refused" in notes
    assert "whoever reaches" not in notes
    assert "once these Secrets are in the namespace: keys\n" in notes
    both = ("--set", "gateway.tls.secretName=tls,gateway.engineApiKey.existingSecret=keys")
    notes = tools.helm("install", "chat", "charts/longleaf", "--dry-run=client", *keys, *both)
    assert "once these Secrets are in the namespace: keys, tls\n" in notes


def test_notes_tell_of_probes(tools: Tools) -> None:
    asked = ("install", "chat", "charts/longleaf", "--dry-run=client", "-n", "serving")
    said = "kubectl -n serving logs chat-longleaf-probe-0"
    assert said not in tools.helm(*asked)
    notes = tools.helm(*asked, "--set", "probe.enabled=true").partition("NOTES:")[2]
    assert said in notes
    assert "no alert hears of them" in notes
    pods = ("--set", "monitoring.podMonitor.enabled=true")
    notes = tools.helm(*asked, "--set", "probe.enabled=true", *pods).partition("NOTES:")[2]
    assert said in notes
    assert "no alert hears" not in notes


def test_notes_tell_of_routes_and_autoscalers(tools: Tools) -> None:
    keda = ("--set", "keda.enabled=true", "--set", "keda.minReplicas=3")
    route = ("--set-json", 'httpRoute={"enabled":true,"parentRefs":[{"name":"public"}]}')
    host = ("--set-json", 'httpRoute.hostnames=["chat.example.com"]')
    text = tools.helm(
        *("install", "chat", "charts/longleaf", "--dry-run=client", *keda, *route, *host)
    )
    notes = text.partition("NOTES:")[2]
    assert ": 3 engine(s) of kind sglang" in notes
    assert "URL=https://chat.example.com" in notes
    assert "nothing scales" in notes


def test_the_notes_command_streams_an_answer(tools: Tools, gateway_url: str) -> None:
    text = tools.helm(
        *("install", "chat", "charts/longleaf", "--dry-run=client", "-f", SHAPES["minimal"])
    )
    command = "curl" + text.partition("  curl")[2].partition("\n\n")[0]
    done = subprocess.run(
        ["sh", "-euc", command],
        env={"PATH": os.environ["PATH"], "URL": gateway_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *chunks, last = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert last == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"] for line in chunks]
    assert "1, 2, 3" in "".join(one[0]["delta"].get("content") or "" for one in deltas if one)


def test_helm_test_is_a_chat_completion(minimal: Rendered, gateway_url: str) -> None:
    """The test pod's own script, against a running gateway and embedded engine."""
    pod = minimal.of("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    chat = container(pod["spec"], "chat")
    variables = environment(chat)
    assert variables["URL"] == "http://chat-longleaf-gateway.serving:80"
    done = subprocess.run(
        [sys.executable, "-c", chat["args"][0]],
        env={**os.environ, **variables, "URL": gateway_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1, 2, 3" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-c", chat["args"][0]],
        env={**os.environ, **variables, "URL": gateway_url, "MODEL": "another"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode != 0
