# Copyright (c) 2026, megatron_residuals contributors.
# SPDX-License-Identifier: Apache-2.0
"""Every process that runs tests gets the CPU host before anything imports Megatron."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import platform
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import pytest_timeout

from tests.covering import each_value_once

if TYPE_CHECKING:
    from tests.scripts import Scripts

SCRIPTS = pytest.StashKey["Scripts"]()
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of a test with parameters only as many cases as meet each value of every one"
    parser.addoption("--each-value-once", action="store_true", help=text)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out products, if asked to: what a case adds to its test, one release shows as well."""
    if not config.getoption("--each-value-once"):
        return
    kept = set(each_value_once(items))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_configure(config: pytest.Config) -> None:
    """Check which host this run is about, and install the CPU host (nothing to do beside a GPU)."""
    expected = os.environ.get("MEGATRON_RESIDUALS_EXPECTED_HOST")
    if expected and version("megatron-core") != expected:
        raise pytest.UsageError(
            f"this run is to test megatron-core {expected}, but {version('megatron-core')} comes "
            "first on sys.path. Run `make test`, which sets PYTHONPATH, or unset "
            "MEGATRON_RESIDUALS_EXPECTED_HOST."
        )
    if importlib.util.find_spec("triton") is not None and not has_gpu():
        # Triton decides when it is first imported whether its interpreter runs the kernels.
        os.environ["TRITON_INTERPRET"] = "1"
    if is_xdist_controller(config):
        return
    from megatron_residuals import cpu_host

    with warnings.catch_warnings():
        # It imports Megatron, which warns of each accelerator library that is not there.
        warnings.simplefilter("ignore")
        cpu_host.install()
        from tests.scripts import Scripts

        config.stash[SCRIPTS] = Scripts()
    import torch

    # The first backward of a process settles whether its forks can run one. Where a test on fake
    # tensors came first, none behind it could.
    torch.zeros(1, requires_grad=True).sum().backward()


@pytest.fixture(scope="session")
def scripts(pytestconfig: pytest.Config) -> Scripts:
    """Runs scripts on forks of a process in which no test has run."""
    return pytestconfig.stash[SCRIPTS]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Note the CPU seconds of a test, its ranks included, in the report (`.ci/run_tests.py`)."""
    yield
    item.user_properties.append(("cpu_s", f"{used_cpu_s(item.config) - item.stash[BEGAN]:.2f}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = used_cpu_s(item.config)


def used_cpu_s(config: pytest.Config) -> float:
    from tests.scripts import cpu_s

    return cpu_s() + config.stash[SCRIPTS].cpu_s


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """A test may take as many times longer as the machine is slow."""
    from megatron_residuals.testing.patience import patience

    patient = settings._replace(timeout=settings.timeout * patience())
    return pytest_timeout.pytest_timeout_set_timer(item, patient)


def has_gpu() -> bool:
    """Whether there is an NVIDIA device, without importing torch."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/dxg")


def is_xdist_controller(config: pytest.Config) -> bool:
    """It only hands out tests, and so can do without five seconds of imports."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_report_header() -> str:
    """The host under test, read from metadata: importing it is left to the workers."""
    return (
        f"host: megatron-core {version('megatron-core')}, torch {version('torch')}, "
        f"Python {platform.python_version()}"
    )


@pytest.fixture(scope="session")
def launch_reader() -> Iterator[Executor]:
    """A forked process in which Megatron reads launches; what that changes stays there."""
    pytest.importorskip("megatron.training", reason="not in the 0.16 wheel")
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, initializer=_prepare_for_launches) as process:
        yield process


def _prepare_for_launches() -> None:
    from megatron_residuals import cpu_host

    cpu_host.install(training=True)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # which that sets, for runs on the CPU
    from megatron.training import argument_utils

    # The host looks up its help texts in its source twice for each launch: most of the time.
    factory = argument_utils.ArgumentGroupFactory
    texts_of = factory._get_field_docstrings
    remembered = functools.cache(lambda kind: texts_of(factory.__new__(factory), kind))
    factory._get_field_docstrings = lambda self, kind: remembered(kind)
