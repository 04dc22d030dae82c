{{/* Pods of a pool, as YAML: their number, and Ray's resources on each.

A pod holds one worker with all its ranks, or one rank where the pool spreads them over nodes. */}}
{{- define "diptych.pool" -}}
{{- $parallel := .parallel | default dict -}}
{{- $ranks := mul (get $parallel "tensor" | default 1) (get $parallel "pipeline" | default 1) -}}
{{- $spread := has (get $parallel "placement") (list "spread" "strict_spread") -}}
{{- $perPod := ternary 1 $ranks $spread -}}
{{- $podsOfOne := ternary $ranks 1 $spread -}}
{{- $replicas := ternary 1 .replicas (kindIs "invalid" .replicas) -}}
{{- $min := get . "min_replicas" | default $replicas -}}
{{- $max := get . "max_replicas" | default $replicas -}}
{{- if kindIs "map" $replicas -}}
{{- $min = $replicas.min -}}
{{- $max = $replicas.max -}}
{{- end -}}
{{- $resources := .resources | default dict -}}
{{- $custom := dict -}}
{{- range $key, $amount := get $resources "custom" | default dict -}}
{{- $_ := set $custom $key (mulf $amount $perPod) -}}
{{- end -}}
{{- $labels := dict "pool" .name -}}
{{- range $key, $selector := get $resources "labels" | default dict -}}
{{- if not (or (hasPrefix "!" $selector) (hasPrefix "ray.io/" $key)) -}}
{{- $_ := set $labels $key (regexReplaceAll `^in\(([^,)]*).*$` $selector "${1}") -}}
{{- end -}}
{{- end -}}
minPods: {{ mul $min $podsOfOne }}
maxPods: {{ mul $max $podsOfOne }}
cpus: {{ ceil (mulf (ternary (get $resources "cpu") 1 (hasKey $resources "cpu")) $perPod) | int }}
gpus: {{ ceil (mulf (get $resources "gpu" | default 0) $perPod) | int }}
custom: {{ toJson $custom }}
labels: {{ toJson $labels }}
{{- end -}}

{{/* Whether something other than helm scales this pool. */}}
{{- define "diptych.scaled" -}}
{{- $pods := fromYaml (include "diptych.pool" .pool) -}}
{{- if and .root.Values.poolAutoscaling.enabled (lt (int $pods.minPods) (int $pods.maxPods)) }}true{{ end -}}
{{- end -}}

{{/* Labels in the format of `ray start --labels`. */}}
{{- define "diptych.rayLabels" -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}
{{- $pairs = append $pairs (printf "%s=%s" $key $value) -}}
{{- end -}}
{{ join "," $pairs }}
{{- end -}}

{{/* The ResourceClaimTemplate for a pool's GPUs, when no device plugin provides them. */}}
{{- define "diptych.gpuClaim" -}}
{{- if .pool.gpus }}{{ .settings.gpu.claimTemplate }}{{ end -}}
{{- end -}}

{{- define "diptych.gpuClaims" -}}
{{- with include "diptych.gpuClaim" . }}
resourceClaims:
  - {name: gpu, resourceClaimTemplateName: {{ quote . }}}
{{- end }}
{{- end -}}

{{/* Container resources of a pool's pod: from the cluster block, unless the settings override them. */}}
{{- define "diptych.poolResources" -}}
{{- $asked := dict "requests" dict "limits" dict -}}
{{- if .pool.cpus -}}
{{- $_ := set $asked.requests "cpu" (toString .pool.cpus) -}}
{{- end -}}
{{- if include "diptych.gpuClaim" . -}}
{{- $_ := set $asked "claims" (list (dict "name" "gpu")) -}}
{{- else if .pool.gpus -}}
{{- $_ := set $asked.limits .settings.gpu.resourceName (toString .pool.gpus) -}}
{{- end -}}
{{ toYaml (mergeOverwrite $asked (deepCopy .settings.resources)) }}
{{- end -}}
