{{- define "firn.name" -}}
{{- if contains "firn" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-firn" .Release.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "firn.operatorName" -}}
{{ include "firn.name" . }}-operator
{{- end }}

{{- define "firn.serviceAccount" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if .Values.serviceAccount.create }}{{ include "firn.operatorName" . }}{{ else }}default{{ end }}
{{- end }}

{{- define "firn.selector" -}}
app.kubernetes.io/name: firn
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "firn.labels" -}}
app.kubernetes.io/name: firn
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* An image reference. Called with a dict of root and which (operator, node or spark). */ -}}
{{- define "firn.image" -}}
{{- $image := index .root.Values.image .which -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "firn.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What the Pod Security Standard `restricted` asks of a pod and of a container. */ -}}
{{- define "firn.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "firn.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The BrokerCluster and the CompactedTopics of the values, as YAML documents. */ -}}
{{- define "firn.resources" -}}
{{- if .Values.cluster.create }}
---
apiVersion: firn.dev/v1alpha1
kind: BrokerCluster
metadata:
  name: {{ .Values.cluster.name }}
  labels:
    {{- include "firn.labels" . | nindent 4 }}
spec:
  {{- toYaml .Values.cluster.spec | nindent 2 }}
{{- end }}
{{- range $name, $spec := .Values.topics }}
---
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata:
  name: {{ $name }}
  labels:
    {{- include "firn.labels" $ | nindent 4 }}
spec:
  {{- $own := dict }}
  {{- if $.Values.cluster.create }}{{ $own = dict "clusterRef" (dict "name" $.Values.cluster.name) }}{{ end }}
  {{- toYaml (merge (deepCopy (default dict $spec)) $own) | nindent 2 }}
{{- end }}
{{- end }}
