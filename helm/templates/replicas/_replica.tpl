{{/*
A replica's pod: dict "root" $ "role" "single", "leader" or "worker".

Nothing in it depends on the chart's version or on the gateway's image and settings, or an upgrade
of the gateway would restart every model server. `role` worker has no HTTP: no port, no probes.
*/}}
{{- define "vllm-fleet-gateway.replica.template" -}}
{{- $root := .root }}
{{- $r := $root.Values.replicas }}
{{- $serves := ne .role "worker" }}
metadata:
  labels:
    {{- include "vllm-fleet-gateway.selectorLabels" (dict "root" $root "component" (ternary "replica" "replica-worker" $serves)) | nindent 4 }}
    {{- with $r.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: vllm
    {{- with $r.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  {{- with $r.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  # A Service called vllm would set VLLM_PORT=tcp://…, which vLLM reads as its own.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (ternary (int $r.leave.timeoutSeconds) 0 $r.leave.enabled) $r.shutdownTimeoutSeconds 60 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $r.podSecurityContext | nindent 4 }}
  {{- with include "vllm-fleet-gateway.placement" (dict "values" $r) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $r.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: vllm
      image: {{ include "vllm-fleet-gateway.image" (dict "image" $r.image "default" "") }}
      imagePullPolicy: {{ $r.image.pullPolicy }}
      command: [vllm, serve]
      args:
        {{- include "vllm-fleet-gateway.replica.args" . | trim | nindent 8 }}
      env:
        {{- include "vllm-fleet-gateway.replica.env" . | trim | nindent 8 }}
        {{- with $r.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $r.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $serves }}
      ports:
        - name: http
          containerPort: {{ $r.port }}
      startupProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml $r.startupProbe | nindent 8 }}
      readinessProbe:
        tcpSocket: {port: http}
        {{- toYaml $r.readinessProbe | nindent 8 }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml $r.livenessProbe | nindent 8 }}
      {{- end }}
      {{- if $r.leave.enabled }}
      lifecycle:
        preStop:
          exec:
            command: [python3, /etc/fleet/leave/leave.py]
      {{- end }}
      securityContext:
        {{- toYaml $r.securityContext | nindent 8 }}
      resources:
        {{- include "vllm-fleet-gateway.replica.resources" $r | nindent 8 }}
      volumeMounts:
        - name: shm
          mountPath: /dev/shm
        - name: tmp
          mountPath: /tmp
        - name: scratch
          mountPath: /scratch
        - name: models
          mountPath: {{ $r.modelCache.mountPath }}
        {{- if $r.leave.enabled }}
        - name: leave
          mountPath: /etc/fleet/leave
          readOnly: true
        {{- if include "vllm-fleet-gateway.auth.key" (dict "root" $root "who" "operator") }}
        - name: operator-token
          mountPath: /etc/fleet/operator
          readOnly: true
        {{- end }}
        {{- end }}
        {{- with $r.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "vllm-fleet-gateway.replica.volumes" . | trim | nindent 4 }}
    {{- with $r.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.replica.args" -}}
{{- $r := .root.Values.replicas }}
- {{ $r.model | quote }}
{{- with $r.servedModelName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- if gt (int $r.tensorParallelSize) 1 }}
- --tensor-parallel-size={{ $r.tensorParallelSize }}
{{- end }}
{{- if gt (int $r.pipelineParallelSize) 1 }}
- --pipeline-parallel-size={{ $r.pipelineParallelSize }}
{{- end }}
{{- if gt (int $r.dataParallelSize) 1 }}
- --data-parallel-size={{ $r.dataParallelSize }}
{{- end }}
- {{ printf "--weight-transfer-config=%s" (dict "backend" $r.weightTransfer.backend | toJson) | quote }}
{{- if ne .role "worker" }}
- --host=0.0.0.0
- --port={{ $r.port }}
{{- end }}
- --shutdown-timeout={{ $r.shutdownTimeoutSeconds }}
{{- if ne .role "single" }}
- --distributed-executor-backend=mp
- --nnodes={{ $r.multiNode.size }}
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port={{ $r.multiNode.masterPort }}
- --node-rank={{ ternary "$(LWS_WORKER_INDEX)" "0" (eq .role "worker") }}
{{- end }}
{{- if eq .role "worker" }}
- --headless
{{- end }}
{{- range $r.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.replica.env" -}}
{{- $root := .root }}
{{- $r := $root.Values.replicas }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- if $r.devMode }}
- name: VLLM_SERVER_DEV_MODE
  value: "1"
{{- end }}
{{- if ne .role "single" }}
- name: VLLM_HOST_IP
  value: $(POD_IP)
{{- end }}
- name: HF_HOME
  value: {{ $r.modelCache.mountPath }}/huggingface
# The root filesystem is read-only and the user is in no /etc/passwd: compile caches follow HOME,
# and torch asks for a user name.
- name: HOME
  value: /scratch
- name: USER
  value: vllm
- name: VLLM_NO_USAGE_STATS
  value: "1"
{{- with $r.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $r.huggingFace.existingSecretKey }}
{{- end }}
{{- with include "vllm-fleet-gateway.auth.key" (dict "root" $root "who" "replica") }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "vllm-fleet-gateway.auth.secret" $root }}
      key: {{ . }}
{{- end }}
{{- if $r.leave.enabled }}
- name: LEAVE_GATEWAY
  value: http://{{ include "vllm-fleet-gateway.fullname" $root }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:{{ $root.Values.gateway.service.port }}
- name: LEAVE_HOST
  value: {{ ternary "$(LWS_LEADER_ADDRESS)" "$(POD_IP)" (eq .role "worker") }}
- name: LEAVE_PORT
  value: {{ $r.port | quote }}
- name: LEAVE_TIMEOUT_S
  value: {{ $r.leave.timeoutSeconds | quote }}
{{- if eq .role "worker" }}
- name: LEAVE_AFTER_LEADER_S
  value: {{ $r.shutdownTimeoutSeconds | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The resources given, and whole GPUs as request and limit. */}}
{{- define "vllm-fleet-gateway.replica.resources" -}}
{{- $resources := deepCopy .resources }}
{{- if gt (int .gpu.count) 0 }}
{{- $gpus := dict .gpu.resource (int .gpu.count) }}
{{- range $key := list "requests" "limits" }}
{{- $_ := set $resources $key (merge (dict) $gpus (default (dict) (get $resources $key))) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "vllm-fleet-gateway.replica.volumes" -}}
{{- $root := .root }}
{{- $r := $root.Values.replicas }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $r.shm.size }}
- name: tmp
  emptyDir: {}
- name: scratch
  emptyDir: {{ with $r.scratch.size }}{sizeLimit: {{ . }}}{{ else }}{}{{ end }}
{{- if eq $r.modelCache.kind "emptyDir" }}
- name: models
  emptyDir:
    sizeLimit: {{ $r.modelCache.size }}
{{- else if ne $r.modelCache.kind "perReplica" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ ternary $r.modelCache.existingClaim (printf "%s-models" (include "vllm-fleet-gateway.fullname" $root)) (eq $r.modelCache.kind "existingClaim") }}
{{- end }}
{{- if $r.leave.enabled }}
- name: leave
  configMap:
    name: {{ include "vllm-fleet-gateway.fullname" $root }}-leave
{{- with include "vllm-fleet-gateway.auth.key" (dict "root" $root "who" "operator") }}
- name: operator-token
  secret:
    secretName: {{ include "vllm-fleet-gateway.auth.secret" $root }}
    items:
      - {key: {{ . }}, path: token}
{{- end }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.replica.claim" -}}
accessModes: [{{ .accessMode }}]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}
