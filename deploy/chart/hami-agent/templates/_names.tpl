{{- define "hami-agent.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* The release's name alone where it says what it is. */ -}}
{{- define "hami-agent.fullname" -}}
{{- $name := include "hami-agent.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "hami-agent.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end -}}

{{- /* A text, whatever YAML makes of it: a name may be of digits alone. */ -}}
{{- define "hami-agent.textual" -}}
{{- ternary . (quote .) (kindIs "string" (get (printf "it: %s" . | fromYaml) "it")) -}}
{{- end -}}

{{- define "hami-agent.selector" -}}
app.kubernetes.io/name: {{ include "hami-agent.name" . | include "hami-agent.textual" }}
app.kubernetes.io/instance: {{ .Release.Name | include "hami-agent.textual" }}
{{- end -}}

{{- define "hami-agent.labels" -}}
{{ include "hami-agent.selector" . }}
{{ include "hami-agent.sharedLabels" . }}
{{- end -}}

{{- /* Who cleans up has a name of its own, or the agents' selectors would match it. Of one that is too
       long for that, what is cut off counts by its hash. */ -}}
{{- define "hami-agent.uninstallSelector" -}}
{{- $name := include "hami-agent.name" . -}}
{{- if gt (len $name) 53 -}}
{{- $name = printf "%s-%s" (trunc 44 $name) (sha256sum $name | trunc 8) -}}
{{- end -}}
app.kubernetes.io/name: {{ $name }}-uninstall
app.kubernetes.io/instance: {{ .Release.Name | include "hami-agent.textual" }}
{{- end -}}

{{- define "hami-agent.uninstallLabels" -}}
{{ include "hami-agent.uninstallSelector" . }}
{{ include "hami-agent.sharedLabels" . }}
{{- end -}}

{{- define "hami-agent.sharedLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: hami-agent
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "hami-agent.account" -}}
{{- .Values.serviceAccount.name | default (ternary (include "hami-agent.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- /* A list: image, and the tag where it names none. */ -}}
{{- define "hami-agent.image" -}}
{{- $image := .image -}}
{{- $registry := .root.Values.global.imageRegistry | default $image.registry -}}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default .tag) -}}
{{- end -}}
{{- end -}}

{{- define "hami-agent.agentImage" -}}
{{- include "hami-agent.image" (dict "image" .Values.image "tag" .Chart.AppVersion "root" .) -}}
{{- end -}}

{{- define "hami-agent.libraryImage" -}}
{{- include "hami-agent.image" (dict "image" .Values.library.image "tag" .Values.global.imageTag "root" .) -}}
{{- end -}}

{{- define "hami-agent.pullSecrets" -}}
{{- $secrets := list -}}
{{- $monitor := .Values.devicePlugin.monitor -}}
{{- $its := ternary $monitor.image.pullSecrets list $monitor.enabled -}}
{{- range concat .Values.global.imagePullSecrets .Values.imagePullSecrets $its -}}
{{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) -}}
{{- end -}}
{{- with $secrets | uniq -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- /* The monitor cannot leave 9394 in all of HAMi's versions; the agent can. */ -}}
{{- define "hami-agent.port" -}}
{{- .Values.web.port | default (ternary 9395 9394 .Values.devicePlugin.monitor.enabled) -}}
{{- end -}}

{{- define "hami-agent.hook" -}}
{{- printf "%s/vgpu" (trimSuffix "/" .Values.global.gpuHookPath) -}}
{{- end -}}

{{- /* The ConfigMap with device-config.yaml; empty: none. */ -}}
{{- define "hami-agent.deviceConfigMap" -}}
{{- if (index .Values "device-config").content -}}
{{- include "hami-agent.fullname" . }}-hami
{{- else -}}
{{- .Values.hami.deviceConfigMap -}}
{{- end -}}
{{- end -}}

{{- /* The ConfigMap with config.json; empty: none. HAMi's order: external, own, the release's. */ -}}
{{- define "hami-agent.nodeConfigMap" -}}
{{- $node := .Values.devicePlugin.nodeConfiguration -}}
{{- if $node.externalConfigName -}}
{{- $node.externalConfigName -}}
{{- else if $node.config -}}
{{- include "hami-agent.fullname" . }}-hami
{{- else -}}
{{- .Values.hami.nodeConfigMap -}}
{{- end -}}
{{- end -}}

{{- /* A factor, also as a text, as helm's --set gives a fraction: its name and value. */ -}}
{{- define "hami-agent.scaling" -}}
{{- $name := index . 0 -}}
{{- $text := index . 1 | toString -}}
{{- if not (regexMatch "^[0-9]{1,9}([.][0-9]{1,9})?$" $text) -}}
{{- fail (printf "%s=%s: a number from 0.01 to 10 is expected, such as 1.5" $name $text) -}}
{{- end -}}
{{- if or (lt (float64 $text) 0.01) (gt (float64 $text) 10.0) -}}
{{- fail (printf "%s=%s: a number from 0.01 to 10 is expected, such as 1.5" $name $text) -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{- /* Makes numbers of the factors of a section `sharing`: what leads to it, and the section. */ -}}
{{- define "hami-agent.scaled" -}}
{{- $path := index . 0 -}}
{{- $sharing := index . 1 -}}
{{- range tuple "memoryScaling" "coreScaling" -}}
{{- if and (hasKey $sharing .) (not (kindIs "invalid" (get $sharing .))) -}}
{{- $_ := set $sharing . (include "hami-agent.scaling" (tuple (printf "%s.%s" $path .) (get $sharing .)) | float64) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The agent's own file: HAMi's values under the agent's names, and `config` over them. */ -}}
{{- define "hami-agent.settings" -}}
{{- $plugin := .Values.devicePlugin -}}
{{- $nvidia := .Values.devices.nvidia -}}
{{- $given := dict
  "sharing.resourceName" .Values.resourceName
  "sharing.memoryResourceName" .Values.resourceMem
  "sharing.memoryPercentResourceName" .Values.resourceMemPercentage
  "sharing.coreResourceName" .Values.resourceCores
  "allocation.schedulerName" .Values.schedulerName
  "sharing.splitCount" $plugin.deviceSplitCount
  "sharing.memoryScaling" $plugin.deviceMemoryScaling
  "sharing.coreScaling" $plugin.deviceCoreScaling
  "sharing.preconfiguredMemoryMiB" $plugin.preConfiguredDeviceMemory
  "sharing.numaTopology" $plugin.enableNumaTopology
  "allocation.passDeviceSpecs" $plugin.passDeviceSpecsEnabled
  "allocation.gdrcopy" $plugin.gdrcopyEnabled
  "allocation.gds" $plugin.gdsEnabled
  "allocation.mofed" $plugin.mofedEnabled
  "allocation.devRoot" $plugin.nvidiaDriverRoot
  "library.corePolicy" $nvidia.gpuCorePolicy
-}}
{{- range $key, $name := dict "sharing.memoryScaling" "deviceMemoryScaling" "sharing.coreScaling" "deviceCoreScaling" -}}
{{- if not (kindIs "invalid" (get $given $key)) -}}
{{- $_ := set $given $key (include "hami-agent.scaling" (tuple (printf "devicePlugin.%s" $name) (get $given $key)) | float64) -}}
{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" $plugin.disablecorelimit) -}}
{{- $_ := set $given "library.disableCoreLimit" (eq (toString $plugin.disablecorelimit) "true") -}}
{{- end -}}
{{- if not (kindIs "invalid" $nvidia.libCudaLogLevel) -}}
{{- $_ := set $given "library.cudaLogLevel" (toString $nvidia.libCudaLogLevel) -}}
{{- end -}}
{{- with $plugin.deviceListStrategy -}}
{{- $_ := set $given "allocation.deviceListStrategy" (splitList "," .) -}}
{{- end -}}
{{- $settings := dict -}}
{{- range $key, $value := $given -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $section := splitList "." $key | first -}}
{{- $_ := set $settings $section (set (get $settings $section | default dict) (splitList "." $key | last) $value) -}}
{{- end -}}
{{- end -}}
{{- with mergeOverwrite $settings (deepCopy .Values.config) -}}
{{- include "hami-agent.scaled" (tuple "config.sharing" (.sharing | default dict)) -}}
{{- range $number, $profile := .profiles -}}
{{- include "hami-agent.scaled" (tuple (printf "config.profiles[%d].sharing" $number) ($profile.sharing | default dict)) -}}
{{- end -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{- /* The resource's name, where the values say it. */ -}}
{{- define "hami-agent.resource" -}}
{{- $settings := include "hami-agent.settings" . | fromYaml | default dict -}}
{{- dig "sharing" "resourceName" "nvidia.com/gpu" $settings -}}
{{- end -}}

{{- /* Whether this API server takes the policies. */ -}}
{{- define "hami-agent.hasPolicies" -}}
{{- if and .Values.admissionPolicy.create (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version) -}}
true
{{- end -}}
{{- end -}}

{{- /* The directories of CDI specifications to look into; none where no setting names a CDI strategy. */ -}}
{{- define "hami-agent.cdiSpecDirs" -}}
{{- $settings := include "hami-agent.settings" . -}}
{{- if contains "cdi-" (list $settings .Values.extraArgs .Values.devicePlugin.extraEnvs | toYaml) -}}
{{- dig "allocation" "cdiSpecDirs" (list "/etc/cdi" "/var/run/cdi") ($settings | fromYaml | default dict) | toYaml -}}
{{- end -}}
{{- end -}}

{{- /* Whether HAMi-core is put on the node: who only looks places nothing. */ -}}
{{- define "hami-agent.places" -}}
{{- if and .Values.library.place (not .Values.observe) -}}
true
{{- end -}}
{{- end -}}

{{- /* Who only looks leaves usage and limits to the monitor that is there. */ -}}
{{- define "hami-agent.monitors" -}}
{{- if and .Values.devicePlugin.monitor.enabled (not .Values.observe) -}}
true
{{- end -}}
{{- end -}}
