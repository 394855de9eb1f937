"""Known vulnerabilities among the pinned packages: `python -m tests.support.audit_dependencies`.

Asks PyPI's advisory service through pip-audit about every pin of constraints.txt, without installing or resolving
anything. Exit code 0 where none is known, and, with a note, where the service cannot be reached; 1 otherwise.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"
_UNREACHABLE = ("requests.exceptions.", "Could not connect to", "is not redirecting properly", "ServiceError")
"""How pip-audit ends when the network or the service fails: it prints one of these and no report, with exit code 1."""


class Verdict(NamedTuple):
    """What the audit comes to."""

    exit_code: int
    message: str


def main() -> int:
    audit = subprocess.run(
        [
            *(sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"),
            *("--format", "json", "--progress-spinner", "off", "--timeout", "10"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    verdict = judge(audit.stdout, audit.stderr)
    print(f"dependency audit: {verdict.message}")
    return verdict.exit_code


def judge(report: str, errors: str) -> Verdict:
    """Return what pip-audit's JSON report, or the lack of one, amounts to."""
    if not report.strip():
        last_line = textwrap.shorten((errors.strip() or "no output").splitlines()[-1], 100)
        if any(sign in errors for sign in _UNREACHABLE):
            return Verdict(0, f"left out, the advisory service cannot be reached ({last_line})")
        return Verdict(1, f"pip-audit failed: {last_line}")
    packages = json.loads(report)["dependencies"]
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        # An index mirror knows no advisories, and pip-audit takes its 404 for "no such package", and reports no flaw.
        return Verdict(0, "left out, the service that answers knows none of the packages")
    found = [
        f"{package['name']} {package['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no version'}"
        for package in audited
        for flaw in package["vulns"]
    ]
    if found:
        return Verdict(1, "\n  ".join(["known vulnerabilities", *found]))
    unknown = f", {len(packages) - len(audited)} unknown to the service" if len(audited) < len(packages) else ""
    return Verdict(0, f"no known vulnerability in {len(audited)} packages{unknown}")


if __name__ == "__main__":
    sys.exit(main())
