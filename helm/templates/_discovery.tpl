{{/* Where replicas come from, and the tokens: what several templates must agree on. */}}

{{- define "vllm-fleet-gateway.discovery.namespace" -}}
{{- default .Release.Namespace .Values.discovery.kubernetes.namespace }}
{{- end }}

{{- define "vllm-fleet-gateway.discovery.selector" -}}
{{- with .Values.discovery.kubernetes.selector }}
{{- . }}
{{- else -}}
app.kubernetes.io/name={{ include "vllm-fleet-gateway.name" . }},app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=replica
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.discovery.dnsHost" -}}
{{- default (printf "%s.%s.svc.%s" (include "vllm-fleet-gateway.replicaService" .) .Release.Namespace .Values.clusterDomain) .Values.discovery.dns.host }}
{{- end }}

{{/* dict "root" $ "port" 0: the port given, or that of this chart's own replicas. */}}
{{- define "vllm-fleet-gateway.discovery.port" -}}
{{- ternary .port .root.Values.replicas.port (gt (int .port) 0) }}
{{- end }}

{{/* The Secret with the tokens, or nothing. */}}
{{- define "vllm-fleet-gateway.auth.secret" -}}
{{- $auth := .Values.auth }}
{{- if $auth.existingSecret }}
{{- $auth.existingSecret }}
{{- else if or $auth.trainerToken $auth.operatorToken $auth.rolloutToken $auth.replicaToken }}
{{- printf "%s-auth" (include "vllm-fleet-gateway.fullname" .) }}
{{- end }}
{{- end }}

{{/* dict "root" $ "who" "trainer": the key of that token in the Secret, or nothing. */}}
{{- define "vllm-fleet-gateway.auth.key" -}}
{{- $auth := .root.Values.auth }}
{{- if $auth.existingSecret }}
{{- get $auth.secretKeys .who }}
{{- else if get $auth (printf "%sToken" .who) }}
{{- printf "%s-token" .who }}
{{- end }}
{{- end }}

{{/* The environment of the store: nothing means memory. */}}
{{- define "vllm-fleet-gateway.store.env" -}}
{{- if .Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "vllm-fleet-gateway.redis.secret" . }}
      key: {{ include "vllm-fleet-gateway.redis.secretKey" . }}
- name: FLEET_STORE
  value: redis://:$(REDIS_PASSWORD)@{{ include "vllm-fleet-gateway.redis" . }}:6379/0
{{- else if or .Values.store.url .Values.store.existingSecret }}
- name: FLEET_STORE
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-store" (include "vllm-fleet-gateway.fullname" .)) .Values.store.existingSecret }}
      key: {{ ternary .Values.store.existingSecretKey "url" (not (empty .Values.store.existingSecret)) }}
{{- else }}
- name: FLEET_STORE
  value: memory://
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.redis.secret" -}}
{{- default (include "vllm-fleet-gateway.redis" .) .Values.redis.auth.existingSecret }}
{{- end }}

{{- define "vllm-fleet-gateway.redis.secretKey" -}}
{{- ternary .Values.redis.auth.existingSecretKey "redis-password" (not (empty .Values.redis.auth.existingSecret)) }}
{{- end }}

{{/* "true" where the state outlives a gateway and can be shared by several. */}}
{{- define "vllm-fleet-gateway.store.shared" -}}
{{- if or .Values.redis.enabled .Values.store.url .Values.store.existingSecret }}true{{ end }}
{{- end }}
