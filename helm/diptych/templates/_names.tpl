{{/* Names and labels. */}}

{{- define "diptych.fullname" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name)) -}}
{{- $name | trunc 36 | trimSuffix "-" -}}
{{- end -}}

{{- define "diptych.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "diptych.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "diptych.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* A parent chart's registry takes precedence. */}}
{{- define "diptych.image" -}}
{{- $global := .Values.global | default dict -}}
{{- with .Values.image -}}
{{- $registry := get $global "imageRegistry" | default .registry -}}
{{- $path := ternary .repository (printf "%s/%s" $registry .repository) (empty $registry) -}}
{{- if .digest -}}
{{ printf "%s@%s" $path .digest }}
{{- else -}}
{{ printf "%s:%s" $path (.tag | default $.Chart.AppVersion) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ours plus the parent chart's, which may be plain names. */}}
{{- define "diptych.pullSecrets" -}}
{{- $secrets := .Values.imagePullSecrets -}}
{{- range get (.Values.global | default dict) "imagePullSecrets" | default list -}}
{{- $secrets = append $secrets (kindIs "map" . | ternary . (dict "name" .)) -}}
{{- end -}}
{{- with uniq $secrets -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* The claim with models, or empty. */}}
{{- define "diptych.modelClaim" -}}
{{- .Values.model.existingClaim | default (ternary (printf "%s-models" (include "diptych.fullname" .)) "" .Values.model.pvc.create) -}}
{{- end -}}

{{/* Ray's head address, for nodes that join. */}}
{{- define "diptych.rayAddress" -}}
{{- if eq .Values.mode "external" -}}
{{ .Values.ray.address }}
{{- else -}}
{{ include "diptych.fullname" . }}-head:6379
{{- end -}}
{{- end -}}

{{- define "diptych.authSecret" -}}
{{ .Values.ray.auth.existingSecret | default (printf "%s-ray" (include "diptych.fullname" .)) }}
{{- end -}}

{{/* The first gRPC port in the pod, and the number of ports: one per gateway process. */}}
{{- define "diptych.grpcPort" -}}
{{ dig "gateway" "grpc_port" 50051 .Values.cluster }}
{{- end -}}

{{/* HTTP port of the first gateway; 0: no HTTP. */}}
{{- define "diptych.httpPort" -}}
{{ dig "gateway" "http_port" 0 .Values.cluster | default 0 }}
{{- end -}}

{{/* Gateway processes per pod: with KubeRay all run in the head's pod, else one per pod. */}}
{{- define "diptych.gateways" -}}
{{ ternary (dig "gateway" "replicas" 1 .Values.cluster) 1 (eq .Values.mode "kuberay") }}
{{- end -}}

{{/* The file that `diptych serve -f` reads. */}}
{{- define "diptych.clusterFile" -}}
{{ toYaml .Values.cluster }}
{{- end -}}

{{/* The models that the pools serve. */}}
{{- define "diptych.models" -}}
{{- $models := list }}
{{- range .Values.cluster.pools }}
{{- $models = append $models (.model | default $.Values.cluster.model) }}
{{- end }}
{{- uniq $models | toJson }}
{{- end }}

{{/* The option that a call needs where there are several models. */}}
{{- define "diptych.askModel" -}}
{{- $models := fromJsonArray (include "diptych.models" .) }}
{{- if rest $models }} --model {{ first $models }}{{ end }}
{{- end }}
