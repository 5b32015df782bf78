{{- define "lastbit.name" -}}
{{- if contains "lastbit" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-lastbit" (.Release.Name | trunc 44 | trimSuffix "-") }}{{ end -}}
{{- end -}}

{{- define "lastbit.selector" -}}
app.kubernetes.io/name: lastbit
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "lastbit.labels" -}}
{{ include "lastbit.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "lastbit.pod" -}}
automountServiceAccountToken: false
# Kubernetes would set LASTBIT_PORT to the address of a Service called lastbit.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "lastbit.container" -}}
image: {{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "lastbit.env" -}}
- name: LASTBIT_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.secret }}
      key: {{ .key }}
{{- range $name, $value := .root.Values.settings }}
- name: {{ $name }}
  {{- /* Helm reads every number of a values file as floating point, and would write a million as 1e+06. */}}
  value: {{ if and (kindIs "float64" $value) (eq $value (floor $value)) }}{{ int64 $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end -}}
