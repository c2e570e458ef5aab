"""values.yaml and its schema: complete, explained, accepting what is real, refusing the rest."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from longleaf.probes.preflight.report import all_checks
from longleaf.probes.preflight.trials import Trials
from tests.charts.rendering import CHART, SHAPES, HelmError, Rendered, Tools, load_yaml


def _keys(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            yield from _keys(inner, (*path, name))


def test_every_value_has_a_comment() -> None:
    """A comment stands above each key, but above those that only group, and Kubernetes' own."""
    kubernetes = {"resources", "embeddedResources", "podSecurityContext", "securityContext"}
    kubernetes |= {"tolerations", "topologySpread"}
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare: list[str] = []
    inside: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        found = re.match(r"^( *)([A-Za-z0-9_.]+):(.*)$", line)
        if found is None:
            continue
        indent, name = len(found[1]), found[2]
        inside = [entry for entry in inside if entry[0] < indent]
        above = {entry[1] for entry in inside}
        foreign = above & kubernetes or {"networkPolicy", "monitoring"} <= above
        explained = lines[number - 1].lstrip().startswith("#")
        group = not found[3].strip() and not lines[number + 1].lstrip().startswith("-")
        if not (explained or group or foreign):
            bare.append(f"{number + 1}: {line.strip()}")
        inside.append((indent, name))
    assert bare == []


def _resolve(schema: Any, root: Any) -> Any:
    while "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def test_schema_and_values_name_the_same() -> None:
    root = json.loads((CHART / "values.schema.json").read_text())
    values = load_yaml(CHART / "values.yaml")

    def compare(value: Any, schema: Any, path: str) -> None:
        schema = _resolve(schema, root)
        named = schema.get("properties")
        if not isinstance(value, dict) or named is None:
            return
        assert schema["additionalProperties"] is False, path
        required_in_values = set(named) - {"global"}
        if path.rpartition(".")[2] not in {
            *("affinity", "resources", "embeddedResources", "options")
        }:
            assert required_in_values == set(value), path
        for name, inner in value.items():
            compare(inner, named[name], f"{path}.{name}")

    compare(values, root, "")
    assert len(list(_keys(values))) > 150


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("engine.replica", 2, "replica"),
        ("gatway", {}, "gatway"),
        ("gateway.autoscaling.enable", True, "enable"),
        ("engine.tensorParallel", 4, "tensorParallel"),
        ("engine.gpus", 7, "gpus"),
        ("engine.contextLength", 300_000, "above engine.kvPoolTokens of 218000"),
        ("engine.contextLength", "200k", "contextLength"),
        ("engine.speculative.draftWindow", 4, "below the block of 8"),
        ("engine.speculative.nodes", 129, "nodes"),
        ("engine.speculative.capturedNodes", [1, 64], "above nodes of 32"),
        ("engine.memoryFraction", 1.5, "memoryFraction"),
        ("engine.kvCacheDtype", "fp4", "kvCacheDtype"),
        ("engine.liveness.timeoutSeconds", 1, "timeoutSeconds"),
        ("engine.nccl.env", {"NCCL_DEBUG": 1}, "NCCL_DEBUG"),
        ("engine.nccl.env", {"CUDA_X": "1"}, "CUDA_X"),
        ("engine.sharedMemory", "lots", "sharedMemory"),
        ("engine.image.digest", "sha256:12", "digest"),
        ("engine.nodeSelector", {"a": True}, "nodeSelector"),
        ("gateway.routing", "random", "routing"),
        ("gateway.service.port", 70_000, "port"),
        ("model.volume.type", "claim", "give model.volume.claimName"),
        ("model.targetDirectory", "../secrets", "targetDirectory"),
        ("model.download.enabled", True, "give model.download.targetRevision"),
        ("model.download.targetRevision", "main", "targetRevision"),
        ("httpRoute.enabled", True, "parentRefs"),
        ("gateway.autoscaling.maxReplicas", 1, "above maxReplicas of 1"),
        ("longestRequestSeconds", 0, "longestRequestSeconds"),
        ("networkPolicy.apiServerCidrs", ["everywhere"], "apiServerCidrs"),
        ("keda.minReplicas", 9, "keda.minReplicas is 9, above maxReplicas of 4"),
        ("keda.minReplicas", 0, "minReplicas"),
        ("engine.servedModelName", "kimi: k2", "servedModelName"),
        ("engine.servedModelName", "kimi 'k2'", "servedModelName"),
        ("gateway.otlpEndpoint", "http://a b", "otlpEndpoint"),
        ("model.volume.hostPath", "/a: b", "hostPath"),
        ("commonLabels", {"app.kubernetes.io/name": "x"}, "commonLabels"),
        ("commonLabels", {"helm.sh/chart": "x"}, "commonLabels"),
        ("engine.podLabels", {"longleaf.dev/serving": "x"}, "podLabels"),
        ("gateway.podLabels", {"app.kubernetes.io/component": "x"}, "podLabels"),
        ("fullnameOverride", "my.chat", "fullnameOverride"),
        ("fullnameOverride", "7b-chat", "objects would be named 7b-chat-"),
        ("engine", None, "engine"),
        ("gateway.tls", None, "tls"),
        ("engine.replicas", None, "replicas"),
        ("engine.contextLength", 1e24, "contextLength"),
        ("preflight.skip", ["gpu-colour"], "skip"),
        ("ingress.enabled", True, "give ingress.host"),
        ("engine.sharedMemory", "300Gi", "above engine.resources.limits.memory of 256Gi"),
        (
            "gateway.resources",
            {"requests": {"cpu": 4}, "limits": {"cpu": "3900m", "memory": "2Gi"}},
            "gateway.resources.requests.cpu is 4, above its limit of 3900m",
        ),
        (
            "engine.resources.requests.memory",
            "1.5Ti",
            "engine.resources.requests.memory is 1.5Ti, above its limit of 256Gi",
        ),
        ("gateway.serviceAccount.create", False, "give gateway.serviceAccount.name"),
        ("probe", {"enabled": True, "contexts": [199_937]}, "context length of 200000"),
        ("probe.contexts", ["16k"], "contexts"),
        ("gateway.podSecurityContext.runAsUser", "app", "runAsUser"),
        ("engine.securityContext.readOnlyRootFilesystem", "yes", "readOnlyRootFilesystem"),
        ("httpRoute.hostnames", ["Bad Host"], "hostnames"),
        ("probe.everySeconds", 5, "everySeconds"),
    ],
)
def test_wrong_values_are_refused(tools: Tools, name: str, value: Any, complaint: str) -> None:
    with pytest.raises(HelmError) as caught:
        tools.template("default", {name: value})
    assert complaint in str(caught.value)


@pytest.mark.parametrize("release", ["7b-chat", "42", "kimi.k2"])
def test_a_release_whose_services_could_not_be_named_is_refused(tools: Tools, release: str) -> None:
    with pytest.raises(HelmError, match="give a fullnameOverride"):
        tools.template("default", release=release)
    named = tools.template("default", {"fullnameOverride": "on"}, release=release)
    labels = named.engines["spec"]["selector"]["matchLabels"]
    assert labels["app.kubernetes.io/instance"] == release
    assert named.of("Service", "on-engine")["spec"]["selector"].items() >= labels.items()


@pytest.mark.parametrize("word", ["on", "n", "y", "null", "true"])
def test_words_that_yaml_knows_are_names(tools: Tools, word: str) -> None:
    values = {
        "nameOverride": word,
        "priorityClass.name": word,
        "model.volume.claimName": "1e3",
        "monitoring.dashboards.label": word,
        "engine.servedModelName": "2024",
        "engine.priorityClassName": word,
        "engine.runtimeClassName": "42",
        "gateway.apiKeys.existingSecret": "42",
        "gateway.apiKeys.key": word,
        "gateway.serviceAccount.name": word,
        "ingress.className": word,
        "tests.apiKeySecret.name": "1e3",
    }
    rendered = tools.template("full", values, release=word)

    def keys(value: Any) -> Iterator[Any]:
        for name, inner in value.items() if isinstance(value, dict) else ():
            yield name
            yield from keys(inner)
        for inner in value if isinstance(value, list) else ():
            yield from keys(inner)

    for one in rendered.objects:
        assert all(isinstance(key, str) for key in keys(one))
        metadata = one["metadata"]
        assert isinstance(metadata["name"], str)
        assert metadata["labels"]["app.kubernetes.io/instance"] == word
        assert metadata["labels"]["app.kubernetes.io/name"] == word
    assert rendered.engine["runtimeClassName"] == "42"
    assert rendered.engine["priorityClassName"] == word
    assert rendered.gateway["serviceAccountName"] == word
    claims = [one.get("persistentVolumeClaim") for one in rendered.engine["volumes"]]
    assert {"claimName": "1e3"} in claims
    assert rendered.of("Ingress")["spec"]["ingressClassName"] == word


def test_a_namespace_of_digits_is_a_name(tools: Tools) -> None:
    text = tools.helm("template", "chat", CHART, "--namespace", "2024", "-f", SHAPES["full"])
    spaces = {one["metadata"].get("namespace", "2024") for one in Rendered(text).objects}
    assert spaces == {"2024"}


def test_a_key_of_the_embedded_engine_is_refused(tools: Tools) -> None:
    with pytest.raises(HelmError, match="the embedded engine demands no key"):
        tools.template("minimal", {"gateway.engineApiKey.existingSecret": "key"})


def test_an_exporter_on_the_engines_port_is_refused(tools: Tools) -> None:
    with pytest.raises(HelmError, match="30000, the engine's own"):
        tools.template("full", {"gpuExporter.port": 30000})


def test_a_probe_without_steps_to_judge_is_refused(tools: Tools) -> None:
    values = {"probe.enabled": True, "engine.speculative.enabled": False}
    with pytest.raises(HelmError, match="there are no steps to judge"):
        tools.template("default", values)
    with pytest.raises(HelmError, match="context length of 8192"):
        tools.template("minimal", {"probe": {"enabled": True, "contexts": [8192]}})
    tools.template("minimal", {"probe": {"enabled": True, "contexts": [8128]}})


def test_two_autoscalers_of_the_gateway_are_refused(tools: Tools) -> None:
    with pytest.raises(HelmError, match="two autoscalers would fight"):
        tools.template("full", {"keda.target": "gateway"})


def test_a_branch_of_the_drafter_is_refused(tools: Tools) -> None:
    with pytest.raises(HelmError, match=r"give model\.download\.drafterRevision"):
        tools.template("full", {"model.download.drafterRevision": ""})


def _leaves(value: Any, schema: Any, root: Any, path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Path, value and schema of everything that the schema names, groups too."""
    schema = _resolve(schema, root)
    yield path, value, schema
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from _leaves(value[name], inner, root, (*path, name))


def _with(values: Any, path: tuple[str, ...], value: Any) -> Any:
    changed: Any = copy.deepcopy(values)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed


def test_the_schema_refuses_a_typo_in_every_group_and_a_wrong_type_of_every_value() -> None:
    root = json.loads((CHART / "values.schema.json").read_text())
    values = load_yaml(CHART / "values.yaml")
    schema = jsonschema_rs.validator_for(root)
    assert schema.is_valid(values)
    typos = wrong = 0
    accepted = []
    for path, value, known in _leaves(values, root, root):
        name = ".".join(path)
        if "properties" in known:
            typos += 1
            if schema.is_valid(_with(values, (*path, "typo"), 1)):
                accepted.append(f"{name}.typo")
        if path:
            wrong += 1
            other: Any = [[]] if isinstance(value, dict) else {"not": "this"}
            if schema.is_valid(_with(values, path, other)):
                accepted.append(name)
    assert accepted == []
    assert typos > 40
    assert wrong > 200


def test_embedded_context_over_its_pool_is_refused(tools: Tools) -> None:
    with pytest.raises(HelmError, match=r"above engine\.embedded\.kvPoolTokens of 40960"):
        tools.template("minimal", {"engine.embedded.contextLength": 50_000})


def test_real_values_are_accepted(tools: Tools) -> None:
    rendered = tools.template(
        "default",
        {
            "engine.nodeSelector": {"node.kubernetes.io/instance-type": "rtx-6000.8x", "x_y.z": ""},
            "engine.podAnnotations": {"k8s.v1.cni.cncf.io/networks": '[{"name": "fast"}]'},
            "engine.resources": {
                "requests": {"cpu": "1500m", "memory": "1.5Ti"},
                "limits": {"cpu": 1.5, "memory": 1649267441664},
            },
            "engine.gpus": 4,
            "engine.tensorParallel": 4,
            "engine.tolerations": [{"operator": "Exists"}],
            "gateway.topologySpread": [],
            "global": {"registry": "x"},
            "gateway.resources": {"requests": {"cpu": 0.5, "memory": "1Gi"}},
            "engine.affinity": None,
            "engine.podLabels": None,
            "gateway.extraEnv": None,
        },
    )
    assert rendered.engine["nodeSelector"]["x_y.z"] == ""
    assert rendered.engine["tolerations"] == [{"operator": "Exists"}]


def test_the_schema_knows_the_checks_of_preflight() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    items = schema["properties"]["preflight"]["properties"]["skip"]["items"]
    assert items["enum"] == list(all_checks(Trials()))
