{{/* Affinity: the chart's terms on GPU labels, and what the values add. */}}
{{- define "longleaf.engineAffinity" -}}
{{- $terms := list }}
{{- if eq .Values.engine.kind "sglang" }}
{{- with .Values.engine.gpuProducts }}
{{- $terms = append $terms (dict "key" "nvidia.com/gpu.product" "operator" "In" "values" .) }}
{{- end }}
{{- with .Values.engine.gpuComputeMajors }}
{{- $terms = append $terms (dict "key" "nvidia.com/gpu.compute.major" "operator" "In" "values" .) }}
{{- end }}
{{- $fewer := sub (int .Values.engine.gpus) 1 | toString }}
{{- $terms = append $terms (dict "key" "nvidia.com/gpu.count" "operator" "Gt" "values" (list $fewer)) }}
{{- end }}
{{- $own := dict }}
{{- if $terms }}
{{- $required := dict "nodeSelectorTerms" (list (dict "matchExpressions" $terms)) }}
{{- $own = dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $required) }}
{{- end }}
{{- $all := mergeOverwrite $own (deepCopy (default dict .Values.engine.affinity)) }}
{{- if $all }}
{{- toYaml $all }}
{{- end }}
{{- end }}

{{- define "longleaf.embeddedArguments" -}}
{{- $engine := .Values.engine -}}
- embedded
- --host=0.0.0.0
- --port=30000
- {{ printf "--served-model-name=%s" $engine.servedModelName | quote }}
- --context-length={{ int $engine.embedded.contextLength }}
- --max-total-tokens={{ int $engine.embedded.kvPoolTokens }}
- --max-running-requests={{ int $engine.maxRunningRequests }}
- --drain-seconds={{ include "longleaf.drains" . }}
{{- with $engine.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "longleaf.sglangArguments" -}}
{{- $engine := .Values.engine -}}
- --model-path=/models/{{ .Values.model.targetDirectory }}
- {{ printf "--served-model-name=%s" $engine.servedModelName | quote }}
- --host=0.0.0.0
- --port=30000
- --tp-size={{ int $engine.tensorParallel }}
- --context-length={{ int $engine.contextLength }}
- --max-total-tokens={{ int $engine.kvPoolTokens }}
- --mem-fraction-static={{ $engine.memoryFraction }}
- --max-running-requests={{ int $engine.maxRunningRequests }}
- --chunked-prefill-size={{ int $engine.chunkedPrefillTokens }}
- --kv-cache-dtype={{ $engine.kvCacheDtype }}
- --page-size=1
- --attention-backend=longleaf_mla
- --disable-prefill-cuda-graph
{{- if .Values.model.trustRemoteCode }}
- --trust-remote-code
{{- end }}
- --skip-server-warmup
- --enable-metrics
{{- if $engine.speculative.enabled }}
- --speculative-algorithm=DDTREE
- --speculative-draft-model-path=/models/{{ .Values.model.drafterDirectory }}
- --speculative-draft-attention-backend=triton
- --speculative-num-draft-tokens={{ int $engine.speculative.nodes }}
{{- with $engine.speculative.draftWindow }}
- --speculative-draft-window-size={{ int . }}
{{- end }}
{{- end }}
{{- if .Values.gateway.engineApiKey.existingSecret }}
- --api-key=$(LONGLEAF_ENGINE_API_KEY)
{{- end }}
{{- with $engine.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "longleaf.preflightArguments" -}}
{{- $engine := .Values.engine -}}
- preflight
- --json
- --gpus={{ int $engine.gpus }}
{{- range $engine.gpuProducts }}
- --product={{ . }}
{{- end }}
{{- range $engine.gpuComputeMajors }}
- --compute-major={{ . }}
{{- end }}
- --minimum-driver={{ .Values.preflight.minimumDriver }}
- --shared-memory={{ $engine.sharedMemory }}
- --target=/models/{{ .Values.model.targetDirectory }}
{{- if $engine.speculative.enabled }}
- --drafter=/models/{{ .Values.model.drafterDirectory }}
- --block-size={{ int $engine.speculative.blockSize }}
- --nodes={{ int $engine.speculative.nodes }}
{{- with $engine.speculative.draftWindow }}
- --draft-window={{ int . }}
{{- end }}
{{- end }}
- --context-length={{ int $engine.contextLength }}
- --kv-pool-tokens={{ int $engine.kvPoolTokens }}
- --kv-cache-dtype={{ $engine.kvCacheDtype }}
- --memory-fraction={{ $engine.memoryFraction }}
- --nccl-timeout={{ int .Values.preflight.ncclTimeoutSeconds }}
{{- range .Values.preflight.skip }}
- --skip={{ . }}
{{- end }}
{{- end }}

{{- define "longleaf.engineEnvironment" -}}
{{- include "longleaf.merged" (dict "own" (include "longleaf.ownEngineEnvironment" .) "extra" .Values.engine.extraEnv) }}
{{- end }}

{{- define "longleaf.ownEngineEnvironment" -}}
- name: HOME
  value: /cache
{{- if eq .Values.engine.kind "sglang" }}
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: HF_HUB_OFFLINE
  value: "1"
{{- with .Values.engine.speculative }}
{{- $options := deepCopy (default dict .options) }}
{{- with .capturedNodes }}
{{- $_ := set $options "nodes" . }}
{{- end }}
{{- if and .enabled $options }}
- name: LONGLEAF_ENGINE
  value: {{ toJson $options | quote }}
{{- end }}
{{- end }}
{{- $nccl := ternary (dict "NCCL_P2P_DISABLE" "1") dict .Values.engine.nccl.disableP2P }}
{{- range $name, $value := mergeOverwrite $nccl (deepCopy (default dict .Values.engine.nccl.env)) }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- with .Values.gateway.engineApiKey }}
{{- if .existingSecret }}
- name: LONGLEAF_ENGINE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "longleaf.engineResources" -}}
{{- if eq .Values.engine.kind "embedded" }}
{{- toYaml .Values.engine.embeddedResources }}
{{- else }}
{{- $gpus := dict "nvidia.com/gpu" (int .Values.engine.gpus | toString) }}
{{- $resources := deepCopy (default dict .Values.engine.resources) }}
{{- $_ := set $resources "requests" (merge $gpus (default dict $resources.requests)) }}
{{- $_ := set $resources "limits" (merge (deepCopy $gpus) (default dict $resources.limits)) }}
{{- toYaml $resources }}
{{- end }}
{{- end }}

{{- define "longleaf.engineMounts" -}}
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
- name: run
  mountPath: /run/longleaf
{{- if eq .Values.engine.kind "sglang" }}
- name: shm
  mountPath: /dev/shm
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{- define "longleaf.downloadEnvironment" -}}
- name: HOME
  value: /cache
{{- with .Values.model.download.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "longleaf.downloadContainer" -}}
{{- $download := .Values.model.download -}}
- name: download
  image: {{ include "longleaf.engineImage" . | quote }}
  imagePullPolicy: {{ .Values.engine.image.pullPolicy | quote }}
  command: [sh, -ceu]
  args:
    - |
      # The first process of a container has no default action for SIGTERM.
      fetching=
      trap '[ -z "$fetching" ] || kill "$fetching"; exit 143' TERM
      fetch() {
        hf download "$@" &
        fetching=$!
        wait "$fetching"
        fetching=
      }
      fetch {{ $download.targetRepository | squote }} --revision {{ $download.targetRevision | squote }} --local-dir /models/{{ .Values.model.targetDirectory }}
      {{- if $download.drafterRepository }}
      fetch {{ $download.drafterRepository | squote }} --revision {{ $download.drafterRevision | squote }} --local-dir /models/{{ .Values.model.drafterDirectory }}
      {{- end }}
  env:
    {{- include "longleaf.merged" (dict "own" (include "longleaf.downloadEnvironment" .) "extra" .Values.engine.extraEnv) | nindent 4 }}
  resources:
    requests:
      cpu: "2"
      memory: 4Gi
    limits:
      memory: 16Gi
  securityContext:
    {{- toYaml .Values.engine.securityContext | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: /models
    - name: cache
      mountPath: /cache
    - name: tmp
      mountPath: /tmp
{{- end }}
