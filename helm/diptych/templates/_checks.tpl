{{/* Checks beyond the schema. Each failure is one line that says what to write instead. */}}
{{- define "diptych.check" -}}
{{- $cluster := .Values.cluster -}}
{{- $gateway := get $cluster "gateway" | default dict -}}
{{- if has (get $gateway "host" | default "127.0.0.1") (list "127.0.0.1" "localhost" "::1") -}}
{{- fail "cluster.gateway.host: the gateway would be unreachable from outside the pod; write 0.0.0.0" -}}
{{- end -}}
{{- if eq (int (get $gateway "grpc_port" | default 0)) 0 -}}
{{- if hasKey $gateway "grpc_port" -}}
{{- fail "cluster.gateway.grpc_port: a Service needs a fixed port; write 50051" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.mode "external") (not .Values.ray.address) -}}
{{- fail "ray.address: mode is external; write HOST:6379 of the Ray to join" -}}
{{- end -}}
{{- if and (ne .Values.mode "external") .Values.ray.address -}}
{{- fail (printf "ray.address: mode is %s, which starts its own Ray; write mode: external, or leave the address out" .Values.mode) -}}
{{- end -}}
{{- if contains "://" .Values.ray.address -}}
{{- fail "ray.address: pods join that Ray as nodes; write HOST:6379 of its head, without a scheme" -}}
{{- end -}}
{{- with .Values.ray.auth -}}
{{- if and .token .existingSecret -}}
{{- fail "ray.auth: give token or existingSecret, not both" -}}
{{- end -}}
{{- if and (ne .mode "token") (or .token .existingSecret) -}}
{{- fail "ray.auth.mode: is disabled, so neither token nor existingSecret has an effect; leave them out" -}}
{{- end -}}
{{- if and (eq .mode "token") (ne $.Values.mode "kuberay") (not .token) (not .existingSecret) -}}
{{- fail "ray.auth: Ray needs a token; give existingSecret (kubectl create secret generic NAME --from-literal=auth_token=$(openssl rand -hex 32)), or token, or mode: disabled" -}}
{{- end -}}
{{- if and (eq $.Values.mode "kuberay") (ne .key "auth_token") -}}
{{- fail "ray.auth.key: KubeRay reads auth_token and no other key" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.model.existingClaim .Values.model.pvc.create -}}
{{- fail "model.pvc.create: model.existingClaim already names a claim; write one of the two" -}}
{{- end -}}
{{- $full := include "diptych.fullname" . -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $full) -}}
{{- fail (printf "fullnameOverride: %s must begin with a letter, and have lower-case letters, digits and dashes" $full) -}}
{{- end -}}
{{- $names := list -}}
{{- $roles := list -}}
{{- $workers := 0 -}}
{{- range $cluster.pools -}}
{{- if has .name (list "head" "gateway" "serve" "autoscaler") -}}
{{- fail (printf "cluster.pools: the chart's own pods use the name %s; give the pool another name" .name) -}}
{{- end -}}
{{- if gt (len (printf "%s-%s" $full .name)) 52 -}}
{{- fail (printf "cluster.pools: %s-%s is too long for a StatefulSet (52); shorten fullnameOverride or the pool's name" $full .name) -}}
{{- end -}}
{{- if has .name $names -}}
{{- fail (printf "cluster.pools: two are called %s; names must differ" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $roles = append $roles .role -}}
{{- $replicas := ternary 1 .replicas (kindIs "invalid" .replicas) -}}
{{- if kindIs "map" $replicas -}}
{{- if gt (int $replicas.min) (int $replicas.max) -}}
{{- fail (printf "cluster.pools: %s has replicas.min above replicas.max" .name) -}}
{{- end -}}
{{- $replicas = $replicas.min -}}
{{- end -}}
{{- $workers = add $workers (int $replicas) -}}
{{- end -}}
{{- if not $workers -}}
{{- fail "cluster.pools: no pool has a worker; give one at least 1 replica" -}}
{{- end -}}
{{- if not (has "mixed" $roles) -}}
{{- range list "prefill" "decode" -}}
{{- if not (has . $roles) -}}
{{- fail (printf "cluster.pools: there is no %s pool (and no mixed one), so no request could finish" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $elastic := get $cluster "elastic" | default dict -}}
{{- if has (get $elastic "mode") (list "advise" "act") -}}
{{- range $role, $floor := get $elastic "floors" | default dict -}}
{{- if gt (int $floor) (int $workers) -}}
{{- fail (printf "cluster.elastic.floors.%s is %d, the pools have %d workers; lower the floor" $role (int $floor) (int $workers)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.cluster.pools -}}
{{- $seconds := pluck "terminationGracePeriodSeconds" (get $.Values.pools .name | default dict) $.Values.podDefaults | first -}}
{{- if and (ne $.Values.mode "external") (lt (int $seconds) 30) -}}
{{- fail (printf "pools.%s: terminationGracePeriodSeconds is %d, and draining a pod takes at least 30; raise it" .name (int $seconds)) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := .Values.pools -}}
{{- if not (has $name $names) -}}
{{- fail (printf "pools.%s: cluster.pools has no such pool, only %s" $name (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (eq .Values.mode "external") (not .Values.networkPolicy.peers) -}}
{{- fail "networkPolicy.peers: mode is external; name the pods of that Ray, such as [{podSelector: {matchLabels: {ray.io/cluster: NAME}}}]" -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled .clients $.Values.metrics.serviceMonitor.enabled (not .scrapers) -}}
{{- fail "networkPolicy.scrapers: is empty, so metrics.serviceMonitor would open the HTTP port to all, although networkPolicy.clients restricts it; name Prometheus, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not (include "diptych.httpPort" . | int)) -}}
{{- fail "metrics.serviceMonitor: gateways serve metrics over HTTP; write cluster.gateway.http_port: 8000" -}}
{{- end -}}
{{- $grace := pluck "terminationGracePeriodSeconds" .Values.gateway .Values.podDefaults | first -}}
{{- if gt (add .Values.gateway.drainSeconds 15 | int) (int $grace) -}}
{{- fail (printf "gateway.drainSeconds is %d, and 15 s are needed to close; raise gateway.terminationGracePeriodSeconds above %d" (int .Values.gateway.drainSeconds) (int $grace)) -}}
{{- end -}}
{{- with .Values.gateway.autoscaling -}}
{{- if and .enabled (eq $.Values.mode "kuberay") -}}
{{- fail "gateway.autoscaling: mode is kuberay, where gateways have no pods of their own; write cluster.gateway.replicas" -}}
{{- end -}}
{{- if and .enabled (hasKey $gateway "replicas") -}}
{{- fail "cluster.gateway.replicas: gateway.autoscaling sets the number; leave it out" -}}
{{- end -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "gateway.autoscaling: minReplicas is %d, above maxReplicas, which is %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.poolAutoscaling.enabled -}}
{{- if eq .Values.mode "kuberay" -}}
{{- fail "poolAutoscaling: mode is kuberay, where Ray's autoscaler adds the pods of pools with replicas: {min, max}; leave it out" -}}
{{- end -}}
{{- if eq .Values.mode "external" -}}
{{- fail "poolAutoscaling: mode is external, where pools have no pods of the chart; leave it out" -}}
{{- end -}}
{{- $scaled := "" -}}
{{- range $cluster.pools -}}
{{- $scaled = include "diptych.scaled" (dict "root" $ "pool" .) | default $scaled -}}
{{- end -}}
{{- if not $scaled -}}
{{- fail "poolAutoscaling: no pool can scale; write replicas: {min: 1, max: 4} in one of cluster.pools" -}}
{{- end -}}
{{- end -}}
{{- $settings := dict "podDefaults" .Values.podDefaults "head" .Values.head "serve" .Values.serve "gateway" .Values.gateway "poolAutoscaling" .Values.poolAutoscaling -}}
{{- range $name, $own := .Values.pools -}}
{{- $_ := set $settings (printf "pools.%s" $name) ($own | default dict) -}}
{{- end -}}
{{- range $place, $own := $settings -}}
{{- range $label := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "diptych/pool" -}}
{{- if hasKey (get $own "podLabels" | default dict) $label -}}
{{- fail (printf "%s.podLabels: the chart selects its pods by %s; leave it out" $place $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "diptych.checkAccess" . -}}
{{- include "diptych.checkPorts" . -}}
{{- if and .Values.grpcRoute.enabled (not .Values.grpcRoute.parentRefs) -}}
{{- fail "grpcRoute.parentRefs: is empty; name the Gateway, such as [{name: public}]" -}}
{{- end -}}
{{- end -}}
