{{- define "torch-ros.labels" -}}
app.kubernetes.io/name: torch-ros
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "torch-ros.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "torch-ros.user" -}}
{{ .Values.client.user | default (printf "ros-%s" .Values.model) }}
{{- end }}

{{- define "torch-ros.members" -}}
{{- range $n := until 3 }}{{ if $n }},{{ end }}{{ $.Release.Name }}-etcd-{{ $n }}.{{ $.Release.Name }}-etcd:2379{{ end }}
{{- end }}

{{- define "torch-ros.endpoint" -}}
{{- if .Values.etcd.enabled -}}
etcds://{{ include "torch-ros.members" . }}
{{- else -}}
{{ required "etcd.endpoint: name your etcd, or set etcd.enabled" .Values.etcd.endpoint }}
{{- end }}
{{- end }}

{{- define "torch-ros.shut" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "torch-ros.pod" -}}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "torch-ros.where" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "torch-ros.env" -}}
- {name: TORCH_ROS_ENDPOINT, value: {{ include "torch-ros.endpoint" . | quote }}}
- {name: TORCH_ROS_ETCD_CA, value: /etc/torch-ros/client/ca.crt}
- {name: TORCH_ROS_ETCD_CERT, value: /etc/torch-ros/client/tls.crt}
- {name: TORCH_ROS_ETCD_KEY, value: /etc/torch-ros/client/tls.key}
- {name: TORCH_ROS_ETCD_USER, value: {{ include "torch-ros.user" . | quote }}}
- {name: TORCH_ROS_ETCD_PASSWORD_FILE, value: /etc/torch-ros/user/password}
- {name: TORCH_ROS_MODEL, value: {{ .Values.model | quote }}}
{{- end }}

{{- define "torch-ros.mounts" -}}
- {name: client, mountPath: /etc/torch-ros/client, readOnly: true}
- {name: user, mountPath: /etc/torch-ros/user, readOnly: true}
{{- end }}

{{- define "torch-ros.volumes" -}}
- name: client
  secret:
    secretName: {{ .Values.client.certificate | default (printf "%s-etcd-client" .Release.Name) }}
    defaultMode: 0440
- name: user
  secret:
    secretName: {{ .Values.client.password | default (printf "%s-etcd-model" .Release.Name) }}
    defaultMode: 0440
{{- end }}

{{- /* The release's pods of these components: (list $ "trainer" "rollout"). */}}
{{- define "torch-ros.pods" -}}
matchLabels: {{- include "torch-ros.labels" (first .) | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ toJson (rest .) }}}
{{- end }}
