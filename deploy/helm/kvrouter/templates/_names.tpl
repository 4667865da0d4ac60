{{/* What everything is called: the release's name, with the chart's unless it is in there. */}}
{{- define "kvrouter.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvrouter.operator" -}}
{{ include "kvrouter.name" . }}-operator
{{- end -}}

{{- define "kvrouter.nats" -}}
{{ include "kvrouter.name" . }}-nats
{{- end -}}

{{- define "kvrouter.cleanUp" -}}
{{ include "kvrouter.operator" . }}-clean-up
{{- end -}}

{{- define "kvrouter.account" -}}
{{- .Values.serviceAccount.name | default (include "kvrouter.operator" .) -}}
{{- end -}}

{{- define "kvrouter.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* NATS as fleets reach it; nothing where there is none. */}}
{{- define "kvrouter.natsServer" -}}
{{- if .Values.fleets.natsServer -}}
{{ .Values.fleets.natsServer }}
{{- else if .Values.nats.enabled -}}
nats://{{ include "kvrouter.nats" . }}.{{ .Release.Namespace }}.svc:4222
{{- else -}}
{{- range $plane, $backend := pick .Values.fleets "discovery" "requestPlane" "eventPlane" -}}
{{- if has $backend (list "nats" "jetstream") -}}
{{- fail (printf "fleets.%s is %s: set nats.enabled to true, or fleets.natsServer to where NATS is" $plane $backend) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether pods are labelled at their binding by a webhook: "true" or nothing. */}}
{{- define "kvrouter.bindingWebhook" -}}
{{- $wanted := toString .Values.admission.bindingWebhook -}}
{{- $hasPolicies := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" -}}
{{- if and .Values.admission.enabled (or (eq $wanted "true") (and (eq $wanted "auto") (not $hasPolicies))) -}}
true
{{- end -}}
{{- end -}}

{{- define "kvrouter.selector" -}}
app.kubernetes.io/name: kvrouter
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvrouter.labels" -}}
{{ include "kvrouter.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvrouter
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The security context of every container: Kubernetes' restricted standard, and nothing written but volumes. */}}
{{- define "kvrouter.restricted" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Where pods of the chart may run, and how they are pulled. */}}
{{- define "kvrouter.placed" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The namespaces whose deployments are judged: those that the operator looks after, and the user asked for. */}}
{{- define "kvrouter.namespaceSelector" -}}
{{- $wanted := deepCopy .Values.admission.namespaceSelector -}}
{{- with .Values.watchNamespace -}}
{{- $name := dict "kubernetes.io/metadata.name" . -}}
{{- $_ := set $wanted "matchLabels" (merge $name ($wanted.matchLabels | default dict)) -}}
{{- end -}}
{{- with $wanted }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* JetStream stays a little below its volume, so that it says it is full before the disk is. */}}
{{- define "kvrouter.natsConfig" -}}
{{- $size := .Values.nats.jetstream.size -}}
{{- $mebibytes := ternary (mul 1024 (trimSuffix "Gi" $size | int)) (trimSuffix "Mi" $size | int) (hasSuffix "Gi" $size) -}}
listen: 0.0.0.0:4222
http: 0.0.0.0:8222
server_name: {{ include "kvrouter.nats" . }}
jetstream {
  store_dir: /data
  max_memory_store: 0
  max_file_store: {{ div (mul $mebibytes 9) 10 }}MB
}
{{- end -}}

{{/* What Helm makes once everything else is gone, and takes away again when it is done. */}}
{{- define "kvrouter.atTheEnd" -}}
helm.sh/hook: post-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
