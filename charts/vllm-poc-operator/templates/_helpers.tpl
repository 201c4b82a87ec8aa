{{- define "operator.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "operator.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "operator.labels" -}}
{{ include "operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "operator.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What the operator may do in a namespace that it watches. */}}
{{- define "operator.rules" -}}
# kopf watches rounds and writes its finalizer and annotations.
- apiGroups: [poc.gonka.ai]
  resources: [pocrounds]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [poc.gonka.ai]
  resources: [pocrounds/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch{{ if .Values.rbac.deletePods }}, delete{{ end }}]
{{- if .Values.rbac.readConfigMaps }}
# Proofs of rounds that validate.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
