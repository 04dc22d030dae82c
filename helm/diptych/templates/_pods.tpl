{{/* A pod's settings: podDefaults overridden by those of its kind. */}}
{{- define "diptych.settings" -}}
{{ toYaml (mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy (.own | default dict))) }}
{{- end -}}

{{/* The hub's token, for pods that read the model: workers, gateways, and `serve`, which downloads it first. */}}
{{- define "diptych.ownEnv" -}}
{{- if eq (get . "component") "autoscaler" -}}
{{ include "diptych.clientEnv" .root }}
{{- else -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /tmp}
- {name: USER, value: diptych}
- {name: DIPTYCH_CACHE, value: /cache}
- {name: HF_HOME, value: /cache/huggingface}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- $auth := .root.Values.ray.auth }}
{{- if ne .root.Values.mode "kuberay" }}
- {name: RAY_AUTH_MODE, value: {{ $auth.mode }}}
{{- if eq $auth.mode "token" }}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "diptych.authSecret" .root | quote }}, key: {{ $auth.key | quote }}}}
{{- end }}
{{- end }}
{{- $model := or (ne (get . "component") "head") (eq .root.Values.mode "kuberay") }}
{{- with .root.Values.model.tokenSecret }}
{{- if and .name $model }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Ours, then extraEnv. The last of equal names wins, since the API server accepts a name only once. */}}
{{- define "diptych.env" -}}
{{- $env := list -}}
{{- $named := dict -}}
{{- range concat (fromYamlArray (include "diptych.ownEnv" .)) (.settings.extraEnv | default list) | reverse -}}
{{- if not (hasKey $named .name) -}}
{{- $_ := set $named .name true -}}
{{- $env = prepend $env . -}}
{{- end -}}
{{- end -}}
{{ toYaml $env }}
{{- end -}}

{{- define "diptych.mounts" -}}
- {name: cluster, mountPath: /etc/diptych, readOnly: true}
{{- if eq (get . "component") "autoscaler" }}
{{ include "diptych.clientMounts" .root }}
{{- else }}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- {name: cache, mountPath: /cache}
{{- with .root.Values.model }}
{{- if include "diptych.modelClaim" $.root }}
- {name: models, mountPath: {{ .mountPath | quote }}, readOnly: {{ .readOnly }}}
{{- end }}
{{- end }}
{{- end }}
{{- with .settings.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "diptych.volumes" -}}
- name: cluster
  configMap: {name: {{ include "diptych.fullname" .root }}-cluster}
{{- if eq (get . "component") "autoscaler" }}
{{ include "diptych.clientVolumes" (dict "root" .root "client" .root.Values.poolAutoscaling.clientSecret) }}
{{- else }}
- name: tmp
  emptyDir: {{ with .settings.tmpSize }}{sizeLimit: {{ . | quote }}}{{ else }}{}{{ end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .settings.shmSize | quote }}}
{{- with .root.Values.model }}
- name: cache
{{- if .cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .cache.existingClaim | quote }}}
{{- else }}
  emptyDir: {{ with .cache.sizeLimit }}{sizeLimit: {{ . | quote }}}{{ else }}{}{{ end }}
{{- end }}
{{- with include "diptych.modelClaim" $.root }}
- name: models
  persistentVolumeClaim: {claimName: {{ quote . }}, readOnly: {{ $.root.Values.model.readOnly }}}
{{- end }}
{{- end }}
{{- end }}
{{- with .settings.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Common to all our containers: image, environment, mounts, security. */}}
{{- define "diptych.container" -}}
image: {{ include "diptych.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  {{- include "diptych.env" . | nindent 2 }}
{{- with .settings.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "diptych.mounts" . | nindent 2 }}
{{- $security := deepCopy .settings.containerSecurityContext }}
{{- if include "diptych.rdma" . }}
{{- $capabilities := get $security "capabilities" | default dict }}
{{- $_ := set $security "capabilities" (set $capabilities "add" (append (get $capabilities "add" | default list) "IPC_LOCK" | uniq)) }}
{{- end }}
securityContext:
  {{- toYaml $security | nindent 2 }}
{{- end -}}

{{/* Whether a pod gets the RDMA device: only pools move KV. */}}
{{- define "diptych.rdma" -}}
{{- if and .settings.rdma.enabled (eq (get . "component") "pool") }}true{{ end -}}
{{- end -}}

{{/* Requests and limits, with the RDMA device if enabled. `resources` is YAML. */}}
{{- define "diptych.resources" -}}
{{- $resources := fromYaml .resources -}}
{{- if include "diptych.rdma" . -}}
{{- with .settings.rdma -}}
{{- $_ := set $resources "limits" (set (get $resources "limits" | default dict) .resourceName (toString .count)) -}}
{{- end -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{/* Scheduling and security context. */}}
{{- define "diptych.placement" -}}
serviceAccountName: {{ get . "account" | default (include "diptych.serviceAccount" .root) | quote }}
automountServiceAccountToken: {{ .apiToken | default false }}
{{- with include "diptych.pullSecrets" .root }}
{{ . }}
{{- end }}
{{- with .settings }}
securityContext:
  {{- toYaml .podSecurityContext | nindent 2 }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with get $.settings $key }}
{{ $key }}:{{ if kindIs "string" . }} {{ quote . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A pod's fields other than its containers. */}}
{{- define "diptych.scheduling" -}}
{{ include "diptych.placement" . }}
terminationGracePeriodSeconds: {{ int .settings.terminationGracePeriodSeconds }}
volumes:
  {{- include "diptych.volumes" . | nindent 2 }}
{{- end -}}

{{- define "diptych.podMetadata" -}}
labels:
  {{- include "diptych.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .pool }}
  diptych/pool: {{ quote . }}
  {{- end }}
  {{- with .settings.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .settings.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A container that ends when Ray's head responds. The full check takes seconds, so it runs once the port is open. */}}
{{- define "diptych.waitForHead" -}}
- name: wait-for-head
  command:
    - /bin/sh
    - -c
    - |
      until python3 -IS -c 'import socket, sys; host, port = sys.argv[1].rsplit(":", 1); socket.create_connection((host.strip("[]"), port), 2)' "$1" 2>/dev/null; do sleep 1; done
      until ray health-check --address "$1"; do sleep 2; done
    - wait
    - {{ include "diptych.rayAddress" .root | quote }}
  {{- include "diptych.container" . | nindent 2 }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
{{- end -}}

{{/* Options of every Ray node. Ports are outside the range of Ray's own workers. */}}
{{- define "diptych.rayStart" -}}
- --node-ip-address=$(POD_IP)
- --metrics-export-port=8080
- --dashboard-agent-listen-port=52365
- --object-store-memory={{ int64 .Values.ray.objectStoreBytes }}
- --disable-usage-stats
{{- end -}}

{{/* Liveness of this pod's Ray node; needs no token. */}}
{{- define "diptych.rayProbes" -}}
startupProbe:
  httpGet: {path: {{ .path }}, port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: 60
readinessProbe:
  httpGet: {path: {{ .path }}, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: {{ .path }}, port: {{ .port }}}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 8
{{- end -}}
