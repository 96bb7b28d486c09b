{{/* dict "path" "FLEET_GATE__TIMEOUT_S" "value" 900: one setting as an environment variable; null is none. */}}
{{- define "vllm-fleet-gateway.setting" -}}
{{- $text := .value | toString }}
{{- if kindIs "float64" .value }}
{{- if eq (floor .value) .value }}{{ $text = .value | int64 | toString }}{{ end }}
{{- else if kindIs "slice" .value }}
{{- $text = .value | toJson }}
{{- end }}
{{- if not (kindIs "invalid" .value) }}
- name: {{ .path }}
  value: {{ $text | quote }}
{{- end }}
{{- end }}

{{/* gateway.settings, two levels deep, as FLEET_GROUP__NAME. */}}
{{- define "vllm-fleet-gateway.settings.env" -}}
{{- range $name, $value := .Values.gateway.settings }}
{{- if kindIs "map" $value }}
{{- range $inner, $leaf := $value }}
{{- with include "vllm-fleet-gateway.setting" (dict "path" (printf "FLEET_%s__%s" (upper $name) (upper $inner)) "value" $leaf) | trim }}
{{ . }}
{{- end }}
{{- end }}
{{- else }}
{{- with include "vllm-fleet-gateway.setting" (dict "path" (printf "FLEET_%s" (upper $name)) "value" $value) | trim }}
{{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.discovery.env" -}}
{{- $discovery := .Values.discovery }}
- name: FLEET_DISCOVERY
  value: {{ $discovery.kind }}
{{- if eq $discovery.kind "static" }}
- name: FLEET_REPLICAS
  value: {{ join "," $discovery.urls | quote }}
{{- else if eq $discovery.kind "dns" }}
- name: FLEET_DNS__HOST
  value: {{ include "vllm-fleet-gateway.discovery.dnsHost" . }}
- name: FLEET_DNS__PORT
  value: {{ include "vllm-fleet-gateway.discovery.port" (dict "root" $ "port" $discovery.dns.port) | quote }}
{{- else }}
- name: FLEET_KUBERNETES__NAMESPACE
  value: {{ include "vllm-fleet-gateway.discovery.namespace" . }}
- name: FLEET_KUBERNETES__SELECTOR
  value: {{ include "vllm-fleet-gateway.discovery.selector" . | quote }}
- name: FLEET_KUBERNETES__PORT
  value: {{ include "vllm-fleet-gateway.discovery.port" (dict "root" $ "port" $discovery.kubernetes.port) | quote }}
- name: FLEET_KUBERNETES__RESTART
  value: {{ $discovery.kubernetes.restart | quote }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.auth.env" -}}
{{- range $who := list "trainer" "operator" "rollout" "replica" }}
{{- with include "vllm-fleet-gateway.auth.key" (dict "root" $ "who" $who) }}
- name: FLEET_AUTH__{{ upper $who }}_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "vllm-fleet-gateway.auth.secret" $ }}
      key: {{ . }}
{{- end }}
{{- end }}
{{- end }}
