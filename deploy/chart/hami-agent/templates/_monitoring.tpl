{{- /* What is scraped of each pod: the chart, the interval, and the monitor's port. The agent's series
       name pods by the labels that a target has, too: theirs are kept. The monitor's job has a name
       of its own, or the alerts about the agent's would take it for one. */ -}}
{{- define "hami-agent.scraped" -}}
{{- $root := index . 0 -}}
- port: http
  path: /metrics
  interval: {{ index . 1 }}
  honorLabels: true
  relabelings:
    - sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: node
{{- if include "hami-agent.monitors" $root }}
- port: {{ index . 2 }}
  path: /metrics
  interval: {{ index . 1 }}
  relabelings:
    - sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: node
    - targetLabel: job
      replacement: {{ include "hami-agent.fullname" $root }}-monitor
{{- end }}
{{- end -}}

{{- /* The alerts of files/rules.yaml. The job is called as the agents' pods and services are. */ -}}
{{- define "hami-agent.rules" -}}
{{- $job := printf "job=%q" (include "hami-agent.name" .) -}}
{{- $rules := .Files.Get "files/rules.yaml" | replace "job=\"hami-agent\"" $job -}}
{{- with .Values.prometheusRule.runbookUrl -}}
{{- $rules = $rules | replace "runbook: RUNBOOK.md" (printf "runbook_url: %s" .) -}}
{{- end -}}
{{- $rules -}}
{{- end -}}

{{- /* Values about metrics that fit each other not. */ -}}
{{- define "hami-agent.refuseTwice" -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- fail "serviceMonitor.enabled=true and podMonitor.enabled=true: each agent would be scraped twice; choose one" -}}
{{- end -}}
{{- $names := dig "metrics" "hami" "none" .Values.config -}}
{{- if and (ne $names "none") .Values.devicePlugin.monitor.enabled -}}
{{- fail (printf "config.metrics.hami=%s and devicePlugin.monitor.enabled=true: both would serve HAMi's series, and sums over them would double; leave one out" $names) -}}
{{- end -}}
{{- if and (dig "usage" "feedback" false .Values.config) .Values.devicePlugin.monitor.enabled -}}
{{- fail "config.usage.feedback=true and devicePlugin.monitor.enabled=true: both would write HAMi-core's limits; leave one out" -}}
{{- end -}}
{{- end -}}

{{- /* The port of the pods that has HAMi's series for who asks each node; empty: none has. */ -}}
{{- define "hami-agent.hamiPort" -}}
{{- if .Values.devicePlugin.monitor.enabled -}}
monitor
{{- else if and (ne .Values.devicePlugin.service.type "ClusterIP") (ne (dig "metrics" "hami" "current" .Values.config) "none") (not .Values.observe) -}}
http
{{- end -}}
{{- end -}}
