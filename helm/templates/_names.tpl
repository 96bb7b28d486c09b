{{/* Names and labels. Selectors carry no version: they cannot change after the install. */}}

{{- define "vllm-fleet-gateway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters, so that suffixes and pod ordinals fit into 63. */}}
{{- define "vllm-fleet-gateway.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* The fleet's name: prefix of the keys in Redis, so two namespaces must not share it. */}}
{{- define "vllm-fleet-gateway.fleet" -}}
{{- default (printf "%s-%s" .Release.Namespace .Release.Name | lower | replace "." "-" | trunc 63 | trimSuffix "-") .Values.fleet.name }}
{{- end }}

{{/* dict "root" $ "component" "gateway" */}}
{{- define "vllm-fleet-gateway.selectorLabels" -}}
app.kubernetes.io/name: {{ include "vllm-fleet-gateway.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "vllm-fleet-gateway.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "vllm-fleet-gateway.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: vllm-fleet-gateway
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* dict "root" $ "component" … "name" … [ "labels" {…} ] [ "annotations" {…} ]: an object's metadata. */}}
{{- define "vllm-fleet-gateway.metadata" -}}
name: {{ .name }}
labels:
  {{- include "vllm-fleet-gateway.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with mergeOverwrite (dict) .root.Values.commonAnnotations (default (dict) .annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* dict "image" {…} "default" "tag": a digest names one image, so it goes before a tag. */}}
{{- define "vllm-fleet-gateway.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .default .image.tag) }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "vllm-fleet-gateway.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.replicaService" -}}
{{ include "vllm-fleet-gateway.fullname" . }}-replicas
{{- end }}

{{- define "vllm-fleet-gateway.redis" -}}
{{ include "vllm-fleet-gateway.fullname" . }}-redis
{{- end }}

{{/* Placement: dict with the component's values; keys that are empty are left out. */}}
{{- define "vllm-fleet-gateway.placement" -}}
{{- range $key := list "nodeSelector" "affinity" "tolerations" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with get $.values $key }}
{{ $key }}: {{ if kindIs "string" . }}{{ . | quote }}{{ else }}
  {{- toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
