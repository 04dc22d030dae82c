{{/* Drains the node before a pool's pod ends. Ray gets the rest of the grace period. */}}
{{- define "diptych.leave" -}}
{{- $deadline := sub .settings.terminationGracePeriodSeconds 20 | toString -}}
lifecycle:
  preStop:
    exec:
      {{- if eq .root.Values.mode "kuberay" }}
      command: [diptych, leave, --deadline, {{ $deadline | quote }}]
      {{- else }}
      command: [/bin/sh, -c, 'RAY_ADDRESS="$0" exec diptych leave --deadline "$1"', {{ include "diptych.rayAddress" .root | quote }}, {{ $deadline | quote }}]
      {{- end }}
{{- end -}}
