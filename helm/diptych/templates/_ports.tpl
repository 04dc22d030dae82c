{{/* Ports in a pod and in a Service must not collide: gateways avoid Ray's ports, gRPC avoids HTTP's. */}}
{{- define "diptych.checkPorts" -}}
{{- $grpc := include "diptych.grpcPort" . | int -}}
{{- $http := include "diptych.httpPort" . | int -}}
{{- $count := include "diptych.gateways" . | int -}}
{{- $rays := dict "8080" "metrics" "52365" "agent" -}}
{{- if eq .Values.mode "kuberay" -}}
{{- $rays = merge $rays (dict "6379" "GCS" "8265" "dashboard" "10001" "client server") -}}
{{- end -}}
{{- range $key, $first := dict "grpc_port" $grpc "http_port" $http -}}
{{- range $index := until (ternary $count 0 (gt $first 0)) -}}
{{- with get $rays (add $first $index | toString) -}}
{{- fail (printf "cluster.gateway.%s: gateway %d would listen on %d, the port of Ray's %s in the same pod; write another" $key $index (add $first $index) .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $http (lt (max (sub $http $grpc) (sub $grpc $http) | int) $count) -}}
{{- fail (printf "cluster.gateway.http_port: is %d, and gRPC has %d port(s) from %d on; write one that is farther away" $http $count $grpc) -}}
{{- end -}}
{{- $port := int .Values.gateway.service.port -}}
{{- if and $http (lt (max (sub $http $port) (sub $port $http) | int) $count) -}}
{{- fail (printf "gateway.service.port: is %d, and the Service has %d port(s) of HTTP from %d on (cluster.gateway.http_port); write one that is farther away" $port $count $http) -}}
{{- end -}}
{{- end -}}
