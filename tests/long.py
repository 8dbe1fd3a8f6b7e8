"""The tests that a full run of 25 minutes leaves out: `bash scripts/test.sh --long` and `--repeat-faults` run them too.

They repeat at length, or over another path or control plane, what a shorter test shows once; or they prove the power of
other tests by planting bugs. A name is a file's path below tests/, two colons, and the test's name with its parameters
in brackets, as fnmatch patterns (a bracket is written [[]).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["LONG", "is_long"]

LONG = (
    "control/test_etcd.py::test_an_etcd_of_three_loses_its_leader_and_then_a_member_hangs",
    "integration/test_cluster.py::test_a_second_node_of_one_name_is_refused_while_the_first_lives[[]sqlite]",
    "integration/test_cluster.py::test_three_nodes_find_each_other_one_is_killed_and_returns[[]sqlite]",
    "integration/test_cluster.py::test_without_its_control_plane_a_node_serves_until_*[[]sqlite]",
    "integration/test_durable.py::test_a_stopped_writer_of_before_meets_nobody_elses_bytes",
    "integration/test_durable.py::test_kill_9_at_every_step_of_an_eviction",
    "integration/test_durable.py::test_kill_9_at_every_step[[]delete]",
    "integration/test_durable.py::test_many_lives_leave_nothing_behind",
    "integration/test_faults_cluster.py::test_memory_adopted_by_a_dead_home_is_free_again_and_it_may_rejoin",
    "integration/test_faults_crowds.py::test_hundreds_of_data_paths_are_opened_and_dropped_at_every_step[[]network]",
    "integration/test_faults_death.py::test_a_client_finds_a_restarted_node_by_itself[[][mr]*",
    "integration/test_faults_death.py::test_a_thousand_pending_operations_end_when_their_node_is_killed[[][mr]*",
    "integration/test_faults_death.py::test_killed_nodes_leave_nothing_on_the_host",
    "integration/test_faults_hosts.py::test_a_client_that_vanishes_gives_its_grants_and_leases_back",
    "integration/test_faults_hosts.py::test_a_one_way_loss_of_the_network_ends_calls_at_their_deadline[[]answers]",
    "integration/test_faults_hosts.py::test_a_stopped_writer_of_another_host_wakes_after_its_slots_were_reclaimed",
    "integration/test_faults_hosts.py::test_fragments_of_a_put_that_was_given_up_never_land_in_the_next_one",
    "integration/test_faults_hosts.py::test_partitions_one_after_the_other_leave_nothing_behind",
    "integration/test_faults_lease.py::test_a_node_stopped_past_its_lease_answers_nothing_until_it_has_it_again[[][mr]*",
    "integration/test_faults_writers.py::test_a_late_writer_after_its_disconnect_reaches_nothing_of_others[[]*-message]",
    "integration/test_faults_writers.py::test_a_stopped_writer_that_wakes_after_its_slots_*[[]message]",
    "integration/test_faults_writers.py::test_sixteen_writers_of_one_key_some_killed",
    "integration/test_faults_writers.py::test_writers_killed_while_they_write_leave_nothing_*[[]ma*",
    "integration/test_faults_writers.py::test_writers_killed_while_they_write_leave_nothing_*[[]me*",
    "integration/test_hosts_perf.py::test_two_hosts_measure_over_their_network",
    "integration/test_replicated_faults.py::test_a_member_without_room_is_said_and_puts_end",
    "integration/test_replicated_faults.py::test_random_faults_from_a_seed_end_in_equal_states_and_flat_memory",
    "integration/test_replicated_input.py::test_a_node_that_returns_after_its_shards_were_given_away",
    "journal/test_disk.py::test_kill_9_loses_no_acknowledged_record[[]power-*",
    "replication/test_replica.py::test_a_replica_that_breaks_a_rule_is_found[[]*",
    "sim/test_cluster.py::test_a_planted_bug_is_found[[]*",
    "test_cli.py::test_twenty_killed_nodes_leave_nothing_behind",
    "test_perf.py::test_plots_are_a_picture_and_a_page_of_its_own",
    "test_perf_runs.py::test_a_backend_measures_what_it_can_over_both_wires[[]ucx_perftest]",
    "test_perf_runs.py::test_a_missing_backend_is_a_notice_and_the_others_go_on",
    "test_perf_runs.py::test_the_script_measures_ucx_without_a_node",
    "test_perf_runs.py::test_two_sides_measure_with_the_token",
)


def is_long(node_id: str) -> bool:
    """Whether the test of this pytest node id, from the repository's root, is one of them."""
    name = node_id.removeprefix("tests/")
    return any(fnmatchcase(name, pattern) for pattern in LONG)
