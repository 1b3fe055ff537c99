{{- /* Never on a node with another plugin for the same GPUs, whoever comes first. */ -}}
{{- define "hami-agent.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- $anti := get $affinity "podAntiAffinity" | default dict -}}
{{- $terms := get $anti "requiredDuringSchedulingIgnoredDuringExecution" | default list -}}
{{- range (ternary list .Values.otherPlugins (or .Values.takeover .Values.observe)) -}}
{{- $terms = append $terms (dict "labelSelector" . "namespaceSelector" dict "topologyKey" "kubernetes.io/hostname") -}}
{{- end -}}
{{- if $terms -}}
{{- $_ := set $anti "requiredDuringSchedulingIgnoredDuringExecution" $terms -}}
{{- $_ := set $affinity "podAntiAffinity" $anti -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{- /* A container with a shell and HAMi-core, without GPUs and without a token; its user is to be added. */ -}}
{{- define "hami-agent.libraryContainer" -}}
image: {{ include "hami-agent.libraryImage" . }}
imagePullPolicy: {{ .Values.library.image.pullPolicy }}
env:
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
resources:
  requests:
    cpu: 10m
    memory: 16Mi
  limits:
    memory: 64Mi
command: [/bin/sh, -euc]
{{- end -}}

{{- /* Variables as in a container, or by name; a number is written as it stands. */ -}}
{{- define "hami-agent.envs" -}}
{{- if kindIs "map" . -}}
{{- range $name, $value := . }}
- name: {{ quote $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- else -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{- /* All GPUs, in the words that the NVIDIA runtime is configured to heed. */ -}}
{{- define "hami-agent.visibleDevices" -}}
{{- ternary "/var/run/nvidia-container-devices" "all" (eq .Values.driver.visibleDevices "volume-mounts") -}}
{{- end -}}

{{- define "hami-agent.visibleMount" -}}
{{- if eq .Values.driver.visibleDevices "volume-mounts" -}}
- name: visible-devices
  mountPath: /var/run/nvidia-container-devices/all
  readOnly: true
{{- end -}}
{{- end -}}

{{- /* Values that fit each other not; and HAMi's plugin for the same nodes, in the namespace that this user may look into. */ -}}
{{- define "hami-agent.refuse" -}}
{{- $full := include "hami-agent.fullname" . -}}
{{- if ne $full (include "hami-agent.textual" $full) -}}
{{- fail (printf "the objects would be named %s, which is no text in YAML: set fullnameOverride" $full) -}}
{{- end -}}
{{- if and .Values.devicePlugin.monitor.enabled (not .Values.observe) (eq (include "hami-agent.port" .) "9394") -}}
{{- fail "web.port=9394 is the monitor's (devicePlugin.monitor.enabled=true): give the agent another one, or leave web.port out for 9395" -}}
{{- end -}}
{{- include "hami-agent.refuseTwice" . -}}
{{- if not (or .Values.takeover .Values.observe) -}}
{{- range (lookup "apps/v1" "DaemonSet" (include "hami-agent.namespace" $) "").items -}}
{{- $labels := .spec.template.metadata.labels | default dict -}}
{{- $same := eq (toJson (.spec.template.spec.nodeSelector | default dict)) (toJson $.Values.devicePlugin.nvidiaNodeSelector) -}}
{{- if and $same (eq (get $labels "app.kubernetes.io/component") "hami-device-plugin") -}}
{{- fail (printf "HAMi's device plugin (DaemonSet %s) serves the same nodes: switch it off with devicePlugin.enabled=false in HAMi's release, or set takeover=true to serve beside it" .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Names and modes of HAMi's chart that would have no effect here, where they are not its defaults. */ -}}
{{- define "hami-agent.refuseUnheard" -}}
{{- $mode := .Values.devicePlugin.migStrategy | default "none" -}}
{{- if ne $mode "none" -}}
{{- fail (printf "devicePlugin.migStrategy=%s: GPUs in MIG mode are not shared; leave it out, or set it to none" $mode) -}}
{{- end -}}
{{- $priority := .Values.resourcePriority | default "nvidia.com/priority" -}}
{{- if ne $priority "nvidia.com/priority" -}}
{{- fail (printf "resourcePriority=%s has no effect here: HAMi's scheduler alone reads that resource of pods; leave it out" $priority) -}}
{{- end -}}
{{- with .Values.devicePlugin.nodeConfiguration.config -}}
{{- with get (fromJson .) "Error" -}}
{{- fail (printf "devicePlugin.nodeConfiguration.config is not valid JSON (%s): no agent could read it; mend it, `hami-agent config check` names the place" .) -}}
{{- end -}}
{{- end -}}
{{- with (index .Values "device-config").content -}}
{{- with get (fromYaml .) "Error" -}}
{{- fail (printf "device-config.content is not valid YAML (%s): no agent could read it; mend it, `hami-agent config check` names the place" .) -}}
{{- end -}}
{{- end -}}
{{- $monitor := .Values.devicePlugin.monitor -}}
{{- $directory := printf "%s/containers" (include "hami-agent.hook" .) -}}
{{- if not (has ($monitor.ctrPath | default $directory) (list $directory "/usr/local/vgpu/containers")) -}}
{{- fail (printf "devicePlugin.monitor.ctrPath=%s has no effect here: it follows from global.gpuHookPath; leave it out" $monitor.ctrPath) -}}
{{- end -}}
{{- $usual := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL") "add" (list "SYS_ADMIN")) -}}
{{- if and $monitor.securityContext (ne (toJson $monitor.securityContext) (toJson $usual)) -}}
{{- fail "devicePlugin.monitor.securityContext has no effect here: the monitor runs without privileges, which it does not need; leave it out" -}}
{{- end -}}
{{- end -}}
