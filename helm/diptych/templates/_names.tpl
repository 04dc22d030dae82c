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

{{/* A parent chart's registry stands before ours. */}}
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

{{/* Ours, and a parent chart's, which may say just the name. */}}
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

{{/* The claim with models; empty: there is none. */}}
{{- define "diptych.modelClaim" -}}
{{- .Values.model.existingClaim | default (ternary (printf "%s-models" (include "diptych.fullname" .)) "" .Values.model.pvc.create) -}}
{{- end -}}

{{/* Where Ray's head is, for whoever joins it. */}}
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

{{/* The first gRPC port in the pod, and how many there are: one for each gateway process. */}}
{{- define "diptych.grpcPort" -}}
{{ dig "gateway" "grpc_port" 50051 .Values.cluster }}
{{- end -}}

{{/* Of the first gateway; 0: none answers HTTP. */}}
{{- define "diptych.httpPort" -}}
{{ dig "gateway" "http_port" 0 .Values.cluster | default 0 }}
{{- end -}}

{{/* Gateway processes in a pod that has any: with KubeRay all are in the head's, else each is in a pod of its own. */}}
{{- define "diptych.gateways" -}}
{{ ternary (dig "gateway" "replicas" 1 .Values.cluster) 1 (eq .Values.mode "kuberay") }}
{{- end -}}

{{/* The file that `diptych serve -f` reads. */}}
{{- define "diptych.clusterFile" -}}
{{ toYaml .Values.cluster }}
{{- end -}}
