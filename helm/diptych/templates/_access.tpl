{{/* TLS, clients' certificates and API keys: which files are mounted where, and who is told of them. */}}

{{/* What `diptych serve` is told beside its file. */}}
{{- define "diptych.accessOptions" -}}
{{- with .Values.gateway -}}
{{- if .tls.secret }} --tls-cert-file /etc/diptych-tls/tls.crt --tls-key-file /etc/diptych-tls/tls.key{{ end -}}
{{- if .tls.clientCASecret }} --tls-client-ca-file /etc/diptych-clients/ca.crt{{ end -}}
{{- if .auth.existingSecret }} --api-keys-file /etc/diptych-keys/{{ .auth.key }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Settings of the pod in which gateways run, with these files. Whole volumes: single files would not be renewed. */}}
{{- define "diptych.withAccess" -}}
{{- $mounts := .settings.extraVolumeMounts -}}
{{- $volumes := .settings.extraVolumes -}}
{{- with .root.Values.gateway -}}
{{- range $name, $secret := dict "tls" .tls.secret "clients" .tls.clientCASecret "keys" .auth.existingSecret -}}
{{- if $secret -}}
{{- $mounts = append $mounts (dict "name" (printf "access-%s" $name) "mountPath" (printf "/etc/diptych-%s" $name) "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" (printf "access-%s" $name) "secret" (dict "secretName" $secret)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toYaml (merge (dict "extraVolumeMounts" $mounts "extraVolumes" $volumes) .settings) }}
{{- end -}}

{{/* How the kubelet asks the gateway. It has gRPC without TLS, HTTPS without a certificate of its own, or a connection. */}}
{{- define "diptych.probe" -}}
{{- $tls := .root.Values.gateway.tls -}}
{{- $http := include "diptych.httpPort" .root | int -}}
{{- if not $tls.secret -}}
grpc: {port: {{ include "diptych.grpcPort" .root }}{{ with .service }}, service: {{ . }}{{ end }}}
{{- else if and $http (not $tls.clientCASecret) -}}
httpGet: {scheme: HTTPS, port: {{ $http }}, path: {{ .path }}}
{{- else -}}
tcpSocket: {port: {{ $http | default (include "diptych.grpcPort" .root) }}}
{{- end -}}
{{- end -}}

{{/* The name for which the certificate must be valid. */}}
{{- define "diptych.host" -}}
{{ include "diptych.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Environment, mounts and volumes of pods that ask a gateway. The gateway's own key is not for them. */}}
{{- define "diptych.clientEnv" -}}
- {name: HOME, value: /tmp}
{{- with .Values.gateway }}
- {name: DIPTYCH_ENDPOINT, value: "{{ if .tls.secret }}grpcs://{{ include "diptych.host" $ }}{{ else }}{{ include "diptych.fullname" $ }}{{ end }}:{{ .service.port }}"}
{{- if and .tls.secret .tls.caKey }}
- {name: DIPTYCH_CA, value: /etc/diptych-ca/ca.crt}
{{- end }}
{{- if .tls.clientCASecret }}
- {name: DIPTYCH_CERT, value: /etc/diptych-client/tls.crt}
- {name: DIPTYCH_CERT_KEY, value: /etc/diptych-client/tls.key}
{{- end }}
{{- if .auth.existingSecret }}
- {name: DIPTYCH_KEY_FILE, value: {{ printf "/etc/diptych-keys/%s" .auth.key | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "diptych.clientMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- with .Values.gateway }}
{{- if and .tls.secret .tls.caKey }}
- {name: ca, mountPath: /etc/diptych-ca, readOnly: true}
{{- end }}
{{- if .tls.clientCASecret }}
- {name: client, mountPath: /etc/diptych-client, readOnly: true}
{{- end }}
{{- if .auth.existingSecret }}
- {name: keys, mountPath: /etc/diptych-keys, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* `client`: the Secret with the certificate that this one shows. */}}
{{- define "diptych.clientVolumes" -}}
- {name: tmp, emptyDir: {}}
{{- $client := .client }}
{{- with .root.Values.gateway }}
{{- if and .tls.secret .tls.caKey }}
- {name: ca, secret: {secretName: {{ .tls.secret | quote }}, items: [{key: {{ .tls.caKey | quote }}, path: ca.crt}]}}
{{- end }}
{{- if .tls.clientCASecret }}
- {name: client, secret: {secretName: {{ quote $client }}}}
{{- end }}
{{- if .auth.existingSecret }}
- {name: keys, secret: {secretName: {{ .auth.existingSecret | quote }}}}
{{- end }}
{{- end }}
{{- end -}}

{{/* What Prometheus needs for an endpoint of a ServiceMonitor. */}}
{{- define "diptych.scrapeAccess" -}}
{{- $monitor := .Values.metrics.serviceMonitor -}}
{{- with .Values.gateway -}}
{{- if .tls.secret -}}
scheme: https
tlsConfig:
  serverName: {{ include "diptych.host" $ | quote }}
  {{- if .tls.caKey }}
  ca: {secret: {name: {{ .tls.secret | quote }}, key: {{ .tls.caKey | quote }}}}
  {{- end }}
  {{- if .tls.clientCASecret }}
  cert: {secret: {name: {{ $monitor.clientSecret | quote }}, key: tls.crt}}
  keySecret: {name: {{ $monitor.clientSecret | quote }}, key: tls.key}
  {{- end }}
{{- end }}
{{- if .auth.existingSecret }}
authorization:
  credentials: {name: {{ $monitor.apiKey.name | quote }}, key: {{ $monitor.apiKey.key | quote }}}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Behind `--endpoint HOST:PORT`: for people, who have the files under these names. */}}
{{- define "diptych.askFiles" -}}
{{- with .Values.gateway -}}
{{- if and .tls.secret .tls.caKey }} --ca ca.crt{{ end -}}
{{- if .tls.clientCASecret }} --cert CERTIFICATE --cert-key ITS_KEY{{ end -}}
{{- if .auth.existingSecret }} --key-file KEYS{{ end -}}
{{- end -}}
{{- end -}}

{{- define "diptych.checkAccess" -}}
{{- $said := dict "tls_cert_file" "tls.secret" "tls_key_file" "tls.secret" "tls_client_ca_file" "tls.clientCASecret" "api_keys_file" "auth.existingSecret" -}}
{{- range $key, $value := $said -}}
{{- if dig "gateway" $key "" $.Values.cluster -}}
{{- fail (printf "cluster.gateway.%s: the chart mounts the file and names it; write gateway.%s" $key $value) -}}
{{- end -}}
{{- end -}}
{{- $monitor := .Values.metrics.serviceMonitor -}}
{{- with .Values.gateway -}}
{{- if and .tls.clientCASecret (not .tls.secret) -}}
{{- fail "gateway.tls.clientCASecret: clients show a certificate to a server that has one; write gateway.tls.secret too" -}}
{{- end -}}
{{- if and .tls.clientCASecret $.Values.smokeTest.enabled (not $.Values.smokeTest.clientSecret) -}}
{{- fail "smokeTest.clientSecret: the gateway asks for a client's certificate; name a kubernetes.io/tls Secret with one, or write smokeTest.enabled: false" -}}
{{- end -}}
{{- with $.Values.poolAutoscaling -}}
{{- if and .enabled (eq .by "diptych") $.Values.gateway.tls.clientCASecret (not .clientSecret) -}}
{{- fail "poolAutoscaling.clientSecret: the gateway asks for a client's certificate; name a kubernetes.io/tls Secret with one" -}}
{{- end -}}
{{- end -}}
{{- if and .tls.clientCASecret $monitor.enabled (not $monitor.clientSecret) -}}
{{- fail "metrics.serviceMonitor.clientSecret: the gateway asks for a client's certificate; name a kubernetes.io/tls Secret with one for Prometheus" -}}
{{- end -}}
{{- if and .auth.existingSecret $monitor.enabled (not $monitor.apiKey.name) -}}
{{- fail "metrics.serviceMonitor.apiKey.name: /metrics needs an API key; name a Secret with the one that Prometheus sends" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpIngress.enabled (not (include "diptych.httpPort" $ | int)) -}}
{{- fail "httpIngress: there is no HTTP to lead to; write cluster.gateway.http_port: 8000" -}}
{{- end -}}
{{- with .Values.httpRoute -}}
{{- if and .enabled (not .parentRefs) -}}
{{- fail "httpRoute.parentRefs: is empty; name the Gateway, such as [{name: public}]" -}}
{{- end -}}
{{- if and .enabled (not (include "diptych.httpPort" $ | int)) -}}
{{- fail "httpRoute: there is no HTTP to lead to; write cluster.gateway.http_port: 8000" -}}
{{- end -}}
{{- end -}}
{{- end -}}
