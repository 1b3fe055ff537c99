"""The values that the chart is rendered with: each set once, and all that can be on together."""

from collections.abc import Mapping
from typing import Any, Final

Values = Mapping[str, Any]

DIGEST: Final = "sha256:" + "0123456789abcdef" * 4
IMAGE: Final[Values] = {"repository": "example/hami-agent"}
LEAST: Final[Values] = {"image": IMAGE}
"""What nobody else can know."""

MATRIX: Final[Mapping[str, Values]] = {
    "least": {},
    "digest": {
        "image": {"registry": "registry.example:5000", **IMAGE, "digest": DIGEST},
        "imagePullSecrets": [{"name": "mine"}],
        "global": {"imagePullSecrets": ["all", {"name": "mine"}]},
        "library": {"image": {"digest": DIGEST}},
        "requireDigests": True,
    },
    "names": {
        "fullnameOverride": "gpus",
        "namespaceOverride": "elsewhere",
        "serviceAccount": {"name": "gpu-account", "annotations": {"a": "b"}},
    },
    "foreign account": {
        "serviceAccount": {"create": False, "name": "present"},
        "rbac": {"create": False},
        "admissionPolicy": {"create": False},
        "uninstall": {"removeAnnotations": False},
        "service": {"create": False},
    },
    "hami": {
        "resourceName": "example.com/gpu",
        "resourceMem": "example.com/gpumem",
        "resourceMemPercentage": "example.com/gpumem-percentage",
        "resourceCores": "example.com/gpucores",
        "schedulerName": "our-scheduler",
        "devices": {"nvidia": {"gpuCorePolicy": "force", "libCudaLogLevel": 2}},
        "devicePlugin": {
            "deviceSplitCount": 20,
            "deviceMemoryScaling": 1.5,
            "deviceCoreScaling": 2,
            "preConfiguredDeviceMemory": 1024,
            "enableNumaTopology": False,
            "migStrategy": "none",
            "disablecorelimit": "false",
            "passDeviceSpecsEnabled": True,
            "deviceListStrategy": "envvar,cdi-cri",
            "gdrcopyEnabled": True,
            "gdsEnabled": False,
            "mofedEnabled": True,
            "nodeConfiguration": {"config": '{"nodeconfig": [{"name": "a"}]}\n'},
            "tolerations": [],
            "nvidiaNodeSelector": {},
        },
        "device-config": {"content": "nvidia:\n  deviceSplitCount: 7\n"},
    },
    "settings": {
        "config": {
            "sharing": {"splitCount": 3},
            "profiles": [{"name": "big", "match": {"nodes": ["gpu-*"]}, "report": {}}],
        },
        "devicePlugin": {"deviceSplitCount": 4, "deviceMemoryScaling": 2},
    },
    "no hami": {
        "hami": {"deviceConfigMap": "", "nodeConfigMap": ""},
        "config": {"scheduler": "none"},
        "library": {"place": False},
        "otherPlugins": [],
    },
    "runtime": {"devicePlugin": {"runtimeClassName": "nvidia"}},
    "driver root": {
        "devicePlugin": {
            "nvidiaDriverRoot": "/run/nvidia/driver",
            "gpuOperatorToolkitReady": {"enabled": True},
        },
        "driver": {"visibleDevices": "volume-mounts"},
    },
    "monitor": {
        "devicePlugin": {"monitor": {"enabled": True}, "service": {"type": "NodePort"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"from": [{"namespaceSelector": {}}]},
    },
    "watched": {
        "nameOverride": "gpus",
        "podMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True, "namespace": "grafana", "annotations": {"folder": "GPUs"}},
        "service": {"create": False},
        "config": {"metrics": {"containers": False, "hami": "both"}},
        "devicePlugin": {"service": {"type": "NodePort"}},
    },
    "elsewhere": {
        "global": {"gpuHookPath": "/opt/hami/"},
        "devicePlugin": {"pluginPath": "/data/kubelet/device-plugins"},
        "web": {"port": 9500},
    },
    "rooted elsewhere": {"devicePlugin": {"podResourcesPath": "/data/root/pod-resources"}},
    "guarded": {
        "networkPolicy": {"apiServerPorts": [443, 16443]},
        "podDisruptionBudget": {"enabled": True, "minAvailable": 2},
        "podSecurityContext": {"seLinuxOptions": {"type": "spc_t"}},
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {"app": "mine"}},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        },
    },
    "hami's words for variables and the monitor": {
        "devicePlugin": {
            "extraEnvs": {"A": "b", "LEVEL": 4, "LONG": 10_000_000, "ON": True},
            "monitor": {
                "enabled": True,
                "image": {"pullSecrets": ["theirs", {"name": "mine"}]},
                "ctrPath": "/usr/local/vgpu/containers",
                "extraEnvs": {},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
                },
            },
        }
    },
    "observed": {"observe": True, "devicePlugin": {"monitor": {"enabled": True}}},
    "extras": {
        "takeover": True,
        "flowSchema": {"create": True},
        "podLabels": {"team": "gpu"},
        "extraArgs": ["--log-level=debug"],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "devicePlugin": {
            "extraEnvs": [{"name": "A", "value": "b"}],
            "podAnnotations": {"c": "d"},
            "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
        },
    },
}
"""By name; each is laid over LEAST."""


def values(name: str) -> Values:
    """One row of the matrix, with the image."""
    return {**LEAST, **MATRIX[name]}


PROFILE: Final[Values] = {"name": "p", "match": {"nodes": ["a"]}}

REFUSED: Final[Mapping[str, tuple[Values, str]]] = {
    "no image": ({"image": {"repository": ""}}, "/image/repository"),
    "a misspelt value": ({"devicePlugin": {"deviceSpltCount": 2}}, "deviceSpltCount"),
    "a config.json of HAMi's that is none": (
        {"devicePlugin": {"nodeConfiguration": {"config": "{nodeconfig: []}"}}},
        "devicePlugin.nodeConfiguration.config is not valid JSON",
    ),
    "a device-config.yaml of HAMi's that is none": (
        {"device-config": {"content": "nvidia:\n\tdeviceSplitCount: 3"}},
        "device-config.content is not valid YAML",
    ),
    "a misspelt setting": ({"config": {"sharing": {"splitCont": 2}}}, "splitCont"),
    "a setting of the wrong type": ({"config": {"log": {"level": "loud"}}}, "/config/log/level"),
    "a setting that the mounts decide": ({"config": {"library": {"hookPath": "/opt"}}}, "hookPath"),
    "a port that the pod decides": ({"config": {"web": {"port": 1}}}, "web"),
    "an update that Kubernetes refuses": (
        {"devicePlugin": {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 1}}}},
        "rollingUpdate",
    ),
    "a name that fits no label": ({"nameOverride": "a" * 64}, "/nameOverride"),
    "a name with a blank": ({"nameOverride": "a b"}, "/nameOverride"),
    "objects with a number for a name": ({"fullnameOverride": "1234"}, "1234, which is no text"),
    "half a digest": ({"image": {**IMAGE, "digest": "sha256:12"}}, "/image/digest"),
    "too many slices": ({"devicePlugin": {"deviceSplitCount": 3001}}, "deviceSplitCount"),
    "a scaling beyond its bounds, as text": (
        {"devicePlugin": {"deviceMemoryScaling": "0.001"}},
        "devicePlugin.deviceMemoryScaling=0.001: a number from 0.01 to 10 is expected",
    ),
    "a scaling of the agent's own that is no number": (
        {"config": {"sharing": {"coreScaling": "much"}}},
        "config.sharing.coreScaling=much: a number from 0.01 to 10 is expected",
    ),
    "a scaling beyond its bounds, as number": (
        {"devicePlugin": {"deviceCoreScaling": 11}},
        "devicePlugin.deviceCoreScaling=11: a number from 0.01 to 10 is expected",
    ),
    "a scaling of the agent's own beyond its bounds, as number": (
        {"config": {"sharing": {"memoryScaling": 11}}},
        "config.sharing.memoryScaling=11: a number from 0.01 to 10 is expected",
    ),
    "a scaling of a profile beyond its bounds": (
        {"config": {"profiles": [{**PROFILE, "sharing": {"coreScaling": "0"}}]}},
        "config.profiles[0].sharing.coreScaling=0: a number from 0.01 to 10 is expected",
    ),
    "a scaling of the agent's own beyond its bounds, as text": (
        {"config": {"sharing": {"memoryScaling": "10.1"}}},
        "config.sharing.memoryScaling=10.1: a number from 0.01 to 10 is expected",
    ),
    "a relative path": ({"global": {"gpuHookPath": "usr/local"}}, "gpuHookPath"),
    **{
        f"a hook path that everybody may write: {path}": (
            {"global": {"gpuHookPath": path}},
            "gpuHookPath",
        )
        for path in ("/tmp", "/tmp/", "/tmp/hami", "//tmp/a", "/var/tmp/a", "/dev/shm", "/a/../tmp")  # noqa: S108 -- refused
    },
    "a kubelet's directory that everybody may write": (
        {"devicePlugin": {"pluginPath": "/tmp/kubelet/device-plugins"}},  # noqa: S108 -- refused
        "pluginPath",
    ),
    **{
        f"a directory of PodResources that is none: {path}": (
            {"devicePlugin": {"podResourcesPath": path}},
            "podResourcesPath",
        )
        for path in ("/tmp/pod-resources", "pod-resources", "/data/kubelet", "/a/pod-resources/")  # noqa: S108 -- refused
    },
    "two containers on one port": (
        {"web": {"port": 9394}, "devicePlugin": {"monitor": {"enabled": True}}},
        "web.port=9394 is the monitor's",
    ),
    "a CDI device by a pod annotation, which no runtime reads": (
        {"driver": {"cdiDevice": "nvidia.com/gpu=all"}},
        "cdiDevice",
    ),
    "targets that are scraped twice": (
        {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
        "podMonitor.enabled=true: each agent would be scraped twice",
    ),
    "HAMi's series twice": (
        {"config": {"metrics": {"hami": "legacy"}}, "devicePlugin": {"monitor": {"enabled": True}}},
        "config.metrics.hami=legacy and devicePlugin.monitor.enabled=true: both would serve",
    ),
    "two writers of limits": (
        {"config": {"usage": {"feedback": True}}, "devicePlugin": {"monitor": {"enabled": True}}},
        "config.usage.feedback=true and devicePlugin.monitor.enabled=true: both would write",
    ),
    "a service for everybody": ({"service": {"type": "NodePort"}}, "type"),
    "a privileged agent": ({"securityContext": {"privileged": True}}, "securityContext"),
    "GPUs in MIG mode": (
        {"devicePlugin": {"migStrategy": "mixed"}},
        "devicePlugin.migStrategy=mixed: GPUs in MIG mode are not shared; leave it out",
    ),
    "another name of priority": (
        {"resourcePriority": "example.com/p"},
        "resourcePriority=example.com/p has no effect here",
    ),
    "a variable that is no text": (
        {"devicePlugin": {"extraEnvs": {"A": ["b"]}}},
        "/devicePlugin/extraEnvs/A",
    ),
    "another directory for the monitor": (
        {"devicePlugin": {"monitor": {"ctrPath": "/opt/containers"}}},
        "devicePlugin.monitor.ctrPath=/opt/containers has no effect here",
    ),
    "a privileged monitor": (
        {"devicePlugin": {"monitor": {"securityContext": {"privileged": True}}}},
        "devicePlugin.monitor.securityContext has no effect here",
    ),
    "the host's processes": ({"devicePlugin": {"hostPID": True}}, "hostPID"),
    "no filter of system calls": (
        {"podSecurityContext": {"seccompProfile": {"type": "Unconfined"}}},
        "podSecurityContext.seccompProfile.type=Unconfined has no effect here: every container has",
    ),
    "a filter of system calls that no container would get": (
        {"podSecurityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "a"}}},
        "podSecurityContext.seccompProfile.type=Localhost has no effect here",
    ),
    "no AppArmor": (
        {"podSecurityContext": {"appArmorProfile": {"type": "Unconfined"}}},
        "podSecurityContext.appArmorProfile.type=Unconfined takes the agent out",
    ),
    "no AppArmor, by annotation": (
        {
            "devicePlugin": {
                "podAnnotations": {
                    "container.apparmor.security.beta.kubernetes.io/agent": "unconfined"
                }
            }
        },
        "container.apparmor.security.beta.kubernetes.io/agent=unconfined takes the agent out",
    ),
    "images by tag where digests are wanted": (
        {"requireDigests": True},
        "requireDigests=true, and these are not set: image.digest, library.image.digest;",
    ),
    "all images by tag where digests are wanted": (
        {"requireDigests": True, "devicePlugin": {"monitor": {"enabled": True}}},
        "not set: devicePlugin.monitor.image.digest, image.digest, library.image.digest;",
    ),
    "one image by tag where digests are wanted": (
        {
            "requireDigests": True,
            "image": {**IMAGE, "digest": DIGEST},
            "library": {"place": False},
            "devicePlugin": {"gpuOperatorToolkitReady": {"enabled": True}},
        },
        "not set: library.image.digest;",
    ),
    "no name of a namespace": ({"networkPolicy": {"namespaces": ["a b"]}}, "/networkPolicy/namesp"),
}
"""Values that are refused, each with a word of the refusal."""
