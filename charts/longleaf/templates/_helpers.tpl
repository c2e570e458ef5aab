{{- define "longleaf.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters: a StatefulSet's pods carry its name and a hash in a label of 63. What a longer one loses,
a hash of it stands for. */}}
{{- define "longleaf.fullname" -}}
{{- $name := include "longleaf.name" . }}
{{- $full := printf "%s-%s" .Release.Name $name }}
{{- if .Values.fullnameOverride }}
{{- $full = .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}
{{- $full = .Release.Name }}
{{- end }}
{{- if gt (len $full) 40 }}
{{- $full = printf "%s-%s" ($full | trunc 31 | trimSuffix "-") ($full | sha256sum | trunc 8) }}
{{- end }}
{{- $full }}
{{- end }}

{{- define "longleaf.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{ include "longleaf.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of pods: (dict "component" … "labels" … "root" $). No version of the chart among them, which would start
every engine anew. */}}
{{- define "longleaf.podLabels" -}}
{{ include "longleaf.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with mergeOverwrite (deepCopy (default dict .root.Values.commonLabels)) (deepCopy (default dict .labels)) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "longleaf.selector" -}}
app.kubernetes.io/name: {{ include "longleaf.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Environment: (dict "own" YAML "extra" list). Each name once, what stands last wins. */}}
{{- define "longleaf.merged" -}}
{{- $all := concat (fromYamlArray .own) (default list .extra) }}
{{- $last := dict }}
{{- range $index, $one := $all }}
{{- $_ := set $last $one.name $index }}
{{- end }}
{{- $kept := list }}
{{- range $index, $one := $all }}
{{- if eq $index (get $last $one.name) }}
{{- $kept = append $kept $one }}
{{- end }}
{{- end }}
{{- toYaml $kept }}
{{- end }}

{{/* Reference of an image: (dict "image" … "root" $). */}}
{{- define "longleaf.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- define "longleaf.engineImage" -}}
{{- $image := ternary .Values.gateway.image .Values.engine.image (eq .Values.engine.kind "embedded") }}
{{- include "longleaf.image" (dict "image" $image "root" .) }}
{{- end }}

{{- define "longleaf.engineAccount" -}}
{{- $made := .Values.engine.serviceAccount.create }}
{{- default (ternary (printf "%s-engine" (include "longleaf.fullname" .)) "default" $made) .Values.engine.serviceAccount.name }}
{{- end }}

{{- define "longleaf.gatewayAccount" -}}
{{- $made := .Values.gateway.serviceAccount.create }}
{{- default (ternary (printf "%s-gateway" (include "longleaf.fullname" .)) "default" $made) .Values.gateway.serviceAccount.name }}
{{- end }}

{{- define "longleaf.downloads" -}}
{{- if and .Values.model.download.enabled (eq .Values.engine.kind "sglang") }}true{{- end }}
{{- end }}

{{- define "longleaf.drains" -}}
{{- int .Values.longestRequestSeconds }}
{{- end }}

{{/* Seconds until a new release is ready: weights are loaded, and what comes before and after. */}}
{{- define "longleaf.waits" -}}
{{- add (int .Values.engine.startup.seconds) 600 }}
{{- end }}

{{/* Replicas of an object: (dict "kind" … "component" … "scale" its autoscaler's values, or none, "replicas" … "root" $).
An autoscaler's number stays as it is: without one in the manifest, Kubernetes would make it 1. */}}
{{- define "longleaf.replicas" -}}
{{- $replicas := int .replicas }}
{{- with .scale }}
{{- $replicas = max (int .minReplicas) $replicas }}
{{- $name := printf "%s-%s" (include "longleaf.fullname" $.root) $.component }}
{{- with lookup "apps/v1" $.kind $.root.Release.Namespace $name }}
{{- $replicas = .spec.replicas }}
{{- end }}
{{- end }}
{{- int $replicas }}
{{- end }}

{{- define "longleaf.engineReplicas" -}}
{{- $scaled := and .Values.keda.enabled (eq .Values.keda.target "engine") }}
{{- $scale := ternary .Values.keda dict $scaled }}
{{- include "longleaf.replicas" (dict "kind" "StatefulSet" "component" "engine" "scale" $scale "replicas" .Values.engine.replicas "root" .) }}
{{- end }}

{{/* Engines that are always there, which an autoscaler's others are not. */}}
{{- define "longleaf.probeReplicas" -}}
{{- $scaled := and .Values.keda.enabled (eq .Values.keda.target "engine") }}
{{- int (ternary .Values.keda.minReplicas .Values.engine.replicas $scaled) }}
{{- end }}

{{/* Tokens that a probe has an engine answer with. */}}
{{- define "longleaf.probeAnswer" -}}64{{- end }}

{{- define "longleaf.lengths" -}}
{{- $lengths := list }}
{{- range . }}
{{- $lengths = append $lengths (int . | toString) }}
{{- end }}
{{- join "," $lengths }}
{{- end }}

{{- define "longleaf.gatewayReplicas" -}}
{{- $scale := dict }}
{{- if .Values.gateway.autoscaling.enabled }}
{{- $scale = .Values.gateway.autoscaling }}
{{- else if and .Values.keda.enabled (eq .Values.keda.target "gateway") }}
{{- $scale = .Values.keda }}
{{- end }}
{{- include "longleaf.replicas" (dict "kind" "Deployment" "component" "gateway" "scale" $scale "replicas" .Values.gateway.replicas "root" .) }}
{{- end }}

{{/* Topology spread constraints with the pods' own selector: (dict "spread" … "component" … "root" $). */}}
{{- define "longleaf.spread" -}}
{{- range .spread }}
- {{ toYaml . | nindent 2 | trim }}
  {{- if not .labelSelector }}
  labelSelector:
    matchLabels:
      {{- include "longleaf.selector" $.root | nindent 6 }}
      app.kubernetes.io/component: {{ $.component }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Egress to the cluster's DNS. */}}
{{- define "longleaf.dns" -}}
- to:
    - namespaceSelector: {}
      podSelector:
        matchLabels:
          k8s-app: kube-dns
    # NodeLocal DNSCache
    - ipBlock:
        cidr: 169.254.20.10/32
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}

{{/* Number that a quantity stands for. */}}
{{- define "longleaf.number" -}}
{{- if kindIs "string" . }}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 }}
{{- $digits := regexFind "^[0-9.]+" . }}
{{- mulf (float64 $digits) (get $units (trimPrefix $digits .)) }}
{{- else }}
{{- . }}
{{- end }}
{{- end }}

{{/* Requests within limits: (dict "name" … "resources" …). */}}
{{- define "longleaf.validateResources" -}}
{{- $limits := default dict .resources.limits }}
{{- range $name, $asked := default dict .resources.requests }}
{{- with get $limits $name }}
{{- if gt (include "longleaf.number" $asked | float64) (include "longleaf.number" . | float64) }}
{{- fail (printf "%s.requests.%s is %v, above its limit of %v" $.name $name $asked .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What Kubernetes changes in no object that is there. It would refuse in the middle, when Services already select by
the new labels and find nobody. */}}
{{- define "longleaf.validateLive" -}}
{{- $name := printf "%s-engine" (include "longleaf.fullname" .) }}
{{- $volume := .Values.model.volume }}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace $name }}
{{- $selector := merge (include "longleaf.selector" $ | fromYaml) (dict "app.kubernetes.io/component" "engine") }}
{{- if ne (toJson .spec.selector.matchLabels) (toJson $selector) }}
{{- fail (printf "%s selects pods by %s, and Kubernetes changes no selector: give the nameOverride that it was installed with, or another fullnameOverride" $name (toJson .spec.selector.matchLabels)) }}
{{- end }}
{{- $live := default list .spec.volumeClaimTemplates }}
{{- $asked := and (eq $.Values.engine.kind "sglang") (eq $volume.type "claimTemplate") }}
{{- $same := eq $asked (gt (len $live) 0) }}
{{- if and $same $asked }}
{{- $claim := (index $live 0).spec }}
{{- $same = and (eq (include "longleaf.number" $claim.resources.requests.storage | float64) (include "longleaf.number" $volume.size | float64)) (eq (default "" $claim.storageClassName) $volume.storageClassName) }}
{{- end }}
{{- if not $same }}
{{- fail (printf "model.volume: Kubernetes changes no claims of a StatefulSet: kubectl -n %s delete statefulset %s --cascade=orphan keeps its pods, then upgrade" $.Release.Namespace $name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What needs two values at once, which a schema cannot say. */}}
{{- define "longleaf.validate" -}}
{{- $full := include "longleaf.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) }}
{{- fail (printf "objects would be named %s-…: Services need a letter first, then letters, digits and dashes, and no dots; give a fullnameOverride" $full) }}
{{- end }}
{{- include "longleaf.validateLive" . }}
{{- if and .Values.gateway.rbac.create (not .Values.gateway.serviceAccount.create) (not .Values.gateway.serviceAccount.name) }}
{{- fail "gateway.serviceAccount.create is false: give gateway.serviceAccount.name, or every pod of the namespace's default account could watch EndpointSlices" }}
{{- end }}
{{- range $name, $resources := dict "engine.resources" .Values.engine.resources "engine.embeddedResources" .Values.engine.embeddedResources "gateway.resources" .Values.gateway.resources "gpuExporter.resources" .Values.gpuExporter.resources }}
{{- include "longleaf.validateResources" (dict "name" $name "resources" (default dict $resources)) }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.enabled: give ingress.host" }}
{{- end }}
{{- $engine := .Values.engine }}
{{- if eq $engine.kind "sglang" }}
{{- if gt (int $engine.contextLength) (int $engine.kvPoolTokens) }}
{{- fail (printf "engine.contextLength is %d, above engine.kvPoolTokens of %d: such a request could never run" (int $engine.contextLength) (int $engine.kvPoolTokens)) }}
{{- end }}
{{- if ne (int $engine.tensorParallel) (int $engine.gpus) }}
{{- fail (printf "engine.tensorParallel is %d, engine.gpus is %d: they must be equal" (int $engine.tensorParallel) (int $engine.gpus)) }}
{{- end }}
{{- with $engine.speculative }}
{{- if and .enabled (not (kindIs "invalid" .draftWindow)) (lt (int .draftWindow) (int .blockSize)) }}
{{- fail (printf "engine.speculative.draftWindow is %d, below the block of %d that it must hold" (int .draftWindow) (int .blockSize)) }}
{{- end }}
{{- range .capturedNodes }}
{{- if gt (int .) (int $engine.speculative.nodes) }}
{{- fail (printf "engine.speculative.capturedNodes has %d, above nodes of %d" (int .) (int $engine.speculative.nodes)) }}
{{- end }}
{{- end }}
{{- end }}
{{- with (default dict (default dict $engine.resources).limits).memory }}
{{- if gt (include "longleaf.number" $engine.sharedMemory | float64) (include "longleaf.number" . | float64) }}
{{- fail (printf "engine.sharedMemory is %s, above engine.resources.limits.memory of %v, which it counts against" $engine.sharedMemory .) }}
{{- end }}
{{- end }}
{{- if and (eq .Values.model.volume.type "claim") (not .Values.model.volume.claimName) }}
{{- fail "model.volume.type is claim: give model.volume.claimName" }}
{{- end }}
{{- with .Values.model.download }}
{{- if and .enabled (not .targetRevision) }}
{{- fail "model.download.enabled: give model.download.targetRevision, a commit" }}
{{- end }}
{{- if and .enabled .drafterRepository (not .drafterRevision) }}
{{- fail "model.download.drafterRepository: give model.download.drafterRevision, a commit" }}
{{- end }}
{{- end }}
{{- if and .Values.gpuExporter.enabled (eq (int .Values.gpuExporter.port) 30000) }}
{{- fail "gpuExporter.port is 30000, the engine's own" }}
{{- end }}
{{- else if .Values.gateway.engineApiKey.existingSecret }}
{{- fail "gateway.engineApiKey.existingSecret: the embedded engine demands no key (engine.kind: embedded)" }}
{{- else if gt (int $engine.embedded.contextLength) (int $engine.embedded.kvPoolTokens) }}
{{- fail (printf "engine.embedded.contextLength is %d, above engine.embedded.kvPoolTokens of %d: such a request could never run" (int $engine.embedded.contextLength) (int $engine.embedded.kvPoolTokens)) }}
{{- end }}
{{- if .Values.probe.enabled }}
{{- if and (eq $engine.kind "sglang") (not $engine.speculative.enabled) }}
{{- fail "probe.enabled: without engine.speculative.enabled there are no steps to judge" }}
{{- end }}
{{- $longest := ternary $engine.contextLength $engine.embedded.contextLength (eq $engine.kind "sglang") }}
{{- $answer := include "longleaf.probeAnswer" . }}
{{- range .Values.probe.contexts }}
{{- if gt (add (int .) (int $answer)) (int64 $longest) }}
{{- fail (printf "probe.contexts has %d: with an answer of %s tokens that is above the engine's context length of %d" (int .) $answer (int $longest)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.keda.enabled (eq .Values.keda.target "gateway") .Values.gateway.autoscaling.enabled }}
{{- fail "keda.target is gateway and gateway.autoscaling is enabled: two autoscalers would fight" }}
{{- end }}
{{- range $name, $scale := dict "gateway.autoscaling" .Values.gateway.autoscaling "keda" .Values.keda }}
{{- if gt (int $scale.minReplicas) (int $scale.maxReplicas) }}
{{- fail (printf "%s.minReplicas is %d, above maxReplicas of %d" $name (int $scale.minReplicas) (int $scale.maxReplicas)) }}
{{- end }}
{{- end }}
{{- end }}
