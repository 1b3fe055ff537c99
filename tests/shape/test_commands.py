"""Every command that a document tells to type is run by a test, or it stands here why not."""

import re

from tests.shape import tree
from tests.shape.typed import DOCUMENTS, told


def read(table: str) -> dict[str, tuple[str, ...]]:
    """The indented lines under each heading; a line that ends with a backslash goes on."""
    found: dict[str, tuple[str, ...]] = {}
    heading = ""
    for line in re.sub(r" \\\n\s+", " ", table).strip().splitlines():
        if line.startswith(" "):
            found[heading] += (line.strip(),)
        else:
            heading = line
            found[heading] = ()
    return found


# Beginnings of commands, under what runs them: a file and one of its tests. Of several that fit,
# the longest counts.
RUN = read(
    r"""
.ci/run
    make check
    make test-prometheus
    make test
    make test-peers
    make test-browser
    make size
    make walk
tests/cases/test_cases.py test_the_case_is_right
    .venv/bin/python tests/cases/starved_start.py
tests/process/test_sandbox.py test_every_claim_of_the_default_scenario_is_true
    make demo
tests/cli/test_explain_sources.py test_the_example_of_the_help_runs
    hami-agent explain
    .venv/bin/hami-agent explain team-a/train-0
tests/process/test_agent_faces.py
    sudo .venv/bin/hami-agent status
    hami-agent status --since
tests/cli/test_status_cluster.py
    hami-agent status --node
tests/cli/test_top.py
    hami-agent top
tests/cli/test_bundle.py
    hami-agent bundle
tests/cli/test_verbs.py test_as_a_plugin_of_kubectl_the_help_names_kubectl
    kubectl hami
tests/cli/test_decode.py test_each_value_is_known_by_its_form
    hami-agent decode
tests/bench/test_bench.py
    make bench
    COMPARE=old.json make bench
tests/systemd/test_interpreter.py \
    test_a_start_compiles_nothing_of_a_python_that_came_without_bytecode
    python3 -I -X faulthandler -m agent run
tests/bench/test_bench.py test_a_word_is_a_part_or_the_beginning_of_several
    BENCH=real make bench
    BENCH='real real-ten-minutes' make bench
tests/image/test_contents.py test_two_builds_are_the_same_image
    make image
    NAME=registry.example/gpu/hami-agent make image
    .venv/bin/python -m pytest --image tests/image
tests/release/test_release.py test_it_has_these_files_and_a_sum_of_each
    make release
    make test-release
tests/deploy/test_settings_page.py test_the_reference_is_what_the_table_of_settings_gives
    make settings
tests/cli/test_status.py test_what_people_see_is_as_it_was
    make golden
tests/deploy/test_metrics_document.py test_the_document_is_what_the_code_says
    make metrics
tests/chart/test_manifests.py
    make manifests
tests/chart/test_objects.py
    make chart-check
tests/process/test_sandbox.py test_ctrl_c_removes_everything
    .venv/bin/hami-agent sandbox --interactive
tests/process/test_agent_settings.py test_the_settings_are_shown_with_their_origin
    hami-agent config show --origin
tests/process/test_agent_settings.py test_the_profile_that_the_page_shows_is_checked_and_taken
    hami-agent config check
tests/process/test_agent_settings.py test_an_annotation_is_decoded
    hami-agent decode 'GPU-1
tests/process/test_agent_gpus.py test_a_gpu_that_falls_ill_is_told_everywhere_and_can_be_asked
    hami-agent recheck GPU
tests/process/test_agent_gpus.py \
    test_a_gpu_is_released_for_its_reset_and_taken_back_by_an_operators_word
    hami-agent release
    hami-agent recheck --was-reset GPU
tests/process/test_agent_gpus.py test_all_gpus_that_were_released_are_taken_back_with_one_word
    hami-agent recheck all
    hami-agent recheck --was-reset all
tests/peers/test_uninstall.py test_with_the_nodes_own_identity_its_node_is_cleaned_and_no_other
    hami-agent uninstall
tests/peers/test_uninstall.py \
    test_the_documented_command_waits_for_the_agent_of_a_node_and_cleans_all_nodes
    hami-agent uninstall --all-nodes --kubeconfig
tests/peers/test_uninstall.py test_confined_the_verb_cleans_all_nodes
    hami-agent uninstall --all-nodes
tests/peers/test_uninstall.py \
    test_an_account_that_was_left_behind_loses_its_rights_by_one_command
    kubectl delete clusterrolebinding hami-agent-uninstall
tests/process/test_agent_process.py
    hami-agent run
tests/process/test_agent_beside.py test_alone_on_a_node_it_registers_nothing_and_writes_nothing
    hami-agent run --observe
tests/image/test_running.py test_it_looks_at_a_node_before_it_serves_one
    hami-agent doctor --pre
    kubectl -n kube-system exec daemonset/hami-agent -c agent -- hami-agent doctor
    kubectl exec
tests/process/test_agent_doctor.py test_where_nothing_is_wrong_no_line_is
    hami-agent doctor
    sudo .venv/bin/hami-agent doctor
tests/process/test_agent_cordon.py \
    test_no_new_pod_is_placed_on_a_cordoned_gpu_until_it_is_uncordoned
    hami-agent cordon GPU
    hami-agent uncordon GPU
    .venv/bin/hami-agent cordon 0
tests/process/test_agent_settings.py test_all_files_of_a_node_are_checked_together
    hami-agent config check config.yaml
tests/systemd/test_readme.py test_all_commands_of_the_document_in_their_order
    hami-agent config check /etc/hami-agent/config.yaml
    sudo systemd/install
    sudo systemd/uninstall
    sudo systemctl restart
    sudo systemctl stop
    sudo systemd-run
    systemctl status
    systemctl reload hami-agent
    systemctl restart hami-agent
    journalctl
tests/systemd/test_failures.py test_without_its_group_or_user_it_is_held_until_an_operator_starts_it
    systemctl start hami-agent
tests/process/test_agent_settings.py test_the_schema_is_one
    hami-agent config schema
tests/process/test_agent_settings.py test_a_hangup_reads_what_no_event_told_of
    kill -HUP
tests/chart/test_readme.py test_a_command_gives_what_it_says
    helm install
    helm upgrade
tests/peers/test_beside_hamis_plugin.py \
    test_the_commands_of_the_document_switch_from_hamis_plugin_to_the_agent
    helm install hami-agent deploy/chart/hami-agent --namespace kube-system --set \
        image.registry=registry.example:5000 --set image.repository=gpu/hami-agent --set \
        devicePlugin.runtimeClassName=nvidia --set takeover=true --set observe=true
    helm upgrade hami-agent deploy/chart/hami-agent --namespace kube-system \
        --reset-then-reuse-values --set observe=false
    helm upgrade hami-agent deploy/chart/hami-agent --namespace kube-system \
        --reset-then-reuse-values --set takeover=false
    helm upgrade hami hami-charts/hami
tests/peers/test_installed.py test_an_update_and_its_rollback_disturb_no_pod
    helm rollback
    kubectl -n kube-system rollout status
tests/peers/test_installed.py \
    test_a_release_that_cannot_start_is_never_complete_and_a_rollback_heals
    helm --wait
tests/peers/test_installed.py \
    test_what_is_uninstalled_leaves_what_the_documents_say_and_nothing_else
    helm uninstall
tests/peers/test_beside_hamis_plugin.py test_of_both_plugins_the_first_keeps_the_node
    kubectl -n kube-system delete pods -l app.kubernetes.io/name=hami-agent
tests/deploy/test_facts.py test_the_benchmarks_quote_the_rights
    make facts
tests/peers/test_faces.py test_the_manifests_are_applied_started_anew_and_deleted
    kubectl -n kube-system rollout restart
    kubectl apply -f deploy/manifests
    kubectl delete -f deploy/manifests
tests/peers/test_faces.py test_the_doctor_is_sent_to_a_node_and_leaves_nothing
    kubectl delete -f deploy/doctor.yaml
    sed 's|image: hami-agent
tests/peers/test_faces.py test_what_stays_on_a_node_is_taken_off_it
    kubectl annotate node NAME
tests/peers/test_faces.py test_a_condition_that_stayed_is_removed
    kubectl patch node NAME
    kubectl patch node NODE
"""
)
# Beginnings of commands that no test runs, under the reason.
NOT_RUN = read(
    """
every other target begins with it
    make setup
it is the whole run of which this test is a part
    make test-systemd
    make test-hostile
    make test-peers-long
    make test-image
    make cover
    CHART=
    HOSTILE=
    PEERS=
    PROMETHEUS=
    SYSTEMD=
pictures are for people to look at; tests/browser makes claims about what they show
    make screenshots
a GPU is needed; without one it says so and ends
    make test-gpu
tests/peers/run builds by the same script
    make peers
it changes or measures the sources of whoever types it
    make fmt
    make proto
    .venv/bin/uv lock
tests/systemd/lab/made.py makes the wheel with the same program
    make build
a GPU is needed
    WATCH=300 make test-gpu
HAMi's own scheduler is needed, built elsewhere
    HAMI_PEERS_SCHEDULER=
HAMi-core's library is needed, built elsewhere
    HAMI_CORE_LIBRARY=
tests/systemd/wheels does it with the same words
    .venv/bin/uv export
tests/systemd/wheels does it, from the index of the machine
    python3 -m pip download
it opens an editor
    systemctl edit
the lab's API server does not reach its node, for logs and for commands in a container
    kubectl -n kube-system logs
    kubectl -n kube-system exec daemonset/hami-agent -c agent -- hami-agent uninstall --help
    kubectl -n kube-system get pods --selector app.kubernetes.io/name=hami-agent
a program of somebody else that shows something to people
    kubectl describe
    kubectl get
    kubectl logs
    kubectl debug
    nvidia-smi
    skopeo inspect
NVIDIA's toolkit and a GPU are needed
    nvidia-ctk
    nvidia-modprobe
deploy/image/build does it before the build that is tested
    deploy/image/context build/context
Docker is needed; buildah builds from the same file
    docker build
a registry is needed
    BASE=registry.example/python
    skopeo copy
tests/image opens and starts the same archive; the import is containerd's
    ctr -n k8s.io images import
"""
)
BEGINNINGS = {one for table in (RUN, NOT_RUN) for commands in table.values() for one in commands}


def entry(command: str) -> str | None:
    """The longest beginning that fits."""
    return max((one for one in BEGINNINGS if command.startswith(one)), key=len, default=None)


def test_a_command_is_run_or_it_is_said_why_not():
    for document in DOCUMENTS:
        assert [] == sorted(one for one in told(document) if entry(one) is None)


def test_no_command_is_left_over_here():
    used = {entry(one) for document in DOCUMENTS for one in told(document)}

    assert set() == BEGINNINGS - used


def test_what_runs_it_is_there():
    for where, commands in RUN.items():
        path, _, name = where.partition(" ")
        if path == ".ci/run":
            targets = {command.removeprefix("make ") for command in commands}
            assert targets <= set(tree.text(path).split())
        else:
            assert not name or name in tree.claims_of(path), where
            assert (tree.ROOT / path).is_file()
