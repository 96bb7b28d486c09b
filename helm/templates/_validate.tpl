{{/* What the schema cannot say: values that contradict each other stop the install with one line. */}}

{{- define "vllm-fleet-gateway.validate" -}}
{{- include "vllm-fleet-gateway.validate.store" . }}
{{- include "vllm-fleet-gateway.validate.auth" . }}
{{- include "vllm-fleet-gateway.validate.discovery" . }}
{{- if .Values.replicas.enabled }}
{{- include "vllm-fleet-gateway.validate.replicas" . }}
{{- include "vllm-fleet-gateway.validate.modelCache" . }}
{{- include "vllm-fleet-gateway.validate.probes" . }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.validate.store" -}}
{{- if and .Values.redis.enabled (or .Values.store.url .Values.store.existingSecret) }}
{{- fail "store and redis.enabled: one store is enough; set redis.enabled=false to use your own Redis" }}
{{- end }}
{{- if and .Values.store.url .Values.store.existingSecret }}
{{- fail "store.url and store.existingSecret: set one of them" }}
{{- end }}
{{- if and (not (include "vllm-fleet-gateway.store.shared" .)) (or .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.replicas) 1) (gt (int .Values.gateway.settings.workers) 1)) }}
{{- fail "gateway.replicas: more than one gateway (or worker) needs a shared store; set redis.enabled=true, store.url or store.existingSecret, or gateway.replicas=1" }}
{{- end }}
{{- if and .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.autoscaling.minReplicas) (int .Values.gateway.autoscaling.maxReplicas)) }}
{{- fail "gateway.autoscaling: minReplicas is above maxReplicas" }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.validate.auth" -}}
{{- $auth := .Values.auth }}
{{- $values := compact (list $auth.trainerToken $auth.operatorToken $auth.rolloutToken $auth.replicaToken) }}
{{- $keys := compact (values $auth.secretKeys) }}
{{- if and $auth.existingSecret $values }}
{{- fail "auth: tokens come from values or from auth.existingSecret, not from both" }}
{{- end }}
{{- if and $auth.existingSecret (not $keys) }}
{{- fail "auth.existingSecret: name the keys to use in auth.secretKeys, or no token would be demanded" }}
{{- end }}
{{- if and $keys (not $auth.existingSecret) }}
{{- fail "auth.secretKeys: set auth.existingSecret, the Secret that has these keys" }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.validate.discovery" -}}
{{- $discovery := .Values.discovery }}
{{- $own := .Values.replicas.enabled }}
{{- if and $own (or (eq $discovery.kind "static") $discovery.dns.host $discovery.kubernetes.selector $discovery.kubernetes.namespace (gt (int $discovery.dns.port) 0) (gt (int $discovery.kubernetes.port) 0)) }}
{{- fail "discovery: this release runs its own replicas and finds them by kubernetes or dns, without host, selector, namespace or port; set replicas.enabled=false to use a fleet that is there" }}
{{- end }}
{{- if and (not $own) (eq $discovery.kind "static") (not $discovery.urls) }}
{{- fail "discovery.urls: name the replicas of the fleet that is there" }}
{{- end }}
{{- if and $discovery.urls (ne $discovery.kind "static") }}
{{- fail "discovery.urls: only read with discovery.kind=static" }}
{{- end }}
{{- if and (not $own) (eq $discovery.kind "dns") (not $discovery.dns.host) }}
{{- fail "discovery.dns.host: name the headless Service of the fleet that is there" }}
{{- end }}
{{- if and (not $own) (eq $discovery.kind "kubernetes") (not $discovery.kubernetes.selector) }}
{{- fail "discovery.kubernetes.selector: say which pods are the fleet that is there" }}
{{- end }}
{{- if and $discovery.kubernetes.restart (ne $discovery.kind "kubernetes") }}
{{- fail "discovery.kubernetes.restart: only pods that were found by discovery.kind=kubernetes can be deleted" }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.validate.replicas" -}}
{{- $r := .Values.replicas }}
{{- $nodes := ternary (int $r.multiNode.size) 1 $r.multiNode.enabled }}
{{- $workers := mul (int $r.tensorParallelSize) (int $r.pipelineParallelSize) (int $r.dataParallelSize) }}
{{- $gpus := mul (int $r.gpu.count) $nodes }}
{{- if and (gt $gpus 0) (ne (int $workers) (int $gpus)) }}
{{- fail (printf "replicas.gpu.count: tensor x pipeline x data parallel size is %d, the pods of one replica have %d GPUs" (int $workers) (int $gpus)) }}
{{- end }}
{{- if and $r.multiNode.enabled (gt (int $r.dataParallelSize) 1) }}
{{- fail "replicas.multiNode: data parallelism over nodes is not set up by this chart; run more replicas instead" }}
{{- end }}
{{- if and $r.keda.enabled $r.multiNode.enabled }}
{{- fail "replicas.keda: scales a StatefulSet, not a LeaderWorkerSet" }}
{{- end }}
{{- if and $r.keda.enabled (not $r.keda.triggers) }}
{{- fail "replicas.keda.triggers: say by what to scale" }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.validate.modelCache" -}}
{{- $r := .Values.replicas }}
{{- $cache := $r.modelCache }}
{{- if and (eq $cache.kind "existingClaim") (not $cache.existingClaim) }}
{{- fail "replicas.modelCache.existingClaim: name the claim" }}
{{- end }}
{{- $several := or (gt (int $r.count) 1) $r.multiNode.enabled $r.keda.enabled }}
{{- if and (eq $cache.kind "shared") $several (has $cache.accessMode (list "ReadWriteOnce" "ReadWriteOncePod")) }}
{{- fail "replicas.modelCache: several pods cannot share a ReadWriteOnce volume; set accessMode=ReadWriteMany or kind=perReplica" }}
{{- end }}
{{- if and (eq $cache.kind "perReplica") $r.multiNode.enabled }}
{{- fail "replicas.modelCache.kind=perReplica: not with multiNode; use shared, existingClaim or emptyDir" }}
{{- end }}
{{- end }}

{{- define "vllm-fleet-gateway.validate.probes" -}}
{{- $r := .Values.replicas }}
{{- $loading := mul (int $r.startupProbe.periodSeconds) (int $r.startupProbe.failureThreshold) }}
{{- if lt (int $loading) 1800 }}
{{- fail (printf "replicas.startupProbe: allows %d s for loading; periodSeconds x failureThreshold must be 1800 or more" (int $loading)) }}
{{- end }}
{{- $timeouts := default (dict) .Values.gateway.settings.timeouts }}
{{- $longest := max (int (default 300 $timeouts.init_s)) (int (default 1800 $timeouts.update_s)) }}
{{- $patience := mul (int $r.livenessProbe.periodSeconds) (int $r.livenessProbe.failureThreshold) }}
{{- if le (int $patience) (int $longest) }}
{{- fail (printf "replicas.livenessProbe: gives up after %d s, a collective may take %d s; raise failureThreshold, or a server would be killed while its weights change" (int $patience) (int $longest)) }}
{{- end }}
{{- end }}
