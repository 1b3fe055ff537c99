{{- define "hami-agent.containerSecurity" -}}
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* No AppArmor profile by default: the kubelet refuses a pod that names one, RuntimeDefault included,
       on nodes without AppArmor. On nodes that have it, the runtime applies its default by itself. */ -}}
{{- define "hami-agent.podSecurity" -}}
{{- merge (dict "seccompProfile" (dict "type" "RuntimeDefault")) (.Values.podSecurityContext | default dict | deepCopy) | toYaml -}}
{{- end -}}

{{- /* What would weaken the profiles of the runtime, or would have no effect on them. */ -}}
{{- define "hami-agent.refuseWeaker" -}}
{{- $pod := .Values.podSecurityContext | default dict -}}
{{- with $pod.seccompProfile -}}
{{- if ne (toJson .) (dict "type" "RuntimeDefault" | toJson) -}}
{{- fail (printf "podSecurityContext.seccompProfile.type=%s has no effect here: every container has RuntimeDefault; leave it out" (toString .type)) -}}
{{- end -}}
{{- end -}}
{{- $advice := "takes the agent out of the runtime's AppArmor profile; leave it out, and the runtime applies that profile where the node has AppArmor" -}}
{{- with $pod.appArmorProfile -}}
{{- if eq (toString .type) "Unconfined" -}}
{{- fail (printf "podSecurityContext.appArmorProfile.type=Unconfined %s" $advice) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := .Values.devicePlugin.podAnnotations -}}
{{- if and (hasPrefix "container.apparmor.security.beta.kubernetes.io/" $name) (eq $value "unconfined") -}}
{{- fail (printf "devicePlugin.podAnnotations: %s=unconfined %s" $name $advice) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The digests that are not set, of images that the kubelet may pull: a JSON list of values. */ -}}
{{- define "hami-agent.missingDigests" -}}
{{- $used := dict "image" .Values.image -}}
{{- if or (include "hami-agent.places" .) .Values.devicePlugin.gpuOperatorToolkitReady.enabled -}}
{{- $_ := set $used "library.image" .Values.library.image -}}
{{- end -}}
{{- if include "hami-agent.monitors" . -}}
{{- $_ := set $used "devicePlugin.monitor.image" .Values.devicePlugin.monitor.image -}}
{{- end -}}
{{- $missing := list -}}
{{- range $name, $image := $used -}}
{{- if not (or $image.digest (eq $image.pullPolicy "Never")) -}}
{{- $missing = append $missing (printf "%s.digest" $name) -}}
{{- end -}}
{{- end -}}
{{- toJson $missing -}}
{{- end -}}

{{- define "hami-agent.refuseTags" -}}
{{- if .Values.requireDigests -}}
{{- with include "hami-agent.missingDigests" . | fromJsonArray -}}
{{- fail (printf "requireDigests=true, and these are not set: %s; set each to the sha256:… of its image" (join ", " .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The types of a policy: Egress only where the API server's ports are known. */ -}}
{{- define "hami-agent.policyTypes" -}}
{{- ternary "[Ingress, Egress]" "[Ingress]" (not (empty .Values.networkPolicy.apiServerPorts)) -}}
{{- end -}}

{{- define "hami-agent.toApiServer" -}}
{{- with .Values.networkPolicy.apiServerPorts -}}
# The API server, by its address: no name is looked up.
egress:
  - ports:
      {{- range . }}
      - port: {{ . }}
        protocol: TCP
      {{- end }}
{{- end -}}
{{- end -}}
