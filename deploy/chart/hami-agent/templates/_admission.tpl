{{- /* Whom the policies concern, and what they compare. */ -}}
{{- define "hami-agent.policyMatch" -}}
matchConditions:
  - name: the-agent
    expression: >-
      request.userInfo.username ==
      "system:serviceaccount:{{ include "hami-agent.namespace" . }}:{{ include "hami-agent.account" . }}"
variables:
  - name: node
    expression: >-
      request.userInfo.?extra[?"authentication.kubernetes.io/node-name"][?0].orValue("")
{{- end -}}

{{- define "hami-agent.policyChanges" -}}
- name: before
  expression: oldObject.metadata.?annotations.orValue({})
- name: after
  expression: object.metadata.?annotations.orValue({})
- name: removed
  expression: variables.before.filter(key, !(key in variables.after))
- name: written
  expression: >-
    variables.after.filter(key,
    !(key in variables.before) || variables.before[key] != variables.after[key])
{{- end -}}

{{- define "hami-agent.policyBound" -}}
- expression: variables.node != ""
  reason: Forbidden
  message: the token does not say on which node its pod is
{{- end -}}

{{- /* The status stays, but for the one condition that the agent may keep on its Node. The kinds of
       members are many and grow, so each that is there is compared. */ -}}
{{- define "hami-agent.policyStatus" -}}
{{- if dig "report" "nodeCondition" false .Values.config -}}
{{ include "hami-agent.policyCondition" . }}
{{- else -}}
object.?status.orValue({}) == oldObject.?status.orValue({})
{{- end -}}
{{- end -}}

{{- define "hami-agent.policyCondition" -}}
(object.?status.orValue({}) == oldObject.?status.orValue({})
    || (object.kind == "Node"
    && dyn(object.?status.orValue({})).all(key, key == "conditions"
    || (key in dyn(oldObject.?status.orValue({}))
    && dyn(object.status)[key] == dyn(oldObject.status)[key]))
    && dyn(oldObject.?status.orValue({})).all(key, key == "conditions"
    || key in dyn(object.?status.orValue({})))
    && object.?status.conditions.orValue([]).filter(one, one.type != "GpuDegraded")
    == oldObject.?status.conditions.orValue([]).filter(one, one.type != "GpuDegraded")))
{{- end -}}

{{- define "hami-agent.policyAlone" -}}
- expression: >-
    {{ include "hami-agent.policyObject" . }}
    && {{ include "hami-agent.policyStatus" . }}
  reason: Forbidden
  message: the agent may change annotations only
{{- end -}}

{{- /* All but annotations and status. */ -}}
{{- define "hami-agent.policyObject" -}}
object.metadata.?labels.orValue({}) == oldObject.metadata.?labels.orValue({})
    && object.metadata.?finalizers.orValue([]) == oldObject.metadata.?finalizers.orValue([])
    && object.metadata.?ownerReferences.orValue([])
    == oldObject.metadata.?ownerReferences.orValue([])
    && object.?spec.orValue({}) == oldObject.?spec.orValue({})
{{- end -}}
