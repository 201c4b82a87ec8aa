{{/* Names of objects begin with it. Labels that selectors have do not follow the overrides: `kubectl poc`, the Job of
`helm uninstall` and the commands of the docs find operator and gateway by them, and selectors of a Deployment never change. */}}
{{- define "operator.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Names of cluster-wide objects have the namespace in them, since a release of the same name may be elsewhere. */}}
{{- define "operator.clusterName" -}}
{{- printf "%s:%s" .name .root.Release.Namespace -}}
{{- end -}}

{{- define "operator.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* All labels of an object: (dict "own" … "more" … "root" $), where `own` is text. Whose key comes first counts, so that
no key is there twice. */}}
{{- define "chart.labels" -}}
{{- merge (dict) (.own | fromYaml) (.more | default dict) (.root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{- define "operator.labels" -}}
{{- include "chart.labels" (dict "own" (include "operator.ownLabels" .) "root" .) -}}
{{- end -}}

{{- define "operator.ownLabels" -}}
{{ include "operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Operators that watch all namespaces must see the same Lease, wherever they are installed. */ -}}
{{- define "operator.leaseNamespace" -}}
{{- .Values.leaderElection.namespace | default (ternary "kube-system" .Release.Namespace (empty .Values.watchNamespaces)) }}
{{- end }}

{{- define "operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels of what `helm uninstall` runs: never those that the operator's own pod is found by. */}}
{{- define "uninstall.labels" -}}
{{- include "chart.labels" (dict "own" (include "uninstall.ownLabels" .) "root" .) -}}
{{- end -}}

{{- define "uninstall.ownLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-uninstall
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Annotations of what `helm uninstall` runs, in the order of this weight. */}}
{{- define "uninstall.hook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* Labels of what `helm test` runs: never those that the operator's own pod is found by. */}}
{{- define "test.labels" -}}
{{- include "chart.labels" (dict "own" (include "test.ownLabels" .) "root" .) -}}
{{- end -}}

{{- define "test.ownLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Annotations of what `helm test` runs, in the order of this weight. A pod that failed stays, with its log. */}}
{{- define "test.hook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* The name of an image: (dict "image" … "root" $). */}}
{{- define "operator.imageName" -}}
{{- $repository := .image.repository -}}
{{- with (.root.Values.global | default dict).imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* So short that the names of its Services, which end with "-network" and "-metrics", have at most 63 characters. */}}
{{- define "gateway.fullname" -}}
{{- printf "%s-gateway" (include "operator.fullname" . | trunc 47 | trimSuffix "-") -}}
{{- end -}}

{{- define "gateway.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "gateway.labels" -}}
{{- include "chart.labels" (dict "own" (include "gateway.ownLabels" .) "root" .) -}}
{{- end -}}

{{- define "gateway.ownLabels" -}}
{{ include "gateway.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "gateway.authSecret" -}}
{{- default (printf "%s-tokens" (include "gateway.fullname" .)) .Values.gateway.auth.existingSecret -}}
{{- end -}}

{{/* The data of the gateway's Secret as JSON: what the cluster has is kept, the rest is made once per rendering. */}}
{{- define "gateway.tokens" -}}
{{- if not (hasKey .Values "madeTokens") -}}
{{- $kept := (lookup "v1" "Secret" .Release.Namespace (include "gateway.authSecret" .)).data | default dict -}}
{{- $tokens := dict -}}
{{- range list "token" "operator-token" "callback-key" "network-token" -}}
{{- $_ := set $tokens . (index $kept . | default (randAlphaNum 40 | b64enc)) -}}
{{- end -}}
{{- $_ := set .Values "madeTokens" (toJson $tokens) -}}
{{- end -}}
{{- .Values.madeTokens -}}
{{- end -}}

{{/* An annotation by which pods restart when the chart's Secret has changed. A Secret of yours may be unreadable here. */}}
{{- define "gateway.tokensChecksum" -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.auth.existingSecret) -}}
checksum/tokens: {{ include "gateway.tokens" . | sha256sum }}
{{- end -}}
{{- end -}}

{{/* Where pods and the operator reach the gateway. */}}
{{- define "gateway.url" -}}
{{- printf "http://%s.%s.svc:8080" (include "gateway.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* The hosts of the gateway's Ingress as JSON: those of the values, and all paths of each ML node with another one. */}}
{{- define "gateway.ingressHosts" -}}
{{- $hosts := .Values.gateway.ingress.hosts | default list -}}
{{- $names := list -}}
{{- range $hosts }}{{ $names = append $names .host }}{{ end -}}
{{- range .Values.gateway.mlNodes -}}
{{- if and .host (not (has .host $names)) -}}
{{- $names = append $names .host -}}
{{- $hosts = append $hosts (dict "host" .host) -}}
{{- end -}}
{{- end -}}
{{- toJson $hosts -}}
{{- end -}}

{{/* The file of the ML nodes, as the gateway reads it: tokens are files. */}}
{{- define "gateway.mlNodes" -}}
{{- $nodes := list -}}
{{- range .Values.gateway.mlNodes -}}
{{- $node := omit . "auth" "chat" -}}
{{- if (.auth | default dict).existingSecret -}}
{{- $_ := set $node "token" (dict "file" (printf "/etc/poc-gateway-tokens/%s/token" .name)) -}}
{{- end -}}
{{- if (.chat | default dict).existingSecret -}}
{{- $_ := set $node "chatToken" (dict "file" (printf "/etc/poc-gateway-chat-tokens/%s/token" .name)) -}}
{{- end -}}
{{- $nodes = append $nodes $node -}}
{{- end -}}
{{- toPrettyJson $nodes -}}
{{- end -}}

{{/* What the gateway may do in a namespace that is watched. */}}
{{- define "gateway.rules" -}}
- apiGroups: [poc.gonka.ai]
  resources: [pocrounds]
  verbs: [get, list]
# The web page shows fleets.
- apiGroups: [poc.gonka.ai]
  resources: [pocfleets]
  verbs: [list]
{{- if .Values.rbac.readSecrets }}
# The user and the password of a round's receiver.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
{{- end -}}

{{/* The resources of the kinds that ask pods to work, and of all kinds. */}}
{{- define "operator.workResources" -}}
pocrounds, pocvalidations, poccalibrations
{{- end -}}

{{- define "operator.resources" -}}
{{ include "operator.workResources" . }}, pocfleets
{{- end -}}

{{/* What the operator may do for fleets in a namespace that it watches. */}}
{{- define "operator.fleetRules" -}}
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, create, patch]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, list, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, patch]
# The template of a Job cannot be changed: one that downloads another model, or with an old token, is made anew.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, create, patch, delete]
# Replicas that span several Kubernetes nodes, where LeaderWorkerSet is installed.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, create, patch]
# The template of the last good revision, to which a failed update goes back.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list]
# Where Prometheus Operator is installed.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch]
# The token of a namespace's pods, where there is none.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end -}}

{{/* What the operator may do in a namespace that it watches. */}}
{{- define "operator.rules" -}}
# kopf watches the objects and writes its finalizer and annotations.
- apiGroups: [poc.gonka.ai]
  resources: [{{ include "operator.workResources" . }}]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [poc.gonka.ai]
  resources: [pocfleets]
  verbs: [get, list, watch]
- apiGroups: [poc.gonka.ai]
  resources: [pocrounds/status, pocvalidations/status, poccalibrations/status, pocfleets/status]
  verbs: [patch]
{{- if .Values.fleets.enabled }}
{{ include "operator.fleetRules" . }}
{{- end }}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- if or .Values.rbac.deletePods .Values.fleets.enabled }}
# Pods that stall, and those of fleets that hang or have an old revision, are evicted, which follows PodDisruptionBudgets.
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
{{- end }}
{{- if .Values.rbac.readConfigMaps }}
# Proofs of validations.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
{{- end }}
{{- if and .Values.rbac.readSecrets (not .Values.gateway.enabled) }}
# The user and the password of a round's receiver.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}
# The token of a namespace's pods.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ .Values.auth.existingSecret | default "vllm-poc-token" }}]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
