"""The dependency audit fails on vulnerabilities and on failures of its own, and never because there is no network."""

import json
from collections.abc import Mapping

import pytest

from tests.support.audit_dependencies import judge

SAFE = {"name": "safe", "version": "1.0", "vulns": []}
UNSAFE = {"name": "unsafe", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2.0"]}]}
HOPELESS = {"name": "hopeless", "version": "1.0", "vulns": [{"id": "CVE-2", "fix_versions": []}]}
SKIPPED = {"name": "odd", "skip_reason": "not found"}


def report(*packages: Mapping[str, object]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def test_no_vulnerability_passes():
    assert judge(report(SAFE, SAFE), "") == (0, "no known vulnerability in 2 packages")
    assert judge(report(SAFE, SKIPPED), "") == (0, "no known vulnerability in 1 packages, 1 unknown to the service")


def test_each_vulnerability_is_named_with_its_cure():
    exit_code, message = judge(report(SAFE, UNSAFE, HOPELESS), "Found 2 known vulnerabilities")
    assert exit_code == 1
    assert message.splitlines()[1:] == [
        "  unsafe 1.0: CVE-1, fixed in 1.1, 2.0",
        "  hopeless 1.0: CVE-2, fixed in no version",
    ]


@pytest.mark.parametrize(
    "errors",
    [
        "Traceback ...\nrequests.exceptions.ConnectionError: Max retries exceeded",
        "ERROR:pip_audit._cli:Could not connect to PyPI's vulnerability feed\nERROR:pip_audit._cli:Tip: ...",
        "Traceback ...\npip_audit._service.interface.ServiceError",
    ],
)
def test_without_network_the_audit_is_left_out(errors):
    exit_code, message = judge("", errors)
    assert exit_code == 0
    assert message.startswith("left out, the advisory service cannot be reached")


def test_a_service_that_knows_no_package_is_no_all_clear():
    assert judge(report(SKIPPED, SKIPPED), "") == (0, "left out, the service that answers knows none of the packages")


def test_a_failure_of_the_audit_itself_fails():
    assert judge("", "ERROR: constraints.txt: bad line 3") == (
        1,
        "pip-audit failed: ERROR: constraints.txt: bad line 3",
    )
    assert judge("", "") == (1, "pip-audit failed: no output")
