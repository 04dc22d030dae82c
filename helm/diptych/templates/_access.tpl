{{/* TLS, client certificates and API keys: mounted files and the settings that name them. */}}

{{/* Options of `diptych serve` beside its file. */}}
{{- define "diptych.accessOptions" -}}
{{- with .Values.gateway -}}
{{- if .tls.secret }} --tls-cert-file /etc/diptych-tls/tls.crt --tls-key-file /etc/diptych-tls/tls.key{{ end -}}
{{- if .tls.clientCASecret }} --tls-client-ca-file /etc/diptych-clients/ca.crt{{ end -}}
{{- if .auth.existingSecret }} --api-keys-file /etc/diptych-keys/{{ .auth.key }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Settings of gateway pods with these files. Whole volumes, since single mounted files would not be renewed. */}}
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

{{/* The gateway's probes. The kubelet supports gRPC without TLS, HTTPS without a client certificate, or TCP. */}}
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

{{/* The host name that the certificate must cover. */}}
{{- define "diptych.host" -}}
{{ include "diptych.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Environment, mounts and volumes of the gateway's clients. They don't get its private key. */}}
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

{{/* `client`: the Secret with the client certificate. */}}
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

{{/* TLS and authorization of a ServiceMonitor's endpoint. */}}
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

{{/* Options after `--endpoint HOST:PORT` in the notes, with local file names. */}}
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
{{- fail (printf "cluster.gateway.%s: the chart mounts the file and sets this path; write gateway.%s" $key $value) -}}
{{- end -}}
{{- end -}}
{{- $monitor := .Values.metrics.serviceMonitor -}}
{{- with .Values.gateway -}}
{{- if and .tls.clientCASecret (not .tls.secret) -}}
{{- fail "gateway.tls.clientCASecret: client certificates need TLS; set gateway.tls.secret too" -}}
{{- end -}}
{{- if and .tls.clientCASecret $.Values.smokeTest.enabled (not $.Values.smokeTest.clientSecret) -}}
{{- fail "smokeTest.clientSecret: the gateway requires a client certificate; name a kubernetes.io/tls Secret with one, or write smokeTest.enabled: false" -}}
{{- end -}}
{{- with $.Values.poolAutoscaling -}}
{{- if and .enabled (eq .by "diptych") $.Values.gateway.tls.clientCASecret (not .clientSecret) -}}
{{- fail "poolAutoscaling.clientSecret: the gateway requires a client certificate; name a kubernetes.io/tls Secret with one" -}}
{{- end -}}
{{- end -}}
{{- if and .tls.clientCASecret $monitor.enabled (not $monitor.clientSecret) -}}
{{- fail "metrics.serviceMonitor.clientSecret: the gateway requires a client certificate; name a kubernetes.io/tls Secret with one for Prometheus" -}}
{{- end -}}
{{- if and .auth.existingSecret $monitor.enabled (not $monitor.apiKey.name) -}}
{{- fail "metrics.serviceMonitor.apiKey.name: /metrics needs an API key; name a Secret with the one that Prometheus sends" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpIngress.enabled (not (include "diptych.httpPort" $ | int)) -}}
{{- fail "httpIngress: the gateway has no HTTP port; write cluster.gateway.http_port: 8000" -}}
{{- end -}}
{{- with .Values.httpRoute -}}
{{- if and .enabled (not .parentRefs) -}}
{{- fail "httpRoute.parentRefs: is empty; name the Gateway, such as [{name: public}]" -}}
{{- end -}}
{{- if and .enabled (not (include "diptych.httpPort" $ | int)) -}}
{{- fail "httpRoute: the gateway has no HTTP port; write cluster.gateway.http_port: 8000" -}}
{{- end -}}
{{- end -}}
{{- end -}}
