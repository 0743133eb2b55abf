"""Shared fixtures. The real networks live outside the repository: $WASSAIL_ZOO, else
../shared/zoo beside it.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ZOO = Path(os.environ.get("WASSAIL_ZOO", Path(__file__).resolve().parents[2] / "shared" / "zoo"))


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    """The module that loads the real networks and data."""
    if not (ZOO / "zoo.py").exists():
        pytest.skip(f"no real networks at {ZOO}: set WASSAIL_ZOO to the folder that holds zoo.py")
    spec = importlib.util.spec_from_file_location("real_zoo", ZOO / "zoo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(
        int(os.environ.get("WASSAIL_TEST_THREADS", "1"))
    )  # the suite itself runs on several workers
    _same_numbers()


def _same_numbers() -> None:
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.default_generator.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The same for what a file draws when it is imported."""
    if isinstance(collector, pytest.Module):
        _same_numbers()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """The same for fixtures that several tests share, whichever of them comes first."""
    if fixturedef.scope != "function":
        _same_numbers()


@pytest.fixture(autouse=True)
def _modules_of_one_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote is forgotten after it: another test may give the same name to
    another file, and which of them runs first differs from machine to machine.
    """
    before = set(sys.modules)
    yield
    ours = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and file.startswith(ours):
            del sys.modules[name]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(
        f"skipped: {skipped} (see the reasons above)" if skipped else "skipped: 0"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Where tests of a second device are asked for, torch knows it from the start.

    Autograd starts a thread for every device that there is at its first use. So the device must be
    known before, and not at all where tests fork: a process that is forked beside such threads
    cannot differentiate. `make test` runs the two apart.
    """
    if _asks_for_devices(config):
        from support.second_device import registered

        registered()


def _asks_for_devices(config: pytest.Config) -> bool:
    asked = " ".join([config.getoption("markexpr"), *config.args])
    return "device" in asked and "not device" not in asked


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of a second device have that word in their names, so in their files: no other file is
    read for them.
    """
    if "device" not in config.getoption("markexpr") or not _asks_for_devices(config):
        return None
    if collection_path.suffix != ".py" or "device" in collection_path.name:
        return None
    return True if "device" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_finish() -> None:
    """Thousands of collected tests are looked through at every collection of garbage: they are set
    aside, and it comes less often. That is a fifth of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# Cases that take long and have shorter siblings in `make test`: they run in `make test-slow`.
LONG = (
    "test_devices.py::test_the_figures_of_the_cpu[ball, sorting]",
    "test_spheres.py::test_verify_and_radii_agree[1]",
    "test_rescaling.py::test_radii_of_rescaled_networks[branch]",
    "test_rescaling.py::test_coefficients_that_underflow_prove_nothing[1.0-alpha-crown]",
    "test_rescaling.py::test_coefficients_that_underflow_prove_nothing[2.0-alpha-crown]",
    "test_rescaling.py::test_coefficients_that_underflow_prove_nothing[1.0-exact]",
    "test_rescaling.py::test_coefficients_that_underflow_prove_nothing[2.0-exact]",
    "test_rescaling.py::test_coefficients_that_underflow_prove_nothing[1.0-branch]",
    "test_rescaling.py::test_coefficients_that_underflow_prove_nothing[2.0-branch]",
    "test_certify.py::test_kit_accepts_ours[inf-None]",
    "test_certify.py::test_kit_accepts_ours[1.0-None]",
    "test_real_networks.py::test_wda_pp_matches_the_authors_with_fewer_passes[mnist_trades-l2]",
    "test_real_networks.py::test_wda_matches_the_authors_with_fewer_passes[cifar_cnn_a_adv-l2]",
    "test_real_networks.py::test_wda_matches_the_authors_with_fewer_passes[mnist_madry_tiny-l2]",
    "test_real_networks.py::test_wda_matches_the_authors_with_fewer_passes[cifar_cnn_a_adv-linf]",
    "test_real_networks.py::test_wda_pp_matches_the_authors_with_fewer_passes[mnist_trades-linf]",
    "test_real_networks.py::test_wda_pp_matches_the_authors_with_fewer_passes[vnn_resnet4b-linf]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[mnist_madry_tiny-1.0]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[mnist_madry_tiny-2.0]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[cifar_conv_small_sigmoid-1.0]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[cifar_conv_small_sigmoid-2.0]",
    "test_w_pgd.py::test_matches_the_authors_with_half_the_forward_passes[cifar_cnn_a_adv-l2]",
    "test_real_networks.py::test_batch_size_and_order_do_not_matter[1.0]",
    "test_lipschitz.py::test_no_jacobian_of_300_random_networks_beats_a_bound[0.01]",
    "test_thousand.py::test_nine_networks[1]",
    "test_thousand.py::test_nine_networks[2]",
    "test_radii.py::test_the_methods_are_ordered[1.0]",
    "test_radii.py::test_steering_changes_the_work_but_not_the_certified_accuracy[crown-1.0]",
    "test_radii.py::test_steering_changes_the_work_but_not_the_certified_accuracy[crown-2.0]",
    "test_loss_curve.py::test_the_cells_of_a_certificate_count[margin]",
    "test_loss_curve.py::test_never_above_what_is_known_on_all_of_space[digits-mlp]",
    "test_loss_curve.py::test_the_exact_worst_case_lies_between_the_sides[3.0]",
    "test_curved.py::test_radii_of_a_vision_transformer_lie_below_its_flips[2]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[mlp-2.0]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[mlp-inf]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[conv-inf]",
    "by_enumeration[lipbab_sd_10-30-30-30-3-0.1-expected3]",
    "test_apgd.py::test_apgd_conforms[targeted-norms3]",
    "test_closing.py::test_an_evaluation_closes_to_a_gap",
    "test_closing.py::test_the_bracket_shrinks_and_holds[inf]",
    "test_executed.py::test_branching_and_verification_above_the_rounding_error",
    "misclassifies[exact]",
    "misclassifies[lipschitz]",
    "test_executed.py::test_a_loss_curve_of_the_executed_network[margin]",
    "test_radii.py::test_the_methods_are_ordered[2.0]",
    "test_certify.py::test_large_networks_get_brackets",
    "test_certify.py::test_kit_accepts_ours[2.0-None]",
    "test_certify.py::test_kit_accepts_ours[1.0-domain1]",
    "test_certify.py::test_limits_of_the_growth[margin]",
    "test_loss_curve.py::test_a_smooth_network",
    "test_loss_curve.py::test_the_exact_worst_case_lies_between_the_sides[2.0]",
    "test_loss_curve.py::test_the_exact_worst_case_lies_between_the_sides[inf]",
    "test_transformer.py::test_constants_beyond_float64_are_carried_as_logarithms",
    "test_transformer.py::test_no_sampled_jacobian_is_above_the_walk[causal]",
    "test_transformer.py::test_no_sampled_jacobian_is_above_the_walk[mixer]",
    "test_transformer.py::test_no_sampled_jacobian_is_above_the_walk[post]",
    "test_apgd.py::test_apgd_conforms[ce-norms0]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[conv-2.0]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[leaky-1.0]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[leaky-2.0]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[residual-1.0]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[residual-2.0]",
    "test_cli.py::test_a_transformer_from_both_sides",
    "test_real_networks.py::test_batch_size_and_order_do_not_matter[2.0]",
    "test_real_networks.py::test_wda_pp_matches_the_authors_with_fewer_passes[vnn_resnet4b-l2]",
    "test_spheres.py::test_layers_that_do_not_stretch_lose_little",
    "test_five_hundred.py::test_a_few_networks[1]",
    "test_five_hundred.py::test_a_few_networks[2]",
    "test_five_hundred.py::test_a_few_networks[3]",
    "test_rescaling.py::test_nor_do_they_without_equilibration[inf-branch]",
    "test_a3.py::test_batches_and_order_do_not_matter[wda-2.0-3]",
    "test_a3.py::test_real_networks[mnist_madry_tiny-l2]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[50]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[100]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[150]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[200]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[250]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[300]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[350]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[400]",
    "test_five_hundred_rescaled_networks_prove_nothing_at_a_flip[450]",
    "test_rescaling.py::test_coefficients_that_underflow_prove_nothing[inf-branch]",
    "test_rescaling.py::test_radii_of_rescaled_networks[alpha-crown]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[leaky-inf]",
    "test_split.py::test_it_proves_up_to_the_exact_distance_and_not_beyond[residual-inf]",
    "test_real_networks.py::test_wda_pp_matches_the_authors_with_fewer_passes[cifar_cnn_a_adv-l2]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[mnist_madry_tiny-1.0]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[cifar_conv_small_sigmoid-2.0]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[cifar_conv_small_sigmoid-1.0]",
    "test_our_engine_beats_wda_pp_at_its_own_passes[cifar_cnn_a_adv-1.0]",
    "test_radii.py::test_radii_on_random_networks_are_below_the_exact_distances[1.0]",
    "test_radii.py::test_no_flip_lies_within_a_radius[cnn-adv-1.0]",
    "test_transformer.py::test_no_sampled_jacobian_is_above_the_walk[vit]",
    "test_certify.py::test_kit_accepts_ours[2.0-domain1]",
    "test_values_stay_in_their_spans_and_margins_above_their_bounds[vision-1.0-None]",
    "test_values_stay_in_their_spans_and_margins_above_their_bounds[vision-2.0-domain1]",
    "test_values_stay_in_their_spans_and_margins_above_their_bounds[vision, fused-1.0-None]",
    "test_the_witness_grows_at_the_recession_slope[silu-inf-cross_entropy]",
    "test_the_witness_grows_at_the_recession_slope[gelu_tanh-1.0-cross_entropy]",
    "test_the_witness_grows_at_the_recession_slope[softplus-2.0-cross_entropy]",
    "test_smooth_certify.py::test_two_inputs_against_brute_force[silu-2.0]",
    "test_branch.py::test_table_a[lipbab_sd_10-30-30-30-3]",
    "test_five_hundred.py::test_real_networks[cifar_vit_pgd_2_3_16-l2-2.0]",
    "test_crash.py::test_some_points_of_every_command[report]",
    "test_crash.py::test_some_points_of_every_command[export]",
    "test_crash.py::test_some_points_of_every_command[add-attack]",
    "test_closed.py::test_exact_radii_and_their_flips_close_the_sandwich[2.0]",
    "test_closed.py::test_exact_radii_and_their_flips_close_the_sandwich[1.0]",
    "test_square.py::test_conformance[None-1.0]",
    "test_square.py::test_conformance[domain0-2.0]",
    "test_loss_curve.py::test_monotone_concave_and_nested[3.0]",
    "test_loss_curve.py::test_monotone_concave_and_nested[2.0]",
    "test_loss_curve.py::test_the_curve_of_the_loss_of_the_population[1.0]",
    "test_infinity.py::test_real_networks_are_closed_in_seconds[exlipbab_iris_4-6-6-3-inf]",
    "test_infinity.py::test_real_networks_are_closed_in_seconds[exlipbab_wine_11-12-12-1-2.0]",
    "test_infinity.py::test_stopped_early_the_bracket_still_holds[inf]",
    "test_spheres.py::test_never_above_the_truth_and_never_below_crown[max pooled-inf]",
    "test_distance.py::test_the_corpus[deep]",
    "test_leaves.py::test_radii_by_branching_stay_below_the_distances",
    "test_training_examples.py::test_hardening_with_proofs",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a second device are marked by their names, long cases by the list above."""
    for item in items:
        if item.nodeid.endswith(LONG):
            item.add_marker("slow")
        if "device" in item.path.name or "device" in item.name:
            item.add_marker("device")
